//! Clients that hold what others need: connections, bodies, keys, time.

use std::time::Duration;

use axum::http::header;
use serde_json::{Value, json};
use steersman::config::ServerConfig;
use steersman_engine::request::{Event, FinishReason};
use steersman_tests::samples;

use crate::connection::{PATIENCE, Served, parsed, read};
use crate::*;

const UNFINISHED: &str = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\
                          Content-Type: application/json\r\n\r\n{\"model\":";

/// The metrics over a socket.
async fn metrics(server: &Served) -> std::collections::BTreeMap<String, f64> {
    let head = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    let response = read(server.send(head).await).await;
    samples(response.split_once("\r\n\r\n").unwrap().1)
}

async fn closed(server: &Served, reason: &str) -> f64 {
    metrics(server).await[&format!("steersman_closed_connections_total{{reason=\"{reason}\"}}")]
}

/// Before, silent connections and half heads stayed open for ever.
#[tokio::test]
async fn connection_without_the_head_of_a_request_is_closed() {
    let config = ServerConfig { idle_timeout_s: 1, ..ServerConfig::default() };
    let server = Served::start(config, answer).await;
    let silent = server.send("").await;
    let half = server.send("GET /health HTTP/1.1\r\nHost: loc").await;
    let kept = server.send("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    assert_eq!(read(silent).await, "");
    assert_eq!(read(half).await, "");
    assert!(read(kept).await.starts_with("HTTP/1.1 200"), "closed after the reply");
    assert_eq!(closed(&server, "timed_out").await, 3.0);
}

#[tokio::test]
async fn body_that_does_not_arrive_times_out() {
    let config = ServerConfig { body_timeout_s: 1, ..ServerConfig::default() };
    let server = Served::start(config, answer).await;
    let (status, reply) = parsed(read(server.send(UNFINISHED).await).await);
    assert_eq!((status, &reply["error"]["code"]), (408, &json!("request_timeout")));
}

/// Before, 64 of them made everyone wait until they timed out.
#[tokio::test]
async fn unfinished_bodies_delay_no_other_request() {
    let server = Served::start(ServerConfig::default(), answer).await;
    let mut unfinished = Vec::new();
    for _ in 0..100 {
        unfinished.push(server.send(UNFINISHED).await);
    }
    let chat = tokio::time::timeout(PATIENCE / 4, server.chat(body(json!({})), ""));
    assert_eq!(chat.await.expect("a reply before the bodies time out").0, 200);
}

/// Before, connections that send nothing used up the open files of the process.
#[tokio::test]
async fn new_connection_displaces_the_one_that_has_waited_longest() {
    let config = ServerConfig { max_connections: 4, ..ServerConfig::default() };
    let server = Served::start(config, answer).await;
    let mut waiting = Vec::new();
    for bytes in ["", "GET /health HTTP/1.1\r\nHost: loc", UNFINISHED, ""] {
        waiting.push(server.send(bytes).await);
    }
    assert_eq!(server.chat(body(json!({})), "").await.0, 200);
    assert_eq!(read(waiting.remove(0)).await, "", "the first was closed");
    assert!(closed(&server, "displaced").await >= 1.0);
}

#[tokio::test]
async fn connection_is_refused_if_the_server_works_for_all_others() {
    fn endless() -> Vec<Act> {
        vec![Say(Event::Answer("Once".into())), UntilCancelled]
    }
    let config = ServerConfig { max_connections: 1, ..ServerConfig::default() };
    let server = Served::start(config, endless).await;
    let running = server.ask(body(json!({"stream": true}))).await;
    server.wait_for_requests(1).await;
    let refused = read(server.send("").await).await;
    for header in ["retry-after: 2", "content-type: application/json", "x-request-id: "] {
        assert!(refused.contains(header), "`{header}` is not in {refused}");
    }
    let (status, reply) = parsed(refused);
    assert_eq!((status, &reply["error"]["code"]), (503, &json!("server_busy")));
    assert!(reply["request_id"].is_string(), "{reply}");
    drop(running);
    server.seen.wait_for_cancellation().await;
    let health = "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    let mut reply = String::new();
    while !reply.starts_with("HTTP/1.1 200") {
        reply = read(server.send(health).await).await;
    }
    assert!(closed(&server, "refused").await >= 1.0);
}

/// Before, 32 waiting clients that hung up kept others out until the running request ended.
#[tokio::test]
async fn clients_that_hang_up_free_their_places_at_once() {
    let server = Served::start(ServerConfig::default(), || vec![UntilCancelled]).await;
    let health = || async {
        let head = "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
        parsed(read(server.send(head).await).await).1["waiting"].clone()
    };
    let _running = server.ask(body(json!({}))).await;
    server.wait_for_requests(1).await;
    let mut waiting = Vec::new();
    for count in 1..=8 {
        waiting.push(server.ask(body(json!({"stream": count % 2 == 0}))).await);
        while health().await != json!(count) {}
    }
    let (status, reply) = server.chat(body(json!({})), "").await;
    assert_eq!((status, &reply["error"]["code"]), (429, &json!("queue_full")));
    waiting.clear();
    while health().await != json!(0) {}
    let _next = server.ask(body(json!({}))).await;
    while health().await != json!(1) {}
}

#[tokio::test]
async fn large_bodies_share_a_budget_that_small_ones_do_not_need() {
    let config = ServerConfig {
        body_limit_bytes: 1 << 20,
        body_budget_bytes: 1 << 20,
        ..ServerConfig::default()
    };
    let server = Served::start(config, || vec![UntilCancelled]).await;
    let large = |extra: usize| body(json!({"user": "x".repeat((700 << 10) + extra)}));
    let first = server.ask(large(0)).await;
    server.wait_for_requests(1).await;
    let (status, reply) = server.chat(large(1), "").await;
    assert_eq!((status, &reply["error"]["code"]), (503, &json!("server_busy")));
    let small = server.ask(body(json!({"user": "x".repeat(60 << 10)}))).await;
    drop(first);
    server.wait_for_requests(2).await;
    let _third = server.ask(large(2)).await;
    drop(small);
    server.wait_for_requests(3).await;
}

/// Before, 24 bodies of 15 MB with millions of values took 1.7 GB.
#[tokio::test]
async fn body_with_too_many_values_is_rejected() {
    let (app, _) = app(answer);
    let many = |count: usize| format!("{{\"metadata\": [{}0]}}", "0,".repeat(count));
    for text in [many(1 << 18), many(1 << 20), format!("[{}]", "{\"\":0},".repeat(1 << 17))] {
        let response = send(&app, post(text)).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST);
        let reply = json_of(response).await;
        assert!(reply["error"]["message"].as_str().unwrap().contains("262144 JSON values"));
    }
    let text = "[],{},::,\\\"".repeat(1 << 16);
    let (status, reply) = chat(&app, body(json!({"user": text}))).await;
    assert_eq!(status, StatusCode::OK, "text is one value: {reply}");
}

#[tokio::test(start_paused = true)]
async fn request_ends_at_its_deadline() {
    fn slow() -> Vec<Act> {
        vec![
            Wait(Duration::from_secs(100)),
            Say(Event::Answer("at last".into())),
            finished(FinishReason::Stop),
        ]
    }
    let config = ServerConfig { request_timeout_s: 60, ..ServerConfig::default() };
    for (headers, stream, seconds) in [
        (&[][..], false, 60),
        (&[], true, 60),
        (&[("x-request-timeout", "7.5")], false, 7),
        (&[("x-request-timeout", "20")], true, 20),
        (&[("x-request-timeout", "1e9")], false, 60),
        (&[("x-stainless-timeout", "30")], false, 30),
        (&[("x-stainless-read-timeout", "30.0")], false, 30),
        (&[("x-request-timeout", "20"), ("x-stainless-timeout", "30")], false, 20),
        // For a stream, it is the time between two events.
        (&[("x-stainless-read-timeout", "30")], true, 60),
        (&[("x-stainless-read-timeout", "NOT_GIVEN")], false, 60),
    ] {
        let (app, seen) = app_with(&config, slow);
        let mut request = post(body(json!({"stream": stream})).to_string());
        for (name, value) in headers {
            request.headers_mut().insert(*name, value.parse().unwrap());
        }
        let started = tokio::time::Instant::now();
        let response = send(&app, request).await;
        let status = response.status().as_u16();
        let bytes = bytes(response).await;
        assert_eq!(started.elapsed().as_secs(), seconds, "{headers:?} {stream}");
        let error = if stream {
            assert_eq!(status, 200);
            data(&bytes).pop().unwrap()
        } else {
            assert_eq!(status, 504);
            serde_json::from_slice(&bytes).unwrap()
        };
        assert_eq!(error["error"]["code"], "deadline_exceeded", "{headers:?} {stream}");
        assert!(seen.last().deadline.is_some());
    }
}

#[tokio::test]
async fn timeout_of_a_client_is_a_number_of_seconds() {
    let (app, _) = app(answer);
    for value in ["soon", "0", "-1", "nan", "inf", ""] {
        let mut request = post(body(json!({})).to_string());
        request.headers_mut().insert("x-request-timeout", value.parse().unwrap());
        let response = send(&app, request).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{value}");
        assert_eq!(json_of(response).await["error"]["param"], "X-Request-Timeout");
    }
}

/// Before, 7,596 keys a second could be tried.
#[tokio::test(start_paused = true)]
async fn wrong_keys_are_answered_slowly_and_right_ones_at_once() {
    let config = ServerConfig {
        api_keys: vec!["sk-one".into()],
        admin_keys: vec!["sk-admin".into()],
        ..ServerConfig::default()
    };
    let (app, _) = app_with(&config, answer);
    let get = |key: Option<&str>| {
        let mut request = axum::http::Request::get("/v1/models").body(Body::empty()).unwrap();
        if let Some(key) = key {
            let value = format!("Bearer {key}").parse().unwrap();
            request.headers_mut().insert(header::AUTHORIZATION, value);
        }
        request
    };
    let started = tokio::time::Instant::now();
    let guesses: Vec<_> = (0..1000)
        .map(|i| {
            let (app, request) = (app.clone(), get(Some(&format!("sk-{i}"))));
            tokio::spawn(async move { send(&app, request).await.status() })
        })
        .collect();
    tokio::task::yield_now().await;
    for (key, status) in [(Some("sk-one"), 200), (Some("sk-admin"), 200), (None, 401)] {
        assert_eq!(send(&app, get(key)).await.status().as_u16(), status);
        assert_eq!(started.elapsed(), Duration::ZERO, "{key:?}");
    }
    for guess in guesses {
        assert_eq!(guess.await.unwrap(), StatusCode::UNAUTHORIZED);
    }
    assert_eq!(started.elapsed().as_secs(), 10, "one every 100 ms, none later than 10 s");
    let again = tokio::time::Instant::now();
    send(&app, get(Some("sk-wrong"))).await;
    assert!(again.elapsed() >= Duration::from_millis(100));
}

/// Before, the connection was reset.
#[tokio::test]
async fn http_2_is_answered_with_an_error() {
    let server = Served::start(ServerConfig::default(), answer).await;
    let socket = server.send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
    let (status, reply) = parsed(read(socket).await);
    assert_eq!((status, &reply["error"]["code"]), (505, &json!("http_version_not_supported")));
}

/// Before, the errors of axum itself were plain text.
#[tokio::test]
async fn errors_of_paths_and_queries_are_json() {
    let (app, _) = app(answer);
    for path in ["/v1/cache?unknown=1", "/v1/models/%ff", "/v1/requests/%ff/trace"] {
        let request = axum::http::Request::get(path).body(Body::empty()).unwrap();
        let response = send(&app, request).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{path}");
        let reply: Value = json_of(response).await;
        assert_eq!(reply["error"]["type"], "invalid_request_error", "{path}");
        assert!(!reply["error"]["message"].as_str().unwrap().is_empty(), "{path}");
    }
}
