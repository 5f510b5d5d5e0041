//! The outlet of a reply: answer text passes the policies before the client has it.
//!
//! Every piece that is to be sent waits here in order. A piece of the answer becomes what `on-text` makes of it;
//! the others follow after what the policies held back. A sequence whose policies do not see text has no
//! outlet, and its pieces are sent at once.
//!
//! The policies hold text back, not the outlet: it knows how much of the answer the client has after each piece,
//! so that a rewind takes back what was held, and the client drops the rest if it can.

use std::collections::VecDeque;

use super::Sequence;
use crate::error::Result;
use crate::policy::{TextChange, TextVerdict, TextView};
use crate::request::FinishReason;
use crate::text::Piece;

/// Most bytes by which policies may make an answer longer: one that adds text to every piece would otherwise
/// send without end.
pub const ADDED_BYTES: usize = 64 << 10;

/// Pieces on their way to the client.
#[derive(Debug, Default)]
pub struct Outlet {
    pieces: VecDeque<Piece>,
    /// Bytes of the answer that the policies have seen.
    seen: usize,
    /// After each call: the bytes that the policies had seen, and those that the client had.
    marks: Vec<(usize, usize)>,
    /// Whether the policies may hold text.
    is_open: bool,
    /// The policies have added too much: no further text is sent.
    is_closed: bool,
}

impl Outlet {
    /// Bytes of the answer that the client had when the policies had seen `seen` bytes.
    pub fn sent_at(&self, seen: usize) -> usize {
        self.marks.iter().rev().find(|(before, _)| *before <= seen).map_or(0, |(_, sent)| *sent)
    }

    /// Takes back the answer after `seen` bytes.
    pub fn rewind(&mut self, seen: usize) {
        self.marks.retain(|(before, _)| *before <= seen);
        self.seen = self.seen.min(seen);
        self.is_open |= seen > 0;
    }
}

impl Sequence {
    /// Sends pieces to the client, through the outlet if there is one.
    pub fn send(&mut self, pieces: Vec<Piece>) {
        match &mut self.outlet {
            Some(outlet) => outlet.pieces.extend(pieces),
            None => self.send_at_once(pieces),
        }
    }

    /// Sends what waits in the outlet. False while a policy is called on a thread: then again after its answer.
    ///
    /// # Errors
    /// [`crate::Error::Policy`] when the policy failed and the profile fails closed.
    pub fn deliver(&mut self) -> Result<bool> {
        while let Some(outlet) = &mut self.outlet {
            match outlet.pieces.front() {
                None => return Ok(true),
                Some(Piece::Answer(text)) => {
                    let text = text.clone();
                    if !self.shape(text, false)? {
                        return Ok(false);
                    }
                }
                // What is held precedes a call.
                Some(Piece::CallDelta(_) | Piece::ToolCall(_) | Piece::Reasoning(_))
                    if outlet.is_open =>
                {
                    if !self.release()? {
                        return Ok(false);
                    }
                    continue;
                }
                Some(_) => {}
            }
            let piece = self.outlet.as_mut().and_then(|outlet| outlet.pieces.pop_front());
            let others = piece.filter(|piece| !matches!(piece, Piece::Answer(_)));
            self.send_at_once(others.into_iter().collect());
        }
        Ok(true)
    }

    /// Sends what the policies hold back. False as in [`Self::deliver`].
    ///
    /// # Errors
    /// The errors of [`Self::deliver`].
    pub fn release(&mut self) -> Result<bool> {
        match &self.outlet {
            Some(outlet) if outlet.is_open => self.shape(String::new(), true),
            _ => Ok(true),
        }
    }

    /// Sends what the policies make of the next text of the answer.
    fn shape(&mut self, text: String, end: bool) -> Result<bool> {
        let Some(outlet) = &mut self.outlet else { return Ok(true) };
        // Casts: an answer has fewer bytes than a request body may have.
        let view = TextView { position: outlet.seen as u32, text, end };
        let Some(verdict) = self.hooks.ask(&view)? else { return Ok(false) };
        self.note_policy();
        let Some(outlet) = &mut self.outlet else { return Ok(true) };
        outlet.seen += view.text.len();
        outlet.is_open = !end;
        let out = match verdict {
            TextVerdict::Replace(TextChange { text, .. }) => text,
            // The chain holds text back.
            TextVerdict::Pass | TextVerdict::Hold(_) => view.text,
        };
        let is_closed = outlet.is_closed;
        if !out.is_empty() && !is_closed {
            self.send_at_once(vec![Piece::Answer(out)]);
        }
        let sent = self.progress.answer.len();
        let Some(outlet) = &mut self.outlet else { return Ok(true) };
        outlet.marks.push((outlet.seen, sent));
        if sent > outlet.seen + ADDED_BYTES && !is_closed {
            outlet.is_closed = true;
            let reason = format!("the policy added more than {ADDED_BYTES} bytes to the answer");
            self.note(reason.clone());
            self.end(FinishReason::Policy(reason));
        }
        Ok(true)
    }
}
