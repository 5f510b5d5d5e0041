//! Ollama's protocol: `POST /api/chat`, `POST /api/generate`, and the routes that describe models.

mod embed;
mod models;
mod reply;
mod request;

use std::time::Duration;

use serde_json::{Map, Value};
use steersman_engine::request::{Event, FinishReason, Request, ToolCall};

pub use self::embed::Embed;
pub use self::models::{ModelList, Shown, Version, running, show, tags, version};
pub use self::reply::{ChatContent, Embedded, GeneratedContent, Line, OneEmbedding};
use self::reply::{Content, DoneReason, End};
pub use self::request::named;
use super::error::ApiError;
use super::extension::Extension;
use super::fields;
use super::probability::Probabilities;
use super::protocol::{Framing, Parsed, Place, Protocol};
use super::reply::{Frames, Head, Reply, usage};
use super::schema::Schemas;

/// The state of one response: of `/api/chat` if `CHAT`, else of `/api/generate`.
#[derive(Debug, Default)]
pub struct Ollama<const CHAT: bool> {
    /// Probabilities of tokens, for the next line of a stream.
    logprobs: Probabilities,
    /// Number of calls that a stream has sent.
    calls: usize,
    /// See [`Protocol::keeps_model`].
    keep_alive: Option<Option<Duration>>,
}

impl<const CHAT: bool> Protocol for Ollama<CHAT> {
    type Whole = Line<Content>;

    const ID: &'static str = "ollama-";

    const OPERATION: &'static str = if CHAT { "chat" } else { "text_completion" };
    // Clients send none, or that of a form. Web pages of other sites are refused by their origin.
    const CONTENT_TYPE: Option<&'static str> = None;
    const FRAMING: Framing = Framing::Lines;
    const STREAMS_CALLS: bool = false;

    fn schema(schemas: &mut Schemas) -> Value {
        let table = if CHAT { fields::OLLAMA_CHAT } else { fields::OLLAMA_GENERATE };
        request::schema(table, schemas)
    }

    fn parse(body: Map<String, Value>) -> Result<Parsed<Self>, ApiError> {
        let parse = if CHAT { request::parse_chat } else { request::parse_generate };
        parse(body, |keep_alive| Self { keep_alive, ..Self::default() })
    }

    /// As Ollama does, refuses a request for reasoning that the model cannot have.
    fn resolve(&mut self, at: &Place<'_>, requests: &mut [Request]) -> Result<(), ApiError> {
        let asks = |request: &Request| request.prompt.is_none() && request.reasoning == Some(true);
        if requests.iter().any(asks) && !at.admission.backend.can_be_told_to_reason() {
            let model = &at.admission.model;
            let message = format!("think: `{model}` does not support thinking; leave it out");
            return Err(ApiError::unsupported("think", message));
        }
        Ok(())
    }

    fn prompt_field(&self, _: usize) -> String {
        if CHAT { "messages" } else { "prompt" }.into()
    }

    fn keeps_model(&self) -> Option<Option<Duration>> {
        self.keep_alive
    }

    fn begin(&mut self, _: &Head, _: &mut Frames) {}

    fn event(&mut self, head: &Head, _: usize, event: Event, out: &mut Frames) {
        let content = match event {
            Event::Reasoning(piece) => Self::content(String::new(), piece, &[]),
            Event::Answer(piece) => Self::content(piece, String::new(), &[]),
            Event::ToolCall(call) if CHAT => {
                self.calls += 1;
                Content::chat(String::new(), String::new(), self.calls - 1, &[&call])
            }
            // There are no tools.
            Event::ToolCall(_) => Self::content(String::new(), String::new(), &[]),
            Event::Logprob(logprob) => {
                self.logprobs.push_logprob(&logprob);
                return;
            }
            // Calls are sent whole.
            Event::CallDelta(_)
            | Event::Started { .. }
            | Event::Rewound { .. }
            | Event::Routed { .. }
            | Event::PromptCounted { .. }
            | Event::Note { .. }
            | Event::PromptToken(_)
            | Event::Embedding(_)
            | Event::Finished(_)
            | Event::Failed(_) => return,
        };
        let logprobs = self.logprobs.take();
        out.data(&Line { logprobs, ..Line::new(head, content, false) });
    }

    fn end(&mut self, head: &Head, replies: &[Reply], out: &mut Frames) {
        let content = Self::content(String::new(), String::new(), &[]);
        let logprobs = self.logprobs.take();
        let last = Line { logprobs, ..Line::new(head, content, true) };
        out.data(&self.ended(head, replies, last));
    }

    fn fail(&mut self, _: &Head, error: &ApiError, out: &mut Frames) {
        out.data(&error.ollama());
    }

    fn whole(&mut self, head: &Head, replies: &[Reply]) -> Line<Content> {
        let Some(reply) = replies.first() else {
            let content = Self::content(String::new(), String::new(), &[]);
            return self.ended(head, replies, Line::new(head, content, true));
        };
        let calls: Vec<_> = reply.tool_calls().collect();
        let content = Self::content(reply.answer(), reply.reasoning(), &calls);
        let logprobs = reply.all_logprobs().map(|logprob| (&logprob).into()).collect();
        self.ended(head, replies, Line { logprobs, ..Line::new(head, content, true) })
    }
}

impl<const CHAT: bool> Ollama<CHAT> {
    /// The content of a line, with calls of which the first is the first one of the reply.
    fn content(answer: String, thinking: String, calls: &[&ToolCall]) -> Content {
        match CHAT {
            true => Content::chat(answer, thinking, 0, calls),
            false => Content::generated(answer, thinking),
        }
    }

    /// The last object of a reply: `line` with reason, counts and times.
    fn ended(&self, head: &Head, replies: &[Reply], line: Line<Content>) -> Line<Content> {
        let Some(reply) = replies.first() else {
            let noted = Extension::without_reply(head);
            let stays = noted.notes.iter().any(|note| note.starts_with("keep_alive:"));
            let unloads = self.keep_alive == Some(Some(Duration::ZERO)) && !stays;
            let reason = if unloads { DoneReason::Unload } else { DoneReason::Load };
            return Line { done_reason: Some(reason), steersman: Some(noted), ..line };
        };
        let reason = match reply.finished.reason {
            FinishReason::Length => DoneReason::Length,
            _ => DoneReason::Stop,
        };
        let (usage, times) = (usage(head, replies), head.times);
        let first_piece = if times.first_piece == 0 { times.ended } else { times.first_piece };
        let mut steersman = Extension::new(head, &reply.finished);
        // `eval_count` has no parts.
        steersman.reasoning_tokens = Some(usage.reasoning_tokens);
        let end = End {
            total_duration: times.ended,
            load_duration: times.started,
            prompt_eval_count: usage.prompt_tokens,
            prompt_eval_duration: first_piece.saturating_sub(times.started),
            eval_count: usage.reply_tokens(),
            eval_duration: times.ended - first_piece,
        };
        Line { done_reason: Some(reason), end: Some(end), steersman: Some(steersman), ..line }
    }
}
