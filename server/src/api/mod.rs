//! OpenAI's HTTP interface: routes, limits on bodies, request ids, and the chat handler.
//!
//! This module speaks HTTP and JSON. It never sees an array, a token id or Wasm: a
//! [`Request`](steersman_engine::request::Request) goes into the engine, events come out.

mod access;
mod cache;
pub mod error;
pub mod fields;
mod log;
mod message;
mod metrics;
mod models;
mod policies;
mod reply;
pub mod request;

use std::error::Error as _;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use http_body_util::LengthLimitError;
use serde_json::{Value, json};
use steersman_engine::Engine;
use steersman_engine::Error;
use tokio::sync::Semaphore;

use self::access::{Access, Admission, Caller};
use self::error::ApiError;
use self::log::RequestLog;
use self::metrics::Metrics;
use self::reply::Head;
use self::request::ChatRequest;
use crate::config::ServerConfig;
use crate::models::Models;

/// Id of the HTTP request in logs and in the response; generated if the client sends none.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Selects a profile, like `model@profile`.
const PROFILE: HeaderName = HeaderName::from_static("x-steersman-profile");

/// Maximum size of a client's request id in bytes; a longer one is replaced, since ids are logged.
const REQUEST_ID_BYTES: usize = 128;

/// Maximum number of bodies read and parsed at the same time. With `body_limit_bytes` it bounds
/// memory before the engine's queue limits the number of requests.
const BODIES: usize = 64;

/// State shared by all handlers.
pub struct App {
    models: Models,
    access: Access,
    /// Shared with the logs of running requests, which count their outcomes.
    metrics: Arc<Metrics>,
    bodies: Semaphore,
    /// Limits uploads of policies to one at a time: compiling a component occupies a core.
    uploads: Semaphore,
    body_limit_bytes: usize,
    body_timeout_s: u64,
}

/// The router of the whole server, to be served or called in a test.
pub fn app(models: impl Into<Models>, config: &ServerConfig) -> Router {
    let app = Arc::new(App {
        models: models.into(),
        access: Access::new(config),
        metrics: Arc::default(),
        bodies: Semaphore::new(BODIES),
        uploads: Semaphore::new(1),
        body_limit_bytes: config.body_limit_bytes,
        body_timeout_s: config.body_timeout_s,
    });
    Router::new()
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
        })
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
    Ok(Json(json!({"status": "ok", "model": model, "waiting": waiting})))
}

/// `POST /v1/chat/completions`
async fn chat(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let request_id = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok()).unwrap_or_default();
    let id = format!("chatcmpl-{}", random_hex());
    let mut log = RequestLog::new(id, request_id, app.metrics.clone());
    let read = read(&app, &caller, &headers, body).await;
    let (chat, admission) = read.map_err(|error| log.failed(error))?;
    let ChatRequest { mut request, stream, include_usage } = chat;
    log.admitted(&admission.profile, stream, admission.permit);
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
    let events = admission.engine.submit(request).map_err(|error| log.failed(error))?;
    if stream {
        reply::stream(head, events, log).await
    } else {
        reply::whole(head, events, log).await
    }
}

/// Reads, admits and checks a request; at most [`BODIES`] at a time.
async fn read(
    app: &App,
    caller: &Caller,
    headers: &HeaderMap,
    body: Body,
) -> Result<(ChatRequest, Admission), ApiError> {
    let _permit = app.bodies.acquire().await.expect("the semaphore is never closed");
    let limit = Limit { bytes: app.body_limit_bytes, set_by: "server.body_limit_bytes" };
    let body = read_body(app, headers, body, "application/json", limit).await?;
    let profile = headers.get(PROFILE).map(|profile| profile.to_str().unwrap_or("?"));
    let mut body = request::parse(&body)?;
    let model = body.model.take();
    let admission = Admission::new(&app.models, &app.access, caller, model, profile)?;
    Ok((body.check()?, admission))
}

/// Maximum size of a body in bytes, and the configuration key that sets it.
struct Limit {
    bytes: usize,
    set_by: &'static str,
}

/// Reads a body, enforcing its type, size and deadline.
async fn read_body(
    app: &App,
    headers: &HeaderMap,
    body: Body,
    content_type: &str,
    limit: Limit,
) -> Result<Vec<u8>, ApiError> {
    // A web page may send cross-origin requests to a local server, but with this content type the
    // browser first sends a preflight request, which we reject.
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let kind = kind.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if !kind.eq_ignore_ascii_case(content_type) {
        return Err(ApiError::not_of_type(content_type));
    }
    let time = Duration::from_secs(app.body_timeout_s);
    match tokio::time::timeout(time, axum::body::to_bytes(body, limit.bytes)).await {
        Ok(Ok(body)) => Ok(body.into()),
        Ok(Err(error)) if error.source().is_some_and(|e| e.is::<LengthLimitError>()) => {
            Err(ApiError::too_large(limit.bytes, limit.set_by))
        }
        Ok(Err(error)) => {
            Err(ApiError::invalid("invalid_body", "", format!("the body is incomplete: {error}")))
        }
        Err(_elapsed) => Err(ApiError::too_slow(app.body_timeout_s)),
    }
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
