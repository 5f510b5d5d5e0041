//! Ollama's protocol: `POST /api/chat`, `POST /api/generate`, and the routes that describe models.

mod embed;
mod request;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::{Extension, Json};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Map, Value, json};
use steersman_engine::request::{Event, FinishReason, Request, ToolCall};

pub use self::embed::Embed;
use super::App;
use super::access::Caller;
use super::chat::extension;
use super::error::{ApiError, Dialect};
use super::fields;
use super::models::described;
use super::openapi::Schemas;
use super::probability::{self, Probabilities};
use super::protocol::{Framing, Parsed, Place, Protocol, destination, read_json};
use super::reply::{self, Frames, Head, Reply};
use crate::models::Description;

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
    const ID: &'static str = "ollama-";
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
        let text = &at.admission.engine.info().text;
        if requests.iter().any(asks) && !text.can_be_told_to_reason() {
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
        let line = match event {
            Event::Reasoning(piece) => line::<CHAT>(head, "", &piece, (0, &[]), false),
            Event::Answer(piece) => line::<CHAT>(head, &piece, "", (0, &[]), false),
            Event::ToolCall(call) => {
                self.calls += 1;
                line::<CHAT>(head, "", "", (self.calls - 1, &[&call]), false)
            }
            Event::Logprob(logprob) => {
                self.logprobs.push_logprob(&logprob);
                return;
            }
            // Calls are sent whole.
            Event::CallDelta(_)
            | Event::Started { .. }
            | Event::Rewound { .. }
            | Event::Routed { .. }
            | Event::Note { .. }
            | Event::PromptToken(_)
            | Event::Embedding(_)
            | Event::Finished(_)
            | Event::Failed(_) => return,
        };
        out.data(&with_logprobs(line, self.logprobs.take_chat()));
    }

    fn end(&mut self, head: &Head, replies: &[Reply], out: &mut Frames) {
        let last = line::<CHAT>(head, "", "", (0, &[]), true);
        let last = with_logprobs(last, self.logprobs.take_chat());
        out.data(&self.ended(head, replies, last));
    }

    fn fail(&mut self, _: &Head, error: &ApiError, out: &mut Frames) {
        out.data(&error.body(Dialect::Ollama));
    }

    fn whole(&mut self, head: &Head, replies: &[Reply]) -> Value {
        let Some(reply) = replies.first() else {
            return self.ended(head, replies, line::<CHAT>(head, "", "", (0, &[]), true));
        };
        let calls: Vec<_> = reply.tool_calls().collect();
        let line = line::<CHAT>(head, &reply.answer(), &reply.reasoning(), (0, &calls), true);
        let logprobs = reply.all_logprobs().map(|logprob| probability::chat_logprob(&logprob));
        self.ended(head, replies, with_logprobs(line, logprobs.collect()))
    }
}

impl<const CHAT: bool> Ollama<CHAT> {
    /// The last object of a reply: `line` with reason, counts and times in nanoseconds.
    fn ended(&self, head: &Head, replies: &[Reply], mut line: Value) -> Value {
        let Some(reply) = replies.first() else {
            let unloads = self.keep_alive == Some(Some(Duration::ZERO));
            line["done_reason"] = if unloads { "unload" } else { "load" }.into();
            return line;
        };
        let reason = match reply.finished.reason {
            FinishReason::Length => "length",
            _ => "stop",
        };
        let (usage, times) = (reply::usage(head, replies), head.times);
        let first_piece = if times.first_piece == 0 { times.ended } else { times.first_piece };
        let mut extension = extension(head, &reply.finished);
        // `eval_count` has no parts.
        extension["reasoning_tokens"] = usage.reasoning_tokens.into();
        let more = json!({
            "done_reason": reason,
            "total_duration": times.ended,
            // The model is loaded; the request waited.
            "load_duration": times.started,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": first_piece.saturating_sub(times.started),
            "eval_count": usage.reply_tokens(),
            "eval_duration": times.ended - first_piece,
            "steersman": extension,
        });
        if let (Some(line), Value::Object(more)) = (line.as_object_mut(), more) {
            line.extend(more);
        }
        line
    }
}

/// `line` with the probabilities of its tokens, if there are any.
fn with_logprobs(mut line: Value, logprobs: Vec<Value>) -> Value {
    if !logprobs.is_empty() {
        line["logprobs"] = logprobs.into();
    }
    line
}

/// One object of a reply, with calls of which the first has this number.
fn line<const CHAT: bool>(
    head: &Head,
    answer: &str,
    thinking: &str,
    (first, calls): (usize, &[&ToolCall]),
    done: bool,
) -> Value {
    let mut line =
        json!({"model": head.model, "created_at": Timestamp::now().to_string(), "done": done});
    let mut content = if CHAT {
        json!({"role": "assistant", "content": answer})
    } else {
        json!({"response": answer})
    };
    if !thinking.is_empty() {
        content["thinking"] = thinking.into();
    }
    if !calls.is_empty() {
        let call = |(index, call): (usize, &&ToolCall)| {
            let (name, arguments) = (&call.function.name, &call.function.arguments);
            let function = json!({"index": first + index, "name": name, "arguments": arguments});
            json!({"id": call.id, "function": function})
        };
        content["tool_calls"] = calls.iter().enumerate().map(call).collect();
    }
    match (content, &mut line) {
        (content, line) if CHAT => line["message"] = content,
        (Value::Object(content), Value::Object(line)) => line.extend(content),
        _ => {}
    }
    line
}

/// `GET /api/version`
pub async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// `GET /api/tags`: the models, as in `GET /v1/models`. Those whose files are missing are left out.
pub async fn tags(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let (names, described) = described(&app).await?;
    let models = names.iter().map(|name| (name.name.as_str(), &described[name.index]));
    let models = models.filter(|(_, described)| described.state != "missing");
    let models: Vec<_> = models.map(|(name, described)| model(name, described)).collect();
    Ok(Json(json!({"models": models})))
}

/// `GET /api/ps`: the models in memory.
pub async fn running(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let (names, described) = described(&app).await?;
    let loaded = names.iter().filter_map(|name| {
        let described = &described[name.index];
        described.engine.as_ref()?;
        let mut model = model(&name.name, described);
        let weights = described.report.bytes;
        model["size"] = weights.into();
        model["size_vram"] = weights.into();
        if let Some(expires) = described.report.expires {
            let expires = SignedDuration::try_from(expires).unwrap_or_default();
            model["expires_at"] = (Timestamp::now() + expires).to_string().into();
        }
        Some(model)
    });
    let models: Vec<_> = loaded.collect();
    Ok(Json(json!({"models": models})))
}

fn model(name: &str, described: &Description) -> Value {
    let info = described.engine.as_ref().map(|engine| engine.info());
    let loaded = info.map_or(0, |info| info.loaded.cast_signed());
    json!({
        "name": name,
        "model": name,
        "modified_at": Timestamp::from_second(loaded).unwrap_or_default().to_string(),
        "size": described.facts.as_ref().map_or(0, |facts| facts.file_bytes()),
        // Known while it is loaded.
        "digest": info.map_or("", |info| info.fingerprint.as_str()),
        "details": details(described),
    })
}

fn family(described: &Description) -> &str {
    let info = described.engine.as_ref().map(|engine| engine.info());
    let facts = described.facts.as_ref();
    info.map(|info| info.family.as_str()).or(facts.map(|f| f.family.as_str())).unwrap_or_default()
}

fn details(described: &Description) -> Value {
    let (family, facts) = (family(described), described.facts.as_deref());
    let billions = |parameters: u64| format!("{:.1}B", parameters as f64 / 1e9);
    json!({
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": facts.map(|facts| billions(facts.parameters)).unwrap_or_default(),
        "quantization_level": facts.map(|facts| facts.quantization.as_str()).unwrap_or_default(),
    })
}

/// `POST /api/show`: facts about one model, which need not be loaded. Whether it can reason, and has no tools, is
/// known while it is.
pub async fn show(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let body = read_json(&app, &headers, body, None).await?;
    let name = app.bodies.parse(body.bytes, request::shown).await?;
    let index = destination(&app, &caller, &headers, name)?.index();
    let described = described(&app).await?.1.swap_remove(index);
    let info = described.engine.as_ref().map(|engine| engine.info());
    let mut capabilities = vec!["completion"];
    if info.is_none_or(|info| info.text.supports_tools()) {
        capabilities.push("tools");
    }
    if info.is_some_and(|info| info.text.can_be_told_to_reason()) {
        capabilities.push("thinking");
    }
    let of_files = described.facts.as_ref().and_then(|facts| facts.context);
    let context = info.map(|info| info.context as u64).or(of_files);
    let family = family(&described);
    let model_info = Map::from_iter([
        ("general.architecture".to_string(), json!(family)),
        (format!("{family}.context_length"), json!(context)),
    ]);
    Ok(Json(json!({
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": details(&described),
        "model_info": model_info,
        "capabilities": capabilities,
    })))
}
