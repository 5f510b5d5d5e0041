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

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::reply::ClientReply;
use super::steering::{Do, Now, Repair, Steering, Todo};
use crate::error::Result;
use crate::policy::{
    ARGUMENT_BYTES, EARLIER_CALLS, EarlierCall, MAX_REPAIRS, ToolCallView, Verdict,
};
use crate::request::{FinishReason, Message, ToolCall};
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

/// The policy's view of `call`, with the earlier calls in `messages`, those `sent` in this reply,
/// and those `accepted` together with it.
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

/// The calls of a conversation, oldest first, with their results. A result without a call id
/// belongs to the oldest call that has none yet.
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
