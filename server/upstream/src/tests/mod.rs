//! Requests against a scripted upstream, with policies in Rust.

mod anthropic;
mod body;
mod faults;
mod replies;
mod steering;

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderMap, Response, StatusCode};
use axum::routing::{get, post};
use futures_util::stream;
use parking_lot::Mutex;
use serde_json::{Value, json};
use steersman_policy_host::{
    Answer, Call, Failure, Policies, Policy, PolicyConfig, Session, Storage,
};
use steersman_request::{Event, FinishReason, Finished, Message, Request};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::{Upstream, UpstreamConfig, UpstreamModel, run};

/// The key of the tests' upstreams.
pub const KEY: &str = "sk-upstream-0123456789abcdef";

/// One step of a response.
#[derive(Clone)]
pub enum Act {
    /// An event with this data.
    Say(Value),
    /// These bytes.
    Raw(&'static str),
    /// A pause.
    Wait(Duration),
    /// Nothing more, until the client closes the connection.
    Hang,
    /// The connection breaks.
    Break,
}

use Act::{Break, Hang, Raw, Say, Wait};

/// A response of the upstream.
#[derive(Clone)]
pub struct Reaction {
    status: u16,
    headers: Vec<(&'static str, String)>,
    acts: Vec<Act>,
}

/// A stream of these acts.
pub fn streamed(acts: Vec<Act>) -> Reaction {
    let headers = vec![("content-type", "text/event-stream".to_string())];
    Reaction { status: 200, headers, acts }
}

/// A JSON response.
pub fn whole(status: u16, json: &Value) -> Reaction {
    let headers = vec![("content-type", "application/json".to_string())];
    let text: &'static str = Box::leak(json.to_string().into_boxed_str());
    Reaction { status, headers, acts: vec![Raw(text)] }
}

impl Reaction {
    /// The same with a header.
    pub fn with(mut self, name: &'static str, value: &str) -> Self {
        self.headers.push((name, value.into()));
        self
    }
}

/// An upstream that answers each request with the next of its responses, and the last one again and again.
pub struct Scripted {
    pub url: String,
    script: Arc<Script>,
}

struct Script {
    responses: Mutex<VecDeque<Reaction>>,
    models: Mutex<Value>,
    seen: Mutex<Vec<(HeaderMap, Value)>>,
    /// Where each request came from.
    peers: Mutex<Vec<SocketAddr>>,
    /// Told when a client closes a response that hangs.
    closed: Notify,
}

impl Scripted {
    pub async fn start(responses: Vec<Reaction>) -> Self {
        Self::with_models(json!({"data": []}), responses).await
    }

    pub async fn with_models(models: Value, responses: Vec<Reaction>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let script = Arc::new(Script {
            responses: Mutex::new(responses.into()),
            models: Mutex::new(models),
            seen: Mutex::default(),
            peers: Mutex::default(),
            closed: Notify::new(),
        });
        let models = |State(script): State<Arc<Script>>| async move {
            axum::Json(script.models.lock().clone())
        };
        let router = Router::new()
            .route("/v1/models", get(models))
            .route("/v1/chat/completions", post(answer))
            .route("/v1/messages", post(answer))
            .with_state(script.clone())
            .into_make_service_with_connect_info::<SocketAddr>();
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, script }
    }

    /// From now on it answers with `models`.
    pub fn list(&self, models: Value) {
        *self.script.models.lock() = models;
    }

    /// Number of requests so far.
    pub fn count(&self) -> usize {
        self.script.seen.lock().len()
    }

    /// The body of request `index`.
    pub fn body(&self, index: usize) -> Value {
        self.script.seen.lock()[index].1.clone()
    }

    /// A header of request `index`.
    pub fn header(&self, index: usize, name: &str) -> Option<String> {
        Some(self.script.seen.lock()[index].0.get(name)?.to_str().unwrap().to_string())
    }

    /// The client's end of the connection of each request.
    pub fn peers(&self) -> Vec<SocketAddr> {
        self.script.peers.lock().clone()
    }

    /// Waits until the client has closed a response that hangs.
    pub async fn closed(&self) {
        self.script.closed.notified().await;
    }
}

/// Tells that a response that hangs was dropped.
struct Closed(Arc<Script>);

impl Drop for Closed {
    fn drop(&mut self) {
        self.0.closed.notify_one();
    }
}

async fn answer(
    State(script): State<Arc<Script>>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    body: Bytes,
) -> Response<Body> {
    let json = serde_json::from_slice(&body).unwrap();
    script.peers.lock().push(peer);
    script.seen.lock().push((headers, json));
    let response = {
        let responses = &mut *script.responses.lock();
        match responses.len() {
            1 => responses[0].clone(),
            _ => responses.pop_front().expect("the upstream has a response"),
        }
    };
    let mut out = Response::builder().status(StatusCode::from_u16(response.status).unwrap());
    for (name, value) in &response.headers {
        out = out.header(*name, value);
    }
    let acts: VecDeque<Act> = response.acts.into();
    let bytes = stream::unfold((acts, script), async |(mut acts, script)| {
        loop {
            let bytes = match acts.pop_front()? {
                Say(json) => Ok(Bytes::from(format!("data: {json}\n\n"))),
                Raw(text) => Ok(Bytes::from(text)),
                Wait(time) => {
                    tokio::time::sleep(time).await;
                    continue;
                }
                Hang => {
                    let _closed = Closed(script.clone());
                    std::future::pending::<Infallible>().await;
                    unreachable!("it hangs")
                }
                Break => Err(std::io::Error::other("broken on purpose")),
            };
            return Some((bytes, (acts, script)));
        }
    });
    out.body(Body::from_stream(bytes)).unwrap()
}

/// A chunk of a chat completion.
pub fn delta(delta: Value) -> Act {
    Say(
        json!({"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}),
    )
}

/// The last chunks of a chat completion.
pub fn end(reason: &str, prompt: u32, completion: u32) -> Vec<Act> {
    vec![
        Say(json!({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})),
        Say(
            json!({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}),
        ),
        Raw("data: [DONE]\n\n"),
    ]
}

/// A stream that says `text`.
pub fn says(text: &str) -> Reaction {
    let mut acts = vec![delta(json!({"role": "assistant", "content": ""}))];
    acts.push(delta(json!({"content": text})));
    acts.extend(end("stop", 12, 5));
    streamed(acts)
}

/// A policy in Rust.
pub struct Native<F>(pub F);

impl<F: FnMut(&Call<'_>) -> Option<Answer> + Send> Policy for Native<F> {
    fn call(&mut self, call: &Call<'_>) -> Result<Answer, Failure> {
        Ok((self.0)(call).unwrap_or_else(|| call.default_answer()))
    }
}

/// A session of one policy in Rust.
pub fn session(
    policy: impl FnMut(&Call<'_>) -> Option<Answer> + Send + 'static,
    shapes_text: bool,
    judges_calls: bool,
) -> Session {
    Session {
        policy: Box::new(Native(policy)),
        params: Arc::default(),
        digest: [0; 32],
        judges_calls,
        shapes_text,
        sees_text: shapes_text,
        policies: 1,
    }
}

/// A model of the upstream at `url`, with the configuration that `change` makes.
pub fn model(url: &str, change: impl FnOnce(&mut UpstreamConfig)) -> UpstreamModel {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    std::fs::write(&file, format!("{KEY}\n")).unwrap();
    let mut config =
        UpstreamConfig { url: url.into(), key_file: file, ..UpstreamConfig::default() };
    change(&mut config);
    assert_eq!(config.problems("work"), [""; 0]);
    let storage = Storage::in_memory();
    let policies = Policies::load(&PolicyConfig::default(), &BTreeMap::new(), &storage).unwrap();
    let upstream = Upstream::new("work", config, Arc::new(policies), BTreeMap::new()).unwrap();
    upstream.model("m")
}

/// A request of one user message.
pub fn ask(text: &str) -> Request {
    let message = Message { role: "user".into(), content: text.into(), ..Message::default() };
    Request {
        id: "test".into(),
        profile: "default".into(),
        messages: vec![message],
        ..Request::default()
    }
}

/// Begins a request without policies.
pub fn begin(model: &UpstreamModel, request: Request) -> UnboundedReceiver<Event> {
    begin_with(model, request, session(|_| None, false, false))
}

/// Begins a request with these policies.
pub fn begin_with(
    model: &UpstreamModel,
    request: Request,
    session: Session,
) -> UnboundedReceiver<Event> {
    let (events, receiver) = unbounded_channel();
    tokio::spawn(run::run_with(model.clone(), request, events, move |_, _| Ok(session)));
    receiver
}

/// All events of a request.
pub async fn all(mut events: UnboundedReceiver<Event>) -> Vec<Event> {
    let mut all = Vec::new();
    while let Some(event) = events.recv().await {
        all.push(event);
    }
    all
}

/// What a client has after these events: reasoning and answer, with what was taken back removed.
pub fn texts(events: &[Event]) -> (String, String) {
    let (mut reasoning, mut answer) = (String::new(), String::new());
    for event in events {
        match event {
            Event::Reasoning(text) => reasoning += text,
            Event::Answer(text) => answer += text,
            Event::Rewound { reasoning: first, answer: second } => {
                reasoning.truncate(reasoning.len() - first);
                answer.truncate(answer.len() - second);
            }
            _ => {}
        }
    }
    (reasoning, answer)
}

/// The end of a request that has succeeded.
pub fn finished(events: &[Event]) -> Finished {
    match events.last() {
        Some(Event::Finished(finished)) => finished.clone(),
        other => panic!("{other:?}"),
    }
}

/// The message of a request that has failed.
pub fn failure(events: &[Event]) -> String {
    match events.last() {
        Some(Event::Failed(error)) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

/// The reason of the end.
pub fn reason(events: &[Event]) -> FinishReason {
    finished(events).reason
}
