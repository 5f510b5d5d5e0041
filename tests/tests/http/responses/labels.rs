//! What a response repeats and no model reads is bounded.

use axum::http::StatusCode;
use serde_json::{Map, Value, json};

use super::create;
use crate::*;

/// A response of a body with 8 MB of `metadata` repeated them, and an id of an item was stored and listed three times.
#[tokio::test]
async fn labels_and_ids_of_items_have_limits() {
    let (app, _) = app(answer);
    let long = "x".repeat(513);
    let pairs = |count: usize| -> Map<String, Value> {
        (0..count).map(|number| (format!("k{number}"), json!("v"))).collect()
    };
    let item = |name: &str, id: &str| {
        json!({"input": [{"type": "function_call", name: id, "name": "f", "arguments": "{}"},
            {"type": "message", "role": "user", "content": "Hi"}]})
    };
    for (body, param, words) in [
        (json!({"metadata": pairs(17)}), "metadata", "17 pairs, at most 16"),
        (json!({"metadata": {"k": long}}), "metadata.k", "513 characters, at most 512"),
        (json!({"metadata": {"k": 5}}), "metadata.k", "must be a string"),
        (json!({"metadata": ["k"]}), "metadata", "must be an object"),
        (json!({"metadata": {&long[..65]: "v"}}), "metadata", "65 characters, at most 64"),
        (json!({"user": long}), "user", "513 bytes, at most 512"),
        (json!({"prompt_cache_key": long}), "prompt_cache_key", "513 bytes"),
        (item("id", &long), "input[0].id", "513 bytes"),
        (item("call_id", &long), "input[0].call_id", "513 bytes"),
    ] {
        let mut whole = json!({"input": "Hi"});
        whole.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
        let (status, reply) = create(&app, whole).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{param}: {reply}");
        assert_eq!(reply["error"]["param"], param, "{reply}");
        let message = reply["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "`{words}` is not in `{message}`");
    }
    let mut largest = pairs(16);
    largest.insert("k0".into(), "é".repeat(512).into());
    let body = json!({"input": "Hi", "metadata": largest, "user": &long[..512]});
    let (status, reply) = create(&app, body).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    assert_eq!(reply["metadata"], Value::from(largest));
}
