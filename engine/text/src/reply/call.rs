//! Calls of a reply: reads them while they are written, emits, repairs or refuses them.

use sha2::{Digest, Sha256};

use super::super::tokenizer::Marker;
use super::super::tool_call::{CallDraft, Format, Ids, Reading, State, next_read};
use super::super::trim::Lead;
use super::{Piece, Reply};
use steersman_request::{Arguments, CallDelta, FunctionCall, ToolCall};

/// Maximum size of a call; a larger one is emitted as text. Models write files in calls, but an
/// endless call must not fill the memory.
const CALL_BYTES: usize = 1 << 20;

/// An incomplete tool call, or several between one pair of tags.
#[derive(Debug, Clone, Default)]
pub struct Call {
    pub content: String,
    /// Number of tokens of the reply before its tag.
    pub start: usize,
    kind: Kind,
    /// Whether a name was read.
    has_name: bool,
    /// The length of the content at which it is read again.
    next_read: usize,
    /// Number of its calls that were emitted as a whole.
    emitted: usize,
    /// The next one, if a piece of it was emitted.
    open: Option<OpenCall>,
}

/// What says that a text is a call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Kind {
    /// A tag, or a header.
    #[default]
    Tagged,
    /// Its first character: the format has no tag.
    Bare,
    /// What follows the tag that the model left out ([`Format::untagged`]).
    Untagged,
    /// The whole answer is JSON that names tools.
    Answer,
}

/// A call of which pieces were emitted.
#[derive(Debug, Clone)]
struct OpenCall {
    id: String,
    name: String,
    /// The arguments that were emitted.
    sent: String,
}

impl Call {
    /// A call in a message with this `header`, which begins after `start` tokens.
    pub fn message(start: usize, header: &str) -> Self {
        Self { start, content: header.into(), ..Self::default() }
    }

    /// A call that begins after `start` tokens with what follows a tag that the model left out.
    pub fn untagged(start: usize) -> Self {
        Self { start, kind: Kind::Untagged, ..Self::default() }
    }

    fn has_tag(&self) -> bool {
        matches!(self.kind, Kind::Tagged | Kind::Untagged)
    }
}

/// Why a call ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// A tag of the model ended it.
    Tag,
    /// The model ended its turn.
    Turn,
    /// A limit cut it off.
    Limit,
}

impl Reply {
    /// Whether `tokens`, text that a policy injects after the tokens of `structure`, would open a call, complete
    /// one, or be one. A tag that is no token is found in any text, and a call without a tag is text.
    pub fn would_call(&self, structure: &[u32], tokens: &[u32]) -> bool {
        let is_call = |piece: &Piece| matches!(piece, Piece::ToolCall(_));
        let has_tag = |reply: &Self| reply.call.as_ref().is_some_and(Call::has_tag);
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
        let (reading, end) = match ending {
            Ending::Tag | Ending::Turn => self.read_whole(&mut call),
            Ending::Limit => {
                let reading = self.read(&call, false);
                let has_ended = reading.ends_call;
                (if has_ended { self.read(&call, true) } else { reading }, String::new())
            }
        };
        let ending = if end.is_empty() { ending } else { Ending::Tag };
        self.end_call(call, reading, ending, &end);
        let rest = std::mem::take(&mut self.leftover);
        self.add_text(&rest);
    }

    /// Reads a call that the model has ended. If a value without an end holds the closing tag, the tag is cut off the
    /// call and returned.
    fn read_whole(&self, call: &mut Call) -> (Reading, String) {
        let reading = self.read(call, true);
        let length = self.certain_length(&call.content);
        if reading.state != (State::Early { is_in_value: true }) || length == call.content.len() {
            return (reading, String::new());
        }
        let tag = call.content.split_off(length);
        (self.read(call, true), tag)
    }

    /// Length of `content` without a closing tag at its end.
    fn certain_length(&self, content: &str) -> usize {
        let close = self.tokenizer.format().close;
        let without = close.and_then(|close| content.trim_end().strip_suffix(close));
        without.map_or(content.len(), str::len)
    }

    /// Whether `text`, with which the answer begins, may be a call without a tag.
    fn bare_call(&self, text: &str) -> Option<Kind> {
        let first = text.chars().find(|c| !c.is_whitespace())?;
        if self.schemas.is_empty() || self.is_reasoning || !self.answer.is_blank() {
            return None;
        }
        let format = self.tokenizer.format();
        if format.bare == Some(first) {
            return Some(Kind::Bare);
        }
        let is_json = self.reads_untagged && format.may_answer_json() && "[{".contains(first);
        is_json.then_some(Kind::Answer)
    }

    /// Begins a call if `text`, with which the answer begins, may be one without a tag.
    pub(super) fn open_bare_call(&mut self, text: &str) {
        if let Some(kind) = self.bare_call(text) {
            let start = self.tokens.saturating_sub(1);
            self.call = Some(Call { start, kind, ..Call::default() });
        }
    }

    fn read(&self, call: &Call, has_ended: bool) -> Reading {
        self.read_text(&call.content, call.kind, has_ended)
    }

    fn read_text(&self, content: &str, kind: Kind, has_ended: bool) -> Reading {
        let format: &Format = self.tokenizer.format();
        match kind {
            Kind::Answer => format.read_answer(content, &self.schemas, has_ended),
            _ => format.read(content, &self.schemas, has_ended, kind != Kind::Tagged),
        }
    }

    /// Reads a call as far as it is written, if enough was added since: whether it may be one, and what
    /// of it is certain.
    pub(super) fn read_more(&mut self) {
        let Some(mut call) = self.call.take() else { return };
        let streams = self.streams_calls && !self.is_reasoning && call.kind != Kind::Answer;
        let length = call.content.len();
        if length > CALL_BYTES {
            let reading = self.read(&call, false);
            return self.end_call(call, reading, Ending::Limit, "");
        }
        let may_end = matches!(call.kind, Kind::Untagged | Kind::Answer);
        if length >= call.next_read && (streams || !call.has_name || may_end) {
            call.next_read = next_read(length);
            let certain = &call.content[..self.certain_length(&call.content)];
            let reading = self.read_text(certain, call.kind, false);
            call.has_name = reading.has_name();
            let is_malformed = reading.state == State::Malformed;
            if is_malformed && (!call.has_name || call.kind == Kind::Answer) {
                return self.emit_malformed_call(call, "");
            }
            if is_malformed && call.kind == Kind::Untagged {
                return self.end_call(call, reading, Ending::Turn, "");
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
        let is_closed = self.certain_length(&call.content) < call.content.len();
        let (mut reading, mut end) = (self.read(&call, true), String::new());
        // Inside a value tags are text: the call may write a file about calls.
        if reading.state == (State::Early { is_in_value: true }) {
            if marker != Marker::CloseReasoning && !(marker == Marker::OpenCall && is_closed) {
                call.content.push_str(tag);
                self.call = Some(call);
                return;
            }
            (reading, end) = self.read_whole(&mut call);
        }
        if marker == Marker::CloseCall {
            end.push_str(tag);
        }
        self.end_call(call, reading, Ending::Tag, &end);
        let rest = std::mem::take(&mut self.leftover);
        self.add_text(&rest);
        match marker {
            Marker::OpenCall => self.open_call(),
            Marker::CloseReasoning => self.close_reasoning(),
            Marker::CloseCall | Marker::OpenReasoning => {}
        }
    }

    pub(super) fn open_call(&mut self) {
        self.call = Some(Call { start: self.tag, ..Call::default() });
    }

    /// Ends a call, of which `reading` is the content, and `end` the last tag: emits its complete calls,
    /// whole replies and streams the same. What follows them is closed if that drops nothing, and else text; if
    /// a stream has its beginning, it stays open, so that its arguments are not JSON.
    fn end_call(&mut self, mut call: Call, mut reading: Reading, ending: Ending, end: &str) {
        let is_whole = reading.state == State::Complete || reading.lacks_tags_only();
        let is_refused = self.is_reasoning || call.kind == Kind::Answer;
        if is_refused && !(is_whole && reading.complete() == reading.calls.len()) {
            return self.emit_malformed_call(call, end);
        }
        let is_closed = !is_whole
            && ending != Ending::Limit
            && reading.close_last(&self.schemas, ending == Ending::Tag);
        let complete = reading.complete();
        self.emit_calls(&mut call, &reading.calls[..complete]);
        if (is_whole || is_closed) && call.open.is_none() {
            let has_all_tags = matches!(call.kind, Kind::Tagged | Kind::Bare);
            if is_closed || reading.is_repaired || !has_all_tags {
                self.note_call("repaired a malformed call", &reading);
            }
            let rest = call.content.split_off(reading.tail);
            if !is_whole && reading.has_tail() && !rest.trim().is_empty() {
                match call.kind {
                    Kind::Untagged => self.leftover = rest,
                    _ => self.add_text(&rest),
                }
            }
        } else if call.open.is_some() {
            let what = match ending {
                Ending::Tag | Ending::Turn => "did not complete a malformed call",
                Ending::Limit => "did not complete a call",
            };
            self.note_call(what, &reading);
            let rest = call.content.split_off(reading.stopped) + end;
            // A whole reply has all of it as text, in which blocks of code may begin and end.
            if complete == 0 && call.kind == Kind::Tagged {
                self.answer.place.push(self.tokenizer.marker_text(Marker::OpenCall));
            }
            let start = if complete == 0 { 0 } else { reading.tail.min(call.content.len()) };
            self.answer.place.push(&call.content[start..]);
            self.answer.visible = true;
            match reading.state {
                State::Malformed => self.add_text(&rest),
                State::Complete | State::Early { .. } => self.answer.place.push(&rest),
            }
        } else {
            if reading.has_name() {
                self.note_call("sent a malformed call as text", &reading);
            }
            if complete == 0 {
                return self.emit_malformed_call(call, end);
            }
            let rest = call.content.split_off(reading.tail);
            self.add_text(&(rest + end));
        }
    }

    fn note_call(&mut self, what: &str, reading: &Reading) {
        let mut names = reading.calls.iter().rev().map(|call| &call.name);
        let name = names.find(|name| !name.is_empty()).map_or("", String::as_str);
        self.out.push(Piece::Note(format!("{what} of `{name}`")));
    }

    /// Emits malformed tool-call markup as text of the current phase.
    fn emit_malformed_call(&mut self, call: Call, end: &str) {
        tracing::debug!(bytes = call.content.len(), "tool call emitted as text");
        let open = match call.kind {
            Kind::Tagged => self.tokenizer.marker_text(Marker::OpenCall),
            Kind::Bare | Kind::Untagged | Kind::Answer => "",
        };
        self.add_text(&format!("{open}{}{end}", call.content));
    }

    /// Emits what was not emitted of `drafts`, the calls in `call`. The pieces of an incomplete call are no
    /// JSON: the last bracket is sent when it is complete.
    fn emit_calls(&mut self, call: &mut Call, drafts: &[CallDraft]) {
        let streams = self.streams_calls;
        for draft in drafts.iter().skip(call.emitted) {
            let arguments = match draft.is_complete {
                true => draft.arguments.as_str(),
                false => draft.arguments.strip_suffix('}').unwrap_or(&draft.arguments),
            };
            // What has no certain value yet may become text.
            let begins = draft.is_complete || streams && arguments.len() > 1;
            if draft.name.is_empty() || call.open.is_none() && !begins {
                return;
            }
            let is_begun = call.open.is_some();
            let mut open = call.open.take().unwrap_or_else(|| {
                self.end_answer_before_call(call.start);
                let id = self.call_id(&draft.name);
                OpenCall { id, name: draft.name.clone(), sent: String::new() }
            });
            let more = arguments.strip_prefix(&open.sent).filter(|_| open.name == draft.name);
            let Some(more) = more else {
                tracing::error!(name = draft.name, "a call was read in two ways");
                call.open = Some(open);
                return;
            };
            if streams && !(is_begun && more.is_empty()) {
                let name = (!is_begun).then(|| open.name.clone());
                let (id, arguments) = (open.id.clone(), more.to_string());
                self.out.push(Piece::CallDelta(CallDelta { id, name, arguments }));
            }
            if !draft.is_complete {
                open.sent = arguments.to_string();
                call.open = Some(open);
                return;
            }
            call.emitted += 1;
            let arguments = Arguments::written(draft.values(), &draft.arguments);
            let function = FunctionCall { name: open.name, arguments };
            let kind = "function".into();
            self.out.push(Piece::ToolCall(ToolCall { id: open.id, kind, function }));
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
