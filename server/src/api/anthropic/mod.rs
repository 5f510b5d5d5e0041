//! Anthropic's protocol: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

mod request;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse;
use axum::{Extension, Json};
use serde_json::{Map, Value, json};
use steersman_engine::request::{CallDelta, Event, FinishReason, ToolCall, Usage};

use super::App;
use super::access::Caller;
use super::chat::extension;
use super::error::{ApiError, Dialect};
use super::openapi::Schemas;
use super::protocol::{JSON, Parsed, Protocol, admit, read_json};
use super::reply::{self, Frames, Head, Part, Reply};
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
        let message = message(head, &[], None, head.usage);
        out.event("message_start", &json!({"type": "message_start", "message": message}));
        out.event("ping", &json!({"type": "ping"}));
    }

    fn event(&mut self, head: &Head, _: usize, event: Event, out: &mut Frames) {
        match event {
            Event::Reasoning(piece) => {
                self.open(head, Kind::Thinking, out);
                self.delta(&json!({"type": "thinking_delta", "thinking": piece}), out);
            }
            Event::Answer(piece) => {
                self.open(head, Kind::Text, out);
                self.delta(&json!({"type": "text_delta", "text": piece}), out);
            }
            Event::CallDelta(CallDelta { id, name, arguments }) => {
                if let Some(name) = name {
                    self.open_tool_use(head, &id, &name, out);
                }
                if !arguments.is_empty() {
                    self.input(&arguments, out);
                }
            }
            Event::ToolCall(call) => {
                if self.open != Some(Kind::ToolUse) {
                    self.open_tool_use(head, &call.id, &call.function.name, out);
                    self.input(&call.function.arguments.to_json(), out);
                }
                self.close(head, out);
            }
            Event::Started { .. }
            | Event::Rewound { .. }
            | Event::PromptToken(_)
            | Event::Embedding(_)
            | Event::Logprob(_)
            | Event::Routed { .. }
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
        let (stop_reason, stop_sequence) = stop(&reply.finished.reason);
        let delta = json!({"stop_reason": stop_reason, "stop_sequence": stop_sequence});
        let usage = usage(reply::usage(head, replies));
        let extension = extension(head, &reply.finished);
        let data = json!({
            "type": "message_delta", "delta": delta, "usage": usage, "steersman": extension,
        });
        out.event("message_delta", &data);
        out.event("message_stop", &json!({"type": "message_stop"}));
    }

    fn fail(&mut self, _: &Head, error: &ApiError, out: &mut Frames) {
        out.event("error", &error.body(Dialect::Anthropic));
    }

    fn whole(&mut self, head: &Head, replies: &[Reply]) -> Value {
        let Some(reply) = replies.first() else { return Value::Null };
        let usage = reply::usage(head, replies);
        let mut message = message(head, &reply.parts, Some(&reply.finished.reason), usage);
        message["steersman"] = extension(head, &reply.finished);
        message
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
        let part = match kind {
            Kind::Thinking => Part::Reasoning(String::new()),
            Kind::Text | Kind::ToolUse => Part::Answer(String::new()),
        };
        self.start(&block(&part, ""), out);
        self.open = Some(kind);
    }

    /// Begins a block of a call, whose input follows.
    fn open_tool_use(&mut self, head: &Head, id: &str, name: &str, out: &mut Frames) {
        self.close(head, out);
        self.start(&json!({"type": "tool_use", "id": id, "name": name, "input": {}}), out);
        self.open = Some(Kind::ToolUse);
    }

    /// A piece of the input of a call.
    fn input(&self, json: &str, out: &mut Frames) {
        self.delta(&json!({"type": "input_json_delta", "partial_json": json}), out);
    }

    /// Ends the open block.
    fn close(&mut self, head: &Head, out: &mut Frames) {
        let Some(kind) = self.open.take() else { return };
        if kind == Kind::Thinking {
            self.delta(&json!({"type": "signature_delta", "signature": head.id}), out);
        }
        self.stop(out);
    }

    fn start(&self, block: &Value, out: &mut Frames) {
        let name = "content_block_start";
        out.event(name, &json!({"type": name, "index": self.blocks, "content_block": block}));
    }

    fn delta(&self, delta: &Value, out: &mut Frames) {
        let name = "content_block_delta";
        out.event(name, &json!({"type": name, "index": self.blocks, "delta": delta}));
    }

    fn stop(&mut self, out: &mut Frames) {
        let name = "content_block_stop";
        out.event(name, &json!({"type": name, "index": self.blocks}));
        self.blocks += 1;
    }
}

/// `POST /v1/messages/count_tokens`: the tokens of the prompt, before policies change it.
pub async fn count_tokens(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let body = read_json(&app, &headers, body, JSON).await?;
    let Parsed { model, call, .. } = app.bodies.parse(body.bytes, request::parse).await?;
    let admission = admit(&app, &caller, &headers, model).await?;
    let mut requests = call?.requests;
    for request in &mut requests {
        app.mcp.offer(&admission, request, &mut Vec::new()).await;
    }
    let tokens = app.bodies.work(move || {
        let counts = requests.iter().map(|request| Ok(admission.engine.tokenize(request)?.len()));
        counts.sum::<Result<usize, steersman_engine::Error>>()
    });
    let tokens = tokens.await?;
    let tokens = tokens.map_err(|error| ApiError::from(error).in_fields("messages", &[]))?;
    Ok(Json(json!({"input_tokens": tokens})))
}

fn message(head: &Head, parts: &[Part], reason: Option<&FinishReason>, count: Usage) -> Value {
    let (stop_reason, stop_sequence) = reason.map_or((None, None), stop);
    let content = parts.iter().filter(|part| !matches!(part, Part::Ran(_)));
    let content: Vec<_> = content.map(|part| block(part, &head.id)).collect();
    json!({
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": usage(count),
    })
}

/// A block. Clients keep reasoning only if it has a signature, which nothing here verifies.
fn block(part: &Part, signature: &str) -> Value {
    match part {
        Part::Reasoning(text) => {
            json!({"type": "thinking", "thinking": text, "signature": signature})
        }
        Part::Answer(text) => json!({"type": "text", "text": text}),
        // Only streams have open calls, and they send their parts as they come. What this server ran is no
        // block: official clients know none for it.
        Part::OpenCall { .. } | Part::Ran(_) => Value::Null,
        Part::ToolCall(call) => tool_use(call),
    }
}

fn tool_use(call: &ToolCall) -> Value {
    let (name, input) = (&call.function.name, &call.function.arguments);
    json!({"type": "tool_use", "id": call.id, "name": name, "input": input})
}

/// `stop_reason` and `stop_sequence`.
fn stop(reason: &FinishReason) -> (Option<&'static str>, Option<&str>) {
    match reason {
        FinishReason::Stop | FinishReason::Policy(_) => (Some("end_turn"), None),
        FinishReason::StopString(stop) => (Some("stop_sequence"), Some(stop)),
        FinishReason::Length => (Some("max_tokens"), None),
        FinishReason::ToolCalls => (Some("tool_use"), None),
    }
}

/// `usage`: tokens that were restored from saved state are counted apart.
fn usage(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.reply_tokens(),
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    })
}
