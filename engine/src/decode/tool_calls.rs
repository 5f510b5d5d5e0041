//! Tool calls: the policy gives a verdict on each before the client receives it.
//!
//! A repair rewinds the reply to the call's opening tag, which no client has seen, and injects the
//! policy's text there. Several calls between one pair of tags are removed together. A call completed
//! by the end of the reply gets its verdict before the reply ends. One completed by the limits of the
//! reply gets a verdict too, but no tokens are left for a repair: it is dropped, with a note.
//!
//! Where no policy of a request gives verdicts, calls may be sent while they are written
//! ([`Request::streams_calls`](crate::request::Request::streams_calls)): the reply is not rewound past what
//! the client has of them.

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::hex;
use super::sequence::Sequence;
use crate::error::Result;
use crate::policy::{
    ARGUMENT_BYTES, EARLIER_CALLS, EarlierCall, MAX_REPAIRS, ToolCallView, Verdict,
};
use crate::request::{FinishReason, Message, ToolCall};
use crate::text::{Piece, Text};

impl Sequence {
    /// The model ends the reply with `token`; a call that this completes gets its verdict first.
    pub(super) fn end_turn(&mut self, token: u32, text: &Text) -> Result<()> {
        // Clients that score a prompt count one token after it, whichever it is.
        if self.request.prompt.is_some() {
            self.report_logprobs(token, text)?;
        }
        if self.reply_state.reply.in_call() {
            let mut ended = self.reply_state.reply.clone();
            self.progress.waiting = ended.finish_turn();
            let start = self.prompt + ended.last_call_start();
            if self.judge_from(start, text)? {
                return Ok(());
            }
            self.reply_state.reply = ended;
        }
        self.tokens.push(token);
        if !self.has_ended() {
            self.end(FinishReason::Stop);
        }
        Ok(())
    }

    /// Gets verdicts on the waiting calls, if any, and carries them out; returns whether the calls were
    /// rewound.
    ///
    /// # Errors
    /// [`crate::Error::Policy`] when the policy failed and the profile fails closed.
    pub(super) fn judge(&mut self, text: &Text) -> Result<bool> {
        if self.progress.waiting.is_empty() {
            return Ok(false);
        }
        let start = self.prompt + self.reply_state.reply.last_call_start();
        let repaired = self.judge_from(start, text)?;
        if repaired || self.has_ended() {
            return Ok(repaired);
        }
        // The client has the calls now. The tag of a next call can still be rewound.
        match self.reply_state.reply.call_start() {
            Some(next) => self.rewind_limit = self.rewind_limit.max(self.prompt + next),
            None => self.start_phase(),
        }
        Ok(false)
    }

    /// Gets verdicts on the waiting calls, the first of which starts at token `start`.
    fn judge_from(&mut self, start: usize, text: &Text) -> Result<bool> {
        let mut pieces = std::mem::take(&mut self.progress.waiting);
        let mut accepted: Vec<ToolCall> = Vec::new();
        for i in 0..pieces.len() {
            let Some(call) = self.new_call(&pieces[i]) else { continue };
            match self.verdict(&call, &accepted)? {
                Verdict::Accept => accepted.push(call),
                Verdict::Repair(words) => {
                    if self.repair(start, &call, &words, text)? {
                        return Ok(true);
                    }
                    accepted.push(call);
                }
                Verdict::Stop(reason) => {
                    self.refuse(&call, reason);
                    pieces.truncate(i);
                    break;
                }
            }
        }
        self.send(pieces);
        Ok(false)
    }

    /// Gets verdicts on the calls among the last `pieces` of the reply; returns the pieces to send.
    /// Errors are those of [`Sequence::judge`].
    pub(super) fn judge_last(&mut self, pieces: Vec<Piece>) -> Result<Vec<Piece>> {
        let (mut sent, mut accepted): (Vec<Piece>, Vec<ToolCall>) = (Vec::new(), Vec::new());
        for piece in pieces {
            let Some(call) = self.new_call(&piece) else {
                sent.push(piece);
                continue;
            };
            match self.verdict(&call, &accepted)? {
                Verdict::Accept => {
                    accepted.push(call);
                    sent.push(piece);
                }
                Verdict::Repair(_) => {
                    let name = &call.function.name;
                    self.note(format!("dropped a call of `{name}`: no tokens left to repair it"));
                }
                Verdict::Stop(reason) => self.refuse(&call, reason),
            }
        }
        Ok(sent)
    }

    fn new_call(&self, piece: &Piece) -> Option<ToolCall> {
        match piece {
            Piece::ToolCall(call) if self.is_new_call(piece) => Some(call.clone()),
            _ => None,
        }
    }

    fn verdict(&mut self, call: &ToolCall, accepted: &[ToolCall]) -> Result<Verdict> {
        let view = view(call, &self.request.messages, &self.progress.tool_calls, accepted);
        let verdict = self.policy.ask(&view)?;
        self.note_policy();
        Ok(verdict)
    }

    /// Replaces the tokens from `start` on with `words`; returns false if the call is accepted instead.
    fn repair(&mut self, start: usize, call: &ToolCall, words: &str, text: &Text) -> Result<bool> {
        let (name, length) = (&call.function.name, self.reply_len());
        if self.progress.repairs == MAX_REPAIRS {
            self.note(format!(
                "accepted a call of `{name}`: limit of {MAX_REPAIRS} repairs reached"
            ));
            return Ok(false);
        }
        if self.is_form_fixed() {
            let reason = "the form of the reply is fixed";
            self.note(format!("accepted a call of `{name}` without repair: {reason}"));
            return Ok(false);
        }
        if !self.rewind(start)? {
            let reason = "the client already has the text";
            self.note(format!("accepted a call of `{name}` without repair: {reason}"));
            return Ok(false);
        }
        if self.has_ended() {
            return Ok(true);
        }
        self.progress.repairs += 1;
        self.note(format!("removed a call of `{name}` after {length} tokens"));
        let mut tokens = Vec::new();
        // The opening tag of this call closed the previous one.
        if self.reply_state.reply.in_call() {
            tokens.extend(self.reply_state.reply.close_call_tokens(text)?);
        }
        tokens.extend(text.encode_plain(words)?);
        self.inject(tokens, "injected text", "tool call repair", text)?;
        Ok(true)
    }

    fn refuse(&mut self, call: &ToolCall, reason: String) {
        let (name, length) = (&call.function.name, self.reply_len());
        self.note(format!("stopped after {length} tokens (call of `{name}`): {reason}"));
        self.end(FinishReason::Policy(reason));
    }
}

/// The policy's view of `call`, with the earlier calls in `messages`, those `sent` in this reply, and
/// those `accepted` together with it.
fn view(
    call: &ToolCall,
    messages: &[Message],
    sent: &[ToolCall],
    accepted: &[ToolCall],
) -> ToolCallView {
    let arguments = compact(&call.function.arguments);
    let mut earlier = conversation(messages);
    earlier.extend(sent.iter().chain(accepted).map(|call| (call, None)));
    let older = earlier.len().saturating_sub(EARLIER_CALLS);
    let earlier_call = |(call, result): &(&ToolCall, Option<&str>)| EarlierCall {
        name: call.function.name.clone(),
        arguments: digest(&canonical(&call.function.arguments)),
        answered: result.map(digest),
    };
    ToolCallView {
        name: call.function.name.clone(),
        digest: digest(&canonical(&call.function.arguments)),
        arguments: arguments[..arguments.floor_char_boundary(ARGUMENT_BYTES)].to_string(),
        index: (sent.len() + accepted.len()) as u32,
        earlier: earlier[older..].iter().map(earlier_call).collect(),
    }
}

/// The calls of a conversation, oldest first, with their results. A result without a call id belongs
/// to the oldest call that has none yet.
fn conversation(messages: &[Message]) -> Vec<(&ToolCall, Option<&str>)> {
    let mut calls: Vec<(&ToolCall, Option<&str>)> = Vec::new();
    for message in messages {
        calls.extend(message.tool_calls.iter().map(|call| (call, None)));
        if message.role != "tool" {
            continue;
        }
        let open = |(_, result): &(&ToolCall, Option<&str>)| result.is_none();
        let id = message.tool_call_id.as_deref().filter(|id| !id.is_empty());
        let index = match id {
            // Ids may repeat in a long conversation; the newest call matches.
            Some(id) => calls.iter().rposition(|one| one.0.id == id && open(one)),
            None => calls.iter().position(open),
        };
        if let Some(index) = index {
            calls[index].1 = Some(&message.content);
        }
    }
    calls
}

/// The first 16 hex digits of a text's SHA-256.
fn digest(text: &str) -> String {
    hex(&Sha256::digest(text)[..8])
}

fn compact(arguments: &Map<String, Value>) -> String {
    serde_json::to_string(arguments).expect("JSON values serialize")
}

/// Compact JSON with sorted keys, equal for equal arguments.
fn canonical(arguments: &Map<String, Value>) -> String {
    fn sorted(value: &Value) -> Value {
        match value {
            Value::Object(map) => Value::Object(sorted_map(map)),
            Value::Array(items) => items.iter().map(sorted).collect(),
            other => other.clone(),
        }
    }

    fn sorted_map(map: &Map<String, Value>) -> Map<String, Value> {
        let mut entries: Vec<(String, Value)> =
            map.iter().map(|(key, value)| (key.clone(), sorted(value))).collect();
        entries.sort_by(|a, b| a.0.cmp(&b.0));
        entries.into_iter().collect()
    }

    compact(&sorted_map(arguments))
}
