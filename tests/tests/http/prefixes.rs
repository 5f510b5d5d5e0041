//! Names of conversations, in headers of replies and in `/health`.

use std::collections::HashSet;

use axum::http::Request as ClientRequest;
use steersman::config::ProfileAccess;
use steersman_engine::report::{CacheSize, NamedPrefix, PrefixReport};
use steersman_engine::request::PrefixName;

use crate::*;

const PREFIX: &str = "x-steersman-prefix";

/// A conversation, its first message only or with a second turn.
fn messages(question: &str, turns: usize) -> Value {
    let all = json!([
        {"role": "user", "content": question},
        {"role": "assistant", "content": "Rome."},
        {"role": "user", "content": "And of Norway?"},
    ]);
    Value::from(all.as_array().unwrap()[..2 * turns - 1].to_vec())
}

/// The status, and the name in the header if there is one.
async fn name(app: &Router, path: &str, key: &str, body: &Value) -> (u16, Option<String>) {
    let mut request = ClientRequest::post(path).header(header::CONTENT_TYPE, "application/json");
    if path == "/v1/messages" {
        request = request.header("anthropic-version", "2023-06-01");
    }
    if !key.is_empty() {
        request = request.header("x-api-key", key);
    }
    let response = send(app, request.body(Body::from(body.to_string())).unwrap()).await;
    let name = response.headers().get(PREFIX).map(|name| name.to_str().unwrap().to_string());
    let status = response.status().as_u16();
    bytes(response).await;
    (status, name)
}

/// [`name`] of a chat.
async fn name_of_chat(app: &Router, key: &str, question: &str, turns: usize) -> String {
    let body = body(json!({"messages": messages(question, turns)}));
    let (status, name) = name(app, "/v1/chat/completions", key, &body).await;
    assert_eq!(status, 200);
    name.expect("the reply has a name")
}

#[tokio::test]
async fn every_turn_has_the_name_of_its_conversation_in_every_protocol() {
    let (app, seen) = app(answer);
    let first = name_of_chat(&app, "", "Hi", 1).await;
    assert!(first.len() == 16 && first.bytes().all(|byte| byte.is_ascii_hexdigit()), "{first}");
    assert_eq!(seen.last().prefix_name.unwrap().to_string(), first);
    assert_eq!(name_of_chat(&app, "", "Hi", 2).await, first);
    assert_ne!(name_of_chat(&app, "", "Hello", 2).await, first);
    let turn = messages("Hi", 2);
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": turn})),
        ("/v1/responses", json!({"input": turn})),
        ("/v1/messages", json!({"messages": turn, "max_tokens": 9})),
        ("/api/chat", json!({"messages": turn})),
        ("/api/generate", json!({"prompt": "Hi"})),
    ] {
        for stream in [false, true] {
            let mut body = body.clone();
            (body["model"], body["stream"]) = ("owner/tiny".into(), stream.into());
            assert_eq!(name(&app, path, "", &body).await, (200, Some(first.clone())), "{path}");
        }
    }
}

#[tokio::test]
async fn what_is_no_conversation_has_no_name() {
    let (app, _) = app(answer);
    let prompt = json!({"model": "owner/tiny", "prompt": "Hi"});
    assert_eq!(name(&app, "/v1/completions", "", &prompt).await, (200, None));
    let wrong = body(json!({"temperature": 9}));
    assert_eq!(name(&app, "/v1/chat/completions", "", &wrong).await, (400, None));
}

/// A client could ask whether another one has sent a text, and anyone could try texts against a name.
#[tokio::test]
async fn a_name_is_of_one_key_and_one_process() {
    let api_keys = vec!["sk-one".into(), "sk-two".into()];
    let config = ServerConfig { api_keys, ..ServerConfig::default() };
    let (first, _) = app_with(&config, answer);
    let (second, _) = app_with(&config, answer);
    let mut names = HashSet::new();
    for app in [&first, &second] {
        for key in ["sk-one", "sk-two"] {
            let name = name_of_chat(app, key, "Hi", 1).await;
            assert_eq!(name_of_chat(app, key, "Hi", 2).await, name);
            assert!(names.insert(name), "{key}");
        }
    }
}

/// A server whose engine holds three conversations. The first engine keeps the queue open.
fn app_that_holds(config: &ServerConfig) -> (Engine, Router) {
    enable_log();
    let queue = Arc::new(Queue::new(8));
    let (engine, _) = engine_on(queue.clone(), "owner/tiny", |_| answer());
    let named = |id: u8| NamedPrefix { name: PrefixName([id; 8]), tokens: 100 + usize::from(id) };
    let memory = CacheSize { nodes: 7, tokens: 900, ..CacheSize::default() };
    let names = [3, 1, 2].map(named).to_vec();
    let report = PrefixReport { memory, names, ..PrefixReport::default() };
    let info = Info { prefixes: report.into(), ..engine.info().clone() };
    let holding = Engine::new(queue, info, engine.policies().clone());
    (engine, steersman::app(holding, config))
}

/// What `/health` has of saved state.
async fn prefixes(app: &Router, key: &str) -> Value {
    let mut request = ClientRequest::get("/health");
    if !key.is_empty() {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    let response = send(app, request.body(Body::empty()).unwrap()).await;
    assert_eq!(response.status(), StatusCode::OK, "{key}");
    let mut health = json_of(response).await;
    health["engines"][0]["prefixes"].take()
}

fn held() -> Value {
    let held = [("03", 103), ("01", 101), ("02", 102)];
    let held = held.map(|(digits, tokens)| json!({"prefix": digits.repeat(8), "tokens": tokens}));
    json!({"count": 7, "tokens": 900, "held": held})
}

#[tokio::test]
async fn health_lists_conversations_on_a_server_without_keys() {
    let (_engine, app) = app_that_holds(&ServerConfig::default());
    for key in ["", "none"] {
        assert_eq!(prefixes(&app, key).await, held());
    }
}

#[tokio::test]
async fn health_lists_conversations_to_keys_that_open_all_profiles_only() {
    let profile = ProfileAccess { api_keys: vec!["sk-strict".into()], ..ProfileAccess::default() };
    let profiles: std::collections::BTreeMap<_, _> =
        [("default".to_string(), ProfileAccess::default()), ("strict".to_string(), profile)].into();
    let closed = ServerConfig {
        api_keys: vec!["sk-all".into()],
        admin_keys: vec!["sk-operator".into()],
        profiles: profiles.clone(),
        ..ServerConfig::default()
    };
    let hidden = json!({"count": 7, "tokens": 900, "held": null});
    let (_engine, app) = app_that_holds(&closed);
    for key in ["sk-all", "sk-operator"] {
        assert_eq!(prefixes(&app, key).await, held(), "{key}");
    }
    for key in ["", "sk-strict", "sk-wrong"] {
        assert_eq!(prefixes(&app, key).await, hidden, "{key}");
    }
    // Any key closes the list to those without one.
    let operators = ServerConfig { admin_keys: vec!["sk-operator".into()], ..Default::default() };
    let of_profile = ServerConfig { profiles, ..Default::default() };
    for config in [operators, of_profile] {
        let (_engine, app) = app_that_holds(&config);
        assert_eq!(prefixes(&app, "").await, hidden);
    }
}

/// Answers to wrong keys take a tenth of a second each, one after the other: `/health` would tell quickly whether a key
/// is valid.
#[tokio::test(start_paused = true)]
async fn keys_are_not_guessed_at_health_faster_than_elsewhere() {
    let config = ServerConfig { api_keys: vec!["sk-all".into()], ..ServerConfig::default() };
    let (_engine, app) = app_that_holds(&config);
    let paused = async |key: &'static str| {
        let before = tokio::time::Instant::now();
        prefixes(&app, key).await;
        before.elapsed() >= Duration::from_millis(100)
    };
    assert!(!paused("").await && !paused("sk-all").await);
    assert!(paused("sk-wrong").await);
}
