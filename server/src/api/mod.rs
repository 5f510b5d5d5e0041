//! The HTTP interface: routes, request ids, errors.
//!
//! Each protocol is a module: `chat`, `completions`, `responses`, `embeddings`, `rerank`, `anthropic`,
//! `ollama`. It parses a body into the engine's
//! [`Request`](steersman_engine::request::Request)s and renders their events;
//! `handle.rs` and `respond.rs` are the path between, which all share. Nothing here sees an array or Wasm.

mod access;
mod anthropic;
mod app;
mod blocking;
mod body;
mod cache;
pub mod chat;
mod completions;
mod downloads;
mod embeddings;
pub mod error;
mod extension;
pub mod fields;
mod handle;
mod health;
mod history;
pub mod json;
mod keys;
mod log;
mod log_lines;
mod metrics;
mod middleware;
mod models;
mod ollama;
mod openapi;
mod operations;
mod origin;
mod params;
mod policies;
mod prefix_names;
mod probability;
mod profiles;
pub mod protocol;
mod pull;
mod pulls;
mod query;
mod register;
mod remove;
mod reply;
pub(crate) mod request_id;
mod requests;
mod rerank;
mod respond;
mod response_store;
mod responses;
mod rounds;
mod route;
mod samples;
mod sampling;
mod schema;
mod search;
mod serve;
mod session;
mod span;
mod structure;
mod tokens;
mod trace;
mod typed;
mod unknown;
pub(crate) mod unread;

use axum::Router;
use axum::extract::{Path, Request};
use axum::http::{HeaderMap, header};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};

pub use self::operations::document;

use self::anthropic::Messages;
use self::app::App;
use self::chat::Chat;
use self::completions::Completions;
use self::embeddings::Embeddings;
use self::error::ApiError;
use self::handle::handle;
use self::ollama::{Embed, Ollama};
use self::rerank::Rerank;
use self::responses::Responses;
use crate::config::ServerConfig;
use crate::console;
use crate::models::Models;
use crate::wiring::Wiring;

/// As [`app_with`], without anything besides the configuration.
///
/// # Panics
/// Outside of a runtime, if a profile grants MCP servers.
pub fn app(models: impl Into<Models>, config: &ServerConfig) -> Router {
    app_with(models, config, Wiring::default())
}

/// The router of the whole server, to be served or called in a test.
///
/// # Panics
/// Outside of a runtime, if a profile grants MCP servers, or `wiring` has reloads or samples.
pub fn app_with(models: impl Into<Models>, config: &ServerConfig, wiring: Wiring) -> Router {
    let app = App::new(models.into(), config, wiring);
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
        .route("/api/delete", delete(remove::delete_as_ollama))
        .route("/v1/models/pull", post(pull::pull).get(pull::running).delete(pull::stop))
        .route("/v1/models/serve", post(serve::serve).delete(serve::withdraw))
        .route("/v1/cache", get(cache::get))
        .route("/v1/downloads", get(downloads::list))
        .route("/v1/search", get(search::get))
        .route("/v1/history", get(history::get))
        .route("/v1/log", get(log_lines::get))
        .route("/v1/keys", get(keys::list).post(keys::create))
        .route("/v1/keys/{name}/revoke", post(keys::revoke))
        .route("/v1/policies", get(policies::list))
        .route("/v1/policies/{name}", post(policies::upload))
        .route("/v1/policies/{name}/rollback", post(policies::roll_back))
        .route("/v1/policies/{name}/shadow", get(policies::shadow))
        .route("/v1/profiles", get(profiles::list))
        .route("/v1/requests", get(requests::list))
        .route("/v1/requests/{id}/events", get(requests::events))
        .route("/v1/requests/{id}/trace", get(trace::trace))
        .route("/metrics", get(health::scrape))
        .route_layer(from_fn_with_state(app.clone(), middleware::authorize))
        .route("/openapi.json", get(operations::json))
        .route("/docs", get(openapi::page))
        // Needs no key, and tells more to one.
        .route(
            "/health",
            get(health::get).layer(from_fn_with_state(app.clone(), middleware::recognize)),
        )
        .route("/v1/session", post(session::open))
        .route("/", get(root))
        .route("/console/{file}", get(console_file))
        .fallback(async |request: Request| {
            ApiError::no_route(request.method().as_str(), request.uri().path())
        })
        .method_not_allowed_fallback(async |request: Request| {
            ApiError::method_not_allowed(request.method().as_str(), request.uri().path())
        });
    router = router.layer(from_fn(query::check));
    if app.origins.has_cors() {
        router = router.layer(app.origins.cors_layer());
    }
    router
        .layer(from_fn_with_state(app.clone(), middleware::check_origin))
        .layer(from_fn(middleware::errors))
        .layer(from_fn(request_id::assign))
        .with_state(app)
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
