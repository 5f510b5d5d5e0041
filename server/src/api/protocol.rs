//! The path of a request through the server, which all protocols share.
//!
//! A [`Protocol`] parses a body into the engine's requests and renders the events of their replies.
//! Everything between is here: reading the body, profile and limits, deadline, log, and the choice
//! between a stream and one object. A body may ask for several replies, which are numbered.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, Uri};
use axum::response::{Response, sse};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use steersman_engine::request::{Choice, Choices, Event, Request};
use steersman_engine::{Engine, Error, RequestError, policy};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Instant;

use super::access::{self, Admission, Caller, Destination};
use super::body::{Limit, ReadBody};
use super::error::ApiError;
use super::log::RequestLog;
use super::reply::{self, Events, Frames, Head, Reply, Source};
use super::route::Routes;
use super::schema::Schemas;
use super::{App, random_hex};
use crate::mcp::{Ran, Toolbox, rounds};
use crate::serve::Shutdown;

/// The content type of bodies.
pub const JSON: Option<&str> = Some("application/json");

/// Selects a profile, like `model@profile`.
const PROFILE: HeaderName = HeaderName::from_static("x-steersman-profile");

/// Seconds after which the client has no use for the reply.
const TIMEOUT: HeaderName = HeaderName::from_static("x-request-timeout");

/// Seconds that OpenAI's Python package waits for the next bytes, and that its JavaScript package
/// waits for the head of the response. Both are for whole replies what [`TIMEOUT`] is for all.
const READ_TIMEOUTS: [HeaderName; 2] = [
    HeaderName::from_static("x-stainless-read-timeout"),
    HeaderName::from_static("x-stainless-timeout"),
];

/// Text with fewer bytes a token is rare.
const BYTES_PER_TOKEN: usize = 3;

/// How a protocol separates the parts of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// Server-sent events.
    Sse,
    /// One JSON object a line.
    Lines,
}

/// A protocol, with the state that rendering one reply needs.
pub trait Protocol: Sized + Send + Sync + 'static {
    /// The replies to a body as one object.
    type Whole: Serialize + JsonSchema;

    /// What ids of replies begin with.
    const ID: &'static str;

    /// Whether the end of a stream has the probabilities of its tokens again.
    const REPEATS_LOGPROBS: bool = false;

    /// The content type that bodies must have, if any.
    const CONTENT_TYPE: Option<&'static str> = JSON;

    /// How streams are written.
    const FRAMING: Framing = Framing::Sse;

    /// Whether streams have the calls of tools while they are written.
    const STREAMS_CALLS: bool = true;

    /// Describes the bodies that [`Self::parse`] takes.
    fn schema(schemas: &mut Schemas) -> Value;

    /// Parses a body.
    ///
    /// # Errors
    /// 400 for what is wrong with it for any profile.
    fn parse(body: Map<String, Value>) -> Result<Parsed<Self>, ApiError>;

    /// Completes the requests of a body with what only the server knows.
    ///
    /// # Errors
    /// 400 or 404 naming the field.
    fn resolve(&mut self, _at: &Place<'_>, _requests: &mut [Request]) -> Result<(), ApiError> {
        Ok(())
    }

    /// The field of the body that has the prompt of reply `index`.
    fn prompt_field(&self, index: usize) -> String;

    /// How long the model stays loaded after the request; `Some(None)` without a limit, `None` if the request does not say.
    fn keeps_model(&self) -> Option<Option<Duration>> {
        None
    }

    /// The beginning of a stream. Protocols without streams leave out this and the next methods.
    fn begin(&mut self, _head: &Head, _out: &mut Frames) {}

    /// One event of reply `index` in a stream; never `Started`, `Embedding`, `Rewound` or `Failed`.
    fn event(&mut self, _head: &Head, _index: usize, _event: Event, _out: &mut Frames) {}

    /// A call that this server ran for reply `index` of a stream. The end names all of them.
    fn ran(&mut self, _head: &Head, _index: usize, _ran: &Ran, _out: &mut Frames) {}

    /// The end of a stream with these replies.
    fn end(&mut self, _head: &Head, _replies: &[Reply], _out: &mut Frames) {}

    /// The end of a stream that fails.
    fn fail(&mut self, _head: &Head, _error: &ApiError, _out: &mut Frames) {}

    /// The replies as one object.
    fn whole(&mut self, head: &Head, replies: &[Reply]) -> Self::Whole;

    /// What an idle stream of server-sent events sends, so that proxies do not close it.
    fn keep_alive() -> sse::Event {
        sse::Event::default().comment("still working")
    }
}

/// A body, as far as it can be parsed without knowing the profile.
#[derive(Debug)]
pub struct Parsed<P> {
    /// The client's name of the model.
    pub model: Option<String>,
    /// Whether to stream the reply.
    pub stream: bool,
    /// The rest; or the first invalid value, which is reported after the profile is known.
    pub call: Result<Call<P>, ApiError>,
}

/// What a body asks for.
#[derive(Debug)]
pub struct Call<P> {
    /// Renders the reply.
    pub protocol: P,
    /// Without ids, profile and deadline.
    pub requests: Vec<Request>,
    /// Choices of each request, at least 1. They are numbered request by request.
    pub choices: usize,
    /// The fields of the body that have the schemas of the client's tools, in the order of the requests' tools.
    pub tool_fields: Vec<String>,
    /// What was left out of the requests, in words.
    pub notes: Vec<String>,
}

impl<P> Call<P> {
    /// Asks for the embeddings of texts.
    pub fn of_texts(protocol: P, requests: Vec<Request>) -> Self {
        let (tool_fields, notes) = (Vec::new(), Vec::new());
        Self { protocol, requests, choices: 1, tool_fields, notes }
    }
}

/// Where an admitted body goes.
pub struct Place<'a> {
    /// What all handlers share.
    pub app: &'a App,
    /// What the client's key opens.
    pub caller: &'a Caller,
    /// Engine and profile.
    pub admission: &'a Admission,
}

/// The handler of a protocol's route.
pub async fn handle<P: Protocol>(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    shutdown: Option<Extension<Shutdown>>,
    uri: Uri,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let received = Instant::now();
    let request_id = headers.get(super::REQUEST_ID).and_then(|id| id.to_str().ok());
    let id = format!("{}{}", P::ID, random_hex());
    let tracked = app.register.enter(&id, uri.path());
    let (metrics, request_id) = (app.metrics.clone(), request_id.unwrap_or_default());
    let mut log = RequestLog::new(id, request_id, metrics, tracked);
    let read = read::<P>(&app, &caller, &headers, body, &mut log).await;
    let (stream, call, destination, named) = read.map_err(|error| log.failed(error))?;
    let seen = app.access.seen_by_policies(&caller, &destination.profile, &headers);
    let seen = policy::Caller { key: seen.key, headers: seen.headers, ..named };
    let Call { mut protocol, mut requests, choices, tool_fields, mut notes } = call;
    let timeout = timeout(&headers, stream).map_err(|error| log.failed(error))?;
    let deadline = received + timeout.unwrap_or(Duration::MAX).min(app.request_timeout);
    let (index, keep_alive) = (destination.index(), protocol.keeps_model());
    let created = UNIX_EPOCH.elapsed().as_ref().map_or(0, Duration::as_secs);
    if requests.is_empty() && keep_alive == Some(Some(Duration::ZERO)) {
        // Nothing is asked for but that: the model is not loaded first.
        notes.extend(keep(&app, index, keep_alive));
        let (id, Destination { model, profile, .. }) = (log.id.clone(), destination);
        let head = Head { id, created, model, profile, choices, notes, ..Head::default() };
        let events = Events::new(Vec::new(), deadline, None);
        return match stream {
            true => reply::stream(protocol, head, events, log).await,
            false => reply::whole(protocol, head, events, log).await,
        };
    }
    let admission = destination.admit(&app.models, deadline).await;
    let admission = admission.map_err(|error| log.failed(error))?;
    log.lease = Some(admission.lease.clone());
    notes.extend(keep(&app, index, keep_alive));
    let place = Place { app: &app, caller: &caller, admission: &admission };
    protocol.resolve(&place, &mut requests).map_err(|error| log.failed(error))?;
    let mut toolboxes = Vec::new();
    for request in &mut requests {
        let toolbox = app.mcp.offer(&admission, request, &mut notes).await;
        toolboxes.push(toolbox.map(Arc::new));
    }
    // An error of request `index`, with the names of the client's fields.
    let named = |index: usize, error: ApiError, protocol: &P| {
        error.in_fields(&protocol.prompt_field(index * choices), &tool_fields)
    };
    for (index, request) in requests.iter().enumerate() {
        let checked = admission.engine.check(request);
        checked.map_err(|error| log.failed(named(index, error.into(), &protocol)))?;
    }
    let requests = check_lengths(&app, &admission, requests).await;
    let requests = requests.map_err(|(index, error)| log.failed(named(index, error, &protocol)))?;
    let running_limit = app.access.running_limit(&admission.profile);
    let complete = |request: Request| Request {
        profile: admission.profile.clone(),
        running_limit,
        caller: seen.clone(),
        deadline: Some(deadline.into_std()),
        span: log.span(),
        // The probabilities of a rewound token cannot be taken back.
        revisable: !stream && request.logprobs.is_none(),
        streams_calls: stream && P::STREAMS_CALLS,
        ..request
    };
    let body = numbered(&log.id, choices, requests.into_iter().map(complete));
    let routes = Routes::new(&app, &admission.profile, deadline);
    let followers = followers(&body, &toolboxes, &routes);
    let live = body.iter().flat_map(Choices::live).cloned().collect();
    log.tracked.queued(&admission.model, live);
    let receivers = admission.engine.submit_all(body).map_err(|error| log.failed(error))?;
    let engine = admission.engine;
    let head = Head {
        id: log.id.clone(),
        created,
        model: admission.model,
        profile: admission.profile,
        choices,
        tool_fields,
        notes,
        ..Head::default()
    };
    let shutdown = shutdown.map(|Extension(shutdown)| shutdown);
    let sources = receivers.into_iter().zip(followers);
    let sources = sources.map(|(events, follower)| follower.source(events, &engine, &routes));
    let events = Events::new(sources.collect(), deadline, shutdown);
    if stream {
        reply::stream(protocol, head, events, log).await
    } else {
        reply::whole(protocol, head, events, log).await
    }
}

/// The requests of a body with `choices` choices each, numbered from the id of the reply, by which traces are
/// found.
fn numbered(id: &str, choices: usize, requests: impl Iterator<Item = Request>) -> Vec<Choices> {
    let of_reply = |index| if index == 0 { id.to_string() } else { format!("{id}-{index}") };
    let one = |(number, request): (usize, Request)| {
        let other = |choice| Choice {
            id: of_reply(number * choices + choice),
            seed: request.seed.map(|seed| seed.wrapping_add(choice as u64)),
            live: Arc::default(),
        };
        let others = (1..choices).map(other).collect();
        let (id, live) = (of_reply(number * choices), Arc::default());
        Choices { request: Request { id, live, ..request }, others }
    };
    requests.enumerate().map(one).collect()
}

/// Who reads the events of a choice before the protocol does.
enum Follower {
    /// Nobody.
    Nobody,
    /// [`Routes`], which may begin this request again elsewhere.
    Routes(Request),
    /// The rounds of this request, with these tools.
    Rounds(Request, Arc<Toolbox>),
}

/// The follower of each choice. Only those that begin a request again hold a copy of it.
fn followers(
    body: &[Choices],
    toolboxes: &[Option<Arc<Toolbox>>],
    routes: &Routes,
) -> Vec<Follower> {
    let of_choices = |(choices, toolbox): (&Choices, &Option<Arc<Toolbox>>)| -> Vec<Follower> {
        match toolbox {
            Some(toolbox) => {
                let rounds = |request| Follower::Rounds(request, toolbox.clone());
                choices.requests().map(rounds).collect()
            }
            None if routes.are_any() => choices.requests().map(Follower::Routes).collect(),
            None => choices.live().map(|_| Follower::Nobody).collect(),
        }
    };
    body.iter().zip(toolboxes).flat_map(of_choices).collect()
}

impl Follower {
    fn source(self, events: UnboundedReceiver<Event>, engine: &Engine, routes: &Routes) -> Source {
        match self {
            Self::Nobody => Source::Engine(events),
            Self::Routes(request) => Source::Engine(routes.follow(|| request, events)),
            Self::Rounds(request, toolbox) => {
                let events = routes.follow(|| request.clone(), events);
                let (engine, routes) = (engine.clone(), routes.clone());
                Source::Rounds(rounds::start(toolbox, engine, routes, request, events))
            }
        }
    }
}

/// Applies the `keep_alive` of a request; returns a note if the configuration decides.
fn keep(app: &App, index: usize, keep_alive: Option<Option<Duration>>) -> Option<String> {
    let follows = app.models.keep(index, keep_alive?);
    (!follows).then(|| "keep_alive: not used, because the model stays loaded as configured".into())
}

/// Reads, parses, admits and checks a body; returns also whom it names. `log` gets what limits it.
async fn read<P: Protocol>(
    app: &App,
    caller: &Caller,
    headers: &HeaderMap,
    body: Body,
    log: &mut RequestLog,
) -> Result<(bool, Call<P>, Destination, policy::Caller), ApiError> {
    let body = read_json(app, headers, body, P::CONTENT_TYPE).await?;
    log.share = body.share;
    let parse = |body: Map<String, Value>| {
        let named = access::named_by(&body);
        P::parse(body).map(|parsed| (parsed, named))
    };
    let (Parsed { model, stream, call }, named) = app.bodies.parse(body.bytes, parse).await?;
    let destination = destination(app, caller, headers, model)?;
    log.admitted(&destination.profile, stream);
    log.permit = app.access.acquire(&destination.profile)?;
    Ok((stream, call?, destination, named))
}

/// Refuses prompts that do not fit into the context at once, not when their turn comes. Only texts that
/// are likely too long are tokenized here, and again in their turn. An error has the number of its request.
async fn check_lengths(
    app: &App,
    admission: &Admission,
    requests: Vec<Request>,
) -> Result<Vec<Request>, (usize, ApiError)> {
    let limit = admission.engine.info().context.saturating_sub(1);
    let is_long = move |request: &Request| {
        let is_cut = request.embedding.is_some_and(|embedding| embedding.truncates);
        !is_cut && request.text_bytes() / BYTES_PER_TOKEN > limit
    };
    if !requests.iter().any(is_long) {
        return Ok(requests);
    }
    let engine = admission.engine.clone();
    let check = move || {
        for (index, request) in requests.iter().enumerate().filter(|(_, request)| is_long(request))
        {
            let failed = |error: Error| (index, error.into());
            let tokens = engine.tokenize(request).map_err(failed)?.len();
            if tokens > limit {
                return Err(failed(RequestError::ContextTooLong { tokens, limit }.into()));
            }
        }
        Ok(requests)
    };
    app.bodies.work(check).await.map_err(|error| (0, error))?
}

/// Reads a JSON body of `content_type`, or of any if there is none.
///
/// # Errors
/// As [`super::body::Bodies::read`].
pub async fn read_json(
    app: &App,
    headers: &HeaderMap,
    body: Body,
    content_type: Option<&str>,
) -> Result<ReadBody, ApiError> {
    let limit =
        Limit { bytes: app.body_limit_bytes, set_by: "server.body_limit_bytes", has_budget: true };
    app.bodies.read(headers, body, content_type, limit).await
}

/// Admits a body for `model`, and waits until that is loaded.
///
/// # Errors
/// As [`Destination::new`] and [`Destination::admit`].
pub async fn admit(
    app: &App,
    caller: &Caller,
    headers: &HeaderMap,
    model: Option<String>,
) -> Result<Admission, ApiError> {
    let deadline = Instant::now() + app.request_timeout;
    destination(app, caller, headers, model)?.admit(&app.models, deadline).await
}

/// Where a body for `model` goes.
///
/// # Errors
/// As [`Destination::new`].
pub fn destination(
    app: &App,
    caller: &Caller,
    headers: &HeaderMap,
    model: Option<String>,
) -> Result<Destination, ApiError> {
    let profile = headers.get(PROFILE).map(|profile| profile.to_str().unwrap_or("?"));
    Destination::new(&app.models, &app.access, caller, model, profile)
}

/// The time that the client gives a request, from its headers.
fn timeout(headers: &HeaderMap, stream: bool) -> Result<Option<Duration>, ApiError> {
    let seconds = |header: &HeaderName| {
        let value = headers.get(header)?.to_str().unwrap_or("?");
        let seconds = value.trim().parse().ok().filter(|seconds: &f64| *seconds > 0.0);
        Some(seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).ok_or(value))
    };
    match seconds(&TIMEOUT) {
        Some(Ok(timeout)) => Ok(Some(timeout)),
        Some(Err(value)) => {
            let message = format!("X-Request-Timeout: is `{value}`, must be a number of seconds");
            Err(ApiError::value("X-Request-Timeout", message))
        }
        None if stream => Ok(None),
        // Packages may change what they send: what is no time is none.
        None => Ok(READ_TIMEOUTS.iter().find_map(|header| seconds(header)?.ok())),
    }
}
