//! What every request passes before its handler: the check of `Host` and `Origin`, the check of its key; and errors on
//! their way back.

use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::access::{API_KEY, Caller, Sender};
use super::app::App;
use super::error::{ApiError, Dialect, KEY_EXPIRED, KEY_REVOKED};
use super::request_id;
use crate::connections::Connection;

/// Bytes of an error in plain text that are kept when it becomes JSON.
const ERROR_BYTES: usize = 4096;

/// Rejects HTTP requests without a valid key, and hands their [`Caller`] to the handlers.
///
/// Answers to wrong keys are slowed down.
pub async fn authorize(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let connection = request.extensions().get::<Arc<Connection>>().cloned();
    let caller = app.access.caller(request.headers());
    let guess = is_guess(&request, &caller).then(|| sender(&request));
    let response = match caller {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => {
            app.metrics.unauthorized();
            if guess.is_none() {
                app.access.log_refusal(&sender(&request), &error);
            }
            error.into_response()
        }
    };
    let is_refused = [StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN].contains(&response.status());
    if let Some(guess) = guess.filter(|_| is_refused) {
        pause(&app, connection.as_deref(), &guess).await;
    }
    response
}

/// Hands the [`Caller`] of a valid key to the handler of a route that needs none.
///
/// What such a route tells to a key alone shows whether a key is valid: answers to wrong ones are slowed down.
pub async fn recognize(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let connection = request.extensions().get::<Arc<Connection>>().cloned();
    let caller = app.access.caller(request.headers());
    let is_guess = is_guess(&request, &caller) && !app.access.sees_all(&Caller::Anonymous);
    let guess = is_guess.then(|| sender(&request));
    if let Ok(caller) = caller {
        request.extensions_mut().insert(caller);
    }
    let response = next.run(request).await;
    if let Some(guess) = guess {
        pause(&app, connection.as_deref(), &guess).await;
    }
    response
}

/// Returns true if a request has a key that nobody has.
fn is_guess(request: &Request, caller: &Result<Caller, ApiError>) -> bool {
    let has_key =
        [header::AUTHORIZATION, API_KEY].iter().any(|name| request.headers().contains_key(name));
    // Who has a key that has expired, or was revoked, does not guess.
    let is_unknown = match caller {
        Ok(caller) => *caller == Caller::Anonymous,
        Err(error) => ![KEY_EXPIRED, KEY_REVOKED].contains(&error.code),
    };
    has_key && is_unknown
}

fn sender(request: &Request) -> Sender {
    let of_request = request.extensions();
    let connection = of_request.get::<Arc<Connection>>();
    Sender {
        request_id: request_id::text(request.headers()).into(),
        route: of_request.get::<MatchedPath>().map(|path| path.as_str().into()),
        address: connection.map(|connection| connection.address.to_string()),
    }
}

/// Waits before the answer to a guess.
async fn pause(app: &App, connection: Option<&Connection>, guess: &Sender) {
    // Others need not wait for a connection that only waits.
    connection.inspect(|connection| connection.waits());
    // As in the reply.
    app.access.pause(guess, ApiError::unauthorized().code).await;
}

/// Refuses requests with another server's `Host` or a foreign `Origin`, on all routes.
pub async fn check_origin(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match app.origins.check(&request) {
        Ok(()) => next.run(request).await,
        Err(error) => {
            app.metrics.refused(error.code);
            if let Some(suppressed) = app.refusals.pass() {
                let (code, reason) = (error.code, &error.message);
                let Sender { request_id, address, .. } = sender(&request);
                tracing::warn!(request_id, address, code, reason, suppressed, "request refused");
            }
            error.into_response()
        }
    }
}

/// Writes errors as the protocol of the path does, also those that axum writes as plain text, for a
/// path or a query that cannot be read.
pub async fn errors(request: Request, next: Next) -> Response {
    let dialect = Dialect::of(request.uri().path(), request.headers());
    let id = request_id::text(request.headers()).to_string();
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let mut response = next.run(request).await;
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        // Requests for replies have a line of their own, and their errors an id.
        if error.status.is_server_error() && error.request_id.is_empty() {
            let (status, code) = (error.status.as_u16(), error.code);
            tracing::warn!(request_id = id, route, status, code, "request failed");
        }
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
