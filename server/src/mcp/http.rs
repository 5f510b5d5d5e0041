//! The HTTP client below rmcp's transport.
//!
//! # Why
//! rmcp has a client of its own over `reqwest`, which adds 31 crates more than this file needs, and a
//! verifier of certificates beside the one of downloads.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rmcp::model::{ClientJsonRpcMessage, JsonRpcMessage, ServerJsonRpcMessage};
use rmcp::transport::common::http_header::{
    EVENT_STREAM_MIME_TYPE, HEADER_LAST_EVENT_ID, HEADER_SESSION_ID, JSON_MIME_TYPE,
};
use rmcp::transport::streamable_http_client::{
    SseError, StreamableHttpClient, StreamableHttpError, StreamableHttpPostResponse,
};
use sse_stream::{Sse, SseStream};
use tokio::time::sleep_until;

use super::bounds::{MESSAGE_BYTES, Pace, Shape};
use crate::media_type::is_type;

/// Time in which a connection must be opened.
const CONNECT: Duration = Duration::from_secs(10);

/// Bytes of the head of a response.
const HEAD_BYTES: usize = 64 << 10;

/// Longest id of a session and of an event, which later requests repeat.
const ID_BYTES: usize = 1024;

/// Characters of an unexpected response that errors repeat.
const QUOTED: usize = 200;

/// Sends the messages of one MCP server's client, with its headers. Follows no redirections, which could
/// carry the headers to another host.
#[derive(Clone)]
pub struct HttpClient {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    headers: HeaderMap,
}

/// Why a request failed, with its causes.
#[derive(Debug)]
pub struct Failed(String);

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failed {}

impl Failed {
    fn new(error: &(dyn std::error::Error + 'static)) -> Self {
        let causes = std::iter::successors(Some(error), |error| error.source());
        Self(causes.map(ToString::to_string).collect::<Vec<_>>().join(": "))
    }

    fn boxed(error: Box<dyn std::error::Error + Send + Sync>) -> Self {
        Self::new(&*error)
    }
}

type Error = StreamableHttpError<Failed>;

impl HttpClient {
    /// A client that sends `headers` with every request.
    pub fn new(headers: HeaderMap) -> Self {
        let mut http = HttpConnector::new();
        http.set_connect_timeout(Some(CONNECT));
        http.enforce_http(false);
        let connector = HttpsConnectorBuilder::new()
            .with_webpki_roots()
            .https_or_http()
            .enable_http1()
            .wrap_connector(http);
        let mut client = Client::builder(TokioExecutor::new());
        client.http1_max_buf_size(HEAD_BYTES);
        Self { client: client.build(connector), headers }
    }

    /// Sends a request; `more` are the headers of the protocol.
    async fn send(
        &self,
        method: Method,
        uri: &str,
        session: Option<Arc<str>>,
        more: HashMap<HeaderName, HeaderValue>,
        body: Bytes,
    ) -> Result<Response<Incoming>, Error> {
        let mut request = Request::builder().method(method).uri(uri);
        if let Some(session) = session {
            request = request.header(HEADER_SESSION_ID, &*session);
        }
        let invalid = |error: http::Error| StreamableHttpError::Client(Failed::new(&error));
        let mut request = request.body(Full::new(body)).map_err(invalid)?;
        request.headers_mut().extend(self.headers.clone());
        request.headers_mut().extend(more);
        let response = self.client.request(request).await;
        response.map_err(|error| StreamableHttpError::Client(Failed::new(&error)))
    }
}

impl StreamableHttpClient for HttpClient {
    type Error = Failed;

    async fn post_message(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session: Option<Arc<str>>,
        _authorization: Option<String>,
        mut headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<StreamableHttpPostResponse, Error> {
        let is_request = matches!(message, JsonRpcMessage::Request(_));
        let had_session = session.is_some();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(JSON_MIME_TYPE));
        headers.insert(ACCEPT, HeaderValue::from_static("application/json, text/event-stream"));
        let body = serde_json::to_vec(&message)?;
        let response = self.send(Method::POST, &uri, session, headers, body.into()).await?;
        let status = response.status();
        if status == StatusCode::NOT_FOUND && had_session {
            return Err(StreamableHttpError::SessionExpired);
        }
        if status.is_success() && !is_request {
            return Ok(StreamableHttpPostResponse::Accepted);
        }
        let session = response.headers().get(HEADER_SESSION_ID);
        if session.is_some_and(|id| id.len() > ID_BYTES) {
            return Err(unexpected(status, "the id of its session is too long"));
        }
        let session = session.and_then(|id| id.to_str().ok()).map(str::to_string);
        if status.is_success() && is_type(response.headers(), EVENT_STREAM_MIME_TYPE) {
            return Ok(StreamableHttpPostResponse::Sse(events(response), session));
        }
        let is_json = is_type(response.headers(), JSON_MIME_TYPE);
        let body = Limited::new(response.into_body(), MESSAGE_BYTES).collect().await;
        let body = body.map_err(|error| StreamableHttpError::Client(Failed::boxed(error)))?;
        let body = body.to_bytes();
        Shape::check(&body).map_err(|problem| unexpected(status, problem))?;
        match serde_json::from_slice::<ServerJsonRpcMessage>(&body) {
            Ok(message) if is_json && status.is_success() => {
                Ok(StreamableHttpPostResponse::Json(message, session))
            }
            Ok(message @ JsonRpcMessage::Error(_)) if is_json => {
                Ok(StreamableHttpPostResponse::Json(message, session))
            }
            _ => Err(unexpected(status, &String::from_utf8_lossy(&body))),
        }
    }

    async fn delete_session(
        &self,
        uri: Arc<str>,
        session: Arc<str>,
        _authorization: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<(), Error> {
        let sent = self.send(Method::DELETE, &uri, Some(session), headers, Bytes::new());
        match sent.await?.status() {
            StatusCode::METHOD_NOT_ALLOWED => {
                Err(StreamableHttpError::ServerDoesNotSupportDeleteSession)
            }
            status if status.is_success() => Ok(()),
            status => Err(unexpected(status, "")),
        }
    }

    async fn get_stream(
        &self,
        uri: Arc<str>,
        session: Option<Arc<str>>,
        last_event_id: Option<String>,
        _authorization: Option<String>,
        mut headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, Error> {
        headers.insert(ACCEPT, HeaderValue::from_static(EVENT_STREAM_MIME_TYPE));
        let id = last_event_id.and_then(|id| HeaderValue::from_str(&id).ok());
        headers.extend(id.map(|id| (name_of(HEADER_LAST_EVENT_ID), id)));
        let response = self.send(Method::GET, &uri, session, headers, Bytes::new()).await?;
        match response.status() {
            StatusCode::METHOD_NOT_ALLOWED => Err(StreamableHttpError::ServerDoesNotSupportSse),
            status
                if status.is_success() && is_type(response.headers(), EVENT_STREAM_MIME_TYPE) =>
            {
                Ok(events(response))
            }
            status => Err(unexpected(status, "")),
        }
    }
}

/// The events of a stream, which is read no faster than its pace, and ends after [`MESSAGE_BYTES`].
fn events(response: Response<Incoming>) -> BoxStream<'static, Result<Sse, SseError>> {
    let body = Limited::new(response.into_body(), MESSAGE_BYTES).map_err(Failed::boxed);
    let pieces = stream::unfold(
        (body.into_data_stream(), Pace::default()),
        async |(mut pieces, mut pace)| {
            let piece = pieces.next().await?;
            if let Some(until) = piece.as_ref().ok().and_then(|piece| pace.count(piece)) {
                sleep_until(until).await;
            }
            Some((piece, (pieces, pace)))
        },
    );
    SseStream::from_bytes_stream(pieces.boxed()).map(|event| checked(event?)).boxed()
}

/// An event without what would decide how this client continues: a pause before it connects again, and an id of any
/// length, which it would repeat.
fn checked(event: Sse) -> Result<Sse, SseError> {
    if let Err(problem) = Shape::check(event.data.as_deref().unwrap_or_default().as_bytes()) {
        return Err(SseError::Body(Box::new(Failed(problem.into()))));
    }
    let id = event.id.filter(|id| id.len() <= ID_BYTES);
    Ok(Sse { id, retry: None, ..event })
}

fn unexpected(status: StatusCode, body: &str) -> Error {
    let quoted: String = body.chars().filter(|c| !c.is_control()).take(QUOTED).collect();
    let colon = if quoted.is_empty() { "" } else { ": " };
    StreamableHttpError::UnexpectedServerResponse(Cow::Owned(format!(
        "HTTP {status}{colon}{quoted}"
    )))
}

fn name_of(name: &'static str) -> HeaderName {
    name.parse().expect("the protocol's headers have valid names")
}
