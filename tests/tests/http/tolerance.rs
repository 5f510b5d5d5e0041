//! What clients send without meaning anything by it is accepted, and what is left out is noted.

use axum::http::StatusCode;
use serde_json::{Value, json};
use steersman_engine::policy::SamplingPatch;

use crate::*;

/// Every case is from the recorded requests of a client.
#[tokio::test]
async fn fields_that_ask_for_nothing_are_accepted() {
    let (app, seen) = app(answer);
    for extra in [
        json!({"unheard_of": null, "adapters": null, "draft_model": null}),
        json!({"model": null}),
        json!({"model": "owner/tiny:latest"}),
        json!({"model": "owner/tiny@strict:latest"}),
        json!({"max_tokens": -1, "top_k": -1}),
        json!({"max_tokens": 3.0, "top_k": 4.0, "seed": 5.0}),
        json!({"store": true, "service_tier": "priority", "verbosity": "low", "user": "u"}),
        json!({"metadata": {"k": "v"}, "parallel_tool_calls": true, "safety_identifier": "s"}),
        json!({"stream": true, "stream_options": {"include_usage": true,
            "continuous_usage_stats": true, "include_obfuscation": false, "other": null}}),
        json!({"messages": [{"role": "user", "content": "a", "unheard_of": null}]}),
        json!({"messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": null},
            {"role": "user", "content": "b"},
            {"role": "assistant"},
            {"role": "user", "content": "c"}
        ]}),
    ] {
        let response = send(&app, post(body(extra.clone()).to_string())).await;
        let status = response.status();
        let text = String::from_utf8(bytes(response).await.to_vec()).unwrap();
        assert_eq!(status, StatusCode::OK, "{extra}: {text}");
    }
    let (_, reply) = chat(&app, body(json!({"model": "owner/tiny@strict:latest"}))).await;
    assert_eq!(reply["steersman"]["profile"], "strict");
    let last = |extra: Value| {
        let (app, seen) = (app.clone(), seen.clone());
        async move {
            assert_eq!(chat(&app, body(extra)).await.0, StatusCode::OK);
            seen.last()
        }
    };
    let request = last(json!({"max_tokens": -1, "top_k": -1})).await;
    assert_eq!((request.max_answer_tokens, request.sampling.top_k), (None, Some(0)));
    let request = last(json!({"max_tokens": 3.0, "temperature": 1, "seed": 5.0})).await;
    assert_eq!((request.max_answer_tokens, request.seed), (Some(3), Some(5)));
    let sampling = SamplingPatch { temperature: Some(1.0), ..SamplingPatch::default() };
    assert_eq!(request.sampling, sampling);
}

/// Before, one malformed call blocked every later turn of its conversation.
#[tokio::test]
async fn malformed_call_in_a_history_blocks_no_later_turn() {
    let (app, seen) = app(answer);
    for (arguments, expected, notes) in [
        (json!("{\"a\": 1}"), json!({"a": 1}), 1),
        (json!({"a": 1}), json!({"a": 1}), 1),
        (json!(""), json!({}), 1),
        (json!(null), json!({}), 1),
        (json!("[1]"), json!({"arguments": [1]}), 2),
        (json!("{\"a\": "), json!({"arguments": "{\"a\": "}), 2),
    ] {
        let function = json!({"name": "f", "arguments": arguments, "provider_specific_fields": {},
                              "parsed_arguments": {"a": 1}});
        let call = json!({"id": "c", "type": "function", "function": function,
                          "provider_specific_fields": {"signature": "x"}});
        let messages = json!([
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": null, "tool_calls": [call],
             "provider_specific_fields": {"citations": null}, "parsed": {"a": 1}},
            {"role": "tool", "tool_call_id": "c", "content": null},
        ]);
        let (status, reply) = chat(&app, body(json!({"messages": messages}))).await;
        assert_eq!(status, StatusCode::OK, "{reply}");
        let call = &seen.last().messages[1].tool_calls[0];
        assert_eq!(Value::from(call.function.arguments.clone()), expected);
        let said = reply["steersman"]["notes"].as_array().unwrap();
        assert_eq!(said.len(), notes, "{said:?}");
        if notes > 1 {
            assert!(said[0].as_str().unwrap().starts_with("messages[1].tool_calls[0].function."));
        }
    }
}

#[tokio::test]
async fn tools_of_other_vendors_are_left_out_with_a_note() {
    let (app, seen) = app(answer);
    let tools = json!([
        {"type": "web_search", "search_context_size": "low"},
        {"type": "function", "function": {"name": "f"}},
        {"type": "namespace", "name": "mcp", "tools": []},
    ]);
    let (status, reply) = chat(&app, body(json!({"tools": tools}))).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    assert_eq!(Value::from(seen.last().tools), json!([tools[1]]));
    let notes = reply["steersman"]["notes"].as_array().unwrap();
    assert!(notes[0].as_str().unwrap().starts_with("tools[0]: left out"), "{notes:?}");
    assert!(notes[1].as_str().unwrap().contains("`namespace`"), "{notes:?}");
}

#[tokio::test]
async fn routes_of_clients_work_without_v1() {
    let (app, _) = app(answer);
    for path in ["/v1/chat/completions", "/chat/completions"] {
        let mut request = post(body(json!({})).to_string());
        *request.uri_mut() = path.parse().unwrap();
        assert_eq!(send(&app, request).await.status(), StatusCode::OK, "{path}");
    }
    for path in ["/models", "/v1/models", "/models/owner/tiny", "/v1/models/owner/tiny:latest"] {
        let request = axum::http::Request::get(path).body(Body::empty()).unwrap();
        assert_eq!(send(&app, request).await.status(), StatusCode::OK, "{path}");
    }
}

/// Before, it was refused when its turn came: 189 s later, in one case.
#[tokio::test]
async fn prompt_that_is_too_long_is_refused_before_its_turn() {
    let (app, seen) = app(|| vec![UntilCancelled]);
    let running = post(body(json!({"stream": true})).to_string());
    let running = tokio::spawn({
        let app = app.clone();
        async move { send(&app, running).await }
    });
    while seen.requests.lock().unwrap().is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let long = json!({"messages": [{"role": "user", "content": "one two three ".repeat(12_000)}]});
    let code = "context_length_exceeded";
    rejected(&app, body(long), 400, code, "messages", "context holds 32767").await;
    assert_eq!(seen.requests.lock().unwrap().len(), 1);
    running.abort();
}

/// Before, clients read the 404 of a route as that of a model.
#[tokio::test]
async fn unknown_route_does_not_read_like_a_missing_model() {
    let (app, _) = app(answer);
    let mut request = post(body(json!({})).to_string());
    *request.uri_mut() = "/v1/v1/chat/completions".parse().unwrap();
    let response = send(&app, request).await;
    assert_eq!(response.status(), StatusCode::NOT_FOUND);
    let error = json_of(response).await["error"].clone();
    assert_eq!(error["code"], "route_not_found");
    let message = error["message"].as_str().unwrap();
    assert!(!message.contains("model") && message.contains("base URL"), "{message}");
    // A file of the repository is nothing to someone who installed a package.
    assert!(message.contains("GET /docs") && !message.contains(".md"), "{message}");
}

/// F24: OpenAI's range of `top_p` begins with 0, which was refused. The smallest set of tokens has one.
#[tokio::test]
async fn a_top_p_of_zero_keeps_the_likeliest_token() {
    let (app, seen) = app(answer);
    for value in [json!(0), json!(0.0), json!(1e-40)] {
        assert_eq!(chat(&app, body(json!({"top_p": value}))).await.0, StatusCode::OK);
        let top_p = seen.last().sampling.top_p.unwrap();
        assert!(top_p > 0.0 && top_p < 1e-30, "{top_p}");
    }
    for value in [json!(-0.1), json!(1.1)] {
        let body = body(json!({"top_p": value}));
        rejected(&app, body, 400, "invalid_value", "top_p", "at most 1").await;
    }
}

/// F27: notes said that such tools run at their vendor only, though the client may run them.
#[tokio::test]
async fn notes_on_tools_that_are_left_out_are_true() {
    let (app, _) = app(answer);
    for kind in ["custom", "bash_20250124", "web_search"] {
        let tools = json!({"tools": [{"type": kind, "name": "f"}]});
        let (_, reply) = chat(&app, body(tools)).await;
        let note = reply["steersman"]["notes"][0].as_str().unwrap();
        assert!(note.contains(&format!("`{kind}`")) && note.contains("functions only"), "{note}");
        assert!(!note.contains("vendor"), "{note}");
    }
}
