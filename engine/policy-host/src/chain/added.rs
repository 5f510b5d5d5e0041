//! Text that policies of a chain have put into system texts. A later policy cannot replace it.

use std::ops::Range;

use crate::contract::Replacement;

/// The policy that added text, the message, and the range of its bytes.
type Span = (usize, usize, Range<usize>);

/// Ranges of added text.
#[derive(Default)]
pub struct Added {
    ranges: Vec<Span>,
}

impl Added {
    /// The replacements of policy `link` that touch nothing which an earlier policy added, in their order.
    /// `system` are the texts that they apply to.
    pub fn permitted(
        &mut self,
        link: usize,
        system: &[String],
        replacements: Vec<Replacement>,
    ) -> Vec<Replacement> {
        let mut system = system.to_vec();
        let mut is_permitted = |replacement: &Replacement| {
            let Replacement { message, old, new } = replacement;
            let index = *message as usize;
            // What cannot be applied is refused as an answer.
            let Some(text) = system.get_mut(index) else { return true };
            let Some(at) = text.find(old) else { return true };
            // Only what differs is replaced: its bytes in the text, and the number of new ones.
            let removed = differing(old, new);
            let length = differing(new, old).len();
            let removed = at + removed.start..at + removed.end;
            let touches = |(by, of, range): &Span| {
                let overlaps = removed.start < range.end && range.start < removed.end;
                *by < link && *of == index && overlaps
            };
            if self.ranges.iter().any(touches) {
                return false;
            }
            text.replace_range(at..at + old.len(), new);
            // Own text that is replaced is gone; what follows moves.
            let is_apart =
                |range: &Range<usize>| range.end <= removed.start || removed.end <= range.start;
            self.ranges.retain(|(_, of, range)| *of != index || is_apart(range));
            for (_, of, range) in &mut self.ranges {
                if *of == index && range.start >= removed.end {
                    let moved = |at: usize| at - removed.len() + length;
                    *range = moved(range.start)..moved(range.end);
                }
            }
            self.ranges.push((link, index, removed.start..removed.start + length));
            true
        };
        replacements.into_iter().filter(|replacement| is_permitted(replacement)).collect()
    }
}

/// The bytes of `text` without the beginning and the end that `other` has, too.
fn differing(text: &str, other: &str) -> Range<usize> {
    let equal = |(a, b): &(u8, u8)| a == b;
    let start = text.bytes().zip(other.bytes()).take_while(equal).count();
    let rest = text.len().min(other.len()) - start;
    let end = text.bytes().rev().zip(other.bytes().rev()).take(rest).take_while(equal).count();
    start..text.len() - end
}
