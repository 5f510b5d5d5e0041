//! The path of a request through the server, which all protocols share: reading the body, profile and limits, deadline,
//! log, the tools of MCP servers, and the choice between a stream and one object.
//!
//! A body may ask for several replies. A [`Batch`] is what it asks for, and a [`Job`] one request of it with what belongs
//! to that request; replies are numbered job by job.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, Uri};
use axum::response::Response;
use serde_json::{Map, Value};
use steersman_engine::request::{Choice, Choices, Event, PrefixName, Request};
use steersman_engine::{Error, RequestError, policy};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Instant;
use tracing::Instrument;

use super::access::{self, Admission, Caller, Destination};
use super::app::App;
use super::error::ApiError;
use super::log::RequestLog;
use super::prefix_names;
use super::protocol::{Call, Parsed, Place, Protocol};
use super::reply::Head;
use super::request_id::{REQUEST_ID, random_hex};
use super::respond::{Events, Source, stream, whole};
use super::rounds;
use super::route::Routes;
use super::span::Arrival;
use crate::mcp::Toolbox;
use crate::models::Backend;
use crate::shutdown::Shutdown;

/// Seconds after which the client has no use for the reply.
const TIMEOUT: HeaderName = HeaderName::from_static("x-request-timeout");

/// Seconds that OpenAI's Python package waits for the next bytes, and that its JavaScript package
/// waits for the head of the response. For replies that are not streamed, both act as [`TIMEOUT`] does for all.
const READ_TIMEOUTS: [HeaderName; 2] = [
    HeaderName::from_static("x-stainless-read-timeout"),
    HeaderName::from_static("x-stainless-timeout"),
];

/// Text with fewer bytes a token is rare.
const BYTES_PER_TOKEN: usize = 3;

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
    let request_id = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok());
    let id = format!("{}{}", P::ID, random_hex());
    let request_id = request_id.unwrap_or_default();
    let route = documented_route(uri.path());
    let tracked = app.register.enter(&id, request_id, &route);
    let arrival =
        Arrival { id: &id, request_id, route: &route, operation: P::OPERATION, headers: &headers };
    let mut log = RequestLog::new(arrival, app.metrics.clone(), tracked);
    let shutdown = shutdown.map(|Extension(shutdown)| shutdown);
    let span = log.span().0;
    let began = begin::<P>(&app, &caller, &headers, body, received, shutdown, &mut log);
    let began = began.instrument(span).await;
    let Began { protocol, head, events, is_stream } = began.map_err(|error| log.failed(error))?;
    let prefix = head.prefix;
    let response = match is_stream {
        true => stream(protocol, head, events, log).await?,
        false => whole(protocol, head, events, log).await?,
    };
    Ok(prefix_names::with_name(response, prefix))
}

/// The route of a path as it is documented: clients may leave out `/v1`.
fn documented_route(path: &str) -> Cow<'_, str> {
    let is_documented = ["/v1/", "/api/"].iter().any(|prefix| path.starts_with(prefix));
    if is_documented { path.into() } else { format!("/v1{path}").into() }
}

/// The replies to a body, which the engine has begun.
struct Began<P> {
    protocol: P,
    head: Head,
    events: Events,
    is_stream: bool,
}

/// Reads a body, and submits its requests.
async fn begin<P: Protocol>(
    app: &Arc<App>,
    caller: &Caller,
    headers: &HeaderMap,
    body: Body,
    received: Instant,
    shutdown: Option<Shutdown>,
    log: &mut RequestLog,
) -> Result<Began<P>, ApiError> {
    let (is_stream, call, destination, named) = read::<P>(app, caller, headers, body, log).await?;
    let seen = app.access.seen_by_policies(caller, &destination.profile, headers);
    let seen = policy::Caller { key: seen.key, headers: seen.headers, ..named };
    let timeout = timeout(headers, is_stream)?;
    let deadline = received + timeout.unwrap_or(Duration::MAX).min(app.request_timeout);
    let (index, keep_alive) = (destination.index(), call.protocol.keeps_model());
    let created = UNIX_EPOCH.elapsed().as_ref().map_or(0, Duration::as_secs);
    if call.requests.is_empty() && keep_alive == Some(Some(Duration::ZERO)) {
        // Nothing is asked for but that: the model is not loaded first.
        let Call { protocol, choices, mut notes, .. } = call;
        let (id, Destination { model, profile, .. }) = (log.id.clone(), destination);
        notes.extend(keep(app, index, keep_alive));
        let head = Head { id, created, model, profile, choices, notes, ..Head::default() };
        let events = Events::new(Vec::new(), deadline, None);
        return Ok(Began { protocol, head, events, is_stream });
    }
    let admission = destination.admit(&app.models, deadline).await?;
    log.lease = Some(admission.lease.clone());
    let mut batch = Batch::new(app, caller, &admission, call).await?;
    batch.notes.extend(keep(app, index, keep_alive));
    batch.offer_tools(app, &admission).await;
    batch.check(app, &admission).await?;
    let prefix = batch.prefix_name(app, &seen.key, &admission, &app.models.name(index));
    let terms = Terms {
        profile: &admission.profile,
        prefix,
        running_limit: app.access.running_limit(&admission.profile),
        caller: &seen,
        deadline,
        is_stream,
        created,
    };
    let routes = Routes::new(app, &admission, deadline);
    let (sources, head, protocol) = batch.submit(terms, &admission, routes, log)?;
    let events = Events::new(sources, deadline, shutdown);
    Ok(Began { protocol, head, events, is_stream })
}

/// What a body asks for, until the engine has it.
struct Batch<P> {
    protocol: P,
    jobs: Vec<Job>,
    /// Choices of each job, at least 1.
    choices: usize,
    /// The fields of the body that have the schemas of the client's tools.
    tool_fields: Vec<String>,
    /// What was left out of the requests, in words.
    notes: Vec<String>,
}

/// One request of a body.
struct Job {
    request: Request,
    /// The tools of MCP servers that it may use, if there are any.
    toolbox: Option<Arc<Toolbox>>,
}

/// What all requests of a body have in common.
struct Terms<'a> {
    profile: &'a str,
    prefix: Option<PrefixName>,
    running_limit: usize,
    caller: &'a policy::Caller,
    deadline: Instant,
    is_stream: bool,
    /// Seconds since 1970 when the body was read.
    created: u64,
}

impl<P: Protocol> Batch<P> {
    /// The batch of a body that was admitted.
    ///
    /// # Errors
    /// As [`Protocol::resolve`].
    async fn new(
        app: &App,
        caller: &Caller,
        admission: &Admission,
        call: Call<P>,
    ) -> Result<Self, ApiError> {
        let Call { mut protocol, mut requests, choices, tool_fields, notes } = call;
        protocol.resolve(&Place { app, caller, admission }, &mut requests)?;
        let jobs = requests.into_iter().map(|request| Job { request, toolbox: None }).collect();
        Ok(Self { protocol, jobs, choices, tool_fields, notes })
    }

    /// Adds the tools that the profile grants.
    async fn offer_tools(&mut self, app: &App, admission: &Admission) {
        let Admission { profile, backend, .. } = admission;
        for Job { request, toolbox } in &mut self.jobs {
            let offered = app.mcp.offer(profile, backend, request, &mut self.notes).await;
            *toolbox = offered.map(Arc::new);
        }
    }

    /// Refuses requests that the engine would refuse.
    ///
    /// # Errors
    /// 400 naming the field of the client.
    async fn check(&mut self, app: &App, admission: &Admission) -> Result<(), ApiError> {
        for (index, job) in self.jobs.iter().enumerate() {
            let checked = admission.backend.check(&job.request);
            checked.map_err(|error| self.named(index, error.into()))?;
        }
        let jobs = check_lengths(app, admission, std::mem::take(&mut self.jobs)).await;
        self.jobs = jobs.map_err(|(index, error)| self.named(index, error))?;
        Ok(())
    }

    /// The name of the beginning of the conversation, which a client with `key` sends to `model`; `None` for what is no
    /// conversation, or has no state here because an upstream computes it.
    fn prefix_name(
        &self,
        app: &App,
        key: &str,
        admission: &Admission,
        model: &str,
    ) -> Option<PrefixName> {
        admission.backend.engine()?;
        let [Job { request, .. }] = &self.jobs[..] else { return None };
        app.prefix_names.of(key, model, &request.messages)
    }

    /// An error of job `index`, with the names of the client's fields.
    fn named(&self, index: usize, error: ApiError) -> ApiError {
        error.in_fields(&self.protocol.prompt_field(index * self.choices), &self.tool_fields)
    }

    /// Submits the requests; returns where the events of each reply come from, and what the replies share.
    fn submit(
        self,
        terms: Terms<'_>,
        admission: &Admission,
        routes: Routes,
        log: &mut RequestLog,
    ) -> Result<(Vec<Source>, Head, P), ApiError> {
        let (backend, span) = (&admission.backend, log.span());
        let (mut body, mut followers) = (Vec::new(), Vec::new());
        for (number, Job { request, toolbox }) in self.jobs.into_iter().enumerate() {
            let request = Request {
                profile: terms.profile.into(),
                prefix_name: terms.prefix,
                running_limit: terms.running_limit,
                caller: terms.caller.clone(),
                deadline: Some(terms.deadline.into_std()),
                span: span.clone(),
                // The probabilities of a rewound token cannot be taken back.
                revisable: !terms.is_stream && request.logprobs.is_none(),
                streams_calls: terms.is_stream && P::STREAMS_CALLS,
                ..request
            };
            let choices = numbered(&log.id, number * self.choices, self.choices, request);
            followers.extend(Follower::all(&choices, toolbox.as_ref(), &routes));
            body.push(choices);
        }
        let live = body.iter().flat_map(Choices::live).cloned().collect();
        log.tracked.queued(&admission.model, live);
        let receivers = backend.submit_all(body)?;
        let sources = receivers.into_iter().zip(followers);
        let sources =
            sources.map(|(events, follower)| follower.source(events, backend, &routes)).collect();
        let Self { protocol, choices, tool_fields, notes, .. } = self;
        let (model, profile) = (admission.model.clone(), admission.profile.clone());
        let (id, created) = (log.id.clone(), terms.created);
        let prefix = terms.prefix;
        let head = Head {
            id,
            created,
            model,
            profile,
            prefix,
            choices,
            tool_fields,
            notes,
            ..Head::default()
        };
        Ok((sources, head, protocol))
    }
}

/// A request with its choices, of which the first has the number `first` among the replies. Their ids, by which traces
/// are found, are made from that of the reply.
fn numbered(id: &str, first: usize, choices: usize, request: Request) -> Choices {
    let id_of = |reply| if reply == 0 { id.to_string() } else { format!("{id}-{reply}") };
    let other = |choice| Choice {
        id: id_of(first + choice),
        seed: request.seed.map(|seed| seed.wrapping_add(choice as u64)),
        live: Arc::default(),
    };
    let others = (1..choices).map(other).collect();
    Choices { request: Request { id: id_of(first), live: Arc::default(), ..request }, others }
}

/// Reads the events of a choice before the protocol does, if anything does.
struct Follower {
    /// The request of the choice, if it may begin again: elsewhere, or with the results of calls.
    request: Option<Arc<Request>>,
    /// The tools whose calls run here.
    toolbox: Option<Arc<Toolbox>>,
}

impl Follower {
    /// The follower of each choice. Only one that may begin its request again holds a copy of it.
    fn all(choices: &Choices, toolbox: Option<&Arc<Toolbox>>, routes: &Routes) -> Vec<Self> {
        let follower = |request| Self { request, toolbox: toolbox.cloned() };
        match toolbox.is_some() || routes.are_any() {
            true => choices.requests().map(|one| follower(Some(Arc::new(one)))).collect(),
            false => choices.live().map(|_| follower(None)).collect(),
        }
    }

    fn source(
        self,
        events: UnboundedReceiver<Event>,
        backend: &Backend,
        routes: &Routes,
    ) -> Source {
        let Some(request) = self.request else { return Source::Engine(events) };
        let events = routes.follow(request.clone(), events);
        match self.toolbox {
            None => Source::Engine(events),
            Some(toolbox) => {
                let (backend, routes) = (backend.clone(), routes.clone());
                Source::Rounds(rounds::start(toolbox, backend, routes, request, events))
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
    let body = app.read_json(headers, body, P::CONTENT_TYPE).await?;
    log.share = body.share;
    let parse = |body: Map<String, Value>| {
        let named = access::named_by(&body);
        P::parse(body).map(|parsed| (parsed, named))
    };
    let (Parsed { model, stream, call }, named) = app.bodies.parse(body.bytes, parse).await?;
    let destination = app.destination(caller, headers, model.clone())?;
    let served = app.models.name(destination.index());
    log.admitted(&served, &destination.profile, model.as_deref(), stream);
    log.permit = app.access.acquire(&destination.profile)?;
    Ok((stream, call?, destination, named))
}

/// Refuses prompts that do not fit into the context at once, not when their turn comes. Only texts that
/// are likely too long are tokenized here, and again in their turn. An error has the number of its request.
async fn check_lengths(
    app: &App,
    admission: &Admission,
    jobs: Vec<Job>,
) -> Result<Vec<Job>, (usize, ApiError)> {
    // An upstream counts tokens itself.
    let Some(engine) = admission.backend.engine().cloned() else { return Ok(jobs) };
    let limit = engine.info().context.saturating_sub(1);
    let is_long = move |request: &Request| {
        let is_cut = request.embedding.is_some_and(|embedding| embedding.truncates);
        !is_cut && request.text_bytes() / BYTES_PER_TOKEN > limit
    };
    if !jobs.iter().any(|job| is_long(&job.request)) {
        return Ok(jobs);
    }
    let check = move || {
        for (index, job) in jobs.iter().enumerate().filter(|(_, job)| is_long(&job.request)) {
            let failed = |error: Error| (index, error);
            let tokens = engine.tokenize(&job.request).map_err(failed)?.len();
            if tokens > limit {
                return Err(failed(RequestError::ContextTooLong { tokens, limit }.into()));
            }
        }
        Ok(jobs)
    };
    let checked = app.bodies.work(check).await.map_err(|error| (0, error))?;
    checked.map_err(|(index, error)| (index, error.into()))
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
