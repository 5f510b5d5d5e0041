//! Writes the engine's events as one JSON object or as a stream of chunks.
//!
//! [`whole`] folds the events into one object, [`stream`] sends each as it comes. Both own the
//! [`Events`]: a client that disconnects drops it, which cancels the request.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::http::{HeaderName, HeaderValue};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use steersman_engine::request::{Event, FinishReason, Finished, ToolCall, Usage};
use steersman_engine::{Error, RequestError};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::{Instant, sleep_until, timeout};

use super::error::ApiError;
use super::log::RequestLog;
use super::probability;
use crate::serve::Shutdown;

/// How long a stream waits for its first event before it responds with 200.
///
/// Until then an error (prompt too long, rejected by the template) gets its own status. During a
/// longer prefill, clients and proxies that receive nothing would give up.
const FIRST_EVENT: Duration = Duration::from_secs(10);

/// Interval of comments in an idle stream; common proxies close connections idle for 60 s.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The events of a request until it ends, its deadline is over, or the server stops.
pub struct Events {
    receiver: UnboundedReceiver<Event>,
    deadline: Instant,
    shutdown: Option<Shutdown>,
    started: bool,
}

/// Why a request has no further events.
pub enum Failure {
    /// The engine failed, or the deadline is over.
    Engine(Error),
    /// The server stops.
    Shutdown,
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Engine(error) => error.into(),
            Failure::Shutdown => Self::stopping(),
        }
    }
}

impl Events {
    /// Of a request that ends at `deadline`, or when `shutdown` cuts it off.
    pub fn new(
        receiver: UnboundedReceiver<Event>,
        deadline: Instant,
        shutdown: Option<Shutdown>,
    ) -> Self {
        Self { receiver, deadline, shutdown, started: false }
    }

    /// The next event, which is never `Failed`.
    async fn next(&mut self) -> Result<Event, Failure> {
        let cut_off = async {
            match &mut self.shutdown {
                Some(shutdown) => shutdown.cuts_off().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            event = self.receiver.recv() => match event.unwrap_or(Event::Failed(Error::Stopped)) {
                Event::Failed(error) => Err(Failure::Engine(error)),
                event => {
                    self.started = true;
                    Ok(event)
                }
            },
            // The engine has the same deadline; a long step may make it late.
            () = sleep_until(self.deadline) => {
                let stage = if self.started { "being decoded" } else { "waiting" };
                Err(Failure::Engine(RequestError::Deadline { stage }.into()))
            }
            () = cut_off => Err(Failure::Shutdown),
        }
    }
}

/// The fields that all chunks of a reply share.
pub struct Head {
    /// `chatcmpl-...`
    pub id: String,
    /// Unix time in seconds.
    pub created: u64,
    /// The client's name for the model.
    pub model: String,
    /// `system_fingerprint`; empty until the engine starts the request.
    pub fingerprint: String,
    /// The profile of the request.
    pub profile: String,
    /// Whether a stream ends with a usage chunk.
    pub include_usage: bool,
}

/// The reply as one object.
///
/// # Errors
/// The engine's error.
pub async fn whole(
    mut head: Head,
    mut events: Events,
    mut log: RequestLog,
) -> Result<Response, ApiError> {
    let mut message = Map::from_iter([("role".to_string(), json!("assistant"))]);
    let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), Vec::new());
    let mut logprobs = Vec::new();
    let finished = loop {
        let event = events.next().await.map_err(|failure| log.failed(failure))?;
        log.event(&event);
        match event {
            Event::Started { fingerprint } => head.fingerprint = fingerprint,
            Event::Reasoning(piece) => reasoning += &piece,
            Event::Logprob(logprob) => logprobs.push(probability::chat_logprob(&logprob)),
            Event::Answer(piece) => content += &piece,
            Event::Rewound { reasoning: rewound, answer } => {
                reasoning.truncate(reasoning.len().saturating_sub(rewound));
                content.truncate(content.len().saturating_sub(answer));
            }
            Event::ToolCall(call) => calls.push(tool_call(&call)),
            Event::Finished(finished) => break finished,
            Event::Failed(error) => return Err(log.failed(error)),
        }
    };
    log.finished(&finished);
    let calls_only = content.is_empty() && !calls.is_empty();
    message.insert("content".into(), if calls_only { Value::Null } else { content.into() });
    if !reasoning.is_empty() {
        message.insert("reasoning_content".into(), reasoning.into());
    }
    if !calls.is_empty() {
        message.insert("tool_calls".into(), calls.into());
    }
    let choice = json!({
        "index": 0,
        "message": message,
        "logprobs": probability::chat_logprobs(logprobs),
        "finish_reason": finish_reason(&finished.reason),
    });
    let mut reply = head.object("chat.completion", json!([choice]));
    reply.insert("usage".into(), usage(finished.usage));
    reply.insert("steersman".into(), head.extension(&finished));
    Ok(Json(reply).into_response())
}

/// The reply as a stream of server-sent events.
///
/// # Errors
/// The engine's error, if it comes first and within [`FIRST_EVENT`]. A later error is the last
/// chunk of the stream.
pub async fn stream(
    mut head: Head,
    mut events: Events,
    mut log: RequestLog,
) -> Result<Response, ApiError> {
    let first = timeout(FIRST_EVENT, async {
        match events.next().await {
            Ok(Event::Started { fingerprint }) => {
                head.fingerprint = fingerprint;
                events.next().await
            }
            other => other,
        }
    });
    // `None` if there is none yet.
    let first = first.await.ok().transpose().map_err(|failure| log.failed(failure))?;
    let mut chunks = Chunks {
        head,
        events,
        log,
        ready: VecDeque::new(),
        logprobs: Vec::new(),
        tool_calls: 0,
        ended: false,
    };
    chunks.delta(json!({"role": "assistant", "content": ""}));
    if let Some(event) = first {
        chunks.log.event(&event);
        chunks.push(event);
    }
    let chunks = futures_util::stream::unfold(chunks, async |mut chunks| {
        let chunk = chunks.next().await?;
        Some((Ok::<_, Infallible>(chunk), chunks))
    });
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE).text("still working");
    let mut response = Sse::new(Box::pin(chunks)).keep_alive(keep_alive).into_response();
    // Tells nginx not to buffer the stream.
    let unbuffered = (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response.headers_mut().extend([unbuffered]);
    Ok(response)
}

/// A stream in progress.
struct Chunks {
    head: Head,
    events: Events,
    log: RequestLog,
    /// Chunks to be sent.
    ready: VecDeque<sse::Event>,
    /// Probabilities of tokens, for the next chunk.
    logprobs: Vec<Value>,
    /// Number of tool calls so far: the index of the next one.
    tool_calls: usize,
    /// Whether `ready` holds the last chunk.
    ended: bool,
}

impl Chunks {
    /// The next chunk; `None` at the end.
    async fn next(&mut self) -> Option<sse::Event> {
        while self.ready.is_empty() && !self.ended {
            match self.events.next().await {
                Ok(event) => {
                    self.log.event(&event);
                    self.push(event);
                }
                Err(failure) => self.fail(failure),
            }
        }
        self.ready.pop_front()
    }

    fn push(&mut self, event: Event) {
        match event {
            // Only after `FIRST_EVENT`; later chunks contain it.
            Event::Started { fingerprint } => self.head.fingerprint = fingerprint,
            Event::Reasoning(piece) => self.delta(json!({"reasoning_content": piece})),
            // A stream cannot take text back: answers are not revisable, and rewound reasoning
            // continues after the text already sent.
            Event::Rewound { .. } => {}
            Event::Logprob(logprob) => self.logprobs.push(probability::chat_logprob(&logprob)),
            Event::Answer(piece) => self.delta(json!({"content": piece})),
            Event::ToolCall(call) => {
                let mut call = tool_call(&call);
                call["index"] = self.tool_calls.into();
                self.tool_calls += 1;
                self.delta(json!({"tool_calls": [call]}));
            }
            Event::Finished(finished) => self.finish(&finished),
            Event::Failed(error) => self.fail(Failure::Engine(error)),
        }
    }

    fn fail(&mut self, failure: Failure) {
        let error = self.log.failed(failure);
        self.send(&error.to_json());
        self.ended = true;
    }

    fn delta(&mut self, delta: Value) {
        let choice = self.choice(delta, None);
        let mut chunk = self.chunk(json!([choice]));
        self.add_null_usage(&mut chunk);
        self.send(&chunk.into());
    }

    fn finish(&mut self, finished: &Finished) {
        self.log.finished(finished);
        let reason = finish_reason(&finished.reason);
        let choice = self.choice(json!({}), Some(reason));
        let mut chunk = self.chunk(json!([choice]));
        self.add_null_usage(&mut chunk);
        chunk.insert("steersman".into(), self.head.extension(finished));
        self.send(&chunk.into());
        if self.head.include_usage {
            let mut chunk = self.chunk(json!([]));
            chunk.insert("usage".into(), usage(finished.usage));
            self.send(&chunk.into());
        }
        self.ready.push_back(sse::Event::default().data("[DONE]"));
        self.ended = true;
    }

    fn choice(&mut self, delta: Value, finish_reason: Option<&str>) -> Value {
        let logprobs = probability::chat_logprobs(std::mem::take(&mut self.logprobs));
        json!({"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason})
    }

    fn chunk(&self, choices: Value) -> Map<String, Value> {
        self.head.object("chat.completion.chunk", choices)
    }

    /// With `include_usage`, the usage is null in all chunks but the last.
    fn add_null_usage(&self, chunk: &mut Map<String, Value>) {
        if self.head.include_usage {
            chunk.insert("usage".into(), Value::Null);
        }
    }

    fn send(&mut self, chunk: &Value) {
        self.ready.push_back(sse::Event::default().data(chunk.to_string()));
    }
}

impl Head {
    fn object(&self, object: &str, choices: Value) -> Map<String, Value> {
        Map::from_iter([
            ("id".to_string(), json!(self.id)),
            ("object".to_string(), json!(object)),
            ("created".to_string(), json!(self.created)),
            ("model".to_string(), json!(self.model)),
            ("system_fingerprint".to_string(), json!(self.fingerprint)),
            ("choices".to_string(), choices),
        ])
    }

    /// `steersman`: what OpenAI's format has no place for.
    fn extension(&self, finished: &Finished) -> Value {
        let mut extension = json!({"profile": self.profile, "notes": finished.notes});
        if let FinishReason::Policy(reason) = &finished.reason {
            extension["stop_reason"] = json!(reason);
        }
        extension
    }
}

fn finish_reason(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop | FinishReason::Policy(_) => "stop",
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
    }
}

/// A call in the API's format, with the arguments as JSON in a string.
fn tool_call(call: &ToolCall) -> Value {
    let arguments = Value::from(call.function.arguments.clone()).to_string();
    json!({
        "id": call.id,
        "type": call.kind,
        "function": {"name": call.function.name, "arguments": arguments},
    })
}

fn usage(usage: Usage) -> Value {
    let completion_tokens = usage.reasoning_tokens + usage.answer_tokens;
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": usage.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            // OpenAI counts tokens here that the client predicted; these were drafted.
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_tokens,
            "forced_tokens": usage.forced_tokens,
            "skipped_layers": usage.skipped_layers,
        },
    })
}
