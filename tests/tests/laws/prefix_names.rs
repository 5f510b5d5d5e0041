//! `/health` lists the conversations that replies name, as long as their state is in memory.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use steersman::config::ServerConfig;
use steersman_tests::{Running, config};
use tower::ServiceExt;

/// Interval and most polls until the end of a reply is saved, which its client does not wait for.
const POLL: Duration = Duration::from_millis(20);
const POLLS: usize = 3000;

const ITALY: &str =
    "Answer in one short sentence, please: what is the capital city of Italy, and nothing else?";
const NORWAY: &str =
    "Answer in one short sentence, please: what is the capital city of Norway, and nothing else?";

async fn json_of(app: &Router, request: Request<Body>) -> (Option<String>, Value) {
    let response = app.clone().oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let name = response.headers().get("x-steersman-prefix");
    let name = name.map(|name| name.to_str().unwrap().to_string());
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (name, serde_json::from_slice(&bytes).unwrap())
}

/// Asks the next question of a conversation, and adds it and the reply. Returns the name in the header and the tokens
/// of the prompt that were saved.
async fn ask(app: &Router, messages: &mut Vec<Value>, question: &str) -> (String, u64) {
    messages.push(json!({"role": "user", "content": question}));
    let body = json!({
        "messages": messages,
        "chat_template_kwargs": {"enable_thinking": false},
        "temperature": 0,
        "max_tokens": 20,
    });
    let request = Request::post("/v1/chat/completions")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(body.to_string()));
    let (name, mut reply) = json_of(app, request.unwrap()).await;
    messages.push(reply["choices"][0]["message"].take());
    let cached = &reply["usage"]["prompt_tokens_details"]["cached_tokens"];
    (name.expect("a reply to a conversation has a name"), cached.as_u64().unwrap())
}

/// The names that `/health` lists, with their tokens, once `is_right` accepts them.
async fn held(app: &Router, is_right: impl Fn(&[(String, u64)]) -> bool) -> Vec<(String, u64)> {
    let mut held = Vec::new();
    for _ in 0..POLLS {
        let request = Request::get("/health").body(Body::empty()).unwrap();
        let (_, health) = json_of(app, request).await;
        let prefixes = &health["engines"][0]["prefixes"];
        let one = |entry: &Value| {
            (entry["prefix"].as_str().unwrap().to_string(), entry["tokens"].as_u64().unwrap())
        };
        held = prefixes["held"].as_array().unwrap().iter().map(one).collect();
        let longest = held.iter().map(|(_, tokens)| *tokens).max().unwrap_or(0);
        assert!(prefixes["tokens"].as_u64().unwrap() >= longest, "{prefixes}");
        if is_right(&held) {
            return held;
        }
        tokio::time::sleep(POLL).await;
    }
    panic!("{held:?}");
}

#[tokio::test]
async fn health_lists_the_conversations_that_replies_name() {
    let mut config = config();
    // What is computed ahead is a use, too.
    config.store.ahead = false;
    let engine = Running::without_store(config);
    let app = steersman::app((*engine).clone(), &ServerConfig::default());
    held(&app, <[_]>::is_empty).await;
    let (mut italy, mut norway) = (Vec::new(), Vec::new());
    let (first, _) = ask(&app, &mut italy, ITALY).await;
    held(&app, |held| held.len() == 1 && held[0].0 == first).await;
    let (second, _) = ask(&app, &mut norway, NORWAY).await;
    assert_ne!(first, second);
    let before =
        held(&app, |held| held.len() == 2 && held[0].0 == second && held[1].0 == first).await;
    // The next turn resumes, has the same name, and is the newest with more tokens.
    let (again, cached) = ask(&app, &mut italy, "And how many people live there?").await;
    assert!(again == first && cached >= 16, "{again} {first} {cached}");
    held(&app, |held| held.len() == 2 && held[0].0 == first && held[0].1 > before[1].1).await;
}
