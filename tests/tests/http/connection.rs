//! Connections: clients that disconnect, servers that stop, request ids and the log.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use serde_json::{Value, json};
use steersman::config::ServerConfig;
use steersman_engine::request::Event;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tracing_subscriber::util::SubscriberInitExt;

use crate::*;

/// Serves on a socket.
async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

/// Sends a chat request over a socket.
async fn ask(address: SocketAddr, body: Value) -> TcpStream {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let body = body.to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    socket.write_all(body.as_bytes()).await.unwrap();
    socket
}

/// A disconnected client must not make others wait for its reply. Both kinds of reply own the
/// engine's receiver, which hyper drops when the connection closes.
#[tokio::test]
async fn disconnecting_cancels_the_request() {
    fn endless() -> Vec<Act> {
        vec![Say(Event::Answer("Once".into())), UntilCancelled]
    }
    let (streaming, seen) = app(endless);
    let mut socket = ask(serve(streaming).await, body(json!({"stream": true}))).await;
    let mut head = vec![0; 4096];
    let read = socket.read(&mut head).await.unwrap();
    assert!(head[..read].starts_with(b"HTTP/1.1 200"));
    assert!(seen.cancelled.lock().unwrap().is_empty());
    drop(socket);
    seen.wait_for_cancellation().await;

    let (whole, seen) = app(endless);
    let socket = ask(serve(whole).await, body(json!({}))).await;
    while seen.requests.lock().unwrap().is_empty() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(seen.cancelled.lock().unwrap().is_empty());
    drop(socket);
    seen.wait_for_cancellation().await;
}

#[tokio::test]
async fn disconnecting_before_the_first_event_cancels_the_request() {
    fn silent() -> Vec<Act> {
        vec![UntilCancelled]
    }
    let (app, seen) = app(silent);
    let socket = ask(serve(app).await, body(json!({"stream": true}))).await;
    while seen.requests.lock().unwrap().is_empty() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    drop(socket);
    seen.wait_for_cancellation().await;
}

#[tokio::test]
async fn slow_body_times_out() {
    let config = ServerConfig { body_timeout_s: 1, ..ServerConfig::default() };
    let (app, _) = app_with(&config, answer);
    let address = serve(app).await;
    let mut socket = TcpStream::connect(address).await.unwrap();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\
                Content-Type: application/json\r\n\r\n{\"model\":";
    socket.write_all(head.as_bytes()).await.unwrap();
    let mut reply = String::new();
    socket.read_to_string(&mut reply).await.unwrap();
    assert!(reply.starts_with("HTTP/1.1 408") && reply.contains("request_timeout"), "{reply}");
}

#[tokio::test]
async fn request_id_is_echoed_or_generated() {
    let (app, _) = app(answer);
    let named = |id: Option<&str>| {
        let mut request = post(body(json!({})).to_string());
        if let Some(id) = id {
            request.headers_mut().insert("x-request-id", id.parse().unwrap());
        }
        request
    };
    let response = send(&app, named(Some("my-trace-1"))).await;
    assert_eq!(response.headers()["x-request-id"], "my-trace-1");
    let mut generated = Vec::new();
    for id in [None, Some(" "), Some("x".repeat(129).as_str())] {
        let response = send(&app, named(id)).await;
        let id = response.headers()["x-request-id"].to_str().unwrap().to_string();
        assert_eq!(id.len(), 24);
        assert!(!generated.contains(&id));
        generated.push(id);
    }
}

/// A log in memory.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn log_has_one_line_for_each_request_without_its_text() {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone());
    // Before capturing the log, since loading policies also logs a line.
    let (app, _) = app(answer);
    let _guard = subscriber.with_ansi(false).finish().set_default();
    let secret = json!([{"role": "user", "content": "my secret"}]);
    for stream in [false, true] {
        let body = body(json!({"messages": secret, "stream": stream}));
        let mut request = post(body.to_string());
        request.headers_mut().insert("x-request-id", "trace-7".parse().unwrap());
        bytes(send(&app, request).await).await;
    }
    chat(&app, body(json!({"messages": secret, "n": 3}))).await;
    let log = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    assert_eq!(log.lines().count(), 3, "{log}");
    for words in
        ["request_id=\"trace-7\"", "profile=\"default\"", "cached_tokens=16", "param=\"n\""]
    {
        assert!(log.contains(words), "`{words}` is not in {log}");
    }
    assert!(!log.contains("secret") && !log.contains("Rome"), "{log}");
}

/// Serves on a socket with one running request; sending to the returned channel stops the server.
async fn stoppable(
    script: fn() -> Vec<Act>,
    grace: Duration,
) -> (TcpStream, oneshot::Sender<()>, tokio::task::JoinHandle<()>) {
    let config = ServerConfig { port: 0, ..ServerConfig::default() };
    let listener = steersman::serve::listen(&config).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (app, seen) = app(script);
    let (stop, stopped) = oneshot::channel();
    let stopped = async { stopped.await.unwrap() };
    let serving = tokio::spawn(async move {
        steersman::serve::run(listener, app, stopped, grace).await.unwrap();
    });
    let socket = ask(address, body(json!({}))).await;
    while seen.requests.lock().unwrap().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    (socket, stop, serving)
}

#[tokio::test]
async fn stopping_server_finishes_running_requests() {
    fn slow() -> Vec<Act> {
        let mut acts = answer();
        acts.insert(0, Wait(Duration::from_millis(200)));
        acts
    }
    let (mut socket, stop, serving) = stoppable(slow, Duration::from_secs(60)).await;
    stop.send(()).unwrap();
    let mut reply = String::new();
    socket.read_to_string(&mut reply).await.unwrap();
    assert!(reply.starts_with("HTTP/1.1 200") && reply.contains("Rome"), "{reply}");
    serving.await.unwrap();
}

#[tokio::test]
async fn stopping_server_aborts_requests_after_the_grace_period() {
    fn endless() -> Vec<Act> {
        vec![UntilCancelled]
    }
    let (_socket, stop, serving) = stoppable(endless, Duration::from_millis(50)).await;
    stop.send(()).unwrap();
    tokio::time::timeout(Duration::from_secs(10), serving).await.unwrap().unwrap();
}

#[tokio::test]
async fn port_in_use_is_a_clear_error() {
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = taken.local_addr().unwrap().port();
    let config = ServerConfig { port, ..ServerConfig::default() };
    let error = steersman::serve::listen(&config).await.unwrap_err().to_string();
    assert!(error.contains("in use") && error.contains("--port"), "{error}");
}
