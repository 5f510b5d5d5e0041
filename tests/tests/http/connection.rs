//! Connections: clients that disconnect, servers that stop, request ids and the log.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use steersman::config::ServerConfig;
use steersman_engine::policy::{Cause, Failure};
use steersman_engine::request::Event;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tracing_subscriber::util::SubscriberInitExt;

use crate::*;

/// A server on a socket.
pub struct Served {
    pub address: SocketAddr,
    pub seen: Arc<Seen>,
    stop: Option<oneshot::Sender<()>>,
    serving: JoinHandle<()>,
}

impl Served {
    pub async fn start(config: ServerConfig, script: fn() -> Vec<Act>) -> Self {
        let config = ServerConfig { port: 0, ..config };
        let listener = steersman::serve::listen(&config).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (app, seen) = app_with(&config, script);
        let (stop, stopped) = oneshot::channel();
        let serving = tokio::spawn(async move {
            // A test that does not stop the server drops the sender.
            let stopped = async { drop(stopped.await) };
            let never = std::future::pending();
            steersman::serve::run(listener, app, &config, stopped, never).await;
        });
        Self { address, seen, stop: Some(stop), serving }
    }

    /// Sends raw bytes over a new connection.
    pub async fn send(&self, bytes: impl AsRef<[u8]>) -> TcpStream {
        let mut socket = TcpStream::connect(self.address).await.unwrap();
        // Fails if the server answers before it has read everything.
        drop(socket.write_all(bytes.as_ref()).await);
        socket
    }

    /// Sends a chat request over a new connection.
    pub async fn ask(&self, body: Value) -> TcpStream {
        self.send(request(body, "")).await
    }

    /// Sends a chat request; returns the status and the JSON of the reply.
    pub async fn chat(&self, body: Value, headers: &str) -> (u16, Value) {
        parsed(
            read(self.send(request(body, &format!("Connection: close\r\n{headers}"))).await).await,
        )
    }

    /// Stops the server; the returned task ends with it.
    pub fn stop(mut self) -> JoinHandle<()> {
        self.stop.take().unwrap().send(()).unwrap();
        self.serving
    }

    /// Waits until the engine has seen `count` requests.
    pub async fn wait_for_requests(&self, count: usize) {
        until(|| self.seen.requests.lock().unwrap().len() >= count).await;
    }
}

/// The bytes of a chat request.
pub fn request(body: Value, headers: &str) -> String {
    let body = body.to_string();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n{headers}\r\n{body}",
        body.len()
    )
}

/// Everything that arrives until the server closes the connection; empty if it resets it.
pub async fn read(mut socket: TcpStream) -> String {
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(PATIENCE, socket.read_to_end(&mut bytes)).await;
    drop(read.expect("the server closes the connection"));
    String::from_utf8(bytes).unwrap()
}

/// Status and JSON of a response.
pub fn parsed(response: String) -> (u16, Value) {
    let status = response.split(' ').nth(1).expect("a response").parse().unwrap();
    let (_, body) = response.split_once("\r\n\r\n").unwrap();
    (status, serde_json::from_str(body).unwrap_or_else(|_| panic!("no JSON: {response}")))
}

/// Longest wait for something that has to happen.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `happened`.
pub async fn until(happened: impl Fn() -> bool) {
    let waits = async {
        while !happened() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waits).await.expect("it happens");
}

/// A client keeps its connection after a refusal that is sent before the body has arrived, here that of an unknown route.
#[tokio::test]
async fn a_connection_takes_requests_after_a_refusal_that_reads_no_body() {
    let server = Served::start(ServerConfig::default(), answer).await;
    let body = "x".repeat(60_000);
    let head = |length: usize| {
        format!("POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n")
    };
    let mut socket = server.send(head(body.len())).await;
    for part in [&body[..100], &body[100..]] {
        tokio::time::sleep(Duration::from_millis(20)).await;
        socket.write_all(part.as_bytes()).await.unwrap();
    }
    let next = "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    socket.write_all(next.as_bytes()).await.unwrap();
    let replies = read(socket).await;
    assert!(replies.starts_with("HTTP/1.1 404") && replies.contains("HTTP/1.1 200"), "{replies}");

    // A long body, one that does not arrive, and one that waits to be asked for are not waited for.
    for (length, header) in [(10 << 20, ""), (100, ""), (100, "Expect: 100-continue\r\n")] {
        let head = head(length).replace("Content-Length", &format!("{header}Content-Length"));
        let reply = read(server.send(head).await).await;
        assert!(reply.starts_with("HTTP/1.1 404"), "{reply}");
        assert!(reply.to_lowercase().contains("\r\nconnection: close\r\n"), "{reply}");
    }
}

/// A client that sends a long body to its end, as most do, reads why it was refused: the connection was reset before.
#[tokio::test]
async fn a_refusal_reaches_a_client_that_still_sends_its_body() {
    let server = Served::start(ServerConfig::default(), answer).await;
    let length = 24 << 20;
    let head =
        format!("POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n");
    let mut socket = server.send(head).await;
    let part = vec![b'x'; 1 << 20];
    for sent in 0..24 {
        // The reply has been sent long ago.
        tokio::time::sleep(Duration::from_millis(5)).await;
        socket.write_all(&part).await.unwrap_or_else(|error| panic!("after {sent} MiB: {error}"));
    }
    let reply = read(socket).await;
    assert!(reply.starts_with("HTTP/1.1 404"), "{reply}");
    assert!(reply.to_lowercase().contains("\r\nconnection: close\r\n"), "{reply}");
}

/// A disconnected client must not make others wait for its reply. Both kinds of reply own the
/// engine's receiver, which hyper drops when the connection closes.
#[tokio::test]
async fn disconnecting_cancels_the_request() {
    fn endless() -> Vec<Act> {
        vec![Say(Event::Answer("Once".into())), UntilCancelled]
    }
    let server = Served::start(ServerConfig::default(), endless).await;
    let mut socket = server.ask(body(json!({"stream": true}))).await;
    let mut head = vec![0; 4096];
    let read = socket.read(&mut head).await.unwrap();
    assert!(head[..read].starts_with(b"HTTP/1.1 200"));
    assert!(server.seen.cancelled.lock().unwrap().is_empty());
    drop(socket);
    server.seen.wait_for_cancellation().await;

    let server = Served::start(ServerConfig::default(), endless).await;
    let socket = server.ask(body(json!({}))).await;
    server.wait_for_requests(1).await;
    assert!(server.seen.cancelled.lock().unwrap().is_empty());
    drop(socket);
    server.seen.wait_for_cancellation().await;
}

#[tokio::test]
async fn disconnecting_before_the_first_event_cancels_the_request() {
    fn silent() -> Vec<Act> {
        vec![UntilCancelled]
    }
    let server = Served::start(ServerConfig::default(), silent).await;
    let socket = server.ask(body(json!({"stream": true}))).await;
    server.wait_for_requests(1).await;
    drop(socket);
    server.seen.wait_for_cancellation().await;
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
    for id in [None, Some(" "), Some("a b"), Some("x".repeat(129).as_str())] {
        let response = send(&app, named(id)).await;
        let id = response.headers()["x-request-id"].to_str().unwrap().to_string();
        assert_eq!(id.len(), 24);
        assert!(!generated.contains(&id));
        generated.push(id);
    }
}

#[tokio::test]
async fn errors_have_the_id_of_their_request() {
    fn fails() -> Vec<Act> {
        vec![
            Say(Event::Answer("Once".into())),
            Say(Event::Failed(steersman_engine::Error::Stopped)),
        ]
    }
    let (app, _) = app(fails);
    for (path, status, body) in [
        ("/v1/chat/completions", 400, json!({})),
        ("/v1/messages", 400, json!({})),
        ("/api/chat", 400, json!({"messages": [{"role": "x"}]})),
        ("/v1/none", 404, json!({})),
        // In the middle of a stream.
        ("/v1/chat/completions", 200, crate::body(json!({"stream": true}))),
        ("/api/generate", 200, json!({"prompt": "Hi"})),
    ] {
        let request = axum::http::Request::post(path)
            .header("content-type", "application/json")
            .header("x-request-id", "trace-7")
            .body(Body::from(body.to_string()));
        let response = send(&app, request.unwrap()).await;
        assert_eq!(response.status(), status, "{path}");
        let text = String::from_utf8(bytes(response).await.to_vec()).unwrap();
        let error = text.lines().rfind(|line| line.contains("error")).unwrap();
        let error: Value = serde_json::from_str(error.trim_start_matches("data: ")).unwrap();
        assert_eq!(error["request_id"], "trace-7", "{path}: {text}");
    }
}

/// A log in memory.
#[derive(Clone, Default)]
pub struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    /// Captures what this thread logs, until the guard is dropped.
    pub fn capture(&self) -> impl Sized + use<> {
        enable_log();
        let writer = self.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone());
        subscriber.with_ansi(false).finish().set_default()
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

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
    // Before capturing the log, since loading policies also logs a line.
    let (app, _) = app(answer);
    let _guard = lines.capture();
    let secret = json!([{"role": "user", "content": "my secret"}]);
    for stream in [false, true] {
        let body = body(json!({"messages": secret, "stream": stream}));
        let mut request = post(body.to_string());
        request.headers_mut().insert("x-request-id", "trace-7".parse().unwrap());
        bytes(send(&app, request).await).await;
    }
    chat(&app, body(json!({"messages": secret, "n": 0}))).await;
    let log = lines.text();
    assert_eq!(log.lines().count(), 3, "{log}");
    for words in
        ["request_id=\"trace-7\"", "profile=\"default\"", "cached_tokens=16", "param=\"n\""]
    {
        assert!(log.contains(words), "`{words}` is not in {log}");
    }
    assert!(!log.contains("secret") && !log.contains("Rome"), "{log}");
}

/// The line of a failed policy named neither the request nor its profile.
#[tokio::test]
async fn log_of_a_failed_policy_names_its_request() {
    fn fails() -> Vec<Act> {
        let cause = Cause::Trap("unreachable".into());
        let failure = Failure { policy: "brk".into(), hook: "on-step", cause };
        vec![Say(Event::Failed(failure.into()))]
    }
    let lines = Lines::default();
    let (app, _) = app(fails);
    let _guard = lines.capture();
    for stream in [false, true] {
        let mut request = post(body(json!({"stream": stream})).to_string());
        request.headers_mut().insert("x-request-id", "trace-7".parse().unwrap());
        bytes(send(&app, request).await).await;
    }
    let log = lines.text();
    let failed: Vec<_> = log.lines().filter(|line| line.contains("policy failed")).collect();
    assert_eq!(failed.len(), 2, "{log}");
    for line in failed {
        let has = |words: &str| assert!(line.contains(words), "`{words}` is not in {line}");
        has("details=policy `brk`: on-step: trapped: unreachable");
        has("request_id=\"trace-7\"");
        has("profile=\"default\"");
    }
}

/// A wrong key had a line without anything by which its client can be found, and a missing one had none.
#[tokio::test]
async fn log_of_a_refused_request_has_its_id_route_and_address() {
    let config = ServerConfig { api_keys: vec!["sk-one".into()], ..ServerConfig::default() };
    let server = Served::start(config, answer).await;
    let lines = Lines::default();
    let _guard = lines.capture();
    let wrong = "Authorization: Bearer sk-two\r\n";
    for (id, host, key) in [
        ("trace-8", "elsewhere", wrong),
        ("trace-9", "localhost", wrong),
        ("trace-10", "localhost", ""),
    ] {
        let head = format!(
            "GET /v1/models HTTP/1.1\r\nHost: {host}\r\n{key}X-Request-Id: {id}\r\nConnection: close\r\n\r\n"
        );
        read(server.send(head).await).await;
        let log = lines.text();
        let line =
            log.lines().find(|line| line.contains(&format!("request_id=\"{id}\""))).expect(&log);
        assert!(line.contains("refused") && line.contains("address=\"127.0.0.1\""), "{line}");
        assert_eq!(line.contains("route=\"/v1/models\""), host == "localhost", "{line}");
        if host == "localhost" {
            assert!(line.contains("code=\"invalid_api_key\""), "{line}");
        }
    }
}

/// A request that ran out of time after many tokens looked like one that never began, and a cancelled one had no status.
#[tokio::test]
async fn log_of_a_request_that_did_not_succeed_says_how_far_it_was() {
    fn late() -> Vec<Act> {
        let deadline = steersman_engine::RequestError::Deadline { stage: "being decoded" };
        vec![Say(Event::Answer("Once".into())), Say(Event::Failed(deadline.into()))]
    }
    fn endless() -> Vec<Act> {
        vec![Say(Event::Answer("Once".into())), UntilCancelled]
    }
    for (script, status) in [(late as fn() -> Vec<Act>, 504), (endless, 499)] {
        let (app, seen) = app(script);
        let lines = Lines::default();
        let _guard = lines.capture();
        let request = send(&app, post(body(json!({})).to_string()));
        if tokio::time::timeout(Duration::from_millis(200), request).await.is_err() {
            seen.wait_for_cancellation().await;
        }
        let log = lines.text();
        let line = log.lines().find(|line| line.contains(&format!("status={status}"))).expect(&log);
        for field in ["prompt_tokens=", "completion_tokens=", "queue_ms=", "first_token_ms="] {
            assert!(line.contains(field), "`{field}` is not in {line}");
        }
        // Operators look for warnings; a client that leaves is none.
        assert_eq!(line.contains(" WARN "), status == 504, "{line}");
    }
}

#[tokio::test]
async fn stopping_server_finishes_running_requests() {
    fn slow() -> Vec<Act> {
        let mut acts = answer();
        acts.insert(0, Wait(Duration::from_millis(200)));
        acts
    }
    let config = ServerConfig { shutdown_s: 60, ..ServerConfig::default() };
    let server = Served::start(config, slow).await;
    let socket = server.ask(body(json!({}))).await;
    server.wait_for_requests(1).await;
    let stopped = server.stop();
    let reply = read(socket).await;
    assert!(reply.starts_with("HTTP/1.1 200") && reply.contains("Rome"), "{reply}");
    stopped.await.unwrap();
}

#[tokio::test]
async fn stopping_server_tells_new_clients_that_it_drains() {
    fn endless() -> Vec<Act> {
        vec![Say(Event::Answer("Once".into())), UntilCancelled]
    }
    let config = ServerConfig { shutdown_s: 3600, ..ServerConfig::default() };
    let server = Served::start(config, endless).await;
    let socket = server.ask(body(json!({"stream": true}))).await;
    server.wait_for_requests(1).await;
    let address = server.address;
    let stopped = server.stop();
    let get = async |path: &str| {
        let mut socket = TcpStream::connect(address).await.unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
        socket.write_all(head.as_bytes()).await.unwrap();
        read(socket).await
    };
    // Until it has noticed the signal, it is healthy.
    let mut health = get("/health").await;
    while health.starts_with("HTTP/1.1 200") {
        tokio::time::sleep(Duration::from_millis(5)).await;
        health = get("/health").await;
    }
    assert!(health.starts_with("HTTP/1.1 503") && health.contains("\"draining\""), "{health}");
    let lines = Lines::default();
    let capture = lines.capture();
    let refused = get("/v1/models").await;
    drop(capture);
    let log = lines.text();
    let is_refusal = |line: &str| line.contains("request refused") && line.contains("draining");
    assert!(log.lines().any(|line| is_refusal(line) && line.contains("request_id=")), "{log}");
    assert!(
        refused.starts_with("HTTP/1.1 503") && refused.contains("server_stopping"),
        "{refused}"
    );
    // They had neither, though every response has an id.
    for header in ["x-request-id: ", "retry-after: 2", "\"request_id\":\""] {
        assert!(refused.contains(header), "`{header}` is not in {refused}");
    }
    assert!(health.contains("x-request-id: "), "{health}");
    assert!(!stopped.is_finished(), "the running request has not ended");
    drop(socket);
    tokio::time::timeout(PATIENCE, stopped).await.expect("it stops").unwrap();
}

/// Before, the connections were closed without any reply, and streams broke off.
#[tokio::test]
async fn requests_cut_off_at_shutdown_end_with_an_error() {
    fn endless() -> Vec<Act> {
        vec![Say(Event::Answer("Once".into())), UntilCancelled]
    }
    let config = ServerConfig { shutdown_s: 0, ..ServerConfig::default() };
    let whole = Served::start(config.clone(), endless).await;
    let socket = whole.ask(body(json!({}))).await;
    whole.wait_for_requests(1).await;
    let stopped = whole.stop();
    let (status, reply) = parsed(read(socket).await);
    assert_eq!((status, &reply["error"]["code"]), (503, &json!("server_stopping")));
    stopped.await.unwrap();

    let stream = Served::start(config, endless).await;
    let mut socket = stream.ask(body(json!({"stream": true}))).await;
    let mut text = String::new();
    while !text.contains("Once") {
        let mut bytes = [0; 4096];
        let read = socket.read(&mut bytes).await.unwrap();
        text += std::str::from_utf8(&bytes[..read]).unwrap();
    }
    let stopped = stream.stop();
    text += &read(socket).await;
    let last = text.lines().rfind(|line| line.starts_with("data: ")).unwrap();
    assert!(last.contains("server_stopping"), "{text}");
    stopped.await.unwrap();
}

/// Before, a half head held the shutdown for the whole grace period.
#[tokio::test]
async fn connections_without_a_request_do_not_hold_the_shutdown() {
    let config = ServerConfig { shutdown_s: 3600, ..ServerConfig::default() };
    let server = Served::start(config, answer).await;
    let silent = server.send("").await;
    let half = server.send("GET /health HTTP/1.1\r\nHost: loc").await;
    let mut kept = server.send("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    let mut reply = [0; 4096];
    assert!(kept.read(&mut reply).await.unwrap() > 0);
    kept.write_all(b"GET /health HTTP/1.1\r\nHost: loc").await.unwrap();
    // The server has read all of them once it answers one more.
    assert_eq!(server.chat(body(json!({})), "").await.0, 200);
    tokio::time::timeout(PATIENCE, server.stop()).await.expect("it stops").unwrap();
    drop((silent, half, kept));
}

#[tokio::test]
async fn port_in_use_is_a_clear_error() {
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = taken.local_addr().unwrap().port();
    let config = ServerConfig { port, ..ServerConfig::default() };
    let error = steersman::serve::listen(&config).await.unwrap_err().to_string();
    assert!(error.contains("in use") && error.contains("--port"), "{error}");
}
