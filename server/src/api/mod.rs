//! The HTTP interface: routes, request ids, errors.
//!
//! Each protocol is a module: `chat`, `completions`, `responses`, `embeddings`, `rerank`, `anthropic`,
//! `ollama`. It parses a body into the engine's
//! [`Request`](steersman_engine::request::Request)s and renders their events; `protocol.rs` and
//! `reply.rs` are the path between, which all share. Nothing here sees an array or Wasm.

pub(crate) mod access;
mod anthropic;
pub(crate) mod body;
mod cache;
pub mod chat;
mod completions;
mod embeddings;
pub mod error;
mod extension;
pub mod fields;
mod health;
pub mod json;
mod log;
mod metrics;
mod models;
mod ollama;
mod openapi;
mod operations;
mod origin;
mod params;
mod policies;
mod probability;
mod profiles;
pub mod protocol;
mod pull;
mod query;
mod reply;
mod requests;
mod rerank;
mod responses;
pub mod route;
mod sampling;
mod schema;
mod structure;
mod tokens;
mod trace;
mod typed;
mod unknown;

use std::sync::{Arc, Weak};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, Request};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use parking_lot::RwLock;
use steersman_models::hub::Hub;
use tokio::sync::Semaphore;

pub use self::operations::document;

use self::access::Access;
use self::anthropic::Messages;
use self::body::Bodies;
use self::chat::Chat;
use self::completions::Completions;
use self::embeddings::Embeddings;
use self::error::{ApiError, Dialect};
use self::metrics::Metrics;
use self::ollama::{Embed, Ollama};
use self::origin::Origins;
use self::profiles::Profiles;
use self::protocol::handle;
use self::pull::Pulls;
use self::requests::register::Register;
use self::rerank::Rerank;
use self::responses::Responses;
use self::responses::store::ResponseStore;
use crate::config::ServerConfig;
use crate::console;
use crate::mcp::Mcp;
use crate::models::Models;
use crate::reload::Reloads;
use crate::throttle::Throttle;

/// Id of the HTTP request in logs and in the response; generated if the client sends none.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Maximum size of a client's request id in bytes; a longer one, or one with blanks, is replaced, since ids are
/// logged.
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
    /// The requests that run, and the newest that have ended.
    register: Register,
    /// For display.
    profiles: RwLock<Profiles>,
    mcp: Arc<Mcp>,
    /// `None` if no response is stored.
    responses: Option<Arc<ResponseStore>>,
    /// Limits uploads of policies to one at a time: compiling a component occupies a core.
    uploads: Semaphore,
    /// Limits rollbacks to one at a time.
    rollbacks: Semaphore,
    /// Limits traces that are read at a time.
    trace_readers: Arc<Semaphore>,
    /// The download of a model that runs.
    pulls: Arc<Pulls>,
    /// Where models are downloaded from, if not what the environment says.
    hub: Option<Hub>,
    body_limit_bytes: usize,
    request_timeout: Duration,
}

/// The router of the whole server, to be served or called in a test.
///
/// # Panics
/// Outside of a runtime, if a profile grants MCP servers, or `config` has reloads.
pub fn app(models: impl Into<Models>, config: &ServerConfig) -> Router {
    let lifetime = Duration::from_secs(config.responses_days * 86_400);
    let folder = config.responses_folder.as_ref().filter(|_| config.responses_bytes > 0);
    let store = folder
        .map(|folder| Arc::new(ResponseStore::open(folder, config.responses_bytes, lifetime)));
    let app = Arc::new(App {
        models: models.into(),
        access: Access::new(config),
        metrics: Arc::default(),
        origins: Origins::new(config),
        refusals: Throttle::default(),
        bodies: Bodies::new(config),
        register: Register::default(),
        profiles: RwLock::new(config.profiles.clone()),
        mcp: Mcp::start(config),
        responses: store,
        uploads: Semaphore::new(1),
        rollbacks: Semaphore::new(1),
        trace_readers: Arc::new(Semaphore::new(trace::READERS)),
        pulls: Arc::default(),
        hub: config.hub.clone(),
        body_limit_bytes: config.body_limit_bytes,
        request_timeout: Duration::from_secs(config.request_timeout_s),
    });
    if let Some(reloads) = config.reloads.clone() {
        tokio::spawn(follow(Arc::downgrade(&app), reloads));
    }
    let clients = Router::new()
        .route("/chat/completions", post(handle::<Chat>))
        .route("/completions", post(handle::<Completions>))
        .route("/embeddings", post(handle::<Embeddings>))
        .route("/rerank", post(handle::<Rerank>))
        .route("/responses", post(handle::<Responses>))
        .route("/responses/{id}", get(responses::get).delete(responses::delete))
        .route("/responses/{id}/input_items", get(responses::input_items))
        .route("/messages", post(handle::<Messages>))
        .route("/messages/count_tokens", post(anthropic::count_tokens))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/apply-template", post(tokens::apply_template))
        .route("/models", get(models::list))
        // A name may contain slashes: `owner/name`.
        .route("/models/{*name}", get(models::get));
    let mut router = Router::new()
        // Clients disagree whether `/v1` is part of a server's address.
        .merge(clients.clone())
        .nest("/v1", clients)
        .route("/api/chat", post(handle::<Ollama<true>>))
        .route("/api/generate", post(handle::<Ollama<false>>))
        .route("/api/embed", post(handle::<Embed<true>>))
        .route("/api/embeddings", post(handle::<Embed<false>>))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::running))
        .route("/api/show", post(ollama::show))
        .route("/api/version", get(ollama::version))
        .route("/api/pull", post(pull::pull_as_ollama))
        .route("/v1/models/pull", post(pull::pull).delete(pull::stop))
        .route("/v1/cache", get(cache::get))
        .route("/v1/policies", get(policies::list))
        .route("/v1/policies/{name}", post(policies::upload))
        .route("/v1/policies/{name}/rollback", post(policies::roll_back))
        .route("/v1/policies/{name}/shadow", get(policies::shadow))
        .route("/v1/profiles", get(profiles::list))
        .route("/v1/requests", get(requests::list))
        .route("/v1/requests/{id}/events", get(requests::events))
        .route("/v1/requests/{id}/trace", get(trace::trace))
        .route("/metrics", get(metrics::get))
        .route_layer(middleware::from_fn_with_state(app.clone(), access::authorize))
        .route("/openapi.json", get(operations::json))
        .route("/docs", get(openapi::page))
        .route("/health", get(health::get))
        .route("/", get(root))
        .route("/console/{file}", get(console_file))
        .fallback(async |request: Request| {
            ApiError::no_route(request.method().as_str(), request.uri().path())
        })
        .method_not_allowed_fallback(async |request: Request| {
            ApiError::method_not_allowed(request.method().as_str(), request.uri().path())
        });
    router = router.layer(middleware::from_fn(query::check));
    if app.origins.has_cors() {
        router = router.layer(app.origins.cors_layer());
    }
    router
        .layer(middleware::from_fn_with_state(app.clone(), origin::check))
        .layer(middleware::from_fn(errors))
        .layer(middleware::from_fn(request_id))
        .with_state(app)
}

/// Applies what changes while the server runs.
async fn follow(app: Weak<App>, mut reloads: Reloads) {
    while reloads.changed().await.is_ok() {
        let config = reloads.borrow_and_update().clone();
        let (Some(app), Some(config)) = (app.upgrade(), config) else { return };
        app.access.reload(&config);
        profiles::reload(&mut app.profiles.write(), &config.profiles);
        app.models.set_aliases(config.aliases.clone());
    }
}

/// `GET /` and `HEAD /`: the console for browsers, and a line by which clients find out whether a server is
/// there. Needs no key.
async fn root(headers: HeaderMap) -> Response {
    console::page(&headers)
        .unwrap_or_else(|| ([(header::VARY, "accept")], "Steersman is running\n").into_response())
}

/// `GET /console/{file}`: needs no key.
async fn console_file(Path(file): Path<String>) -> Result<Response, ApiError> {
    let path = format!("/console/{file}");
    console::file(&file).ok_or_else(|| ApiError::no_route("GET", &path))
}

/// Writes errors as the protocol of the path does, also those that axum writes as plain text, for a
/// path or a query that cannot be read.
async fn errors(request: Request, next: Next) -> Response {
    let dialect = Dialect::of(request.uri().path(), request.headers());
    let id = request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok());
    let id = id.unwrap_or_default().to_string();
    let mut response = next.run(request).await;
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let rendered = ApiError { request_id: id, ..error }.respond(dialect);
        return with_headers_of(rendered, &response);
    }
    let status = response.status();
    let kind = response.headers().get(header::CONTENT_TYPE);
    let is_text = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/plain"));
    if !is_text || !(status.is_client_error() || status.is_server_error()) {
        return response;
    }
    let text = axum::body::to_bytes(response.into_body(), ERROR_BYTES).await.unwrap_or_default();
    let error = ApiError::of_status(status, &String::from_utf8_lossy(&text));
    ApiError { request_id: id, ..error }.respond(dialect)
}

/// `response` with the headers of `other` that it lacks, such as those of CORS.
fn with_headers_of(mut response: Response, other: &Response) -> Response {
    for (name, value) in other.headers() {
        if name != header::CONTENT_LENGTH && !response.headers().contains_key(name) {
            response.headers_mut().insert(name, value.clone());
        }
    }
    response
}

/// Gives each HTTP request an id, and returns it in the response.
async fn request_id(mut request: Request, next: Next) -> Response {
    let id = request.headers().get(REQUEST_ID).filter(|id| {
        (1..=REQUEST_ID_BYTES).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic)
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
    // The id of a request opens its trace.
    getrandom::fill(&mut bytes).expect("the system has a source of randomness");
    hex::encode(bytes)
}
