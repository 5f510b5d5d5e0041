//! Requests as the engine gets them: messages, tools, reasoning, models and profiles.

use axum::body::Body;
use axum::http::StatusCode;
use serde_json::{Value, json};
use steersman_engine::policy::SamplingPatch;
use steersman_engine::request::Effort;

use crate::*;

#[tokio::test]
async fn every_field_reaches_the_engine() {
    let (app, seen) = app(answer);
    let tools = json!([{
        "type": "function",
        "function": {"strict": false, "name": "f", "parameters": {"z": 1, "a": 2}}
    }]);
    let body = json!({
        "model": "owner/tiny@strict",
        "messages": [
            {"role": "developer", "content": "Be brief.", "name": "boss"},
            {"role": "user", "content": [
                {"type": "text", "text": "a"},
                {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
            ]},
            {
                "role": "assistant", "content": null, "reasoning": "hm", "refusal": null,
                "annotations": [],
                "tool_calls": [{
                    "index": 0, "id": "c1", "type": "function",
                    "function": {"name": "f", "arguments": "{\"z\": 1, \"a\": [2]}"}
                }]
            },
            {"role": "tool", "tool_call_id": "c1", "content": "done"}
        ],
        "tools": tools,
        "tool_choice": "auto",
        "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0, "seed": -1,
        "stop": ["X", "Y"],
        "max_tokens": 9, "max_completion_tokens": 9,
        "chat_template_kwargs": {"enable_thinking": true, "add_dates": true},
        "max_thinking_tokens": 100,
        "user": "u", "metadata": {"k": "v"}, "n": 1, "logprobs": null, "frequency_penalty": 0.0,
        "presence_penalty": 0, "response_format": {"type": "text"}, "store": false
    });
    let (status, reply) = chat(&app, body).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    assert_eq!(reply["model"], "owner/tiny@strict");
    assert_eq!(reply["steersman"]["profile"], "strict");

    let request = seen.last();
    let messages = json!([
        {"role": "developer", "content": "Be brief.", "name": "boss"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant", "content": "", "reasoning_content": "hm",
            "tool_calls": [{
                "id": "c1", "type": "function",
                "function": {"name": "f", "arguments": {"z": 1, "a": [2]}}
            }]
        },
        {"role": "tool", "content": "done", "tool_call_id": "c1"}
    ]);
    assert_eq!(serde_json::to_value(&request.messages).unwrap(), messages);
    // Compared as text: templates write the keys in the client's order.
    assert_eq!(Value::from(request.tools).to_string(), tools.to_string());
    assert_eq!(request.profile, "strict");
    assert_eq!(Value::from(request.template_variables), json!({"add_dates": true}));
    assert_eq!((request.reasoning, request.reasoning_budget), (Some(true), Some(100)));
    assert_eq!((request.max_tokens, request.max_answer_tokens), (Some(9), None));
    let sampling = SamplingPatch {
        temperature: Some(0.5),
        top_p: Some(0.9),
        top_k: Some(20),
        min_p: Some(0.0),
    };
    assert_eq!((request.sampling, request.seed), (sampling, Some(u64::MAX)));
    assert_eq!(request.stop, ["X", "Y"]);
}

#[tokio::test]
async fn absent_fields_are_left_to_the_engine() {
    let (app, seen) = app(answer);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let absent = json!({"tools": tools, "tool_choice": "none", "stop": null, "seed": null});
    assert_eq!(chat(&app, body(absent)).await.0, StatusCode::OK);
    let request = seen.last();
    assert!(request.tools.is_empty(), "tool_choice none hides the tools");
    assert_eq!((request.reasoning, request.reasoning_budget), (None, None));
    assert_eq!(request.sampling, SamplingPatch::default());
    assert_eq!((request.max_tokens, request.max_answer_tokens), (None, None));
    assert_eq!(request.stop.len(), 0);
    assert_eq!(request.profile, "default");
}

#[tokio::test]
async fn three_parameters_control_reasoning() {
    let (app, seen) = app(answer);
    let enable = |on: bool| json!({"chat_template_kwargs": {"enable_thinking": on}});
    for (extra, reasoning, budget) in [
        (enable(true), Some(true), None),
        (enable(false), Some(false), None),
        (json!({"chat_template_kwargs": {"thinking": true}}), Some(true), None),
        (json!({"chat_template_kwargs": {"thinking": false}}), Some(false), None),
        (json!({"reasoning_effort": "none"}), Some(false), None),
        (json!({"reasoning_effort": "minimal"}), Some(false), None),
        (json!({"reasoning_effort": "low"}), Some(true), Some(1024)),
        (json!({"reasoning_effort": "medium"}), Some(true), Some(8192)),
        (json!({"reasoning_effort": "high"}), Some(true), None),
        (json!({"max_thinking_tokens": 0}), Some(false), None),
        (json!({"max_thinking_tokens": 50}), Some(true), Some(50)),
        (json!({"max_thinking_tokens": 50, "reasoning_effort": "low"}), Some(true), Some(50)),
        (json!({"chat_template_kwargs": {"enable_thinking": null}}), None, None),
        (json!({"reasoning_effort": null}), None, None),
    ] {
        assert_eq!(chat(&app, body(extra.clone())).await.0, StatusCode::OK, "{extra}");
        let request = seen.last();
        assert_eq!((request.reasoning, request.reasoning_budget), (reasoning, budget), "{extra}");
        let effort = request.effort.map(Effort::word);
        assert_eq!(effort, extra["reasoning_effort"].as_str(), "{extra}");
        assert!(request.template_variables.is_empty(), "{extra}");
    }
}

#[tokio::test]
async fn model_is_selected_by_name_and_profile() {
    let (app, seen) = app(answer);
    let get = |path: &str| axum::http::Request::get(path).body(Body::empty()).unwrap();
    let list = json_of(send(&app, get("/v1/models")).await).await;
    let names: Vec<_> = list["data"].as_array().unwrap().iter().map(|m| m["id"].clone()).collect();
    assert_eq!(
        (list["object"].clone(), names),
        (json!("list"), vec![json!("owner/tiny"), json!("owner/tiny@strict")])
    );
    for path in ["/v1/models/owner/tiny", "/v1/models/owner%2Ftiny@strict"] {
        let response = send(&app, get(path)).await;
        assert_eq!(response.status(), StatusCode::OK, "{path}");
        let model = json_of(response).await;
        assert_eq!(model["object"], "model");
        assert_eq!(model["created"], 1_700_000_000);
    }
    assert_eq!(send(&app, get("/v1/models/gpt")).await.status(), StatusCode::NOT_FOUND);

    for name in ["gpt-5", "owner/tiny2", "owner/tiny@loose", "owner/tiny@", "", "tiny"] {
        let body = body(json!({"model": name}));
        rejected(&app, body, 404, "model_not_found", "model", "owner/tiny").await;
    }
    let with_header = |model: &str, profile: &str| {
        let mut request = post(body(json!({"model": model})).to_string());
        request.headers_mut().insert("x-steersman-profile", profile.parse().unwrap());
        request
    };
    for (model, profile, status) in [
        ("owner/tiny", "strict", 200),
        ("owner/tiny@strict", "strict", 200),
        ("owner/tiny", "default", 200),
        ("owner/tiny@strict", "default", 400),
        ("owner/tiny", "loose", 404),
    ] {
        let response = send(&app, with_header(model, profile)).await;
        assert_eq!(response.status().as_u16(), status, "{model} {profile}");
        if status == 200 {
            assert_eq!(seen.last().profile, profile);
        }
    }
}
