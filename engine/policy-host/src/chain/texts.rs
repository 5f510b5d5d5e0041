//! Answer text on its way through the policies of a chain: what each of them holds back, and what they have
//! replaced.
//!
//! The engine passes each piece of the answer, and gets what the client receives. A rewind shows in the
//! position of the next piece: every policy then holds again what it held there.
//!
//! Text that a policy has replaced is remembered. A later policy, which never saw it here, may know it from
//! elsewhere: a replacement of its own that contains it does not apply.

use std::ops::Range;

use super::differing::differing;
use crate::contract::{HELD_BYTES, TextChange, TextVerdict, TextView};

/// Replaced texts, and words of them, that are remembered, the newest.
const REPLACED: usize = 64;

/// Bytes that are kept of what a policy let through, in which replaced text may begin.
const TAIL_BYTES: usize = 4096;

/// The answer text of a request.
pub struct Texts {
    links: Vec<LinkText>,
    /// Bytes of the answer so far.
    position: usize,
    /// After each piece.
    marks: Vec<Mark>,
    /// Texts that were replaced, and by whom.
    replaced: Vec<(usize, String)>,
}

/// How far the answer has come.
struct Mark {
    /// Bytes of it.
    end: usize,
    /// For each policy, the bytes that it got and those that it let through.
    links: Box<[(usize, usize)]>,
}

/// The answer as one policy gets it.
#[derive(Default)]
struct LinkText {
    input: String,
    /// Bytes of it that the policy does not hold back.
    released: usize,
    /// The end of what it let through.
    tail: String,
}

impl Texts {
    /// The texts of a chain of `links` policies, before the first token.
    pub fn new(links: usize) -> Self {
        let links = (0..links).map(|_| LinkText::default()).collect();
        Self { links, position: 0, marks: Vec::new(), replaced: Vec::new() }
    }

    /// Takes back the text from `position` on, if there is any.
    pub fn begin(&mut self, position: usize) {
        if position >= self.position {
            return;
        }
        self.marks.retain(|mark| mark.end <= position);
        for (index, link) in self.links.iter_mut().enumerate() {
            let (input, released) = self.marks.last().map_or((0, 0), |mark| mark.links[index]);
            link.input.truncate(input);
            link.released = released;
            link.tail.clear();
        }
        self.position = position;
    }

    /// Ends a piece of `bytes`.
    pub fn end(&mut self, bytes: usize) {
        self.position += bytes;
        let links = self.links.iter().map(|link| (link.input.len(), link.released)).collect();
        self.marks.push(Mark { end: self.position, links });
    }

    /// What policy `index` is asked about `text`, which the policies before it let through; `None` if there is
    /// nothing new.
    pub fn view(&mut self, index: usize, text: &str, end: bool) -> Option<TextView> {
        let link = &mut self.links[index];
        link.input.push_str(text);
        if text.is_empty() && !end {
            return None;
        }
        let position = u32::try_from(link.released).unwrap_or(u32::MAX);
        Some(TextView { position, text: link.input[link.released..].to_owned(), end })
    }

    /// What policy `index` lets through with this verdict on its view; with `is_checked` it cannot bring back
    /// what an earlier one replaced. The second value tells whether it tried.
    pub fn answer(
        &mut self,
        index: usize,
        verdict: TextVerdict,
        end: bool,
        is_checked: bool,
    ) -> (String, bool) {
        let link = &mut self.links[index];
        let seen = &link.input[link.released..];
        let asked = |bytes: u32| {
            let bytes = seen.len().min(bytes as usize);
            seen.ceil_char_boundary(seen.len() - bytes)
        };
        let kept = |from: usize| {
            let most = if end { 0 } else { HELD_BYTES };
            from.max(seen.ceil_char_boundary(seen.len().saturating_sub(most)))
        };
        let (mut out, until, replaced) = match verdict {
            TextVerdict::Pass => (seen.to_owned(), seen.len(), None),
            TextVerdict::Hold(bytes) => {
                let until = kept(asked(bytes));
                (seen[..until].to_owned(), until, None)
            }
            TextVerdict::Replace(TextChange { text, hold }) => {
                let from = asked(hold);
                let until = kept(from);
                (text + &seen[from..until], until, Some(0..from))
            }
        };
        let mut is_refused = false;
        if let Some(range) = replaced.filter(|_| is_checked) {
            let whole = format!("{}{out}", link.tail);
            let is_back = |(by, text): &(usize, String)| {
                let start = link.tail.len().saturating_sub(text.len());
                let start = whole.ceil_char_boundary(start);
                *by < index && whole[start..].contains(&**text) && !seen.contains(&**text)
            };
            is_refused = self.replaced.iter().any(is_back);
            let old: Range<usize> = differing(&seen[range.clone()], &out);
            if !is_refused {
                let gone = seen.get(old).unwrap_or_default();
                let words = gone.split(|c: char| !c.is_alphanumeric());
                let words = words.filter(|word| word.len() > 1);
                let all = [gone.trim()].into_iter().chain(words);
                let all = all.filter(|text| !text.is_empty() && !out.contains(text));
                self.replaced.extend(all.map(|text| (index, text.to_owned())));
                let older = self.replaced.len().saturating_sub(REPLACED);
                self.replaced.drain(..older);
            }
            if is_refused {
                out = seen[..until].to_owned();
            }
        }
        link.tail.push_str(&out);
        let surplus = link.tail.len().saturating_sub(TAIL_BYTES);
        link.tail.drain(..link.tail.ceil_char_boundary(surplus));
        link.released += until;
        (out, is_refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What one policy lets through of these pieces.
    fn passed(pieces: &[&str], mut verdict: impl FnMut(&TextView) -> TextVerdict) -> Vec<String> {
        let mut texts = Texts::new(1);
        let mut outs = Vec::new();
        for (i, piece) in pieces.iter().enumerate() {
            let end = i + 1 == pieces.len();
            let Some(view) = texts.view(0, piece, end) else {
                outs.push(String::new());
                continue;
            };
            outs.push(texts.answer(0, verdict(&view), end, true).0);
            texts.end(piece.len());
        }
        outs
    }

    #[test]
    fn held_text_comes_again_and_the_end_releases_it() {
        assert_eq!(passed(&["ab", "cd", "e"], |_| TextVerdict::Hold(3)), ["", "a", "bcde"]);
        // Whole characters are held.
        assert_eq!(passed(&["aö", "b", ""], |_| TextVerdict::Hold(1)), ["aö", "", "b"]);
        let hold = |_: &TextView| TextVerdict::Hold(u32::MAX);
        let long = "x".repeat(HELD_BYTES);
        assert_eq!(passed(&[&long, "yz", ""], hold), ["", "xx", &(long[2..].to_owned() + "yz")]);
        let replace =
            |_: &TextView| TextVerdict::Replace(TextChange { text: "-".into(), hold: u32::MAX });
        assert_eq!(passed(&["ab", "c"], replace), ["-", "-abc"]);
    }

    #[test]
    fn a_rewind_restores_what_was_held() {
        let mut texts = Texts::new(1);
        for (position, piece, seen, out) in [
            (0, "abc", "abc", "a"),
            (3, "d", "bcd", "b"),
            (4, "e", "cde", "c"),
            (3, "x", "bcx", "b"),
            (0, "y", "y", ""),
        ] {
            texts.begin(position);
            let view = texts.view(0, piece, false).unwrap();
            assert_eq!(view.text, seen);
            assert_eq!(texts.answer(0, TextVerdict::Hold(2), false, true).0, out);
            texts.end(piece.len());
        }
    }
}
