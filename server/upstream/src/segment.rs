//! Texts in pieces about as long as tokens.
//!
//! The tokens of an upstream are not known: it sends texts. Policies, budgets and the loop detector count pieces
//! instead: a word with the space before it (eight letters at most), three digits, a character of a script without
//! spaces, a run of one sign, a line break. English has about 1.2 tokens a piece. A piece is complete when the next
//! character does not belong to it, however the text was cut on its way.
//!
//! The number of a piece is a hash of its text, so that it is the same in each request, and policies can compare.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use steersman_policy_host::Vocabulary;

/// Most letters of a piece.
const LETTERS: usize = 8;

/// Most digits of a piece.
const DIGITS: usize = 3;

/// Most characters of a run of one sign, or of spaces.
const RUN: usize = 16;

/// Most bytes of a part of a text.
const PART_BYTES: usize = 32 << 10;

/// Most bytes of pieces that one request remembers, so that policies can have their texts.
const KNOWN_BYTES: usize = 8 << 20;

/// What a character may be a part of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Letter,
    Digit,
    Space,
    Break,
    Sign(char),
    /// A character that is a piece of its own.
    Alone,
}

fn class(c: char) -> Class {
    match c {
        '\n' | '\r' => Class::Break,
        c if c.is_whitespace() => Class::Space,
        c if c.is_ascii_digit() => Class::Digit,
        // Scripts of Latin, Greek, Cyrillic, Hebrew, Arabic and their neighbours write spaces.
        c if c.is_alphabetic() && u32::from(c) < 0x0e00 => Class::Letter,
        c if c.is_ascii() => Class::Sign(c),
        _ => Class::Alone,
    }
}

/// Cuts a text that comes in parts.
#[derive(Debug, Clone, Default)]
pub struct Segmenter {
    /// The piece that is not complete.
    open: String,
}

impl Segmenter {
    /// Adds text; `out` gets the pieces that it completes.
    pub fn push(&mut self, text: &str, mut out: impl FnMut(&str)) {
        for c in text.chars() {
            if !self.open.is_empty() && !self.belongs(c) {
                out(&self.open);
                self.open.clear();
            }
            self.open.push(c);
        }
    }

    /// Ends the text; `out` gets the last piece.
    pub fn end(&mut self, mut out: impl FnMut(&str)) {
        if !self.open.is_empty() {
            out(&self.open);
            self.open.clear();
        }
    }

    /// Returns true if `c` belongs to the open piece.
    fn belongs(&self, c: char) -> bool {
        let Some(last) = self.open.chars().next_back() else { return true };
        // The space before a word is not counted.
        let length = self.open.trim_start_matches(' ').chars().count();
        match (class(last), class(c)) {
            // A single space belongs to what follows.
            (Class::Space, Class::Letter | Class::Digit | Class::Sign(_)) => self.open == " ",
            (Class::Letter, Class::Letter) => length < LETTERS,
            (Class::Digit, Class::Digit) => length < DIGITS,
            (Class::Space, Class::Space) => self.open.chars().count() < RUN,
            (Class::Break, Class::Break) => length < RUN,
            (Class::Sign(a), Class::Sign(b)) => a == b && length < RUN,
            _ => false,
        }
    }
}

/// The number of a piece.
pub fn number(piece: &str) -> u32 {
    // FNV-1a.
    piece
        .bytes()
        .fold(0x811c_9dc5, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// `text` in parts that policies can take at once: a reply that is not streamed comes as one text.
pub fn parts(mut text: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        let (part, rest) = text.split_at(text.floor_char_boundary(PART_BYTES));
        text = rest;
        (!part.is_empty()).then_some(part)
    })
}

/// Counts the pieces of a text.
pub fn count(text: &str) -> usize {
    let (mut segmenter, mut pieces) = (Segmenter::default(), 0);
    segmenter.push(text, |_| pieces += 1);
    segmenter.end(|_| pieces += 1);
    pieces
}

/// The pieces of one request, for policies that ask for the tokenizer.
#[derive(Default)]
pub struct Pieces(Mutex<Known>);

#[derive(Default)]
struct Known {
    texts: HashMap<u32, Box<str>>,
    bytes: usize,
}

impl Pieces {
    /// The pieces of a request.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Remembers a piece; returns its number.
    pub fn add(&self, piece: &str) -> u32 {
        let (number, known) = (number(piece), &mut *self.0.lock());
        if known.bytes < KNOWN_BYTES && !known.texts.contains_key(&number) {
            known.bytes += piece.len() + size_of::<(u32, Box<str>)>();
            known.texts.insert(number, piece.into());
        }
        number
    }
}

impl Vocabulary for Pieces {
    fn encode(&self, text: &str) -> Option<Vec<u32>> {
        let (mut segmenter, mut pieces) = (Segmenter::default(), Vec::new());
        segmenter.push(text, |piece| pieces.push(self.add(piece)));
        segmenter.end(|piece| pieces.push(self.add(piece)));
        Some(pieces)
    }

    fn decode(&self, tokens: &[u32]) -> String {
        let known = self.0.lock();
        tokens.iter().filter_map(|token| known.texts.get(token)).map(|text| &**text).collect()
    }

    fn size(&self) -> u32 {
        u32::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(parts: &[&str]) -> Vec<String> {
        let (mut segmenter, mut pieces) = (Segmenter::default(), Vec::new());
        for part in parts {
            segmenter.push(part, |piece| pieces.push(piece.to_string()));
        }
        segmenter.end(|piece| pieces.push(piece.to_string()));
        pieces
    }

    #[test]
    fn pieces_do_not_depend_on_how_the_text_was_cut() {
        let text = "So the price is 12345.67 --- wait,\n\n  let me reconsider 日本語 über internationalization";
        let whole = pieces(&[text]);
        let letters: Vec<String> = text.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        assert_eq!(pieces(&letters), whole);
        assert_eq!(whole.concat(), text);
        assert_eq!(whole[..6], ["So", " the", " price", " is", " 123", "45"]);
        assert!(whole.contains(&"日".to_string()) && whole.contains(&" internat".to_string()));
        assert_eq!(count(text), whole.len());
    }

    #[test]
    fn policies_get_the_texts_of_pieces_back() {
        let pieces = Pieces::new();
        let text = "the same words, 42 times";
        let tokens = pieces.encode(text).unwrap();
        assert_eq!(pieces.decode(&tokens), text);
        assert_eq!(tokens[0], number("the"));
        assert_eq!(pieces.decode(&[1]), "");
    }
}
