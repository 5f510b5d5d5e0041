//! Calls of tools, between the model that wrote them and the client: the policy judges each.
//!
//! A call that is repaired is taken back from its opening tag on, which no client has seen, and the
//! policy's text stands in its place. Of several calls between one pair of tags, one that is repaired
//! takes the others with it. A call that only the end of the turn completes is judged before the turn
//! ends; one that the reply's limits complete is judged as well, but there is no room to repair it:
//! it is dropped, with a note.

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::hex;
use super::sequence::Sequence;
use crate::error::Result;
use crate::policy::{ARGUMENT_BYTES, EARLIER_CALLS, EarlierCall, REPAIRS, ToolCallView, Verdict};
use crate::request::{FinishReason, Message, ToolCall};
use crate::text::{Piece, Text};

impl Sequence {
    /// The model ends its turn with `token`; a call that this completes is judged first.
    pub(super) fn end_turn(&mut self, token: u32, text: &Text) -> Result<()> {
        if self.reply_state.reply.in_call() {
            let mut ended = self.reply_state.reply.clone();
            self.progress.waiting = ended.finish();
            let from = self.prompt + ended.last_call_start();
            if self.judge_from(from, text)? {
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

    /// Asks the policy about the calls that wait, if there are any, and does what it says; true where
    /// they were taken back.
    ///
    /// # Errors
    /// [`crate::Error::Policy`] when it failed and fails closed.
    pub(super) fn judge(&mut self, text: &Text) -> Result<bool> {
        if self.progress.waiting.is_empty() {
            return Ok(false);
        }
        let from = self.prompt + self.reply_state.reply.last_call_start();
        let repaired = self.judge_from(from, text)?;
        if repaired || self.has_ended() {
            return Ok(repaired);
        }
        // What the client has is not rewound, but for the tag of the next call.
        match self.reply_state.reply.call_start() {
            Some(next) => self.rewind_limit = self.prompt + next,
            None => self.start_phase(),
        }
        Ok(false)
    }

    /// Judges the calls that wait, the first of which begins behind `from` tokens.
    fn judge_from(&mut self, from: usize, text: &Text) -> Result<bool> {
        let mut pieces = std::mem::take(&mut self.progress.waiting);
        let mut accepted: Vec<ToolCall> = Vec::new();
        for i in 0..pieces.len() {
            let Some(call) = self.new_call(&pieces[i]) else { continue };
            match self.verdict(&call, &accepted)? {
                Verdict::Accept => accepted.push(call),
                Verdict::Repair(words) => {
                    if self.repair(from, &call, &words, text)? {
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

    /// Judges the calls among the last `pieces`, which nothing can follow; returns what is sent.
    ///
    /// # Errors
    /// As [`Sequence::judge`].
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
                    self.note(format!("dropped a call of `{name}`: no room is left to repair it"));
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
        let verdict = self.policy.on_tool_call(&view)?;
        self.note_policy();
        Ok(verdict)
    }

    /// Puts `words` in the place of what stands behind `from` tokens; false where the call is
    /// accepted instead.
    fn repair(&mut self, from: usize, call: &ToolCall, words: &str, text: &Text) -> Result<bool> {
        let (name, at) = (&call.function.name, self.reply_len());
        if self.progress.repairs == REPAIRS {
            self.note(format!("accepted a call of `{name}`: {REPAIRS} were repaired already"));
            return Ok(false);
        }
        if !self.rewind(from)? {
            let has = "the client has text that would go with it";
            self.note(format!("accepted a call of `{name}`, not repaired: {has}"));
            return Ok(false);
        }
        if self.has_ended() {
            return Ok(true);
        }
        self.progress.repairs += 1;
        self.note(format!("took back a call of `{name}` after {at} tokens"));
        let mut tokens = Vec::new();
        // The tag that began this call ended the one before it.
        if self.reply_state.reply.in_call() {
            tokens.extend(self.reply_state.reply.close_call_tokens(text)?);
        }
        tokens.extend(text.encode_plain(words)?);
        self.inject(tokens, "injected text", "a call to repair", text)?;
        Ok(true)
    }

    fn refuse(&mut self, call: &ToolCall, reason: String) {
        let (name, at) = (&call.function.name, self.reply_len());
        self.note(format!("stopped after {at} tokens, on a call of `{name}`: {reason}"));
        self.end(FinishReason::Policy(reason));
    }
}

/// What a policy sees of `call`, behind the calls of `messages`, those `sent` in this reply, and those
/// `accepted` together with it.
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

/// The calls of a conversation, oldest first, with their results where they have one: the result that
/// names a call is its own, one that names none is that of the oldest without.
fn conversation(messages: &[Message]) -> Vec<(&ToolCall, Option<&str>)> {
    let mut calls: Vec<(&ToolCall, Option<&str>)> = Vec::new();
    for message in messages {
        calls.extend(message.tool_calls.iter().map(|call| (call, None)));
        if message.role != "tool" {
            continue;
        }
        let open = |(_, result): &(&ToolCall, Option<&str>)| result.is_none();
        let id = message.tool_call_id.as_deref().filter(|id| !id.is_empty());
        let found = match id {
            // Ids may come again in a long conversation: the newest of that name is meant.
            Some(id) => calls.iter().rposition(|one| one.0.id == id && open(one)),
            None => calls.iter().position(open),
        };
        if let Some(at) = found {
            calls[at].1 = Some(&message.content);
        }
    }
    calls
}

/// The first 16 hex digits of a text's SHA-256.
fn digest(text: &str) -> String {
    hex(&Sha256::digest(text)[..8])
}

fn compact(arguments: &Map<String, Value>) -> String {
    serde_json::to_string(arguments).expect("JSON values can be written")
}

/// The arguments as compact JSON with sorted keys: the same for equal ones.
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
