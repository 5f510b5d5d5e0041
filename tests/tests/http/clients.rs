//! Requests that clients sent, recorded by `tests/fixtures/clients.py`: each is answered in its protocol, or refused
//! with the name of the field.

use axum::http::{StatusCode, header};
use serde_json::{Value, json};
use steersman_engine::RequestError;
use steersman_tests::{bundled_text, fixture};
use steersman_text::grammar::Grammars;

use crate::*;

const CLIENTS: [&str; 15] = [
    "aider",
    "anthropic",
    "claude-code",
    "codex",
    "dspy",
    "guidance",
    "instructor",
    "langchain",
    "litellm",
    "llama-index",
    "npm",
    "openai",
    "openai-agents",
    "pydantic-ai",
    "smolagents",
];

/// The model of the recorded requests.
const MODEL: &str = "tiny-hybrid-4bit";

fn server(script: fn() -> Vec<Act>) -> (Router, Arc<Seen>) {
    let (engine, seen) = engine_of(MODEL, 8, script);
    (steersman::app(engine, &ServerConfig::default()), seen)
}

fn embedding() -> Vec<Act> {
    vec![Say(Event::Embedding(vec![0.6, -0.8])), finished(FinishReason::Length)]
}

fn request(recorded: &Value) -> axum::http::Request<Body> {
    let text = |field: &str| recorded[field].as_str().unwrap();
    let mut request = axum::http::Request::builder().method(text("method")).uri(text("path"));
    for (name, value) in recorded["headers"].as_object().unwrap() {
        request = request.header(name, value.as_str().unwrap());
    }
    let body = match &recorded["body"] {
        Value::Null => Body::empty(),
        body => body.to_string().into(),
    };
    request.body(body).unwrap()
}

/// The route of a request, without `/v1` and the query.
fn route(recorded: &Value) -> &str {
    let path = recorded["path"].as_str().unwrap().split('?').next().unwrap();
    path.strip_prefix("/v1").unwrap_or(path)
}

/// The JSON of a stream's events or lines.
fn events(stream: &str) -> Vec<Value> {
    let lines = stream.lines().filter(|line| !line.starts_with("event:") && !line.is_empty());
    let json = lines.map(|line| line.strip_prefix("data: ").unwrap_or(line));
    json.map(|text| serde_json::from_str(text).unwrap_or_else(|_| text.into())).collect()
}

/// Checks that a reply has the shape of its protocol.
fn check_reply(route: &str, is_stream: bool, text: &str, at: &str) {
    let events = if is_stream {
        events(text)
    } else {
        vec![serde_json::from_str(text).unwrap_or_else(|_| panic!("{at}: {text}"))]
    };
    let (first, last) = (&events[0], &events[events.len() - 1]);
    assert!(
        events.iter().all(|event| event.get("error").is_none_or(Value::is_null)),
        "{at}: {text}"
    );
    let expected = match (route, is_stream) {
        ("/chat/completions", false) => first["choices"][0]["message"]["role"] == "assistant",
        ("/chat/completions", true) => {
            first["object"] == "chat.completion.chunk" && *last == json!("[DONE]")
        }
        ("/completions", false) => first["choices"][0]["text"].is_string(),
        ("/completions", true) => first["object"] == "text_completion" && *last == json!("[DONE]"),
        ("/responses", false) => first["object"] == "response" && first["status"] == "completed",
        ("/responses", true) => {
            first["type"] == "response.created" && last["type"] == "response.completed"
        }
        ("/messages", false) => first["type"] == "message" && first["stop_reason"] == "end_turn",
        ("/messages", true) => first["type"] == "message_start" && last["type"] == "message_stop",
        ("/messages/count_tokens", _) => first["input_tokens"].as_u64() > Some(0),
        ("/embeddings", _) => !first["data"][0]["embedding"].is_null(),
        ("/api/chat" | "/api/generate", _) => last["done"] == true,
        ("/api/show", _) => first["capabilities"].is_array(),
        ("/models", _) => first["data"][0]["id"] == MODEL,
        ("/models/tiny-hybrid-4bit", _) => first["id"] == MODEL,
        _ => panic!("{at}: no shape is known of {route}"),
    };
    assert!(expected, "{at}: {text}");
}

#[tokio::test]
async fn recorded_requests_of_clients_are_answered_or_refused_by_name() {
    let (chats, seen) = server(answer);
    let (embeddings, _) = server(embedding);
    let grammars = Grammars::new(bundled_text());
    let mut count = 0;
    for client in CLIENTS {
        let fixture = fixture(&format!("clients/{client}.json"));
        for (i, recorded) in fixture["requests"].as_array().unwrap().iter().enumerate() {
            let at = format!("{client} {i}");
            let route = route(recorded);
            let app = if route == "/embeddings" { &embeddings } else { &chats };
            seen.requests.lock().unwrap().clear();
            let response = send(app, request(recorded)).await;
            let (status, headers) = (response.status(), response.headers().clone());
            let text = String::from_utf8(bytes(response).await.to_vec()).unwrap();
            count += 1;
            // The scripted engine does not look at forms; the real one compiles them.
            let refused_form = seen.requests.lock().unwrap().iter().find_map(|request| {
                match grammars.compile(request) {
                    Ok(_) => None,
                    Err(RequestError::Structure { path, .. }) => Some(path),
                    Err(error) => panic!("{at}: {error}"),
                }
            });
            match (recorded.get("refused"), refused_form) {
                (Some(refused), Some(path)) => assert_eq!(refused["param"], path, "{at}"),
                // The size of embeddings is the model's.
                (Some(refused), None) if refused["param"] == "dimensions" => {}
                (Some(refused), None) => {
                    assert_eq!(refused["status"], status.as_u16(), "{at}: {text}");
                    let error: Value = serde_json::from_str(&text).unwrap();
                    assert!(refused["param"].is_string(), "{at}: refused without a field");
                    assert_eq!(error["error"]["param"], refused["param"], "{at}: {text}");
                }
                (None, Some(path)) => panic!("{at}: the form is refused at {path}"),
                (None, None) => {
                    assert_eq!(status, StatusCode::OK, "{at}: {text}");
                    let kind = headers[header::CONTENT_TYPE].to_str().unwrap();
                    let is_stream = ["text/event-stream", "application/x-ndjson"].contains(&kind);
                    check_reply(route, is_stream, &text, &at);
                }
            }
        }
    }
    assert!(count > 100, "{count}");
}
