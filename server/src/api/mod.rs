//! OpenAI's HTTP interface: routes, keys, request ids, and the one handler that does the work.
//!
//! This room speaks HTTP and JSON. It never sees an array, a token id or a policy: a
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
use steersman_engine::Error;
use steersman_engine::engine::Engine;
use tokio::sync::Semaphore;

use self::access::{Access, Caller};
use self::error::ApiError;
use self::log::RequestLog;
use self::metrics::Metrics;
use self::reply::Head;
use self::request::ChatRequest;
use crate::config::ServerConfig;
use crate::models::Models;

/// Names a request in logs; echoed, or made up where the client sends none.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Chooses a profile, as `model@profile` does.
const PROFILE: HeaderName = HeaderName::from_static("x-steersman-profile");

/// Most bytes of a client's request id; a longer one is replaced, since it goes into the log.
const REQUEST_ID_BYTES: usize = 128;

/// Bodies that are read and parsed at the same time; with `body_limit_bytes` it bounds the memory
/// that clients can fill before the engine's queue bounds their number.
const BODIES: usize = 64;

/// What every handler may use.
pub struct App {
    models: Models,
    access: Access,
    /// Shared with the logs of running requests, which count their ends.
    metrics: Arc<Metrics>,
    bodies: Semaphore,
    /// A component is large, and compiling it takes a core: one at a time.
    uploads: Semaphore,
    body_limit_bytes: usize,
    body_timeout_s: u64,
}

/// The server as axum has it: serve it, or call it in a test.
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
        // A name may have slashes: `owner/name`.
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

/// `GET /health`: quick whatever the engine does, and open to everyone. 503 once an engine is
/// gone.
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
    let mut chat = read(&app, &caller, &headers, body).await.map_err(|error| log.failed(error))?;
    log.understood(&chat.request.profile, chat.stream);
    log.place = app.access.enter(&chat.request.profile).map_err(|error| log.failed(error))?;
    chat.request.id = log.id.clone();
    let head = Head {
        id: log.id.clone(),
        created: UNIX_EPOCH.elapsed().as_ref().map_or(0, Duration::as_secs),
        model: chat.model,
        fingerprint: String::new(),
        profile: chat.request.profile.clone(),
        include_usage: chat.include_usage,
    };
    let engine = app.models.of(&chat.request.profile).expect("its profile was found");
    let events = engine.submit(chat.request).map_err(|error| log.failed(error))?;
    if chat.stream {
        reply::stream(head, events, log).await
    } else {
        reply::whole(head, events, log).await
    }
}

/// Reads and checks a request; at most [`BODIES`] at a time.
async fn read(
    app: &App,
    caller: &Caller,
    headers: &HeaderMap,
    body: Body,
) -> Result<ChatRequest, ApiError> {
    let _turn = app.bodies.acquire().await.expect("the semaphore is never closed");
    let limit = Limit { bytes: app.body_limit_bytes, set_by: "server.body_limit_bytes" };
    let body = read_body(app, headers, body, "application/json", limit).await?;
    let profile = headers.get(PROFILE).map(|profile| profile.to_str().unwrap_or("?"));
    let own = if let Caller::Profile(own) = caller { Some(own.as_str()) } else { None };
    let chat = request::parse(&body, profile, own, &app.models)?;
    app.access.allow(caller, &chat.request.profile)?;
    Ok(chat)
}

/// Most bytes of a body, and what says so.
struct Limit {
    bytes: usize,
    set_by: &'static str,
}

/// The body, within its limits of type, size and time.
async fn read_body(
    app: &App,
    headers: &HeaderMap,
    body: Body,
    content_type: &str,
    limit: Limit,
) -> Result<Vec<u8>, ApiError> {
    // A page in a browser can send a local server anything but JSON without being asked: this
    // header is what makes the browser ask first, and we do not answer that question.
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
            Err(ApiError::invalid("invalid_body", "", format!("the body broke off: {error}")))
        }
        Err(_elapsed) => Err(ApiError::too_slow(app.body_timeout_s)),
    }
}

/// Gives each request a name, which comes back in the reply.
async fn request_id(mut request: Request, next: Next) -> Response {
    let id = request.headers().get(REQUEST_ID).filter(|id| {
        id.len() <= REQUEST_ID_BYTES && id.to_str().is_ok_and(|id| !id.trim().is_empty())
    });
    let id = id
        .cloned()
        .unwrap_or_else(|| HeaderValue::from_str(&random_hex()).expect("hex digits make a header"));
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let mut response = next.run(request).await;
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// 24 hex digits that no other request has.
fn random_hex() -> String {
    let mut bytes = [0; 12];
    // Without randomness the clock has to do; the id is a name, not a secret.
    if getrandom::fill(&mut bytes).is_err() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        bytes.copy_from_slice(&now.as_nanos().to_le_bytes()[..12]);
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
