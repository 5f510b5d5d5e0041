//! Anthropic's protocol: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

mod reply;
mod request;

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse;
use serde_json::{Map, Value};
use steersman_engine::request::{Arguments, CallDelta, Event};

use self::reply::{ContentBlock, Delta};
pub use self::reply::{InputTokens, MessageEvent, MessageReply, StreamEvent};
use super::access::Caller;
use super::app::App;
use super::error::ApiError;
use super::extension::Extension;
use super::protocol::{JSON, Parsed, Protocol};
use super::reply::{Frames, Head, Reply, usage};
use super::schema::Schemas;
use crate::mcp::Ran;

/// The state of one response.
#[derive(Debug, Default)]
pub struct Messages {
    /// The block that a stream has begun and not ended.
    open: Option<Kind>,
    /// Number of blocks that a stream has ended.
    blocks: usize,
}

/// The kind of a block that arrives in pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Thinking,
    Text,
    ToolUse,
}

impl Protocol for Messages {
    type Whole = MessageReply;

    const ID: &'static str = "msg_";

    fn schema(schemas: &mut Schemas) -> Value {
        request::schema(schemas)
    }

    fn parse(body: Map<String, Value>) -> Result<Parsed<Self>, ApiError> {
        request::parse(body)
    }

    fn prompt_field(&self, _: usize) -> String {
        "messages".into()
    }

    fn begin(&mut self, head: &Head, out: &mut Frames) {
        send(MessageEvent::MessageStart { message: MessageReply::new(head, &[], head.usage) }, out);
        send(MessageEvent::Ping {}, out);
    }

    fn event(&mut self, head: &Head, _: usize, event: Event, out: &mut Frames) {
        match event {
            Event::Reasoning(piece) => {
                self.open(head, Kind::Thinking, out);
                self.delta(Delta::Thinking { thinking: piece }, out);
            }
            Event::Answer(piece) => {
                self.open(head, Kind::Text, out);
                self.delta(Delta::Text { text: piece }, out);
            }
            Event::CallDelta(CallDelta { id, name, arguments }) => {
                if let Some(name) = name {
                    self.open_tool_use(head, id, name, out);
                }
                if !arguments.is_empty() {
                    self.input(arguments, out);
                }
            }
            Event::ToolCall(call) => {
                if self.open != Some(Kind::ToolUse) {
                    let (id, name) = (call.id.clone(), call.function.name.clone());
                    self.open_tool_use(head, id, name, out);
                    self.input(call.function.arguments.to_json(), out);
                }
                self.close(head, out);
            }
            Event::Started { .. }
            | Event::Rewound { .. }
            | Event::PromptToken(_)
            | Event::Embedding(_)
            | Event::Logprob(_)
            | Event::Routed { .. }
            | Event::PromptCounted { .. }
            | Event::Note { .. }
            | Event::Finished(_)
            | Event::Failed(_) => {}
        }
    }

    fn ran(&mut self, head: &Head, _: usize, _: &Ran, out: &mut Frames) {
        self.close(head, out);
    }

    fn end(&mut self, head: &Head, replies: &[Reply], out: &mut Frames) {
        self.close(head, out);
        let Some(reply) = replies.first() else { return };
        let delta = (&reply.finished.reason).into();
        let usage = usage(head, replies).into();
        let steersman = Extension::new(head, &reply.finished);
        send(MessageEvent::MessageDelta { delta, usage, steersman }, out);
        send(MessageEvent::MessageStop {}, out);
    }

    fn fail(&mut self, _: &Head, error: &ApiError, out: &mut Frames) {
        out.event("error", &StreamEvent::Error(error.anthropic()));
    }

    fn whole(&mut self, head: &Head, replies: &[Reply]) -> MessageReply {
        let reply = replies.first().expect("a body has one request: `request::parse` makes it");
        let message = MessageReply::new(head, &reply.parts, usage(head, replies));
        message.ended((&reply.finished.reason).into(), Extension::new(head, &reply.finished))
    }

    fn keep_alive() -> sse::Event {
        sse::Event::default().event("ping").data(r#"{"type":"ping"}"#)
    }
}

impl Messages {
    /// Begins a block of this kind, unless one is open.
    fn open(&mut self, head: &Head, kind: Kind, out: &mut Frames) {
        if self.open == Some(kind) {
            return;
        }
        self.close(head, out);
        let block = match kind {
            Kind::Thinking => {
                ContentBlock::Thinking { thinking: String::new(), signature: String::new() }
            }
            Kind::Text | Kind::ToolUse => ContentBlock::Text { text: String::new() },
        };
        self.start(block, out);
        self.open = Some(kind);
    }

    /// Begins a block of a call, whose input follows.
    fn open_tool_use(&mut self, head: &Head, id: String, name: String, out: &mut Frames) {
        self.close(head, out);
        self.start(ContentBlock::ToolUse { id, name, input: Arguments::default() }, out);
        self.open = Some(Kind::ToolUse);
    }

    /// A piece of the input of a call.
    fn input(&self, partial_json: String, out: &mut Frames) {
        self.delta(Delta::InputJson { partial_json }, out);
    }

    /// Ends the open block.
    fn close(&mut self, head: &Head, out: &mut Frames) {
        let Some(kind) = self.open.take() else { return };
        if kind == Kind::Thinking {
            self.delta(Delta::Signature { signature: head.id.clone() }, out);
        }
        self.stop(out);
    }

    fn start(&self, content_block: ContentBlock, out: &mut Frames) {
        send(MessageEvent::ContentBlockStart { index: self.blocks, content_block }, out);
    }

    fn delta(&self, delta: Delta, out: &mut Frames) {
        send(MessageEvent::ContentBlockDelta { index: self.blocks, delta }, out);
    }

    fn stop(&mut self, out: &mut Frames) {
        send(MessageEvent::ContentBlockStop { index: self.blocks }, out);
        self.blocks += 1;
    }
}

fn send(event: MessageEvent, out: &mut Frames) {
    out.event(event.name(), &StreamEvent::Message(event));
}

/// `POST /v1/messages/count_tokens`: the tokens of the prompt, before policies change it.
pub async fn count_tokens(
    State(app): State<Arc<App>>,
    axum::Extension(caller): axum::Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<InputTokens>, ApiError> {
    let body = app.read_json(&headers, body, JSON).await?;
    let Parsed { model, call, .. } = app.bodies.parse(body.bytes, request::parse).await?;
    let admission = app.admit(&caller, &headers, model).await?;
    let mut requests = call?.requests;
    for request in &mut requests {
        app.mcp.offer(&admission.profile, &admission.backend, request, &mut Vec::new()).await;
    }
    let tokens = app.bodies.work(move || {
        let counts = requests.iter().map(|request| Ok(admission.backend.tokenize(request)?.len()));
        counts.sum::<Result<usize, steersman_engine::Error>>()
    });
    let tokens = tokens.await?;
    let tokens = tokens.map_err(|error| ApiError::from(error).in_fields("messages", &[]));
    Ok(Json(InputTokens { input_tokens: tokens? }))
}
