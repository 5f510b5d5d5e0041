//! OpenAI's HTTP interface: routes, request ids, deadlines, and the chat handler.
//!
//! This module speaks HTTP and JSON. It never sees an array, a token id or Wasm: a
//! [`Request`](steersman_engine::request::Request) goes into the engine, events come out.

mod access;
mod body;
mod cache;
pub mod error;
pub mod fields;
mod log;
mod message;
mod metrics;
mod models;
mod origin;
mod policies;
mod probability;
mod reply;
pub mod request;
mod structure;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use serde_json::{Value, json};
use steersman_engine::{Engine, Error};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use self::access::{Access, Admission, Caller};
use self::body::{Bodies, Limit};
use self::error::ApiError;
use self::log::RequestLog;
use self::metrics::Metrics;
use self::origin::Origins;
use self::reply::{Events, Head};
use self::request::{ChatRequest, Parsed};
use crate::config::ServerConfig;
use crate::models::Models;
use crate::serve::Shutdown;
use crate::throttle::Throttle;

/// Id of the HTTP request in logs and in the response; generated if the client sends none.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

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

/// Maximum size of a client's request id in bytes; a longer one is replaced, since ids are logged.
const REQUEST_ID_BYTES: usize = 128;

/// Bytes of an error in plain text that are kept when it becomes JSON.
const ERROR_BYTES: usize = 4096;

/// State shared by all handlers.
pub struct App {
    models: Models,
    access: Access,
    /// Shared with the logs of running requests, which count their outcomes.
    metrics: Arc<Metrics>,
    origins: Origins,
    /// Of log lines about refused hosts and origins.
    refusals: Throttle,
    bodies: Bodies,
    /// Limits uploads of policies to one at a time: compiling a component occupies a core.
    uploads: Semaphore,
    body_limit_bytes: usize,
    request_timeout: Duration,
}

/// The router of the whole server, to be served or called in a test.
pub fn app(models: impl Into<Models>, config: &ServerConfig) -> Router {
    let app = Arc::new(App {
        models: models.into(),
        access: Access::new(config),
        metrics: Arc::default(),
        origins: Origins::new(config),
        refusals: Throttle::default(),
        bodies: Bodies::new(config),
        uploads: Semaphore::new(1),
        body_limit_bytes: config.body_limit_bytes,
        request_timeout: Duration::from_secs(config.request_timeout_s),
    });
    let mut router = Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/models", get(models::list))
        // A name may contain slashes: `owner/name`.
        .route("/v1/models/{*name}", get(models::get))
        .route("/v1/cache", get(cache::get))
        .route("/v1/policies", get(policies::list))
        .route("/v1/policies/{name}", post(policies::upload))
        .route("/v1/policies/{name}/rollback", post(policies::roll_back))
        .route("/v1/requests/{id}/trace", get(policies::trace))
        .route("/metrics", get(metrics::get))
        .route_layer(middleware::from_fn_with_state(app.clone(), access::authorize))
        .route("/health", get(health))
        .fallback(async |request: Request| ApiError::not_found(request.uri().path()))
        .method_not_allowed_fallback(async |request: Request| {
            ApiError::method_not_allowed(request.method().as_str(), request.uri().path())
        });
    if app.origins.has_cors() {
        router = router.layer(app.origins.cors_layer());
    }
    router
        .layer(middleware::from_fn_with_state(app.clone(), origin::check))
        .layer(middleware::map_response(errors_in_json))
        .layer(middleware::from_fn(request_id))
        .with_state(app)
}

/// `GET /health`: never waits for the engine and needs no key. 503 if an engine has stopped.
async fn health(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let engines = app.models.engines();
    if engines.iter().any(Engine::has_stopped) {
        return Err(Error::Stopped.into());
    }
    let model = &app.models.first().info().model;
    let waiting: usize = engines.iter().map(Engine::waiting).sum();
    let engines: Vec<Value> = engines.iter().map(activity).collect();
    Ok(Json(json!({"status": "ok", "model": model, "waiting": waiting, "engines": engines})))
}

/// What an engine does, for `/health`.
fn activity(engine: &Engine) -> Value {
    let (info, activity) = (engine.info(), engine.info().activity.report());
    let mut bytes = BTreeMap::from([("limit", activity.bytes.limit)]);
    bytes.extend(metrics::accounts(&activity.bytes));
    json!({
        "model": info.model,
        "running": activity.running,
        "waiting": engine.waiting(),
        "preempted": activity.preempted,
        "rows_per_pass": rounded(activity.rows_mean),
        "tokens_per_second": rounded(activity.tokens_per_second),
        "preemptions": activity.preemptions,
        "stalls": activity.stalls,
        "bytes": bytes,
    })
}

/// With one decimal.
fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// `POST /v1/chat/completions`
async fn chat(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    shutdown: Option<Extension<Shutdown>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let received = Instant::now();
    let request_id = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok()).unwrap_or_default();
    let id = format!("chatcmpl-{}", random_hex());
    let mut log = RequestLog::new(id, request_id, app.metrics.clone());
    let read = read(&app, &caller, &headers, body, &mut log).await;
    let (chat, admission) = read.map_err(|error| log.failed(error))?;
    let ChatRequest { mut request, stream, include_usage } = chat;
    let timeout = timeout(&headers, stream).map_err(|error| log.failed(error))?;
    let deadline = received + timeout.unwrap_or(Duration::MAX).min(app.request_timeout);
    let head = Head {
        id: log.id.clone(),
        created: UNIX_EPOCH.elapsed().as_ref().map_or(0, Duration::as_secs),
        model: admission.model,
        fingerprint: String::new(),
        profile: admission.profile.clone(),
        include_usage,
    };
    request.id = log.id.clone();
    request.profile = admission.profile;
    request.deadline = Some(deadline.into_std());
    let events = admission.engine.submit(request).map_err(|error| log.failed(error))?;
    let events = Events::new(events, deadline, shutdown.map(|Extension(shutdown)| shutdown));
    if stream {
        reply::stream(head, events, log).await
    } else {
        reply::whole(head, events, log).await
    }
}

/// Reads, parses, admits and checks a request. `log` gets what limits it.
async fn read(
    app: &App,
    caller: &Caller,
    headers: &HeaderMap,
    body: Body,
    log: &mut RequestLog,
) -> Result<(ChatRequest, Admission), ApiError> {
    let limit =
        Limit { bytes: app.body_limit_bytes, set_by: "server.body_limit_bytes", has_budget: true };
    let body = app.bodies.read(headers, body, "application/json", limit).await?;
    log.share = body.share;
    let profile = headers.get(PROFILE).map(|profile| profile.to_str().unwrap_or("?"));
    let Parsed { model, stream, chat } = app.bodies.parse(body.bytes).await?;
    let admission = Admission::new(&app.models, &app.access, caller, model, profile)?;
    log.admitted(&admission.profile, stream);
    log.permit = app.access.acquire(&admission.profile)?;
    Ok((chat?, admission))
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

/// Makes JSON of the errors that axum writes as plain text, for a path or a query that cannot be read.
async fn errors_in_json(response: Response) -> Response {
    let status = response.status();
    let kind = response.headers().get(header::CONTENT_TYPE);
    let is_text = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/plain"));
    if !is_text || !(status.is_client_error() || status.is_server_error()) {
        return response;
    }
    let text = axum::body::to_bytes(response.into_body(), ERROR_BYTES).await.unwrap_or_default();
    ApiError::of_status(status, &String::from_utf8_lossy(&text)).into_response()
}

/// Gives each HTTP request an id, and returns it in the response.
async fn request_id(mut request: Request, next: Next) -> Response {
    let id = request.headers().get(REQUEST_ID).filter(|id| {
        id.len() <= REQUEST_ID_BYTES && id.to_str().is_ok_and(|id| !id.trim().is_empty())
    });
    let id = id.cloned().unwrap_or_else(|| {
        HeaderValue::from_str(&random_hex()).expect("hex digits are a valid header value")
    });
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let mut response = next.run(request).await;
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// 24 random hex digits.
fn random_hex() -> String {
    let mut bytes = [0; 12];
    // The clock is good enough if there is no randomness: ids are not secret.
    if getrandom::fill(&mut bytes).is_err() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        bytes.copy_from_slice(&now.as_nanos().to_le_bytes()[..12]);
    }
    hex::encode(bytes)
}
