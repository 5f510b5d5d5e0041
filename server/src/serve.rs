//! Listening, connections, and graceful shutdown.
//!
//! HTTP/1.1 only. Each connection has a deadline for the head of its next request, and counts against
//! the limits of [`Connections`].

use std::convert::Infallible;
use std::future::Future;
use std::io::ErrorKind;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context as TaskContext, Poll, ready};
use std::time::Duration;

use anyhow::{Result, anyhow};
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::from_fn;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Value, json};
use steersman_engine::loading::{self, Loading};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tower::ServiceExt;

use crate::api::error::{ApiError, Dialect};
use crate::api::request_id::{self, REQUEST_ID};
use crate::api::unread;
use crate::config::ServerConfig;
use crate::connections::{Connection, Connections};
use crate::console;
use crate::heap;
use crate::shutdown::{Shutdown, Stage};
use crate::throttle::Throttle;

/// Bytes of a request's head, and of the buffers of a connection.
const HEAD_BYTES: usize = 64 << 10;

/// Pause after a failure to accept, which without one would repeat at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Time in which a client must read the rest of its reply once `server.request_timeout_s` is over.
const REST: Duration = Duration::from_secs(30);

/// Time in which requests that are cut off at the end may still send an error.
const LAST_REPLIES: Duration = Duration::from_secs(1);

/// Begins a connection in HTTP/2.
const HTTP_2: &[u8] = b"PRI * HTTP/2.0";

/// Listens on the configured address.
///
/// # Errors
/// If the address is in use or not available; the message says what to do.
pub async fn listen(config: &ServerConfig) -> Result<TcpListener> {
    let (host, port) = (config.host.as_str(), config.port);
    TcpListener::bind((host, port)).await.map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => anyhow!(
            "port {port} on {host} is in use: is Steersman already running? Stop it, or choose \
             another port with --port"
        ),
        ErrorKind::PermissionDenied => {
            anyhow!("this user may not listen on port {port}; choose one from 1024 up with --port")
        }
        _ => anyhow!(error).context(format!("listening on {host}, port {port}")),
    })
}

/// The app that `app` holds as soon as the models are loaded; until then every answer is a 503.
pub fn once_loaded(app: Arc<OnceLock<Router>>) -> Router {
    Router::new().fallback(async move |request: Request| match app.get() {
        Some(app) => app.clone().oneshot(request).await.into_response(),
        None => match console_file(&request) {
            Some(file) => with_id(file, request_id::of(request.headers())),
            None => {
                let now = loading::now();
                let error = ApiError::loading(now.as_ref().map(|now| now.stage));
                answer_without_app(&request, loading(now), error)
            }
        },
    })
}

/// The app while no ranks serve, as `why` says: every answer is a 503.
pub fn without_ranks(why: watch::Receiver<Option<String>>) -> Router {
    Router::new().fallback(async move |request: Request| match console_file(&request) {
        Some(file) => with_id(file, request_id::of(request.headers())),
        None => {
            let health = json!({"status": "rank_lost", "reason": *why.borrow()});
            answer_without_app(&request, health, ApiError::rank_lost())
        }
    })
}

/// The answer while no app does: 503, with `health` for `/health` and `error` for all else.
fn answer_without_app<B>(request: &Request<B>, health: Value, error: ApiError) -> Response {
    let (path, headers) = (request.uri().path(), request.headers());
    let id = request_id::of(headers);
    let response = if path == "/health" {
        (StatusCode::SERVICE_UNAVAILABLE, Json(health)).into_response()
    } else {
        let request_id = id.to_str().unwrap_or_default().to_string();
        ApiError { request_id, ..error }.respond(Dialect::of(path, headers))
    };
    with_id(response, id)
}

/// `response` with the id of its request.
fn with_id(mut response: Response, id: HeaderValue) -> Response {
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// The console shows how far loading is.
fn console_file(request: &Request) -> Option<Response> {
    match request.uri().path() {
        "/" => console::page(request.headers()),
        path => console::file(path.strip_prefix("/console/")?),
    }
}

/// What is being loaded `now`, and how far that is.
fn loading(now: Option<Loading>) -> Value {
    let mut body = json!({"status": "loading"});
    if let Some(Loading { model, stage, fraction }) = now {
        body["model"] = model.into();
        body["stage"] = stage.into();
        // Two decimals.
        body["fraction"] = json!(fraction.map(|fraction| (fraction * 100.0).round() / 100.0));
    }
    body
}

/// Serves until `stop` is ready, then waits for running requests until `server.shutdown_s` is over.
/// Requests that still run then, or when `cut_off` is ready, end with the error of its stage.
pub async fn run(
    listener: TcpListener,
    app: Router,
    config: &ServerConfig,
    stop: impl Future<Output = ()>,
    cut_off: impl Future<Output = Stage>,
) {
    // Around all answers of a connection, also those before the models are loaded.
    let app = app.layer(from_fn(unread::drain));
    let connections = Arc::new(Connections::new(config));
    tracing::debug!(limit = connections.limit(), "accepting connections");
    let (stage, serving) = watch::channel(Stage::Serving);
    let idle_timeout = Duration::from_secs(config.idle_timeout_s);
    let longest_request = Duration::from_secs(config.request_timeout_s) + REST;
    let accepting = accept(&listener, &connections, |stream, connection| {
        let client = Client {
            app: app.clone(),
            connection: Arc::new(connection),
            shutdown: Shutdown(serving.clone()),
            idle_timeout,
            longest_request,
        };
        tokio::spawn(client.serve(stream));
    });
    let mut cut_off = pin!(cut_off);
    let end = tokio::select! {
        () = stop => None,
        () = accepting => None,
        () = heap::return_while_idle() => None,
        end = cut_off.as_mut() => Some(end),
    };
    drop(serving);
    let end = match end {
        Some(end) => end,
        None => {
            stage.send_replace(Stage::Finishing);
            let count = connections.count();
            tracing::info!(connections = count, "draining: running requests may finish");
            // Load balancers and clients learn why they are not served.
            let refused = Arc::new(Throttle::default());
            let refuse_new = accept(&listener, &connections, |stream, connection| {
                let refused = refused.clone();
                tokio::spawn(refuse_while_draining(stream, connection, idle_timeout, refused));
            });
            tokio::select! {
                () = stage.closed() => return,
                () = refuse_new => Stage::CuttingOff,
                () = sleep(Duration::from_secs(config.shutdown_s)) => Stage::CuttingOff,
                end = cut_off => end,
            }
        }
    };
    let connections = connections.count();
    let reason = if end == Stage::RankLost { "rank lost" } else { "shutdown" };
    tracing::warn!(connections, reason, "ending running requests");
    stage.send_replace(end);
    // A client that does not read its reply is not waited for.
    let _ = timeout(LAST_REPLIES, stage.closed()).await;
}

/// Answers one request of a connection that was opened while the server drains: 503, and `draining` for
/// `/health`.
async fn refuse_while_draining(
    stream: TcpStream,
    connection: Connection,
    idle_timeout: Duration,
    refused: Arc<Throttle>,
) {
    let address = connection.address;
    let service = service_fn(async |request: hyper::Request<Incoming>| {
        let health = json!({"status": "draining"});
        let response = answer_without_app(&request, health, ApiError::stopping());
        if request.uri().path() != "/health"
            && let Some(suppressed) = refused.pass()
        {
            let request_id = request_id::text(response.headers());
            let (route, code) = (request.uri().path(), ApiError::stopping().code);
            tracing::info!(
                request_id,
                route,
                %address,
                code,
                reason = "draining",
                suppressed,
                "request refused"
            );
        }
        Ok::<_, Infallible>(response)
    });
    let http = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(idle_timeout)
        .max_buf_size(HEAD_BYTES)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        // A client that sends no HTTP gets no answer.
        _ = http => {}
        () = connection.displaced() => {}
    }
}

/// Accepts connections, within their limits, for ever.
async fn accept(
    listener: &TcpListener,
    connections: &Arc<Connections>,
    serve: impl Fn(TcpStream, Connection),
) {
    let failed = Throttle::default();
    loop {
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                if [ErrorKind::ConnectionAborted, ErrorKind::ConnectionReset]
                    .contains(&error.kind())
                {
                    continue;
                }
                if let Some(suppressed) = failed.pass() {
                    let open = connections.count();
                    tracing::error!(%error, open, suppressed, "accepting a connection failed");
                }
                // Most likely the process has too many open files.
                connections.displace();
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        match connections.add(address.ip()) {
            Some(connection) => serve(stream, connection),
            None => refuse(&stream),
        }
        connections.close_displaced().await;
    }
}

/// Sends a 503 if that is possible at once.
fn refuse(stream: &TcpStream) {
    let _ = stream.try_write(&plain_response(ApiError::too_many_connections()));
}

/// A response for a connection that hyper does not serve.
fn plain_response(error: ApiError) -> Vec<u8> {
    let id = request_id::random_hex();
    let error = ApiError { request_id: id.clone(), ..error };
    let json = serde_json::to_string(&error.openai()).expect("an error has string keys only");
    let (status, length) = (error.status, json.len());
    let mut response = format!(
        "HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n{REQUEST_ID}: {id}\r\n"
    )
    .into_bytes();
    for (name, value) in error.respond(Dialect::OpenAi).headers() {
        if name != header::CONTENT_LENGTH {
            for part in [name.as_str().as_bytes(), &b": "[..], value.as_bytes(), &b"\r\n"[..]] {
                response.extend_from_slice(part);
            }
        }
    }
    response.extend_from_slice(b"\r\n");
    response.extend_from_slice(json.as_bytes());
    response
}

/// What a connection needs to be served.
struct Client {
    app: Router,
    connection: Arc<Connection>,
    shutdown: Shutdown,
    idle_timeout: Duration,
    longest_request: Duration,
}

impl Client {
    async fn serve(self, mut stream: TcpStream) {
        // Nagle's algorithm would delay each small chunk until the previous one is acknowledged.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "setting TCP_NODELAY failed");
        }
        let mut stopping = self.shutdown.clone();
        let mut first = [0; HTTP_2.len()];
        let first = tokio::select! {
            arrived = timeout(self.idle_timeout, stream.peek(&mut first)) => match arrived {
                Ok(Ok(length)) if length > 0 => &first[..length],
                // The client has closed the connection.
                Ok(_) => return,
                Err(_elapsed) => return self.count_timeout(),
            },
            () = self.connection.displaced() => return,
            () = stopping.reaches(Stage::Finishing) => return,
        };
        if first == HTTP_2 {
            let response = plain_response(ApiError::not_http_1());
            // The client may have closed the connection.
            let _ = stream.write_all(&response).await;
            let _ = stream.shutdown().await;
            return;
        }
        self.serve_http(stream).await;
    }

    async fn serve_http(self, stream: TcpStream) {
        let mut stopping = self.shutdown.clone();
        let has_request = AtomicBool::new(false);
        let service = service_fn(|request: hyper::Request<Incoming>| {
            has_request.store(true, Ordering::Relaxed);
            self.answer(request)
        });
        let http = http1::Builder::new()
            .timer(TokioTimer::new())
            // From the opening of the connection or the end of the last reply.
            .header_read_timeout(self.idle_timeout)
            .max_buf_size(HEAD_BYTES)
            .serve_connection(TokioIo::new(stream), service);
        let mut http = pin!(http);
        let served = tokio::select! {
            served = http.as_mut() => served,
            () = self.connection.displaced() => return,
            () = self.connection.works_longer_than(self.longest_request) => {
                return tracing::debug!("connection closed: its client does not read the reply");
            }
            () = stopping.reaches(Stage::Finishing) => {
                if !has_request.load(Ordering::Relaxed) {
                    return;
                }
                http.as_mut().graceful_shutdown();
                http.await
            }
        };
        match served {
            Err(error) if error.is_timeout() => self.count_timeout(),
            Err(error) => tracing::debug!(%error, "connection ended"),
            Ok(()) => {}
        }
    }

    fn answer(
        &self,
        request: hyper::Request<Incoming>,
    ) -> impl Future<Output = Result<Response, Infallible>> + use<> {
        let (app, connection) = (self.app.clone(), self.connection.clone());
        let working = connection.clone();
        let mut request: Request =
            request.map(|body| Body::new(UntilEnd::new(Body::new(body), move || working.works())));
        request.extensions_mut().insert(connection.clone());
        request.extensions_mut().insert(self.shutdown.clone());
        async move {
            let response = app.oneshot(request).await?;
            let end = move || connection.waits();
            Ok(response.map(|body| Body::new(UntilEnd::new(body, end))))
        }
    }

    fn count_timeout(&self) {
        self.connection.all().counts.timed_out.inc();
    }
}

/// A body that calls `end` once, when it has been read to its end or is dropped.
struct UntilEnd<F: FnOnce() + Unpin> {
    body: Body,
    end: Option<F>,
}

impl<F: FnOnce() + Unpin> UntilEnd<F> {
    fn new(body: Body, end: F) -> Self {
        let mut body = Self { body, end: Some(end) };
        if body.body.is_end_stream() {
            body.end();
        }
        body
    }

    fn end(&mut self) {
        if let Some(end) = self.end.take() {
            end();
        }
    }
}

impl<F: FnOnce() + Unpin> Drop for UntilEnd<F> {
    fn drop(&mut self) {
        self.end();
    }
}

impl<F: FnOnce() + Unpin> HttpBody for UntilEnd<F> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut TaskContext<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_none() || self.body.is_end_stream() {
            self.end();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
