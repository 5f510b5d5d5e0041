//! Replies that consist of messages; see [`super::super::harmony`].
//!
//! A header decides what the body is. Its tokens belong to the phase before it; a reply begins in the
//! reasoning. Messages of one kind are separated by an empty line.
//!
//! A malformed header is text of the answer, with a note, and so is its body. A header that the reply ends
//! in is dropped, with a note.

use super::super::Text;
use super::super::harmony::{
    ANSWER_HEADER, Body, CALL_CHANNEL, PREAMBLE_HEADER, REASONING_HEADER, Tag, may_be_header,
    read_header,
};
use super::super::tokenizer::Tokenizer;
use super::super::trim::Lead;
use super::call::{Call, Ending};
use super::{Phase, Piece, Reply};
use steersman_request::error::Result;

/// Between two messages of one kind.
pub(super) const GAP: &str = "\n\n";

/// The state of the newest message.
#[derive(Debug, Clone, Default)]
pub struct Message {
    /// Number of tokens of the reply before its header.
    start: usize,
    /// Number of tokens of the prompt that belong to it.
    in_prompt: usize,
    /// The header, until it is complete.
    header: Option<Header>,
}

#[derive(Debug, Clone, Default)]
struct Header {
    text: String,
    /// Bytes at its beginning that are part of the prompt.
    prompt: usize,
}

impl Header {
    fn own(&self) -> &str {
        &self.text[self.prompt..]
    }
}

impl Message {
    /// Where a reply to `prompt` begins, and whether it begins with reasoning. `None` if the prompt has no
    /// messages.
    pub fn of_prompt(tokenizer: &Tokenizer, prompt: &[u32]) -> Option<(Self, bool)> {
        let is_start = |id: &u32| tokenizer.message_tag(*id) == Some(Tag::Start);
        let start = prompt.iter().rposition(is_start)?;
        let (mut header, mut is_reasoning) = (Some(String::new()), true);
        let mut in_prompt = prompt.len() - start;
        for part in prompt[start..].chunk_by(|a, b| {
            tokenizer.message_tag(*a).is_none() && tokenizer.message_tag(*b).is_none()
        }) {
            match (tokenizer.message_tag(part[0]), &mut header) {
                (Some(Tag::Message), Some(text)) => {
                    is_reasoning = read_header(text) == Some(Body::Reasoning);
                    header = None;
                }
                (Some(Tag::End | Tag::Return | Tag::Call), _) => {
                    (header, is_reasoning, in_prompt) = (Some(String::new()), true, 0);
                }
                (Some(tag), Some(text)) => text.push_str(tag.text()),
                (None, Some(text)) => text.push_str(&tokenizer.decode(part)),
                (_, None) => {}
            }
        }
        let header = header.map(|text| Header { prompt: text.len(), text });
        Some((Self { start: 0, in_prompt, header }, is_reasoning))
    }
}

impl Reply {
    /// Whether the next token belongs to the header of a message.
    pub fn in_header(&self) -> bool {
        self.message.as_ref().is_some_and(|message| message.header.is_some())
    }

    /// Number of tokens before the newest message, those of the `prompt` included, if the reply consists of
    /// messages.
    pub fn message_start(&self, prompt: usize) -> Option<usize> {
        let message = self.message.as_ref()?;
        Some((prompt + message.start).saturating_sub(message.in_prompt))
    }

    /// The tokens after which text belongs to `phase`, reasoning or answer: the rest of an incomplete header.
    /// `None` if the header is one of another message.
    ///
    /// # Errors
    /// As [`Text::encode`].
    pub fn open_message_tokens(&self, text: &Text, phase: Phase) -> Result<Option<Vec<u32>>> {
        let Some(header) = self.message.as_ref().and_then(|message| message.header.as_ref()) else {
            return Ok(Some(Vec::new()));
        };
        let whole = match phase {
            Phase::Reasoning => REASONING_HEADER,
            Phase::Answer | Phase::ToolCall => PREAMBLE_HEADER,
        };
        whole.strip_prefix(&header.text).map(|rest| text.encode(rest)).transpose()
    }

    /// [`Reply::close_reasoning_tokens`] of `message`: the end of the reasoning, and the header of the answer
    /// or, if the reply must call a tool, the beginning of that of a call. None within the header of another
    /// message, which closes the reasoning anyway.
    pub(super) fn close_message_tokens(
        &self,
        message: &Message,
        text: &Text,
        hint: &str,
    ) -> Result<Vec<u32>> {
        let next = if self.must_call { CALL_CHANNEL } else { ANSWER_HEADER };
        let markup = match &message.header {
            None => format!("{}{next}", Tag::End.text()),
            Some(header) => match next.strip_prefix(&header.text) {
                Some(rest) => rest.to_string(),
                None => match REASONING_HEADER.strip_prefix(&header.text) {
                    Some(rest) => format!("{rest}{}{next}", Tag::End.text()),
                    None => return Ok(Vec::new()),
                },
            },
        };
        let mut tokens = text.encode(&markup)?;
        if !self.must_call {
            tokens.extend(text.encode_plain(hint)?);
        }
        Ok(tokens)
    }

    /// Adds a special token, after `before` tokens of the reply.
    pub(super) fn message_tag(&mut self, tag: Tag, before: usize) {
        let Some(message) = &mut self.message else { return };
        match (&mut message.header, tag) {
            (Some(header), Tag::Message) => {
                header.text.push_str(tag.text());
                self.end_header();
            }
            (Some(header), Tag::Channel | Tag::Constrain) => {
                header.text.push_str(tag.text());
                self.check_header();
            }
            (Some(header), Tag::Start | Tag::End | Tag::Return | Tag::Call) => {
                if !header.own().trim().is_empty() {
                    self.text_of_header();
                }
                self.begin_header(tag, before);
            }
            (None, Tag::Message | Tag::Constrain) => self.add_to_phase(tag.text()),
            (None, _) => {
                self.end_message();
                self.begin_header(tag, before);
            }
        }
    }

    /// Adds whole characters.
    pub(super) fn message_text(&mut self, text: &str) {
        match self.message.as_mut().and_then(|message| message.header.as_mut()) {
            Some(header) => {
                header.text.push_str(text);
                self.check_header();
            }
            None => self.add_to_phase(text),
        }
    }

    /// Ends the reply in a header, which is text if no tag shows that it is a header.
    pub(super) fn finish_header(&mut self) {
        let header = self.message.as_mut().and_then(|message| message.header.as_mut());
        let Some(header) = header.filter(|header| !header.own().trim().is_empty()) else { return };
        if !header.text.contains("<|") {
            return self.text_of_header();
        }
        let header = std::mem::take(header);
        self.out.push(Piece::Note(format!("dropped the header `{}`: incomplete", header.own())));
    }

    fn begin_header(&mut self, tag: Tag, before: usize) {
        let (start, text) = match tag {
            Tag::Start | Tag::Channel => (before, tag.text()),
            _ => (before + 1, ""),
        };
        let header = Some(Header { text: text.into(), prompt: 0 });
        self.message = Some(Message { start, in_prompt: 0, header });
    }

    fn check_header(&mut self) {
        let header = self.message.as_ref().and_then(|message| message.header.as_ref());
        if header.is_some_and(|header| !may_be_header(&header.text)) {
            self.text_of_header();
        }
    }

    /// A complete header.
    fn end_header(&mut self) {
        let Some(message) = &mut self.message else { return };
        let Some(header) = message.header.take() else { return };
        let start = message.start;
        match read_header(&header.text) {
            Some(Body::Reasoning) => {
                self.is_reasoning = true;
                if self.reasoning.visible {
                    // White space is held back until text follows.
                    self.reasoning.tail.push(GAP);
                }
                self.reasoning.lead = Lead::new(true);
            }
            Some(Body::Call(_)) if !self.schemas.is_empty() => {
                self.is_reasoning = false;
                self.call = Some(Call::message(start, header.own()));
            }
            Some(Body::Answer) => self.begin_answer(),
            Some(Body::Call(_)) | None => {
                message.header = Some(header);
                self.text_of_header();
            }
        }
    }

    fn begin_answer(&mut self) {
        self.is_reasoning = false;
        self.answer.lead = Lead::new(true);
        if self.answer.visible {
            self.answer.gap = GAP.into();
        }
    }

    /// Emits the header as text of the answer, as which the message goes on.
    fn text_of_header(&mut self) {
        let Some(header) = self.message.as_mut().and_then(|message| message.header.take()) else {
            return;
        };
        tracing::warn!(header = header.text, "malformed header of a message");
        self.out.push(Piece::Note("sent a malformed header of a message as text".into()));
        self.begin_answer();
        self.add_text(header.own());
    }

    /// Ends the body of a message.
    fn end_message(&mut self) {
        if self.call.is_some() {
            return self.finish_call(Ending::Tag);
        }
        if self.is_reasoning {
            self.reasoning.tail.take();
            return;
        }
        let held = self.answer.stop.flush();
        let text = self.answer.tail.push(&held);
        self.emit_answer(text);
        self.answer.tail.take();
    }
}
