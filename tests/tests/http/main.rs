//! Laws of the HTTP API, with a scripted engine: requests, replies, errors, and clients that
//! disconnect.
//!
//! The engine is a task that plays a script of events for each request, so nothing here depends on
//! a model. `openai_client.py` makes similar requests with OpenAI's package and the real engine.

mod access;
mod answer_limits;
mod anthropic;
mod choices;
mod clients;
mod completions;
mod connection;
mod console;
mod continued;
mod embeddings;
mod fields;
mod fuzz;
mod keys;
mod limits;
mod mcp;
mod metrics;
mod models;
mod monitor;
mod ollama;
mod on_demand;
mod openapi;
mod operations;
mod origin;
mod prefixes;
mod prompt_fields;
mod pull;
mod queries;
mod refusal;
mod reply;
mod request;
mod rerank;
mod responses;
mod round_trip;
mod serve;
mod session;
mod structure;
mod talk;
mod tolerance;
mod upstream;

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{StatusCode, header};
use axum::response::Response;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use steersman::config::ServerConfig;
use steersman::wiring::Wiring;
use steersman_engine::internals::engine::{Engine, Info};
use steersman_engine::internals::queue::{Job, Queue, Taken};
use steersman_engine::request::{
    CallDelta, Event, FinishReason, Finished, FunctionCall, Request, ToolCall, Usage,
};
use steersman_engine::{config::Profile, policy::PolicyConfig};
use steersman_tests::policies;
use tokio::sync::mpsc::UnboundedSender;
use tower::ServiceExt;

/// One step of the scripted engine.
enum Act {
    Say(Event),
    Wait(Duration),
    /// Waits until the request is cancelled, and records that.
    UntilCancelled,
}

use Act::{Say, UntilCancelled, Wait};

/// Requests and cancellations that the scripted engine saw.
#[derive(Default)]
struct Seen {
    requests: Mutex<Vec<Request>>,
    cancelled: Mutex<Vec<String>>,
}

impl Seen {
    fn last(&self) -> Request {
        self.requests.lock().unwrap().last().expect("a request reached the engine").clone()
    }

    /// Waits at most ten seconds for a cancelled request.
    async fn wait_for_cancellation(&self) {
        for _ in 0..1000 {
            if !self.cancelled.lock().unwrap().is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the engine saw no cancellation");
    }
}

/// An engine with a queue of `queue` that plays `script` for each request, one body at a time.
fn engine(queue: usize, script: fn() -> Vec<Act>) -> (Engine, Arc<Seen>) {
    engine_of("owner/tiny", queue, script)
}

/// Plays `script` for `request`.
async fn play(
    request: Request,
    events: UnboundedSender<Event>,
    records: Arc<Seen>,
    script: Vec<Act>,
) {
    let started = Event::Started {
        fingerprint: "fp_test".into(),
        prompt_tokens: USAGE.prompt_tokens,
        cached_tokens: USAGE.cached_tokens,
        max_tokens: request.max_tokens.unwrap_or(MAX_TOKENS),
        max_answer_tokens: request.max_answer_tokens,
    };
    drop(events.send(started));
    for act in script {
        match act {
            Say(event) => drop(events.send(event)),
            Wait(time) => tokio::time::sleep(time).await,
            UntilCancelled => {
                events.closed().await;
                records.cancelled.lock().unwrap().push(request.id.clone());
            }
        }
    }
}

fn engine_of(model: &str, queue: usize, script: fn() -> Vec<Act>) -> (Engine, Arc<Seen>) {
    engine_that(model, queue, move |_| script())
}

/// As [`engine_of`], with a script that reads the request.
fn engine_that(
    model: &str,
    queue: usize,
    script: impl Fn(&Request) -> Vec<Act> + Send + 'static,
) -> (Engine, Arc<Seen>) {
    engine_on(Arc::new(Queue::new(queue)), model, script)
}

/// As [`engine_that`], with this queue.
fn engine_on(
    queue: Arc<Queue>,
    model: &str,
    script: impl Fn(&Request) -> Vec<Act> + Send + 'static,
) -> (Engine, Arc<Seen>) {
    let waiting = queue.clone();
    let seen = Arc::new(Seen::default());
    let records = seen.clone();
    tokio::spawn(async move {
        while !*waiting.ended().borrow() {
            let Some(Taken { number, job, others, .. }) = waiting.try_take() else {
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            };
            waiting.leave(number);
            // The choices of a request run together.
            let mut choices = Vec::new();
            let others: Vec<_> = others.into_iter().map(|other| other.of(&job.request)).collect();
            for Job { request, events } in std::iter::once(job).chain(others) {
                let acts = script(&request);
                records.requests.lock().unwrap().push(request.clone());
                choices.push(tokio::spawn(play(request, events, records.clone(), acts)));
            }
            for choice in choices {
                choice.await.unwrap();
            }
        }
    });
    let info = Info {
        prefixes: Default::default(),
        store_enabled: false,
        text: steersman_tests::bundled_text(),
        activity: Default::default(),
        model: model.into(),
        family: "qwen3_5".into(),
        context: 32768,
        prompt_bytes: 1 << 20,
        numbers: "CPU, f32".into(),
        fingerprint: "fp_model".into(),
        profiles: vec!["default".into(), "strict".into()],
        loaded: 1_700_000_000,
    };
    let profiles = [("default".into(), Profile::default())];
    let policies = policies(&PolicyConfig::default(), profiles).unwrap();
    (Engine::new(queue, info, Arc::new(policies)), seen)
}

fn app_with(config: &ServerConfig, script: fn() -> Vec<Act>) -> (Router, Arc<Seen>) {
    enable_log();
    let (engine, seen) = engine(8, script);
    (steersman::app(engine, config), seen)
}

/// As [`app_with`], with what a running server has besides its configuration.
fn app_wired(
    config: &ServerConfig,
    wiring: Wiring,
    script: fn() -> Vec<Act>,
) -> (Router, Arc<Seen>) {
    enable_log();
    let (engine, seen) = engine(8, script);
    (steersman::app_with(engine, config, wiring), seen)
}

/// The wiring of a server that stores responses in `folder`.
fn storing_in(folder: &Path) -> Wiring {
    Wiring { responses: Some(folder.into()), ..Wiring::default() }
}

/// Enables every log line in all threads, and discards it. Otherwise a line that another test reaches while
/// [`connection::Lines`] begins to capture the log may stay disabled: `tracing` keeps which are enabled.
fn enable_log() {
    // Fails if it is enabled already.
    let _ = tracing_subscriber::fmt().with_writer(std::io::sink).try_init();
}

fn app(script: fn() -> Vec<Act>) -> (Router, Arc<Seen>) {
    app_with(&ServerConfig::default(), script)
}

/// The limit of a reply whose request sets none.
const MAX_TOKENS: u32 = 50;

const USAGE: Usage = Usage {
    prompt_tokens: 20,
    cached_tokens: 16,
    reasoning_tokens: 5,
    answer_tokens: 7,
    drafted_tokens: 6,
    accepted_tokens: 4,
    forced_tokens: 0,
    skipped_layers: 0,
};

fn finished(reason: FinishReason) -> Act {
    Say(Event::Finished(Finished {
        reason,
        usage: USAGE,
        notes: vec!["routed: plain".into()],
        labels: vec![("tier".into(), "plain".into())],
    }))
}

/// A call that arrives in pieces, and one that arrives whole.
fn call_in_pieces(reason: FinishReason) -> Vec<Act> {
    let delta = |name: Option<&str>, arguments: &str| {
        let (id, name) = ("call_a".into(), name.map(Into::into));
        Say(Event::CallDelta(CallDelta { id, name, arguments: arguments.into() }))
    };
    let call = |id: &str| {
        let arguments = json!({"town": "Rome"}).as_object().unwrap().clone();
        let function = FunctionCall { name: "weather".into(), arguments: arguments.into() };
        Say(Event::ToolCall(ToolCall { id: id.into(), kind: "function".into(), function }))
    };
    vec![
        delta(Some("weather"), "{\"town\":"),
        delta(None, "\"Rome\"}"),
        call("call_a"),
        call("call_b"),
        finished(reason),
    ]
}

/// A call that a limit cuts off.
fn cut_call() -> Vec<Act> {
    let mut acts = call_in_pieces(FinishReason::Length);
    acts.drain(1..4);
    acts
}

fn answer() -> Vec<Act> {
    vec![
        Say(Event::Reasoning("It is".into())),
        Say(Event::Reasoning(" Rome.".into())),
        Say(Event::Answer("Rome".into())),
        Say(Event::Answer("\n.".into())),
        finished(FinishReason::Stop),
    ]
}

/// The smallest valid body, with `extra` fields.
fn body(extra: Value) -> Value {
    let mut body = json!({"model": "owner/tiny", "messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// The response to `request`, whose JSON has the published schema.
async fn send(app: &Router, request: axum::http::Request<Body>) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_string());
    let anthropic = request.headers().contains_key("anthropic-version");
    let response = app.clone().oneshot(request).await.unwrap();
    openapi::checked(&method, &path, anthropic, response).await
}

fn post(body: impl Into<Body>) -> axum::http::Request<Body> {
    axum::http::Request::post("/v1/chat/completions")
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.into())
        .unwrap()
}

async fn bytes(response: Response) -> Bytes {
    response.into_body().collect().await.unwrap().to_bytes()
}

async fn json_of(response: Response) -> Value {
    serde_json::from_slice(&bytes(response).await).unwrap()
}

/// Posts a chat body; returns the status and the normalized JSON.
async fn chat(app: &Router, body: Value) -> (StatusCode, Value) {
    let response = send(app, post(body.to_string())).await;
    let status = response.status();
    let mut reply = json_of(response).await;
    normalize(&mut reply);
    (status, reply)
}

/// Checks id and time, and replaces them by constants.
fn normalize(reply: &mut Value) {
    if let Some(id) = reply.get_mut("id") {
        assert!(id.as_str().unwrap().starts_with("chatcmpl-"));
        *id = "chatcmpl-X".into();
        assert!(reply["created"].as_u64().unwrap() > 1_700_000_000);
        reply["created"] = 0.into();
    }
}

/// The normalized `data:` of each event of a stream.
fn data(stream: &[u8]) -> Vec<Value> {
    let lines = std::str::from_utf8(stream).unwrap().lines();
    let data = lines.filter_map(|line| line.strip_prefix("data: "));
    data.map(|text| {
        let mut chunk = serde_json::from_str(text).unwrap_or_else(|_| Value::from(text));
        normalize(&mut chunk);
        chunk
    })
    .collect()
}

/// Checks that a chat request is rejected with this status, code and param, and a message that
/// contains `words`.
async fn rejected(app: &Router, body: Value, status: u16, code: &str, param: &str, words: &str) {
    let (got, reply) = chat(app, body.clone()).await;
    let error = &reply["error"];
    assert_eq!(got.as_u16(), status, "{body} {reply}");
    assert_eq!(error["code"], code, "{body} {reply}");
    assert_eq!(error["param"].as_str().unwrap_or_default(), param, "{body} {reply}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains(words), "`{words}` is not in `{message}`");
    assert!(error["type"].is_string());
}
