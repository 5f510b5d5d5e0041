//! One reply, token by token: the phase of each token, and the text that clients see.
//!
//! A reply consists of reasoning, an answer and tool calls, separated by markers. A marker is
//! recognized by its token id, so text that spells it (injected by a policy, or quoted by the
//! model) stays text. If the tag of calls is not a single token, it is searched in the text; some models
//! write calls without a tag ([`super::tool_call::Format::bare`]), or messages with headers (`message.rs`).
//! Reasoning is delimited by token ids, or by texts if the model spells its tags ([`Tokenizer::spells_reasoning`]);
//! then `<response>` and `</response>` around its answer are none of it.
//! Never decides when to stop, and drops only markers and the white space next to them.
//!
//! Markers in unusual places:
//! - `<think>` before any visible answer starts reasoning (again), which an empty line separates from what came
//!   before; at the start of reasoning it is dropped; elsewhere it is text.
//! - `</think>` outside reasoning is dropped before any visible answer, and is text after that.
//! - The tag of calls is a marker if the request has tools. In reasoning, a well-formed call is a call
//!   and a malformed one is reasoning; the tokens of both count as reasoning, so budgets hold.
//! - Content after the tag that cannot become a call, or is malformed, is emitted as text with its
//!   markers. Inside a value of a call all markers are text (a model may write a file about calls),
//!   so a value without an end lasts to the end of the reply.
//!
//! # Malformed calls
//! A call that only lacks its end, where the model ended it, is closed. One whose last value has no end is not, and
//! neither is one that a limit cut off: half a command must not run. What cannot be repaired comes as text. Each comes with a note.
//!
//! With [`Reply::stream_calls`], the answer's calls are emitted while they are written, from their first
//! certain value on. The calls are those of a reply that is not streamed. A call that turns out to be
//! malformed cannot become text as there: it stays open, so that its arguments are not JSON, as that of a
//! call which a limit cuts off; what follows is text.
//!
//! # Calls without their tag
//! With [`Reply::read_untagged_calls`], [`Format::untagged`](super::tool_call::Format::untagged) at the
//! beginning of a line, outside of a block of code, begins a call if it names a tool. So does an answer that is
//! nothing but JSON which names tools.
//!
//! Stop strings are searched in the answer only, as clients see it, before white space next to a
//! call is removed.

use std::collections::VecDeque;
use std::sync::Arc;

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::Text;
use super::detokenize::Detokenizer;
use super::stop::Stop;
use super::tokenizer::{Marker, Tokenizer};
use super::tool_call::{Format, Ids, Schemas};
use super::trim::{Lead, Tail};
use steersman_request::error::{RequestError, Result};
use steersman_request::{CallDelta, ToolCall};

mod call;
mod message;
mod tags;

use call::{Call, Ending};
use message::{GAP, Message};
use tags::Place;

/// Raw text held for a policy that does not take it: the newest bytes.
const RAW_BYTES: usize = 64 << 10;

/// The part of a reply to which the next token belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Between `<think>` and `</think>`, or in messages of that kind and the headers around them.
    Reasoning,
    /// The part that the user reads.
    Answer,
    /// Between the tags of a call, outside reasoning.
    ToolCall,
}

/// A piece of a reply, as clients see it.
#[derive(Debug, Clone, PartialEq)]
pub enum Piece {
    /// The next piece of the reasoning.
    Reasoning(String),
    /// The next piece of the answer.
    Answer(String),
    /// The next piece of a call that is being written; only with [`Reply::stream_calls`].
    CallDelta(CallDelta),
    /// A complete tool call.
    ToolCall(ToolCall),
    /// What became of a malformed call.
    Note(String),
}

/// The state of one reply; see the module.
#[derive(Debug, Clone)]
pub struct Reply {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    schemas: Schemas,
    /// If a call may begin with text: the text held back because it may be the beginning.
    spelled: Option<String>,
    /// The tokens of `spelled`: for each, the number of tokens before it and its bytes.
    spans: VecDeque<(usize, usize)>,
    /// Number of tokens pushed.
    tokens: usize,
    /// Number of tokens before the last tag.
    tag: usize,
    /// Number of tokens before the last emitted calls.
    last_call: usize,
    is_reasoning: bool,
    reasoning: Reasoning,
    answer: Answer,
    call: Option<Call>,
    /// The newest message, if the reply consists of messages.
    message: Option<Message>,
    must_call: bool,
    streams_calls: bool,
    /// See [`Reply::read_untagged_calls`].
    reads_untagged: bool,
    /// Whether the tags of calls are text.
    spells_tags: bool,
    /// Text after a call that has ended, which may have the tag of another.
    leftover: String,
    calls: usize,
    /// Digest of the prompt: call ids are unique in a conversation and equal on repetition.
    prompt: [u8; 32],
    /// See [`Reply::take_text`].
    raw: String,
    out: Vec<Piece>,
}

#[derive(Debug, Clone, Default)]
struct Reasoning {
    lead: Lead,
    tail: Tail,
    visible: bool,
    /// Whether the text is empty or ends with a line break.
    on_new_line: bool,
    /// Whether an earlier block of the reply has text.
    is_next: bool,
    /// [`Reply::last_call`] when text was added last.
    last_call: usize,
    /// What the tag is followed by, until it has arrived; see [`Tokenizer::reasoning_label`].
    label: Option<&'static str>,
    /// The beginning of `label`.
    held: String,
}

#[derive(Debug, Clone, Default)]
struct Answer {
    lead: Lead,
    stop: Stop,
    tail: Tail,
    visible: bool,
    /// White space before a call, restored if text follows the call.
    gap: String,
    place: Place,
    /// Whether a tag that is none of the text has opened it.
    is_framed: bool,
}

impl Reply {
    pub(super) fn new(
        tokenizer: Arc<Tokenizer>,
        prompt: &[u32],
        stop: &[String],
        tools: &[Value],
    ) -> Self {
        // The generation prompt: the tokens after the last hidden one. It contains no text of the user.
        let turn = prompt
            .iter()
            .rev()
            .take_while(|id| tokenizer.marker(**id).is_some() || !tokenizer.is_hidden(**id));
        let last = turn
            .filter_map(|id| tokenizer.marker(*id))
            .find(|marker| matches!(marker, Marker::OpenReasoning | Marker::CloseReasoning));
        let message = Message::of_prompt(&tokenizer, prompt);
        let (message, is_reasoning) = match message {
            Some((message, is_reasoning)) => (Some(message), is_reasoning),
            None => (None, last == Some(Marker::OpenReasoning)),
        };
        let schemas = Schemas::new(tools);
        let schemas_are_empty = schemas.is_empty();
        let is_spelled =
            tokenizer.format().open.is_some() && tokenizer.marker_id(Marker::OpenCall).is_none();
        // The calls of the conversation, where they are numbered.
        let is_call = |id: &&u32| tokenizer.call_token(**id) == Some("<|tool_call_begin|>");
        let is_numbered = tokenizer.format().ids == Ids::Function;
        let calls = if is_numbered { prompt.iter().filter(is_call).count() } else { 0 };
        let mut digest = Sha256::new();
        prompt.iter().for_each(|id| digest.update(id.to_le_bytes()));
        Self {
            detokenizer: Detokenizer::new(tokenizer.clone()),
            spelled: (!schemas.is_empty() && is_spelled || tokenizer.spells_reasoning())
                .then(String::new),
            spans: VecDeque::new(),
            tokens: 0,
            tag: 0,
            last_call: 0,
            tokenizer,
            schemas,
            is_reasoning,
            reasoning: Reasoning::new(),
            answer: Answer {
                lead: Lead::new(last.is_some() || message.is_some()),
                stop: Stop::new(stop),
                ..Answer::default()
            },
            call: None,
            message,
            must_call: false,
            streams_calls: false,
            reads_untagged: false,
            spells_tags: !schemas_are_empty && is_spelled,
            leftover: String::new(),
            calls,
            prompt: digest.finalize().into(),
            raw: String::new(),
            out: Vec::new(),
        }
    }

    /// Emits the answer's calls while they are written.
    pub fn stream_calls(&mut self) {
        self.streams_calls = true;
    }

    /// The reply must have a call: none of its reasoning is closed for an answer.
    pub fn require_call(&mut self) {
        self.must_call = true;
    }

    /// The phase of the next token.
    pub fn phase(&self) -> Phase {
        match &self.call {
            _ if self.is_reasoning => Phase::Reasoning,
            Some(_) => Phase::ToolCall,
            None => Phase::Answer,
        }
    }

    /// Whether a stop string was found; no piece follows then.
    pub fn stopped(&self) -> bool {
        self.stopped_by().is_some()
    }

    /// The stop string that was found, if any.
    pub fn stopped_by(&self) -> Option<&str> {
        self.answer.stop.found()
    }

    /// Adds a sampled or injected token; returns the pieces that are complete.
    pub fn push(&mut self, token: u32) -> Vec<Piece> {
        if self.stopped() {
            return Vec::new();
        }
        let before = self.tokens;
        self.tokens += 1;
        let tag = self.message.as_ref().and_then(|_| self.tokenizer.message_tag(token));
        let marker = self.tokenizer.marker(token).filter(|marker| self.is_marker(*marker));
        if let Some(tag) = tag {
            self.flush_text();
            self.add_raw(tag.text());
            self.message_tag(tag, before);
        } else if let Some(marker) = marker {
            self.flush_text();
            self.tag = before;
            self.add_raw(self.tokenizer.marker_text(marker));
            self.marker(marker);
        } else if let Some(spelling) = self.call_token(token) {
            let mut text = String::new();
            self.detokenizer.flush(&mut text);
            self.text(&(text + spelling));
        } else if !self.tokenizer.is_hidden(token) {
            let mut text = String::new();
            self.detokenizer.push(token, &mut text);
            self.text(&text);
        }
        std::mem::take(&mut self.out)
    }

    /// Ends the reply where the model ends its turn; returns the text held back.
    ///
    /// A call without its closing tag is a call if it is complete or can be repaired, and text otherwise.
    pub fn finish_turn(&mut self) -> Vec<Piece> {
        self.finish_call(Ending::Turn);
        let has_no_answer = self.is_reasoning && self.answer.is_blank() && self.message.is_none();
        let mut pieces = self.finish();
        if has_no_answer && self.reasoning.visible && self.last_call == 0 {
            let note = "the model ended its reply within its reasoning, so there is no answer";
            pieces.push(Piece::Note(note.into()));
        }
        pieces
    }

    /// Ends the reply at a limit; returns the text held back.
    ///
    /// A call without its closing tag is a call if it is complete, and text otherwise.
    pub fn finish(&mut self) -> Vec<Piece> {
        self.finish_call(Ending::Limit);
        self.finish_header();
        let rest = self.reasoning.tail.take();
        if self.is_reasoning && self.reasoning.visible {
            self.emit_reasoning(rest);
        }
        let held = self.answer.stop.flush();
        let rest = self.answer.tail.push(&held) + &self.answer.tail.take();
        self.emit_answer(rest);
        std::mem::take(&mut self.out)
    }

    /// Takes the text since the last call of this method, for policies: whole characters, with
    /// markers, at most the newest 64 KiB.
    pub fn take_text(&mut self) -> String {
        let mut text = std::mem::take(&mut self.raw);
        cut_front(&mut text, RAW_BYTES);
        text
    }

    /// What [`Reply::take_text`] would take, without taking it.
    pub fn untaken_text(&self) -> &str {
        &self.raw
    }

    /// Whether the answer has no text yet.
    pub fn is_answer_blank(&self) -> bool {
        self.answer.is_blank()
    }

    /// Whether a tool call is incomplete, in reasoning or in the answer.
    pub fn in_call(&self) -> bool {
        self.call.is_some()
    }

    /// Number of tokens of the reply before the tag of the incomplete call.
    pub fn call_start(&self) -> Option<usize> {
        self.call.as_ref().map(|call| call.start)
    }

    /// Number of tokens of the reply before the tag of the last emitted calls.
    pub fn last_call_start(&self) -> usize {
        self.last_call
    }

    /// The tokens that close a tool call.
    ///
    /// # Errors
    /// As [`Text::encode`].
    pub fn close_call_tokens(&self, text: &Text) -> Result<Vec<u32>> {
        match self.tokenizer.marker_id(Marker::CloseCall) {
            Some(close) => Ok(vec![close]),
            None => text.encode_plain(self.tokenizer.marker_text(Marker::CloseCall)),
        }
    }

    /// The tokens that close the reasoning and continue with `hint`: a line break unless the
    /// reasoning is at one, `</think>`, an empty line, the hint without special tokens. In messages: the
    /// end of this one, and the header of the answer.
    ///
    /// # Errors
    /// [`RequestError::Tokenizer`] if the model has no `</think>`.
    pub fn close_reasoning_tokens(&self, text: &Text, hint: &str) -> Result<Vec<u32>> {
        if let Some(message) = &self.message {
            return self.close_message_tokens(message, text, hint);
        }
        let close = match self.tokenizer.marker_id(Marker::CloseReasoning) {
            Some(close) => Some(vec![close]),
            None if self.tokenizer.spells_reasoning() => {
                Some(text.encode_plain(self.tokenizer.marker_text(Marker::CloseReasoning))?)
            }
            None => None,
        };
        let Some(close) = close else {
            let problem = "the model's vocabulary has no tag to close the reasoning with".into();
            return Err(RequestError::Tokenizer(problem).into());
        };
        let mut tokens = Vec::new();
        if !self.reasoning.on_new_line || self.detokenizer.is_pending() {
            tokens.extend(text.encode_plain("\n")?);
        }
        tokens.extend(close);
        tokens.extend(text.encode_plain(&format!("\n\n{hint}"))?);
        Ok(tokens)
    }

    /// The text of `token` if it is a special token of a call, or of the tag before one.
    fn call_token(&self, token: u32) -> Option<&'static str> {
        let text = self.tokenizer.call_token(token)?;
        let Format { open, untagged, .. } = self.tokenizer.format();
        let tags = [open.filter(|_| self.spells_tags), untagged.filter(|_| self.reads_untagged)];
        let is_part = tags.iter().flatten().any(|tag| tag.contains(text));
        (self.in_call() || is_part).then_some(text)
    }

    fn is_marker(&self, marker: Marker) -> bool {
        match marker {
            Marker::OpenReasoning | Marker::CloseReasoning => true,
            Marker::OpenCall | Marker::CloseCall => !self.schemas.is_empty(),
        }
    }

    /// Processes the text held back, before a marker or at the end.
    fn flush_text(&mut self) {
        let mut text = String::new();
        self.detokenizer.flush(&mut text);
        self.text(&text);
        if let Some(held) = self.spelled.as_mut().map(std::mem::take) {
            self.add_to_phase(&held);
        }
        let rest = std::mem::take(&mut self.leftover);
        self.add_to_phase(&rest);
        self.spans.clear();
    }

    /// Adds text to the current phase.
    fn add_to_phase(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        if self.is_reasoning {
            self.reasoning.on_new_line = text.ends_with('\n');
        }
        if self.call.is_none() {
            self.open_bare_call(text);
        }
        match &mut self.call {
            Some(call) => {
                call.content.push_str(text);
                self.read_more();
            }
            None => self.add_text(text),
        }
    }

    /// Adds text that is not part of a call.
    fn add_text(&mut self, text: &str) {
        if self.is_reasoning { self.add_reasoning(text) } else { self.add_answer(text) }
    }

    fn add_reasoning(&mut self, text: &str) {
        let text = self.reasoning.after_label(text);
        let text = self.reasoning.lead.push(&text);
        // A call stood here: what is before it and what is after it are different texts.
        let follows_call = self.reasoning.last_call != self.last_call;
        let is_glued = self.reasoning.tail.is_empty() && !text.starts_with(char::is_whitespace);
        if follows_call && is_glued && self.reasoning.visible && !text.is_empty() {
            self.reasoning.tail.push(GAP);
        }
        if !text.is_empty() {
            self.reasoning.last_call = self.last_call;
        }
        let text = self.reasoning.tail.push(&text);
        self.emit_reasoning(text);
    }

    fn add_answer(&mut self, text: &str) {
        self.answer.place.push(text);
        let text = self.answer.lead.push(text);
        if text.is_empty() {
            return;
        }
        let gap = std::mem::take(&mut self.answer.gap);
        // Keep the white space before a call or the one after it, not both.
        let line = gap.is_empty() || gap.contains('\n');
        let text = gap + if line { &text } else { text.trim_start() };
        let text = self.answer.stop.push(&text);
        // Hold white space back while a marker may follow it.
        let text = if self.answer.stop.found().is_none()
            && (!self.answer.visible || !self.schemas.is_empty())
        {
            self.answer.tail.push(&text)
        } else {
            self.answer.tail.take() + &text
        };
        self.emit_answer(text);
    }

    fn marker(&mut self, marker: Marker) {
        if self.stopped() {
            return;
        }
        self.reasoning.on_new_line = false;
        match self.call.take() {
            Some(call) => self.marker_in_call(marker, call),
            None => match marker {
                Marker::OpenCall => self.open_call(),
                Marker::CloseCall => self.add_text(self.tokenizer.marker_text(marker)),
                Marker::OpenReasoning => self.open_reasoning(),
                Marker::CloseReasoning => self.close_reasoning(),
            },
        }
    }

    fn open_reasoning(&mut self) {
        if self.is_reasoning {
            if self.reasoning.visible {
                self.add_text(self.tokenizer.marker_text(Marker::OpenReasoning));
            }
        } else if self.answer.is_blank() {
            self.answer.drop_blank();
            self.is_reasoning = true;
            let is_next = self.reasoning.is_next || self.reasoning.visible;
            let label = self.tokenizer.reasoning_label();
            let last_call = self.last_call;
            self.reasoning = Reasoning { is_next, label, last_call, ..Reasoning::new() };
            if is_next {
                // White space is held back until text follows.
                self.reasoning.tail.push(GAP);
            }
        } else {
            self.add_text(self.tokenizer.marker_text(Marker::OpenReasoning));
        }
    }

    fn close_reasoning(&mut self) {
        if self.is_reasoning {
            self.reasoning.tail.take();
            self.is_reasoning = false;
            self.answer.lead = Lead::new(true);
        } else if self.answer.is_blank() {
            self.answer.drop_blank();
        } else {
            self.add_text(self.tokenizer.marker_text(Marker::CloseReasoning));
        }
    }

    fn emit_reasoning(&mut self, text: String) {
        if text.is_empty() {
            return;
        }
        self.reasoning.visible = true;
        match self.out.last_mut() {
            Some(Piece::Reasoning(last)) => last.push_str(&text),
            _ => self.out.push(Piece::Reasoning(text)),
        }
    }

    fn emit_answer(&mut self, text: String) {
        if text.is_empty() {
            return;
        }
        self.answer.visible = true;
        match self.out.last_mut() {
            Some(Piece::Answer(last)) => last.push_str(&text),
            _ => self.out.push(Piece::Answer(text)),
        }
    }

    fn add_raw(&mut self, text: &str) {
        self.raw.push_str(text);
        if self.raw.len() > 2 * RAW_BYTES {
            cut_front(&mut self.raw, RAW_BYTES);
        }
    }
}

impl Reasoning {
    fn new() -> Self {
        Self { lead: Lead::new(true), on_new_line: true, ..Self::default() }
    }

    /// `text` without the label that begins it.
    fn after_label(&mut self, text: &str) -> String {
        let Some(label) = self.label else { return text.into() };
        self.held.push_str(text);
        if self.held.len() < label.len() && label.starts_with(&self.held) {
            return String::new();
        }
        self.label = None;
        let held = std::mem::take(&mut self.held);
        held.strip_prefix(label).map(str::to_string).unwrap_or(held)
    }
}

impl Answer {
    /// Whether the answer so far is white space only.
    fn is_blank(&self) -> bool {
        !self.visible && self.stop.held().trim().is_empty()
    }

    fn drop_blank(&mut self) {
        self.stop.flush();
        self.tail.take();
        self.lead = Lead::new(true);
    }
}

/// Cuts `text` to its last `bytes` bytes, or fewer to keep characters whole.
fn cut_front(text: &mut String, bytes: usize) {
    if text.len() > bytes {
        let start = text.ceil_char_boundary(text.len() - bytes);
        text.drain(..start);
    }
}
