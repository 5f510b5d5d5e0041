//! Text that policies of a chain have put into system texts. A later policy cannot replace it.

use std::ops::Range;

use super::differing::differing;
use crate::contract::{PromptEdit, Replacement};

/// The policy that added text, the message, and the range of its bytes.
type Span = (usize, usize, Range<usize>);

/// Ranges of added text.
#[derive(Default)]
pub struct Added {
    ranges: Vec<Span>,
}

impl Added {
    /// The edits of policy `link` that touch nothing which an earlier policy added, in their order.
    /// `system` are the texts that they apply to.
    pub fn permitted(
        &mut self,
        link: usize,
        system: &[String],
        edits: Vec<PromptEdit>,
    ) -> Vec<PromptEdit> {
        let mut system = system.to_vec();
        let mut is_permitted = |edit: &PromptEdit| {
            if system.is_empty() && !matches!(edit, PromptEdit::Replace(_)) {
                system.push(String::new());
            }
            let Replacement { message, old, new } = match edit {
                PromptEdit::Replace(replacement) => replacement,
                PromptEdit::Begin(text) => {
                    system[0].insert_str(0, text);
                    for (_, _, range) in self.ranges.iter_mut().filter(|(_, of, _)| *of == 0) {
                        *range = range.start + text.len()..range.end + text.len();
                    }
                    self.ranges.push((link, 0, 0..text.len()));
                    return true;
                }
                PromptEdit::End(text) => {
                    let last = system.len() - 1;
                    let at = system[last].len();
                    system[last].push_str(text);
                    self.ranges.push((link, last, at..at + text.len()));
                    return true;
                }
            };
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
        edits.into_iter().filter(|edit| is_permitted(edit)).collect()
    }
}
