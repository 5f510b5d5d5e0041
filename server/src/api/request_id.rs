//! Ids of HTTP requests and of replies.

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;

/// Id of the HTTP request in logs and in the response; generated if the client sends none.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Maximum size of a client's request id in bytes; a longer one, or one with blanks, is replaced, since ids are
/// logged.
const REQUEST_ID_BYTES: usize = 128;

/// Gives each HTTP request an id, and returns it in the response.
pub async fn assign(mut request: Request, next: Next) -> Response {
    let id = of(request.headers());
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let mut response = next.run(request).await;
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// The id of a request with these headers: the client's, or a new one.
pub fn of(headers: &HeaderMap) -> HeaderValue {
    let id = headers.get(REQUEST_ID).filter(|id| {
        (1..=REQUEST_ID_BYTES).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic)
    });
    id.cloned().unwrap_or_else(|| {
        HeaderValue::from_str(&random_hex()).expect("hex digits are a valid header value")
    })
}

/// The id as text, which each request has that [`assign`] has passed on.
pub fn text(headers: &HeaderMap) -> &str {
    headers.get(REQUEST_ID).and_then(|id| id.to_str().ok()).unwrap_or_default()
}

/// 24 random hex digits.
pub fn random_hex() -> String {
    let mut bytes = [0; 12];
    // The id of a request opens its trace.
    getrandom::fill(&mut bytes).expect("the system has a source of randomness");
    hex::encode(bytes)
}
