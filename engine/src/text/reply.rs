//! One reply, token by token: which part of it a token belongs to, and what clients see of it.
//!
//! A reply is a thought, an answer and calls of tools. Markers part them, and a marker counts by
//! its token id where the vocabulary has it as one token, so that text which spells it (injected by
//! a policy, or quoted by the model) is just text. Where `<tool_call>` is no token it is found as
//! text; a thought is always parted by ids.
//! Never decides when to stop, and drops nothing but markers and the white space next to them.
//!
//! What happens to markers in unusual places:
//! - `<think>` before anything visible was answered opens a thought (again); at the start of a
//!   thought it is dropped; elsewhere it is text, and the `</think>` that follows it too.
//! - `</think>` outside of a thought is dropped.
//! - `<tool_call>` counts if the request has tools. A call inside a thought is one if well-formed
//!   and else part of the thought; its tokens count as thought, so that budgets hold.
//! - What follows `<tool_call>` and cannot become a call, or turns out malformed, is text of the
//!   part in which it stands, markers included. Inside of a value of a call all markers are text
//!   (a model may write a file about calls), so a value without an end lasts to the reply's end.
//!
//! Stop strings look at the answer alone, as clients see it, before white space in front of a call
//! is cut.

use std::collections::VecDeque;
use std::sync::Arc;

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::Text;
use super::detokenize::Detokenizer;
use super::stop::{Stop, partial};
use super::tokenizer::{Marker, Tokenizer};
use super::tool_call::{self, Malformed, Schemas};
use super::trim::{Lead, Tail};
use crate::error::{Error, Result};
use crate::request::{FunctionCall, ToolCall};

/// Bytes of a call that are collected before it is given out as text: a model writes files in
/// calls, but one that never ends must not fill the memory.
const CALL_BYTES: usize = 1 << 20;

/// Bytes of raw text kept for a policy that does not ask for it; the latest ones stay.
const RAW_BYTES: usize = 64 << 10;

/// Which part of a reply the next token belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Between `<think>` and `</think>`.
    Reasoning,
    /// What the client asked for.
    Answer,
    /// Between `<tool_call>` and `</tool_call>`, outside of a thought.
    ToolCall,
}

/// A piece of a reply, as clients see it.
#[derive(Debug, Clone, PartialEq)]
pub enum Piece {
    /// The next piece of the thought.
    Reasoning(String),
    /// The next piece of the answer.
    Answer(String),
    /// A complete call.
    ToolCall(ToolCall),
}

/// The reply to one request; see the module.
#[derive(Debug, Clone)]
pub struct Reply {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    schemas: Schemas,
    /// `<tool_call>` is no token: it is looked for in the text, and this is held back for it.
    spelt: Option<String>,
    /// Which tokens what is held back came with: how many came before, and bytes.
    spans: VecDeque<(usize, usize)>,
    /// Tokens that have come.
    tokens: usize,
    /// How many of them came before the tag that was met last, and before the calls given out last.
    tag: usize,
    called: usize,
    thinking: bool,
    thought: Thought,
    answer: Answer,
    call: Option<Call>,
    calls: usize,
    /// Digest of the prompt: makes call ids unique in a conversation, and equal when repeated.
    prompt: [u8; 32],
    raw: String,
    out: Vec<Piece>,
}

#[derive(Debug, Clone, Default)]
struct Thought {
    lead: Lead,
    tail: Tail,
    visible: bool,
    /// Whether the text so far ends with a line.
    on_new_line: bool,
}

#[derive(Debug, Clone, Default)]
struct Answer {
    lead: Lead,
    stop: Stop,
    tail: Tail,
    visible: bool,
    /// White space in front of a call: comes back if text follows the call.
    gap: String,
    /// `<think>`s that are text.
    quoted: usize,
}

/// What came after a `<tool_call>` so far.
#[derive(Debug, Clone, Default)]
struct Call {
    content: String,
    /// Tokens of the reply before its tag.
    from: usize,
}

impl Reply {
    pub(super) fn new(
        tokenizer: Arc<Tokenizer>,
        prompt: &[u32],
        stop: &[String],
        tools: &[Value],
    ) -> Self {
        // The turn that the prompt opens: no user's text stands behind the last special token.
        let turn = prompt
            .iter()
            .rev()
            .take_while(|id| tokenizer.marker(**id).is_some() || !tokenizer.is_silent(**id));
        let last = turn
            .filter_map(|id| tokenizer.marker(*id))
            .find(|marker| matches!(marker, Marker::OpenReasoning | Marker::CloseReasoning));
        let thinking = last == Some(Marker::OpenReasoning);
        let schemas = Schemas::new(tools);
        let has_token = tokenizer.marker_id(Marker::OpenCall).is_some();
        let mut digest = Sha256::new();
        prompt.iter().for_each(|id| digest.update(id.to_le_bytes()));
        Self {
            detokenizer: Detokenizer::new(tokenizer.clone()),
            spelt: (!schemas.is_empty() && !has_token).then(String::new),
            spans: VecDeque::new(),
            tokens: 0,
            tag: 0,
            called: 0,
            tokenizer,
            schemas,
            thinking,
            thought: Thought { lead: Lead::new(true), on_new_line: true, ..Thought::default() },
            answer: Answer {
                lead: Lead::new(last.is_some()),
                stop: Stop::new(stop),
                ..Answer::default()
            },
            call: None,
            calls: 0,
            prompt: digest.finalize().into(),
            raw: String::new(),
            out: Vec::new(),
        }
    }

    /// Which part of the reply the next token belongs to.
    pub fn phase(&self) -> Phase {
        match &self.call {
            _ if self.thinking => Phase::Reasoning,
            Some(_) => Phase::ToolCall,
            None => Phase::Answer,
        }
    }

    /// Whether a stop string was found; no piece follows.
    pub fn stopped(&self) -> bool {
        self.answer.stop.found()
    }

    /// Adds a token, sampled or forced; returns what can now be shown.
    pub fn push(&mut self, token: u32) -> Vec<Piece> {
        if self.stopped() {
            return Vec::new();
        }
        let before = self.tokens;
        self.tokens += 1;
        let marker = self.tokenizer.marker(token).filter(|marker| self.heeds(*marker));
        if let Some(marker) = marker {
            self.flush_text();
            self.tag = before;
            self.keep_raw(marker.text());
            self.marker(marker);
        } else if !self.tokenizer.is_silent(token) {
            let mut text = String::new();
            self.detokenizer.push(token, &mut text);
            self.text(&text);
        }
        std::mem::take(&mut self.out)
    }

    /// Ends the reply; returns all that was held back.
    ///
    /// A call without its closing tag is one if it is complete, else text.
    pub fn finish(&mut self) -> Vec<Piece> {
        if !self.stopped() {
            self.flush_text();
        }
        if let Some(call) = self.call.take() {
            match tool_call::parse(&call.content, &self.schemas) {
                Ok(calls) => self.emit_calls(calls, call.from),
                Err(_) => self.give_up(call, None),
            }
        }
        let rest = self.thought.tail.take();
        if self.thinking && self.thought.visible {
            self.emit_thought(rest);
        }
        let held = self.answer.stop.flush();
        let rest = self.answer.tail.push(&held) + &self.answer.tail.take();
        self.emit_answer(rest);
        std::mem::take(&mut self.out)
    }

    /// All text since the last call, whole characters, markers included, for policies. At most the
    /// latest 64 KiB.
    pub fn take_text(&mut self) -> String {
        let mut text = std::mem::take(&mut self.raw);
        cut_front(&mut text, RAW_BYTES);
        text
    }

    /// Whether a call is being written, in a thought or outside.
    pub fn in_call(&self) -> bool {
        self.call.is_some()
    }

    /// How many tokens came before the tag of the call that is being written.
    pub fn call_start(&self) -> Option<usize> {
        self.call.as_ref().map(|call| call.from)
    }

    /// How many tokens came before the tag of the calls that were given out last.
    pub fn last_call_start(&self) -> usize {
        self.called
    }

    /// The tokens that end a call.
    ///
    /// # Errors
    /// As [`Text::encode`].
    pub fn close_call_tokens(&self, text: &Text) -> Result<Vec<u32>> {
        match self.tokenizer.marker_id(Marker::CloseCall) {
            Some(close) => Ok(vec![close]),
            None => text.encode_plain(Marker::CloseCall.text()),
        }
    }

    /// The tokens that end the thought and go on with `hint`: a line's end if the thought is
    /// inside of a line, `</think>`, an empty line, the hint without special tokens.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the model has no `</think>`.
    pub fn close_reasoning_tokens(&self, text: &Text, hint: &str) -> Result<Vec<u32>> {
        let Some(close) = self.tokenizer.marker_id(Marker::CloseReasoning) else {
            let problem = "the model's vocabulary has no </think> to end a thought with".into();
            return Err(Error::Invalid { field: "close-thinking", problem });
        };
        let mut tokens = Vec::new();
        if !self.thought.on_new_line || self.detokenizer.is_pending() {
            tokens.extend(text.encode_plain("\n")?);
        }
        tokens.push(close);
        tokens.extend(text.encode_plain(&format!("\n\n{hint}"))?);
        Ok(tokens)
    }

    fn heeds(&self, marker: Marker) -> bool {
        match marker {
            Marker::OpenReasoning | Marker::CloseReasoning => true,
            Marker::OpenCall | Marker::CloseCall => !self.schemas.is_empty(),
        }
    }

    /// Gives out what waits for more letters: a marker or the end has come.
    fn flush_text(&mut self) {
        let mut text = String::new();
        self.detokenizer.flush(&mut text);
        self.text(&text);
        if let Some(held) = self.spelt.as_mut().map(std::mem::take) {
            self.part(&held);
        }
        self.spans.clear();
    }

    /// Text of any part, in whole characters; finds the tags of calls where they are no tokens.
    fn text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.keep_raw(text);
        let Some(held) = self.spelt.as_mut().map(std::mem::take) else { return self.part(text) };
        self.spans.push_back((self.tokens.saturating_sub(1), text.len()));
        let mut rest = held + text;
        loop {
            let marker = if self.call.is_some() { Marker::CloseCall } else { Marker::OpenCall };
            let Some(at) = rest.find(marker.text()) else {
                let held = rest.split_off(rest.len() - partial(&rest, marker.text()));
                self.spelt = Some(held);
                self.pass_over(rest.len());
                return self.part(&rest);
            };
            self.part(&rest[..at]);
            self.pass_over(at);
            self.tag = self.spans.front().map_or(self.tokens, |&(before, _)| before);
            self.marker(marker);
            self.pass_over(marker.text().len());
            rest.drain(..at + marker.text().len());
        }
    }

    /// So many bytes are no longer held back.
    fn pass_over(&mut self, mut bytes: usize) {
        while let Some((_, left)) = self.spans.front_mut() {
            if *left > bytes {
                *left -= bytes;
                return;
            }
            bytes -= *left;
            self.spans.pop_front();
        }
    }

    /// Text that belongs to the current part.
    fn part(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        if self.thinking {
            self.thought.on_new_line = text.ends_with('\n');
        }
        let Some(call) = &mut self.call else {
            return if self.thinking { self.think(text) } else { self.answer(text) };
        };
        call.content.push_str(text);
        if call.content.len() > CALL_BYTES || !tool_call::is_plausible(&call.content) {
            let call = self.call.take().unwrap_or_default();
            self.give_up(call, None);
        }
    }

    fn think(&mut self, text: &str) {
        let text = self.thought.lead.push(text);
        let text = self.thought.tail.push(&text);
        self.emit_thought(text);
    }

    fn answer(&mut self, text: &str) {
        let text = self.answer.lead.push(text);
        if text.is_empty() {
            return;
        }
        let gap = std::mem::take(&mut self.answer.gap);
        // The white space in front of a call or that behind it, not both.
        let line = gap.is_empty() || gap.contains('\n');
        let text = gap + if line { &text } else { text.trim_start() };
        let text = self.answer.stop.push(&text);
        // White space waits while a marker may follow that would make it white space next to one.
        let text =
            if !self.answer.stop.found() && (!self.answer.visible || !self.schemas.is_empty()) {
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
        self.thought.on_new_line = false;
        match self.call.take() {
            Some(call) => self.marker_in_call(marker, call),
            None => match marker {
                Marker::OpenCall => self.open_call(),
                Marker::CloseCall => self.part(marker.text()),
                Marker::OpenReasoning => self.open_thought(),
                Marker::CloseReasoning => self.close_thought(),
            },
        }
    }

    fn marker_in_call(&mut self, marker: Marker, mut call: Call) {
        let ends = match marker {
            Marker::CloseCall | Marker::OpenCall => true,
            Marker::CloseReasoning => self.thinking,
            Marker::OpenReasoning => false,
        };
        if !ends {
            call.content.push_str(marker.text());
            self.call = Some(call);
            return;
        }
        let closed = call.content.trim_end().ends_with(Marker::CloseCall.text());
        match tool_call::parse(&call.content, &self.schemas) {
            Ok(calls) => self.emit_calls(calls, call.from),
            // A file about calls may hold the tags: inside of a value they are text.
            Err(Malformed::InsideValue)
                if marker != Marker::CloseReasoning && !(marker == Marker::OpenCall && closed) =>
            {
                call.content.push_str(marker.text());
                self.call = Some(call);
                return;
            }
            Err(_) => {
                let end = (marker == Marker::CloseCall).then_some(marker);
                self.give_up(call, end);
            }
        }
        match marker {
            Marker::OpenCall => self.open_call(),
            Marker::CloseReasoning => self.close_thought(),
            Marker::CloseCall | Marker::OpenReasoning => {}
        }
    }

    fn open_call(&mut self) {
        self.call = Some(Call { content: String::new(), from: self.tag });
    }

    fn open_thought(&mut self) {
        if self.thinking {
            if self.thought.visible {
                self.part(Marker::OpenReasoning.text());
            }
        } else if self.answer.is_blank() {
            self.answer.forget_blank();
            self.thinking = true;
            self.thought =
                Thought { lead: Lead::new(true), on_new_line: true, ..Thought::default() };
        } else {
            self.answer.quoted += 1;
            self.part(Marker::OpenReasoning.text());
        }
    }

    fn close_thought(&mut self) {
        if self.thinking {
            self.thought.tail.take();
            self.thinking = false;
            self.answer.lead = Lead::new(true);
        } else if self.answer.quoted > 0 {
            self.answer.quoted -= 1;
            self.part(Marker::CloseReasoning.text());
        } else if self.answer.is_blank() {
            self.answer.forget_blank();
        }
    }

    /// Passes a call on that is none, as text of the part in which it stands.
    fn give_up(&mut self, call: Call, end: Option<Marker>) {
        tracing::warn!(bytes = call.content.len(), "malformed tool call passed on as text");
        self.call = None;
        let end = end.map_or("", Marker::text);
        self.part(&format!("{}{}{end}", Marker::OpenCall.text(), call.content));
    }

    fn emit_calls(&mut self, calls: Vec<FunctionCall>, from: usize) {
        self.called = from;
        if !self.thinking {
            let held = self.answer.stop.flush();
            let text = self.answer.tail.push(&held);
            self.emit_answer(text);
            let gap = self.answer.tail.take();
            if self.answer.visible && self.answer.gap.is_empty() {
                self.answer.gap = gap;
            }
            self.answer.lead = Lead::new(true);
        }
        for function in calls {
            let id = self.call_id();
            self.out.push(Piece::ToolCall(ToolCall { id, kind: "function".into(), function }));
        }
    }

    fn call_id(&mut self) -> String {
        let digest = Sha256::new().chain_update(self.prompt).chain_update(self.calls.to_le_bytes());
        self.calls += 1;
        let digest = digest.finalize();
        let hex: String = digest.iter().take(12).map(|byte| format!("{byte:02x}")).collect();
        format!("call_{hex}")
    }

    fn emit_thought(&mut self, text: String) {
        if text.is_empty() {
            return;
        }
        self.thought.visible = true;
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

    fn keep_raw(&mut self, text: &str) {
        self.raw.push_str(text);
        if self.raw.len() > 2 * RAW_BYTES {
            cut_front(&mut self.raw, RAW_BYTES);
        }
    }
}

impl Answer {
    /// Nothing but white space was answered so far.
    fn is_blank(&self) -> bool {
        !self.visible && self.stop.held().trim().is_empty()
    }

    fn forget_blank(&mut self) {
        self.stop.flush();
        self.tail.take();
        self.lead = Lead::new(true);
    }
}

/// Cuts `text` to its last `bytes` bytes, or a few less to keep characters whole.
fn cut_front(text: &mut String, bytes: usize) {
    if text.len() > bytes {
        let start = text.ceil_char_boundary(text.len() - bytes);
        text.drain(..start);
    }
}
