//! Tool calls: the policy gives a verdict on each before the client receives it.
//!
//! A repair rewinds the reply to the call's opening tag, which no client has seen, and injects the
//! policy's text there. Several calls between one pair of tags are removed together. A call
//! completed by the end of the reply gets its verdict before the reply ends. One completed by the
//! limits of the reply gets a verdict too, but no tokens are left for a repair: it is dropped, with
//! a note.
//!
//! Where no policy of a request gives verdicts, calls may be sent while they are written
//! ([`Request::streams_calls`](crate::request::Request::streams_calls)): the reply is not rewound
//! past what the client has of them.

use super::reply::ClientReply;
use super::steering::{Do, Now, Repair, Steering, Todo};
use crate::error::Result;
use crate::policy::{MAX_REPAIRS, Verdict};
use crate::request::calls::view;
use crate::request::{FinishReason, ToolCall};
use crate::text::{Phase, Piece};

impl Steering {
    /// Gets verdicts on the waiting calls, if any, and carries them out. Returns [`Do::Nothing`]
    /// when no call waits.
    ///
    /// # Errors
    /// [`crate::Error::Policy`] when the policy failed and the profile fails closed.
    pub(super) fn judge(&mut self, reply: &mut ClientReply, now: &Now<'_>) -> Result<Do> {
        if reply.waiting.is_empty() && reply.judged.is_empty() {
            return Ok(Do::Nothing);
        }
        let has_tokens = !matches!(self.todo, Todo::Finish);
        while let Some(piece) = reply.waiting.front() {
            if let Some(call) = new_call(reply, piece) {
                let Some(verdict) = self.verdict(&call, reply, now)? else { return Ok(Do::Away) };
                match verdict {
                    Verdict::Accept => {}
                    Verdict::Repair(words) if has_tokens => {
                        if let Some(next) = self.repair(&call, words, reply, now) {
                            return Ok(next);
                        }
                    }
                    Verdict::Repair(_) => {
                        let name = &call.function.name;
                        reply.note(format!(
                            "dropped a call of `{name}`: no tokens left to repair it"
                        ));
                        reply.waiting.pop_front();
                        continue;
                    }
                    Verdict::Stop(reason) => {
                        let (name, length) = (&call.function.name, reply.len());
                        reply.note(format!(
                            "stopped after {length} tokens (call of `{name}`): {reason}"
                        ));
                        let rest = if has_tokens { reply.waiting.len() } else { 1 };
                        reply.waiting.drain(..rest);
                        return Ok(Do::End(FinishReason::Policy(reason)));
                    }
                }
            }
            let judged = reply.waiting.pop_front();
            reply.judged.extend(judged);
        }
        let pieces = std::mem::take(&mut reply.judged);
        reply.send(pieces);
        if !now.has_ended && !matches!(self.todo, Todo::EndTurn { .. } | Todo::Finish) {
            reply.keep_calls();
        }
        Ok(Do::Nothing)
    }

    /// `None` while the policy is called on a thread.
    fn verdict(
        &mut self,
        call: &ToolCall,
        reply: &mut ClientReply,
        now: &Now<'_>,
    ) -> Result<Option<Verdict>> {
        let accepted = reply.judged.iter().filter_map(|piece| new_call(reply, piece));
        let accepted: Vec<ToolCall> = accepted.collect();
        let view = view(call, &now.request.messages, reply.tool_calls(), &accepted);
        let verdict = self.hooks.ask(&view)?;
        self.take_notes(reply);
        Ok(verdict)
    }

    /// Replaces the waiting calls, and all tokens from the first one on, with `words`: rewinds
    /// them, and lets [`Steering::write_repair`] follow. `None` if the call is accepted instead.
    fn repair(
        &mut self,
        call: &ToolCall,
        words: String,
        reply: &mut ClientReply,
        now: &Now<'_>,
    ) -> Option<Do> {
        let parsed = match &self.todo {
            Todo::EndTurn { ended, .. } => &**ended,
            _ => reply.parsed(),
        };
        let start = now.prompt + parsed.last_call_start();
        let (name, length) = (call.function.name.clone(), reply.len());
        // In a chain each policy has as many, so that a later one does not use up those of an
        // earlier one.
        let limit = MAX_REPAIRS * self.hooks.policies();
        if self.repairs == limit {
            reply.note(format!("accepted a call of `{name}`: limit of {limit} repairs reached"));
            return None;
        }
        if self.is_form_fixed(reply) {
            let reason = "the form of the reply is fixed";
            reply.note(format!("accepted a call of `{name}` without repair: {reason}"));
            return None;
        }
        let Some(rewind) = self.rewind(start, None, reply, now) else {
            let reason = "the client already has the text";
            reply.note(format!("accepted a call of `{name}` without repair: {reason}"));
            return None;
        };
        reply.waiting.clear();
        reply.judged.clear();
        // The rest of an injected text is replaced too.
        self.injection.iter_mut().for_each(|injection| injection.tokens.clear());
        match &mut self.todo {
            Todo::Committed(committed) => committed.loop_found = None,
            Todo::EndTurn { .. } => self.todo = Todo::Nothing,
            Todo::Nothing | Todo::Ask(_) | Todo::Apply(_) | Todo::Act(_) | Todo::Finish => {}
        }
        self.repair = Some(Repair { name, length, words });
        Some(rewind)
    }

    /// Writes the text of a repair, whose call was rewound.
    pub(super) fn write_repair(
        &mut self,
        repair: Repair,
        reply: &mut ClientReply,
        now: &Now<'_>,
    ) -> Result<Option<Do>> {
        let Repair { name, length, words } = repair;
        self.repairs += 1;
        reply.note(format!("removed a call of `{name}` after {length} tokens"));
        let mut tokens = Vec::new();
        // The opening tag of this call closed the previous one.
        if reply.parsed().in_call() {
            tokens.extend(reply.parsed().close_call_tokens(now.text)?);
        }
        let header = reply.parsed().open_message_tokens(now.text, Phase::Answer)?;
        tokens.extend(header.unwrap_or_default());
        let words = now.text.encode_plain(&words)?;
        if reply.parsed().would_call(&tokens, &words) {
            reply.note("left out the text of a repair: it would be part of a tool call".into());
        } else {
            tokens.extend(words);
        }
        Ok(self.inject(tokens, "injected text", "tool call repair", reply, now))
    }
}

/// The call that `piece` is, if the client does not have it.
fn new_call(reply: &ClientReply, piece: &Piece) -> Option<ToolCall> {
    match piece {
        Piece::ToolCall(call) if reply.is_new_call(piece) => Some(call.clone()),
        _ => None,
    }
}
