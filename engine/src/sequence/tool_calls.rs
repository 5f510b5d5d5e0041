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

use super::Sequence;
use super::steer::Todo;
use crate::error::Result;
use crate::policy::{
    ARGUMENT_BYTES, EARLIER_CALLS, EarlierCall, MAX_REPAIRS, ToolCallView, Verdict,
};
use crate::request::{FinishReason, Message, ToolCall};
use crate::text::{Phase, Piece, Text};

impl Sequence {
    /// Gets verdicts on the waiting calls, if any, and carries them out. False while the policy is called on
    /// a thread: then again after its answer.
    ///
    /// # Errors
    /// [`crate::Error::Policy`] when the policy failed and the profile fails closed.
    pub fn judge(&mut self, text: &Text) -> Result<bool> {
        if self.progress.waiting.is_empty() {
            return Ok(true);
        }
        let has_tokens = !matches!(self.todo, Todo::Finish);
        while let Some(piece) = self.progress.waiting.front() {
            if let Some(call) = self.new_call(piece) {
                let Some(verdict) = self.verdict(&call)? else { return Ok(false) };
                match verdict {
                    Verdict::Accept => {}
                    Verdict::Repair(words) if has_tokens => {
                        if self.repair(&call, &words, text)? {
                            return Ok(true);
                        }
                    }
                    Verdict::Repair(_) => {
                        let name = &call.function.name;
                        self.note(format!(
                            "dropped a call of `{name}`: no tokens left to repair it"
                        ));
                        self.progress.waiting.pop_front();
                        continue;
                    }
                    Verdict::Stop(reason) => {
                        self.refuse(&call, reason);
                        let rest = if has_tokens { self.progress.waiting.len() } else { 1 };
                        self.progress.waiting.drain(..rest);
                        continue;
                    }
                }
            }
            let judged = self.progress.waiting.pop_front();
            self.progress.judged.extend(judged);
        }
        let pieces = std::mem::take(&mut self.progress.judged);
        self.send(pieces);
        if self.has_ended() || matches!(self.todo, Todo::EndTurn { .. } | Todo::Finish) {
            return Ok(true);
        }
        // The client has the calls now. The tag of a next call can still be rewound.
        match self.reply_state.reply.call_start() {
            Some(next) => self.rewind_limit = self.rewind_limit.max(self.prompt + next),
            None => self.start_phase(),
        }
        Ok(true)
    }

    fn new_call(&self, piece: &Piece) -> Option<ToolCall> {
        match piece {
            Piece::ToolCall(call) if self.is_new_call(piece) => Some(call.clone()),
            _ => None,
        }
    }

    /// `None` while the policy is called on a thread.
    fn verdict(&mut self, call: &ToolCall) -> Result<Option<Verdict>> {
        let accepted = self.progress.judged.iter().filter_map(|piece| self.new_call(piece));
        let accepted: Vec<ToolCall> = accepted.collect();
        let view = view(call, &self.request.messages, &self.progress.tool_calls, &accepted);
        let verdict = self.hooks.ask(&view)?;
        self.note_policy();
        Ok(verdict)
    }

    /// Replaces the waiting calls, and all tokens from the first one on, with `words`. Returns false if the
    /// call is accepted instead.
    fn repair(&mut self, call: &ToolCall, words: &str, text: &Text) -> Result<bool> {
        let reply = match &self.todo {
            Todo::EndTurn { ended, .. } => ended,
            _ => &self.reply_state.reply,
        };
        let start = self.prompt + reply.last_call_start();
        let (name, length) = (&call.function.name, self.reply_len());
        // In a chain each policy has as many, so that a later one does not use up those of an earlier one.
        let limit = MAX_REPAIRS * self.hooks.policies();
        if self.progress.repairs == limit {
            self.note(format!("accepted a call of `{name}`: limit of {limit} repairs reached"));
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
        self.progress.waiting.clear();
        self.progress.judged.clear();
        // The rest of an injected text is replaced too.
        self.injection.iter_mut().for_each(|injection| injection.tokens.clear());
        match &mut self.todo {
            Todo::Committed(committed) => committed.loop_found = None,
            Todo::EndTurn { .. } => self.todo = Todo::Nothing,
            Todo::Nothing | Todo::Ask(_) | Todo::Act { .. } | Todo::Finish => {}
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
        let header = self.reply_state.reply.open_message_tokens(text, Phase::Answer)?;
        tokens.extend(header.unwrap_or_default());
        let words = text.encode_plain(words)?;
        if self.reply_state.reply.would_call(&tokens, &words) {
            self.note("left out the text of a repair: it would be part of a tool call".into());
        } else {
            tokens.extend(words);
        }
        self.inject(tokens, "injected text", "tool call repair");
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
    let arguments = call.function.arguments.to_json();
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
pub fn digest(text: &str) -> String {
    hex::encode(&Sha256::digest(text)[..8])
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
