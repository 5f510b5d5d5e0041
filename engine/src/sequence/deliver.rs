//! Answer text on its way through the policies: what waits in the [`Outlet`] of a reply is sent.

use super::outlet::{ADDED_BYTES, Outlet};
use super::reply::ClientReply;
use super::steering::{Do, Steering};
use crate::error::Result;
use crate::policy::{TextChange, TextVerdict, TextView};
use crate::request::FinishReason;
use crate::text::Piece;

impl Steering {
    /// Sends what waits in the outlet of `reply`. Returns [`Do::Nothing`] when that is done.
    ///
    /// # Errors
    /// [`crate::Error::Policy`] when the policy failed and the profile fails closed.
    pub(super) fn deliver(&mut self, reply: &mut ClientReply) -> Result<Do> {
        while let Some(outlet) = &reply.outlet {
            let next = match outlet.first() {
                None => return Ok(Do::Nothing),
                Some(Piece::Answer(text)) => {
                    let text = text.clone();
                    self.shape(text, false, reply)?
                }
                // What is held precedes a call.
                Some(Piece::CallDelta(_) | Piece::ToolCall(_) | Piece::Reasoning(_))
                    if outlet.is_open() =>
                {
                    match self.release(reply)? {
                        Do::Nothing => continue,
                        next => return Ok(next),
                    }
                }
                Some(_) => Do::Nothing,
            };
            if let Do::Away = next {
                return Ok(next);
            }
            let piece = reply.outlet.as_mut().and_then(Outlet::take_first);
            let unshaped = piece.filter(|piece| !matches!(piece, Piece::Answer(_)));
            reply.send_at_once(unshaped.into_iter().collect());
            if let Do::End(_) = next {
                return Ok(next);
            }
        }
        Ok(Do::Nothing)
    }

    /// Sends what the policies hold back. Returns [`Do::Nothing`] when that is done.
    ///
    /// # Errors
    /// The errors of [`Self::deliver`].
    pub(super) fn release(&mut self, reply: &mut ClientReply) -> Result<Do> {
        match &reply.outlet {
            Some(outlet) if outlet.is_open() => self.shape(String::new(), true, reply),
            _ => Ok(Do::Nothing),
        }
    }

    /// Sends what the policies make of the next text of the answer.
    fn shape(&mut self, text: String, end: bool, reply: &mut ClientReply) -> Result<Do> {
        let Some(outlet) = &reply.outlet else { return Ok(Do::Nothing) };
        // Casts: an answer has fewer bytes than a request body may have.
        let view = TextView { position: outlet.seen() as u32, text, end };
        let Some(verdict) = self.hooks.ask(&view)? else { return Ok(Do::Away) };
        self.take_notes(reply);
        let bytes = view.text.len();
        let shaped = match verdict {
            TextVerdict::Replace(TextChange { text, .. }) => text,
            // The chain holds text back.
            TextVerdict::Pass | TextVerdict::Hold(_) => view.text,
        };
        if !reply.send_shaped(shaped, bytes, end) {
            return Ok(Do::Nothing);
        }
        let reason = format!("the policy added more than {ADDED_BYTES} bytes to the answer");
        reply.note(reason.clone());
        Ok(Do::End(FinishReason::Policy(reason)))
    }
}
