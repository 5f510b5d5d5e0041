//! Replaces texts and words of answers, in the pieces that the client gets.
//!
//! What may become a text is held back until it is known, and with words, each word until it ends.

use steersman_policy::{TextChange, TextVerdict, TextView};

/// A text of an answer, and what takes its place.
#[derive(Debug, Clone, PartialEq)]
pub struct Replacement {
    /// In lower case if it is a word.
    pub old: String,
    pub new: String,
    /// Whether it stands for whole words, in any case. Otherwise it is replaced wherever it occurs.
    pub is_word: bool,
}

/// Whether a text begins with another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Begins {
    /// The bytes of it.
    With(usize),
    /// The text ends too early to tell.
    Perhaps,
    No,
}

impl Replacement {
    /// Whether `text` begins with it. `before` is the character before `text`.
    fn begins(&self, text: &str, before: Option<char>, end: bool) -> Begins {
        if !self.is_word {
            return match () {
                () if text.starts_with(&self.old) => Begins::With(self.old.len()),
                () if !end && self.old.starts_with(text) => Begins::Perhaps,
                () => Begins::No,
            };
        }
        if before.is_some_and(char::is_alphanumeric) {
            return Begins::No;
        }
        let mut rest = &*self.old;
        for (at, c) in text.char_indices() {
            if rest.is_empty() {
                return if c.is_alphanumeric() { Begins::No } else { Begins::With(at) };
            }
            for lower in c.to_lowercase() {
                match rest.strip_prefix(lower) {
                    Some(left) => rest = left,
                    None => return Begins::No,
                }
            }
        }
        match (end, rest.is_empty()) {
            (true, true) => Begins::With(text.len()),
            (true, false) => Begins::No,
            (false, _) => Begins::Perhaps,
        }
    }
}

/// What the client gets of `view`. It begins at a word if one of `all` stands for words: only
/// whole words are let through then.
pub fn replaced(all: &[Replacement], view: &TextView) -> TextVerdict {
    let TextView { text, end, .. } = view;
    let has_words = all.iter().any(|one| one.is_word);
    let last_word = match has_words && !end {
        true => text.trim_end_matches(char::is_alphanumeric).len(),
        false => text.len(),
    };
    let firsts = first_bytes(all);
    let (mut out, mut copied, mut at) = (String::new(), 0, 0);
    let mut before = None;
    let mut is_changed = false;
    while at < last_word {
        let rest = &text[at..];
        let first = rest.chars().next().expect("it is before the end");
        let found = match firsts[usize::from(rest.as_bytes()[0])] {
            true => longest_first(all, rest, before, *end),
            false => None,
        };
        match found {
            Some((new, bytes)) if at + bytes <= last_word => {
                out.push_str(&text[copied..at]);
                out.push_str(new);
                before = text[..at + bytes].chars().next_back();
                at += bytes;
                copied = at;
                is_changed = true;
            }
            // Held until it is known, or until the word in which it ends is whole.
            Some(_) => break,
            None => {
                before = Some(first);
                at += first.len_utf8();
            }
        }
    }
    out.push_str(&text[copied..at]);
    // At most the view, which is held within 1,024 bytes.
    let hold = (text.len() - at) as u32;
    match (is_changed, hold) {
        (true, _) => TextVerdict::Replace(TextChange { text: out, hold }),
        (false, 0) => TextVerdict::Pass,
        (false, _) => TextVerdict::Hold(hold),
    }
}

/// What replaces the beginning of `text`, and its bytes: a huge number if it is not known yet.
fn longest_first<'a>(
    all: &'a [Replacement],
    text: &str,
    before: Option<char>,
    end: bool,
) -> Option<(&'a str, usize)> {
    all.iter().find_map(|one| match one.begins(text, before, end) {
        Begins::With(bytes) => Some((&*one.new, bytes)),
        Begins::Perhaps => Some(("", usize::MAX / 2)),
        Begins::No => None,
    })
}

/// The bytes with which a text may begin: most places of an answer are passed at once.
fn first_bytes(all: &[Replacement]) -> [bool; 256] {
    let mut firsts = [false; 256];
    for one in all {
        let Some(first) = one.old.chars().next() else { continue };
        if first.is_ascii() {
            firsts[first as usize] = true;
            firsts[first.to_ascii_uppercase() as usize] |= one.is_word;
        }
        // In another case a letter may have another first byte: the lower case of Kelvin is `k`.
        if one.is_word || !first.is_ascii() {
            firsts[0x80..].fill(true);
        }
    }
    firsts
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The client's text of an answer in pieces of `bytes`, as the host applies the verdicts.
    fn sent(all: &[Replacement], text: &str, bytes: usize) -> String {
        let (mut held, mut sent, mut at) = (String::new(), String::new(), 0);
        loop {
            let next = text.ceil_char_boundary((at + bytes).min(text.len()));
            held.push_str(&text[at..next]);
            let end = at == text.len();
            let view = TextView { text: held.clone(), end, position: 0 };
            let (out, hold) = match replaced(all, &view) {
                TextVerdict::Pass => (held.clone(), 0),
                TextVerdict::Hold(hold) => (held[..held.len() - hold as usize].to_owned(), hold),
                TextVerdict::Replace(TextChange { text, hold }) => (text, hold),
            };
            sent.push_str(&out);
            held = held[held.len() - hold as usize..].to_owned();
            if end {
                assert_eq!(held, "");
                return sent;
            }
            at = next;
        }
    }

    fn texts(pairs: &[(&str, &str)], is_word: bool) -> Vec<Replacement> {
        let one = |(old, new): &(&str, &str)| Replacement {
            old: (*old).into(),
            new: (*new).into(),
            is_word,
        };
        pairs.iter().map(one).collect()
    }

    #[test]
    fn texts_are_replaced_wherever_they_are_however_the_answer_is_cut() {
        let all = texts(&[("as an AI", "here"), ("sorry", "regret"), ("ü", "ue")], false);
        let cases = [
            ("I am sorry.", "I am regret."),
            ("unsorryly as an AI", "unregretly here"),
            ("as an A", "as an A"),
            ("Sorry as an Ant sorr", "Sorry as an Ant sorr"),
            ("über sosorry", "ueber soregret"),
            ("", ""),
        ];
        for (text, expected) in cases {
            for bytes in 1..12 {
                assert_eq!(sent(&all, text, bytes), expected, "{text} by {bytes}");
            }
        }
    }

    #[test]
    fn whole_words_are_replaced_in_any_case_however_the_answer_is_cut() {
        let all =
            texts(&[("as an ai", ""), ("sorry", "I regret"), ("äh", ""), ("k", "kelvin")], true);
        let cases = [
            ("Sorry, I am SORRY.", "I regret, I am I regret."),
            ("unsorry sorryly sorry2 sorry", "unsorry sorryly sorry2 I regret"),
            ("Well, as an AI model, as an aim", "Well,  model, as an aim"),
            ("ÄH, well", ", well"),
            // The sign of the unit: its lower case is the letter.
            ("5 \u{212a}", "5 kelvin"),
            ("so", "so"),
        ];
        for (text, expected) in cases {
            for bytes in 1..12 {
                assert_eq!(sent(&all, text, bytes), expected, "{text} by {bytes}");
            }
        }
    }

    #[test]
    fn texts_and_words_are_replaced_together() {
        let mut all = texts(&[("\u{2014}", "-")], false);
        all.extend(texts(&[("sorry", "")], true));
        for bytes in 1..12 {
            assert_eq!(sent(&all, "a\u{2014}sorry\u{2014}b sorrys", bytes), "a--b sorrys");
        }
    }

    #[test]
    fn a_part_of_a_word_is_replaced_only_when_the_word_is_whole() {
        let mut all = texts(&[("un", "-")], false);
        all.extend(texts(&[("sorry", "")], true));
        for bytes in 1..12 {
            assert_eq!(sent(&all, "unsorry sorry", bytes), "-sorry ");
        }
    }
}
