//! A policy routes requests over HTTP: another profile answers, with its policies, and the reply says so.

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use steersman::config::{ProfileAccess, ServerConfig};
use steersman_engine::policy::Param;
use steersman_tests::{Running, config, profile};
use tower::ServiceExt;

/// An app whose profile `quick` routes questions about Italy to `large`, which needs a key, hides Rome, and takes at most
/// `limit` requests at a time.
fn app(limit: usize) -> (Running, Router) {
    let mut config = config();
    config.store.ahead = false;
    // A busy machine may stop a thread for longer than the default of 50 ms.
    config.policy.deadline_ms = 10_000;
    let mut quick = profile("router");
    quick.policy.params.insert("to".into(), Param::from("large"));
    quick.policy.params.insert("words".into(), Param::from("italy"));
    quick.routes = vec!["large".into()];
    let mut large = profile("redact");
    large.policy.params.insert("texts".into(), Param::from("Rome"));
    config.profiles.extend([("quick".into(), quick.clone()), ("large".into(), large.clone())]);
    let engine = Running::without_store(config);
    let quick = ProfileAccess { settings: quick, ..ProfileAccess::default() };
    let large = ProfileAccess {
        settings: large,
        api_keys: vec!["sk-large".into()],
        requests: limit,
        ..ProfileAccess::default()
    };
    let profiles = [("quick".to_owned(), quick), ("large".to_owned(), large)].into();
    let server = ServerConfig { profiles, ..ServerConfig::default() };
    let app = steersman::app((*engine).clone(), &server);
    (engine, app)
}

async fn ask(app: &Router, question: &str, stream: bool) -> (StatusCode, String) {
    let body = json!({
        "messages": [{"role": "user", "content": question}],
        "chat_template_kwargs": {"enable_thinking": false},
        "temperature": 0,
        "stream": stream,
        "max_tokens": 40,
    });
    let request = Request::post("/v1/chat/completions")
        .header(header::CONTENT_TYPE, "application/json")
        .header("x-steersman-profile", "quick")
        .body(Body::from(body.to_string()))
        .unwrap();
    let response = app.clone().oneshot(request).await.unwrap();
    let status = response.status();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(bytes.to_vec()).unwrap())
}

fn parse(text: &str) -> Value {
    serde_json::from_str(text).expect(text)
}

#[tokio::test]
async fn another_profile_answers_and_the_reply_names_it() {
    let (engine, app) = app(0);
    let question = "What is the capital of Italy?";
    let (status, text) = ask(&app, question, false).await;
    let reply = parse(&text);
    assert_eq!(status, StatusCode::OK, "{text}");
    let model = &engine.info().model;
    assert_eq!(reply["model"], json!(model));
    assert_eq!(reply["choices"][0]["message"]["content"], "The capital of Italy is [redacted].");
    let extension = &reply["steersman"];
    assert_eq!(extension["profile"], "large");
    assert_eq!(extension["labels"], json!({"redacted": "1"}));
    let note = format!("routed to `{model}` with the profile `large`");
    assert!(extension["notes"].as_array().unwrap().contains(&json!(note)), "{extension}");
    let id = reply["id"].as_str().unwrap();
    let traces = engine.policies().traces();
    let profile_of = |id: &str| traces.get(id).unwrap()[0].link.profile.clone();
    assert_eq!(
        (profile_of(id), profile_of(&format!("{id}-routed"))),
        ("quick".into(), "large".into())
    );

    let (_, stream) = ask(&app, question, true).await;
    assert!(stream.contains(r#""profile":"large""#) && !stream.contains("Rome"), "{stream}");
    let (_, other) = ask(&app, "What is the capital of Norway?", false).await;
    assert_eq!(parse(&other)["steersman"]["profile"], "quick");
    assert_eq!(parse(&other)["steersman"].get("labels"), None);
}

/// The permit is given back when the reply has ended, so one after the other is answered.
#[tokio::test]
async fn the_limit_of_the_destination_applies_while_a_request_runs() {
    let (_engine, app) = app(1);
    let question = "What is the capital of Italy?";
    for _ in 0..3 {
        assert_eq!(ask(&app, question, false).await.0, StatusCode::OK);
    }
    let asked = (0..4).map(|_| ask(&app, question, false));
    let statuses = futures(asked).await;
    assert!(statuses.iter().any(|(status, _)| *status == StatusCode::OK), "{statuses:?}");
    for (_, text) in statuses.iter().filter(|(status, _)| *status != StatusCode::OK) {
        assert_eq!(parse(text)["error"]["code"], "route_unavailable", "{text}");
        assert!(text.contains("limits.requests"), "{text}");
    }
}

/// Runs all at the same time.
async fn futures<T>(all: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut all: Vec<_> = all.map(Box::pin).collect();
    let mut done: Vec<Option<T>> = all.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (future, done) in all.iter_mut().zip(&mut done) {
            if done.is_none()
                && let std::task::Poll::Ready(value) = future.as_mut().poll(context)
            {
                *done = Some(value);
            }
        }
        match done.iter().all(Option::is_some) {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
    done.into_iter().flatten().collect()
}
