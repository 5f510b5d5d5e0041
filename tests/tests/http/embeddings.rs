//! OpenAI's embeddings.

use axum::http::{StatusCode, header};
use serde_json::{Value, json};
use steersman_engine::request::{Embedding, RawPrompt};

use crate::*;

fn embedding() -> Vec<Act> {
    vec![Say(Event::Embedding(vec![0.6, -0.8])), finished(FinishReason::Length)]
}

async fn embed(app: &Router, body: Value) -> (StatusCode, Value) {
    let request = axum::http::Request::post("/v1/embeddings")
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into())
        .unwrap();
    let response = send(app, request).await;
    (response.status(), json_of(response).await)
}

#[tokio::test]
async fn each_text_has_an_embedding() {
    let (app, seen) = app(embedding);
    let text = |text: &str| RawPrompt::Text(text.into());
    for (input, prompts) in [
        (json!("a"), vec![text("a")]),
        (json!(["a", "b"]), vec![text("a"), text("b")]),
        (json!([1, 2]), vec![RawPrompt::Tokens(vec![1, 2])]),
        (json!([[1], [2]]), vec![RawPrompt::Tokens(vec![1]), RawPrompt::Tokens(vec![2])]),
        // More than the queue has places.
        (json!(vec!["a"; 20]), vec![text("a"); 20]),
    ] {
        seen.requests.lock().unwrap().clear();
        let (status, reply) = embed(&app, json!({"input": input, "model": "owner/tiny"})).await;
        assert_eq!(status, StatusCode::OK, "{reply}");
        let count = prompts.len();
        let requests = seen.requests.lock().unwrap().clone();
        let got: Vec<_> = requests.iter().filter_map(|request| request.prompt.clone()).collect();
        assert_eq!(got, prompts);
        let whole = Some(Embedding::default());
        assert!(requests.iter().all(|r| r.embedding == whole && r.max_tokens == Some(0)));
        assert_eq!((&reply["object"], &reply["model"]), (&json!("list"), &json!("owner/tiny")));
        let data = reply["data"].as_array().unwrap();
        assert_eq!(data.len(), count);
        let last = &data[count - 1];
        assert_eq!((&last["index"], &last["object"]), (&json!(count - 1), &json!("embedding")));
        let values: Vec<f32> = serde_json::from_value(last["embedding"].clone()).unwrap();
        assert_eq!(values, [0.6, -0.8]);
        let tokens = 20 * count;
        assert_eq!(reply["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
    }
}

#[tokio::test]
async fn dimensions_and_format_are_the_clients_choice() {
    let (app, seen) = app(embedding);
    let body = json!({"input": "a", "dimensions": 16, "encoding_format": "base64", "user": "u"});
    let (status, reply) = embed(&app, body).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    // 0.6 and -0.8 as little-endian f32.
    assert_eq!(reply["data"][0]["embedding"], "mpkZP83MTL8=");
    assert_eq!(seen.last().embedding, Some(Embedding { dimensions: Some(16), truncates: false }));
}

#[tokio::test]
async fn errors_of_embeddings_name_the_field() {
    let (app, _) = app(embedding);
    for (body, code, param) in [
        (json!({}), "missing_required_parameter", "input"),
        (json!({"input": 3}), "invalid_type", "input"),
        (json!({"input": []}), "invalid_value", "input"),
        (json!({"input": vec!["a"; 257]}), "invalid_value", "input"),
        (json!({"input": ["a", null]}), "invalid_type", "input[1]"),
        (json!({"input": "a", "dimensions": 0}), "invalid_value", "dimensions"),
        (json!({"input": "a", "encoding_format": "hex"}), "invalid_value", "encoding_format"),
        (json!({"input": "a", "stream": true}), "unknown_parameter", "stream"),
    ] {
        let (status, reply) = embed(&app, body.clone()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body} {reply}");
        let error = &reply["error"];
        assert_eq!((&error["code"], &error["param"]), (&json!(code), &json!(param)), "{body}");
    }
}
