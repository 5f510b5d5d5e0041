//! Calls of a reply: reads them while they are written, emits, repairs or refuses them.

use sha2::{Digest, Sha256};

use super::super::tokenizer::Marker;
use super::super::tool_call::{CallDraft, Format, Ids, Reading, State, next_read};
use super::super::trim::Lead;
use super::{Piece, Reply};
use crate::request::{CallDelta, FunctionCall, ToolCall};

/// Maximum size of a call; a larger one is emitted as text. Models write files in calls, but an
/// endless call must not fill the memory.
const CALL_BYTES: usize = 1 << 20;

/// An incomplete tool call.
#[derive(Debug, Clone, Default)]
pub struct Call {
    pub content: String,
    /// Number of tokens of the reply before its tag.
    pub start: usize,
    /// Whether it has no tag.
    is_bare: bool,
    /// Whether a name was read.
    has_name: bool,
    /// The length of the content at which it is read again.
    next_read: usize,
    /// Number of its calls that were emitted as a whole.
    emitted: usize,
    /// Id of the next one, of which a piece was emitted.
    id: Option<String>,
    /// Bytes of its arguments that were emitted.
    sent: usize,
}

impl Call {
    /// A call in a message with this `header`, which begins after `start` tokens.
    pub fn message(start: usize, header: &str) -> Self {
        Self { start, content: header.into(), ..Self::default() }
    }

    /// A call without a tag, after `start` tokens.
    pub fn bare(start: usize) -> Self {
        Self { start, is_bare: true, ..Self::default() }
    }
}

/// Why a call ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The model ended it, or its turn.
    Model,
    /// A limit cut it off.
    Limit,
}

impl Reply {
    /// Whether `tokens`, text that a policy injects after the tokens of `structure`, would open a call, complete
    /// one, or be one. A tag that is no token is found in any text, and a call without a tag is text.
    pub fn would_call(&self, structure: &[u32], tokens: &[u32]) -> bool {
        let is_call = |piece: &Piece| matches!(piece, Piece::ToolCall(_));
        let has_tag = |reply: &Self| reply.call.as_ref().is_some_and(|call| !call.is_bare);
        let ends_in_call = |mut reply: Self| reply.finish_turn().iter().any(is_call);
        let mut before = self.clone();
        structure.iter().for_each(|token| drop(before.push(*token)));
        let mut after = before.clone();
        let pieces: Vec<_> = tokens.iter().flat_map(|token| after.push(*token)).collect();
        // One character begins many texts; what the model writes after it is its own.
        let begins_tag = after.spelled.as_ref().is_some_and(|held| held.len() > 1);
        pieces.iter().any(is_call)
            || has_tag(&after) && !has_tag(&before)
            || begins_tag
            || ends_in_call(after) && !ends_in_call(before)
    }

    pub(super) fn finish_call(&mut self, ending: Ending) {
        if !self.stopped() {
            self.flush_text();
        }
        let Some(mut call) = self.call.take() else { return };
        let mut reading = self.read(&call, ending == Ending::Model);
        // A value without an end holds the closing tag too.
        if ending == Ending::Model
            && let Some(close) = self.tokenizer.format().close
            && reading.state == (State::Early { is_in_value: true })
            && let Some(content) = call.content.trim_end().strip_suffix(close)
        {
            let shorter = Call { content: content.into(), ..call.clone() };
            let without_tag = self.read(&shorter, true);
            let sent = without_tag.calls.get(call.emitted).map_or(0, |draft| draft.arguments.len());
            if call.sent <= sent {
                (call, reading) = (shorter, without_tag);
            }
        }
        self.end_call(call, reading, ending, "");
    }

    /// Whether the answer begins with `text` as a call without a tag begins.
    pub(super) fn may_be_bare_call(&self, text: &str) -> bool {
        let first = text.chars().find(|c| !c.is_whitespace());
        first.is_some()
            && first == self.tokenizer.format().bare
            && !self.schemas.is_empty()
            && !self.is_reasoning
            && self.answer.is_blank()
    }

    fn read(&self, call: &Call, has_ended: bool) -> Reading {
        let format: &Format = self.tokenizer.format();
        format.read(&call.content, &self.schemas, has_ended, call.is_bare)
    }

    /// Reads a call as far as it is written, if enough was added since: whether it may be one, and what
    /// of it is certain.
    pub(super) fn read_more(&mut self) {
        let streams = self.streams_calls && !self.is_reasoning;
        let Some(mut call) = self.call.take() else { return };
        let length = call.content.len();
        if length > CALL_BYTES {
            let reading = self.read(&call, false);
            return self.end_call(call, reading, Ending::Limit, "");
        }
        if length >= call.next_read && (streams || !call.has_name) {
            call.next_read = next_read(length);
            let reading = self.read(&call, false);
            call.has_name = reading.has_name();
            if !call.has_name && reading.state == State::Malformed {
                return self.emit_malformed_call(call, "");
            }
            // A tag may be quoted: what names no tool waits for its end.
            if streams {
                let is_known = |draft: &&CallDraft| self.schemas.has(&draft.name);
                let known = reading.calls.iter().take_while(is_known).count();
                self.emit_calls(&mut call, &reading.calls[..known]);
            }
        }
        self.call = Some(call);
    }

    pub(super) fn marker_in_call(&mut self, marker: Marker, mut call: Call) {
        let ends = match marker {
            Marker::CloseCall | Marker::OpenCall => true,
            Marker::CloseReasoning => self.is_reasoning,
            Marker::OpenReasoning => false,
        };
        if !ends {
            call.content.push_str(self.tokenizer.marker_text(marker));
            self.call = Some(call);
            return;
        }
        let tag = self.tokenizer.marker_text(marker);
        let close = self.tokenizer.format().close;
        let is_closed = close.is_some_and(|close| call.content.trim_end().ends_with(close));
        let reading = self.read(&call, true);
        // Inside a value tags are text: the call may write a file about calls.
        if reading.state == (State::Early { is_in_value: true })
            && marker != Marker::CloseReasoning
            && !(marker == Marker::OpenCall && is_closed)
        {
            call.content.push_str(tag);
            self.call = Some(call);
            return;
        }
        let end = if marker == Marker::CloseCall { tag } else { "" };
        self.end_call(call, reading, Ending::Model, end);
        match marker {
            Marker::OpenCall => self.open_call(),
            Marker::CloseReasoning => self.close_reasoning(),
            Marker::CloseCall | Marker::OpenReasoning => {}
        }
    }

    pub(super) fn open_call(&mut self) {
        self.call = Some(Call { start: self.tag, ..Call::default() });
    }

    /// Ends a call, of which `reading` is the whole content: emits the calls, repairs them, or emits the
    /// content as text with its tags, the last of which is `end`.
    fn end_call(&mut self, mut call: Call, mut reading: Reading, ending: Ending, end: &str) {
        let is_whole = reading.state == State::Complete || reading.lacks_tags_only();
        let can_repair = !is_whole && !self.is_reasoning && ending == Ending::Model;
        let is_repaired = can_repair && reading.repair(&self.schemas);
        if is_whole || is_repaired {
            self.emit_calls(&mut call, &reading.calls);
            if is_repaired || reading.is_repaired {
                self.note_call("repaired a malformed call", &reading);
            }
        } else if call.emitted == 0 && call.id.is_none() {
            if !self.is_reasoning && reading.has_name() {
                self.note_call("sent a malformed call as text", &reading);
            }
            return self.emit_malformed_call(call, end);
        } else if ending == Ending::Limit {
            return self.note_call("did not complete a call", &reading);
        } else {
            if let Some(draft) = reading.calls.get_mut(call.emitted).filter(|_| call.id.is_some()) {
                draft.close();
            }
            self.emit_calls(&mut call, &reading.calls);
            self.note_call("closed a malformed call whose beginning was sent", &reading);
        }
        let rest = call.content.split_off(reading.rest);
        if reading.state == State::Malformed && !rest.trim().is_empty() {
            self.add_text(&rest);
        }
    }

    fn note_call(&mut self, what: &str, reading: &Reading) {
        let mut names = reading.calls.iter().rev().map(|call| &call.name);
        let name = names.find(|name| !name.is_empty()).map_or("", String::as_str);
        tracing::warn!(what, "malformed tool call");
        self.out.push(Piece::Note(format!("{what} of `{name}`")));
    }

    /// Emits malformed tool-call markup as text of the current phase.
    fn emit_malformed_call(&mut self, call: Call, end: &str) {
        tracing::debug!(bytes = call.content.len(), "tool call emitted as text");
        let open = if call.is_bare { "" } else { self.tokenizer.marker_text(Marker::OpenCall) };
        self.add_text(&format!("{open}{}{end}", call.content));
    }

    /// Emits what was not emitted of `drafts`, the calls in `call`.
    fn emit_calls(&mut self, call: &mut Call, drafts: &[CallDraft]) {
        let streams = self.streams_calls;
        for draft in drafts.iter().skip(call.emitted) {
            let is_begun = call.id.is_some();
            if draft.name.is_empty() || !(streams || draft.is_complete) {
                return;
            }
            let id = call.id.take().unwrap_or_else(|| {
                self.end_answer_before_call(call.start);
                self.call_id(&draft.name)
            });
            let arguments = draft.arguments.get(call.sent..).unwrap_or_default();
            if streams && !(is_begun && arguments.is_empty()) {
                let name = (!is_begun).then(|| draft.name.clone());
                let arguments = arguments.to_string();
                self.out.push(Piece::CallDelta(CallDelta { id: id.clone(), name, arguments }));
            }
            if !draft.is_complete {
                (call.id, call.sent) = (Some(id), draft.arguments.len());
                return;
            }
            (call.emitted, call.sent) = (call.emitted + 1, 0);
            let function = FunctionCall { name: draft.name.clone(), arguments: draft.values() };
            self.out.push(Piece::ToolCall(ToolCall { id, kind: "function".into(), function }));
        }
    }

    /// Emits the text held back before a call that starts at token `start`.
    fn end_answer_before_call(&mut self, start: usize) {
        self.last_call = start;
        if self.is_reasoning {
            return;
        }
        let held = self.answer.stop.flush();
        let text = self.answer.tail.push(&held);
        self.emit_answer(text);
        let gap = self.answer.tail.take();
        if self.answer.visible && self.answer.gap.is_empty() {
            self.answer.gap = gap;
        }
        self.answer.lead = Lead::new(true);
    }

    fn call_id(&mut self, name: &str) -> String {
        let digest = Sha256::new().chain_update(self.prompt).chain_update(self.calls.to_le_bytes());
        let digits = hex::encode(&digest.finalize()[..12]);
        let number = self.calls;
        self.calls += 1;
        match self.tokenizer.format().ids {
            Ids::Call => format!("call_{digits}"),
            Ids::Nine => digits[..9].to_string(),
            Ids::Function => format!("functions.{name}:{number}"),
        }
    }
}
