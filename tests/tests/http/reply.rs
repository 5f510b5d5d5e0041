//! Replies: objects, streams, errors of the engine, and slow starts.

use std::time::Duration;

use axum::body::Body;
use axum::http::{StatusCode, header};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use steersman::config::ServerConfig;
use steersman_engine::policy::{Cause, Failure};
use steersman_engine::request::{Event, FinishReason, FunctionCall, ToolCall};
use steersman_engine::{Error, RequestError};

use crate::*;

#[tokio::test]
async fn reply_has_openai_format() {
    let (app, seen) = app(answer);
    let (status, reply) = chat(&app, body(json!({}))).await;
    assert_eq!(status, StatusCode::OK);
    let expected = json!({
        "id": "chatcmpl-X",
        "object": "chat.completion",
        "created": 0,
        "model": "owner/tiny",
        "system_fingerprint": "fp_test",
        "choices": [{
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Rome\n.",
                "reasoning_content": "It is Rome.",
                "reasoning": "It is Rome."
            },
            "logprobs": null,
            "finish_reason": "stop"
        }],
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 12,
            "total_tokens": 32,
            "prompt_tokens_details": {"cached_tokens": 16},
            "completion_tokens_details": {
                "reasoning_tokens": 5,
                "accepted_prediction_tokens": 4,
                "rejected_prediction_tokens": 2,
                "forced_tokens": 0,
                "skipped_layers": 0
            }
        },
        "steersman": {"profile": "default", "notes": ["routed: plain"],
            "labels": {"tier": "plain"}}
    });
    assert_eq!(reply, expected);
    assert!(seen.last().id.starts_with("chatcmpl-"));
}

#[tokio::test]
async fn stream_equals_the_whole_reply_in_chunks() {
    let (app, _) = app(answer);
    let body = body(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let response = send(&app, post(body.to_string())).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
    assert_eq!(response.headers()[header::CACHE_CONTROL], "no-cache");
    let chunk = |choices: Value| {
        json!({
            "id": "chatcmpl-X",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": "owner/tiny",
            "system_fingerprint": "fp_test",
            "choices": choices,
            "usage": null,
        })
    };
    let delta = |delta: Value, reason: Value| {
        chunk(json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": reason}]))
    };
    let mut last = delta(json!({}), json!("stop"));
    last["steersman"] = json!({"profile": "default", "notes": ["routed: plain"],
            "labels": {"tier": "plain"}});
    let mut usage = chunk(json!([]));
    usage["usage"] = json!({
        "prompt_tokens": 20,
        "completion_tokens": 12,
        "total_tokens": 32,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {
                "reasoning_tokens": 5,
                "accepted_prediction_tokens": 4,
                "rejected_prediction_tokens": 2,
                "forced_tokens": 0,
                "skipped_layers": 0
            }
    });
    let expected = vec![
        delta(json!({"role": "assistant", "content": ""}), Value::Null),
        delta(json!({"reasoning_content": "It is", "reasoning": "It is"}), Value::Null),
        delta(json!({"reasoning_content": " Rome.", "reasoning": " Rome."}), Value::Null),
        delta(json!({"content": "Rome"}), Value::Null),
        delta(json!({"content": "\n."}), Value::Null),
        last,
        usage,
        json!("[DONE]"),
    ];
    assert_eq!(data(&bytes(response).await), expected);
}

#[tokio::test]
async fn stream_has_usage_only_on_request() {
    let (app, _) = app(answer);
    let response = send(&app, post(body(json!({"stream": true})).to_string())).await;
    let chunks = data(&bytes(response).await);
    assert_eq!(chunks.len(), 7);
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
}

fn tool_calls() -> Vec<Act> {
    let arguments = json!({"town": "Zürich", "days": 2, "about": ["rain"]});
    let arguments = arguments.as_object().unwrap().clone();
    let function = FunctionCall { name: "weather".into(), arguments: arguments.into() };
    let call =
        |id: &str| ToolCall { id: id.into(), kind: "function".into(), function: function.clone() };
    vec![
        Say(Event::ToolCall(call("call_a"))),
        Say(Event::ToolCall(call("call_b"))),
        finished(FinishReason::ToolCalls),
    ]
}

#[tokio::test]
async fn tool_calls_are_whole_with_arguments_as_json_in_a_string() {
    let (app, _) = app(tool_calls);
    let tools = json!([{"type": "function", "function": {"name": "weather", "parameters": {}}}]);
    let arguments = r#"{"town":"Zürich","days":2,"about":["rain"]}"#;
    let call = |id: &str| {
        let function = json!({"name": "weather", "arguments": arguments});
        json!({"id": id, "type": "function", "function": function})
    };

    let (_, reply) = chat(&app, body(json!({"tools": tools}))).await;
    let choice = &reply["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    let calls = json!([call("call_a"), call("call_b")]);
    let message = json!({"role": "assistant", "content": null, "tool_calls": calls});
    assert_eq!(choice["message"], message);

    let body = body(json!({"tools": tools, "stream": true}));
    let chunks = data(&bytes(send(&app, post(body.to_string())).await).await);
    for (index, id) in ["call_a", "call_b"].into_iter().enumerate() {
        let mut call = call(id);
        call["index"] = index.into();
        assert_eq!(chunks[1 + index]["choices"][0]["delta"], json!({"tool_calls": [call]}));
    }
    assert_eq!(chunks[3]["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn tool_calls_are_streamed_with_their_name_first() {
    let (app, seen) = app(|| call_in_pieces(FinishReason::ToolCalls));
    let body = body(json!({"stream": true}));
    let chunks = data(&bytes(send(&app, post(body.to_string())).await).await);
    assert!(seen.last().streams_calls);
    let deltas: Vec<_> =
        chunks[1..5].iter().map(|c| &c["choices"][0]["delta"]["tool_calls"][0]).collect();
    let function = json!({"name": "weather", "arguments": "{\"town\":"});
    assert_eq!(
        *deltas[0],
        json!({"index": 0, "id": "call_a", "type": "function", "function": function})
    );
    assert_eq!(*deltas[1], json!({"index": 0, "function": {"arguments": "\"Rome\"}"}}));
    // The whole call is not sent again; the next one came whole.
    assert_eq!((&deltas[2]["index"], &deltas[2]["id"]), (&json!(1), &json!("call_b")));
    assert!(deltas[3].is_null());
}

#[tokio::test]
async fn engine_errors_have_their_status_in_streams_too() {
    type Case = (fn() -> Vec<Act>, u16, &'static str, &'static str, &'static str);
    let cases: [Case; 6] = [
        (
            || {
                vec![Say(Event::Failed(Error::Request(RequestError::ContextTooLong {
                    tokens: 99,
                    limit: 10,
                })))]
            },
            400,
            "invalid_request_error",
            "context_length_exceeded",
            "99 tokens",
        ),
        (
            || {
                vec![Say(Event::Failed(Error::Request(RequestError::Template(
                    "no system twice".into(),
                ))))]
            },
            400,
            "invalid_request_error",
            "invalid_messages",
            "no system twice",
        ),
        (
            || {
                let problem = "must be less".into();
                vec![Say(Event::Failed(Error::Request(RequestError::Field {
                    field: "max_tokens",
                    problem,
                })))]
            },
            400,
            "invalid_request_error",
            "invalid_value",
            "max_tokens",
        ),
        (
            || {
                let cause = Cause::Trap("secret trap".into());
                let failure = Failure { policy: "mine".into(), hook: "on-step", cause };
                vec![Say(Event::Failed(failure.into()))]
            },
            500,
            "policy_error",
            "policy_error",
            "`mine`",
        ),
        (
            || vec![Say(Event::Failed(Error::Array("secret shape".into())))],
            500,
            "server_error",
            "internal_error",
            "log",
        ),
        // The engine thread died: the channel closes without a last event.
        (Vec::new, 503, "server_error", "engine_stopped", "stopped"),
    ];
    for (script, status, kind, code, words) in cases {
        let (app, _) = app(script);
        for stream in [false, true] {
            let (got, reply) = chat(&app, body(json!({"stream": stream}))).await;
            assert_eq!(got.as_u16(), status, "{reply}");
            assert_eq!(reply["error"]["type"], kind);
            assert_eq!(reply["error"]["code"], code);
            let message = reply["error"]["message"].as_str().unwrap();
            assert!(message.contains(words), "`{words}` is not in `{message}`");
            assert!(!message.contains("secret"), "details belong in the log: {message}");
        }
    }
}

#[tokio::test]
async fn late_error_is_the_last_chunk_of_a_stream() {
    fn fails_late() -> Vec<Act> {
        vec![Say(Event::Answer("Ro".into())), Say(Event::Failed(Error::Array("x".into())))]
    }
    let (app, _) = app(fails_late);
    let response = send(&app, post(body(json!({"stream": true})).to_string())).await;
    assert_eq!(response.status(), StatusCode::OK);
    let chunks = data(&bytes(response).await);
    assert_eq!(chunks.len(), 3);
    assert_eq!(chunks[1]["choices"][0]["delta"]["content"], "Ro");
    assert_eq!(chunks[2]["error"]["code"], "internal_error");
    let (status, reply) = chat(&app, body(json!({}))).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR, "a partial answer is an error: {reply}");
}

#[tokio::test]
async fn reply_contains_the_reason_of_a_policy_for_stopping() {
    fn stopped() -> Vec<Act> {
        vec![Say(Event::Answer("No".into())), finished(FinishReason::Policy("off topic".into()))]
    }
    let (app, _) = app(stopped);
    let (_, reply) = chat(&app, body(json!({}))).await;
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
    assert_eq!(reply["steersman"]["stop_reason"], "off topic");
}

#[tokio::test]
async fn answer_at_max_tokens_has_finish_reason_length() {
    fn cut() -> Vec<Act> {
        vec![Say(Event::Reasoning("on and on".into())), finished(FinishReason::Length)]
    }
    let (app, _) = app(cut);
    let (_, reply) = chat(&app, body(json!({}))).await;
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    assert_eq!(reply["choices"][0]["message"]["content"], "");
}

#[tokio::test(start_paused = true)]
async fn full_queue_is_429_and_health_still_responds() {
    fn slow() -> Vec<Act> {
        vec![Wait(Duration::from_secs(3600)), finished(FinishReason::Stop)]
    }
    let (engine, _) = engine(1, slow);
    let config = ServerConfig { request_timeout_s: 10_000, ..ServerConfig::default() };
    let app = steersman::app(engine, &config);
    let mut others = Vec::new();
    for _ in 0..2 {
        let app = app.clone();
        others.push(tokio::spawn(async move { chat(&app, body(json!({}))).await }));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let response = send(&app, post(body(json!({})).to_string())).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(response.headers()[header::RETRY_AFTER], "2");
    let error = json_of(response).await["error"].clone();
    assert_eq!(error["code"], "queue_full");
    assert!(
        error["message"].as_str().unwrap().contains("its limit is 1 (engine.queue)"),
        "{error}"
    );
    let health = axum::http::Request::get("/health").body(Body::empty()).unwrap();
    let health = json_of(send(&app, health).await).await;
    assert_eq!([&health["status"], &health["model"]], ["ok", "owner/tiny"]);
    assert_eq!([&health["waiting"], &health["engines"][0]["waiting"]], [1, 1]);
    for other in others {
        assert_eq!(other.await.unwrap().0, StatusCode::OK);
    }
}

#[tokio::test(start_paused = true)]
async fn stream_sends_comments_during_a_long_prefill() {
    fn slow() -> Vec<Act> {
        vec![
            Wait(Duration::from_secs(42)),
            Say(Event::Answer("at last".into())),
            finished(FinishReason::Stop),
        ]
    }
    let (app, _) = app(slow);
    let started = tokio::time::Instant::now();
    let response = send(&app, post(body(json!({"stream": true})).to_string())).await;
    assert_eq!(started.elapsed().as_secs(), 10, "headers are sent after at most ten seconds");
    let stream = bytes(response).await;
    let text = std::str::from_utf8(&stream).unwrap();
    assert_eq!(text.matches(": still working\n\n").count(), 2, "at 25 s and 40 s: {text}");
    assert_eq!(data(&stream)[1]["choices"][0]["delta"]["content"], "at last");
}

#[tokio::test(start_paused = true)]
async fn error_after_a_long_prefill_is_in_the_stream() {
    fn slow() -> Vec<Act> {
        let error = Error::Request(RequestError::ContextTooLong { tokens: 9, limit: 1 });
        vec![Wait(Duration::from_secs(11)), Say(Event::Failed(error))]
    }
    let (app, _) = app(slow);
    let response = send(&app, post(body(json!({"stream": true})).to_string())).await;
    assert_eq!(response.status(), StatusCode::OK);
    let chunks = data(&bytes(response).await);
    assert_eq!(chunks[1]["error"]["code"], "context_length_exceeded");
    assert_eq!(chunks.len(), 2);
}

#[tokio::test]
async fn stream_sends_each_piece_at_once() {
    fn halting() -> Vec<Act> {
        vec![Say(Event::Answer("first".into())), UntilCancelled]
    }
    let (app, _) = app(halting);
    let response = send(&app, post(body(json!({"stream": true})).to_string())).await;
    let mut body = response.into_body();
    let mut text = String::new();
    while !text.contains("first") {
        let frame = body.frame().await.unwrap().unwrap();
        text += std::str::from_utf8(frame.data_ref().unwrap()).unwrap();
    }
}
