//! Errors of the engine name the field of the client's protocol.

use axum::http::{StatusCode, header};
use serde_json::{Value, json};
use steersman_engine::{Error, RequestError};

use crate::*;

async fn post_to(app: &Router, path: &str, body: &Value) -> (StatusCode, Value) {
    let request = axum::http::Request::post(path)
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into())
        .unwrap();
    let response = send(app, request).await;
    (response.status(), json_of(response).await)
}

fn failing(error: RequestError) -> Router {
    let script = move |request: &steersman_engine::request::Request| {
        // The second of several texts.
        let text = format!("{:?}", request.prompt);
        match text.contains("good") {
            true => vec![Say(Event::Embedding(vec![1.0])), finished(FinishReason::Stop)],
            false => vec![Say(Event::Failed(Error::Request(error.clone())))],
        }
    };
    let (engine, _) = engine_that("owner/tiny", 8, script);
    steersman::app(engine, &ServerConfig::default())
}

/// F21: `context_length_exceeded` and "the prompt is empty" named `messages` in every protocol, and an unknown token of
/// `input` named `prompt`.
#[tokio::test]
async fn errors_about_the_prompt_name_the_field_that_has_it() {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let cases = [
        ("/v1/chat/completions", json!({"messages": messages}), "messages"),
        ("/v1/chat/completions", json!({"messages": messages, "n": 3}), "messages"),
        ("/v1/chat/completions", json!({"messages": messages, "stream": true}), "messages"),
        ("/v1/completions", json!({"prompt": "Hi"}), "prompt"),
        ("/v1/completions", json!({"prompt": ["good", "bad"]}), "prompt[1]"),
        ("/v1/completions", json!({"prompt": ["good", "bad"], "n": 2}), "prompt[1]"),
        ("/v1/responses", json!({"input": "Hi"}), "input"),
        ("/v1/messages", json!({"messages": messages}), "messages"),
        ("/v1/embeddings", json!({"input": "Hi"}), "input"),
        ("/v1/embeddings", json!({"input": ["good", "good", "bad"]}), "input[2]"),
        ("/v1/rerank", json!({"query": "bad", "documents": ["good"]}), "query"),
        ("/v1/rerank", json!({"query": "good", "documents": ["good", "bad"]}), "documents[1]"),
    ];
    for (error, code) in [
        (RequestError::ContextTooLong { tokens: 99, limit: 10 }, "context_length_exceeded"),
        (
            RequestError::PromptTooLong { tokens: 99, limit: 10, profile: "default".into() },
            "context_length_exceeded",
        ),
        (RequestError::PromptBytes { bytes: 99, limit: 10 }, "prompt_too_large"),
        (RequestError::EmptyPrompt, "invalid_value"),
        (RequestError::Template("no".into()), "invalid_messages"),
        (RequestError::Tokenizer("no".into()), "invalid_value"),
        (RequestError::UnknownToken { token: 99_999, size: 4090 }, "invalid_value"),
    ] {
        let app = failing(error);
        for (path, body, field) in &cases {
            let (status, reply) = post_to(&app, path, body).await;
            assert_eq!(status, StatusCode::BAD_REQUEST, "{path} {body}: {reply}");
            let error = &reply["error"];
            assert_eq!(error["param"], *field, "{path} {body}: {reply}");
            assert_eq!(error["code"], code, "{path} {body}: {reply}");
            let message = error["message"].as_str().unwrap();
            assert!(!message.contains("messages"), "{path}: {message}");
        }
    }
    // What is checked before its turn, by the model's own tokenizer.
    let (app, _) = app(answer);
    let (long, huge) = ("one two three ".repeat(12_000), "x".repeat((1 << 20) + 1));
    for (text, code) in [(long, "context_length_exceeded"), (huge, "prompt_too_large")] {
        let messages = json!([{"role": "user", "content": text}]);
        for (path, body, field) in [
            ("/v1/chat/completions", json!({"messages": messages}), "messages"),
            ("/v1/completions", json!({"prompt": ["a", text]}), "prompt[1]"),
            ("/v1/responses", json!({"input": text}), "input"),
            ("/v1/embeddings", json!({"input": ["a", text]}), "input[1]"),
            ("/v1/rerank", json!({"query": "a", "documents": [text]}), "documents[0]"),
        ] {
            let (status, reply) = post_to(&app, path, &body).await;
            assert_eq!(status, StatusCode::BAD_REQUEST, "{path}");
            let error = &reply["error"];
            assert_eq!((&error["param"], &error["code"]), (&json!(field), &json!(code)), "{path}");
        }
    }
    let huge = "x".repeat((1 << 20) + 1);
    for (path, body, field) in [
        ("/tokenize", json!({"prompt": huge}), "prompt"),
        ("/tokenize", json!({"content": huge}), "content"),
        ("/tokenize", json!({"messages": [{"role": "user", "content": huge}]}), "messages"),
        ("/apply-template", json!({"messages": [{"role": "user", "content": huge}]}), "messages"),
        (
            "/v1/messages/count_tokens",
            json!({"messages": [{"role": "user", "content": huge}]}),
            "messages",
        ),
    ] {
        let (_, reply) = post_to(&app, path, &body).await;
        assert_eq!(reply["error"]["param"], field, "{path}: {reply}");
    }
}

/// F21 and its kind: the schema of a strict tool stands in another field in each protocol, and after a tool that was
/// left out at another index.
#[tokio::test]
async fn errors_about_a_tools_schema_name_the_field_that_has_it() {
    let app = failing(RequestError::Structure {
        path: "tools[0].function.parameters.properties.a.not".into(),
        problem: "is not supported".into(),
    });
    let schema = json!({"type": "object"});
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let nested = json!({"type": "function", "function": {"name": "f", "parameters": schema}});
    let flat = json!({"type": "function", "name": "f", "parameters": schema});
    let other = json!({"type": "web_search"});
    for (path, body, field) in [
        (
            "/v1/chat/completions",
            json!({"messages": messages, "tools": [other, nested]}),
            "tools[1].function.parameters.properties.a.not",
        ),
        (
            "/v1/responses",
            json!({"input": "Hi", "tools": [other, flat]}),
            "tools[1].parameters.properties.a.not",
        ),
        (
            "/v1/messages",
            json!({"messages": messages, "tools": [{"type": "web_search_20250305", "name": "w"},
                                                   {"name": "f", "input_schema": schema}]}),
            "tools[1].input_schema.properties.a.not",
        ),
    ] {
        let (_, reply) = post_to(&app, path, &body).await;
        let error = &reply["error"];
        assert_eq!(error["param"], field, "{path}: {reply}");
        assert_eq!(error["message"], format!("{field}: is not supported"), "{path}");
    }
}

/// What a client sends is quoted in errors, but not megabytes of it.
#[tokio::test]
async fn an_error_quotes_no_more_than_some_kilobytes() {
    let (app, _) = app(answer);
    let long = "x".repeat(1 << 20);
    for extra in [
        json!({long.clone(): 1}),
        json!({"max_tokens": long}),
        json!({"reasoning_effort": long}),
        json!({"logit_bias": {long.clone(): 1}}),
        json!({"messages": [{"role": long, "content": "a"}]}),
    ] {
        let (status, reply) = chat(&app, body(extra)).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(reply.to_string().len() < 6000, "{} bytes", reply.to_string().len());
    }
}
