//! What the server sends, it accepts: each reply of a protocol is a part of that protocol's next conversation.

use axum::http::{StatusCode, header};
use serde_json::{Value, json};
use steersman_engine::request::{FunctionCall, Message, ToolCall};

use crate::*;

/// Reasoning, an answer and two calls.
fn all_parts() -> Vec<Act> {
    let mut acts = answer();
    acts.pop();
    acts.extend(call_in_pieces(FinishReason::ToolCalls));
    acts
}

/// An answer that a limit cut off.
fn cut() -> Vec<Act> {
    vec![
        Say(Event::Reasoning("hm".into())),
        Say(Event::Answer("Ro".into())),
        finished(FinishReason::Length),
    ]
}

/// Reasoning that a limit cut off.
fn only_reasoning() -> Vec<Act> {
    vec![Say(Event::Reasoning("hm".into())), finished(FinishReason::Length)]
}

fn nothing() -> Vec<Act> {
    vec![finished(FinishReason::Stop)]
}

async fn post_to(app: &Router, path: &str, body: &Value) -> Value {
    let request = axum::http::Request::post(path)
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into())
        .unwrap();
    let response = send(app, request).await;
    let status = response.status();
    let reply = json_of(response).await;
    assert_eq!(status, StatusCode::OK, "{path} {body}: {reply}");
    reply
}

/// The assistant's part of the last conversation: reasoning, text and calls, without what separates rounds.
fn said(messages: &[Message]) -> (String, String, Vec<Value>) {
    let assistant = messages.iter().filter(|message| message.role == "assistant");
    let (mut reasoning, mut text, mut calls) = (String::new(), String::new(), Vec::new());
    for message in assistant {
        reasoning += message.reasoning_content.as_deref().unwrap_or_default();
        text += &message.content;
        let of = |ToolCall { function: FunctionCall { name, arguments }, .. }: &ToolCall| {
            json!([name, arguments])
        };
        calls.extend(message.tool_calls.iter().map(of));
    }
    (reasoning, text, calls)
}

/// F28 and its kind: parts that replies contain, such as a refusal, were refused in the next request.
#[tokio::test]
async fn every_reply_is_accepted_as_history() {
    let user = json!({"role": "user", "content": "Hi"});
    for (script, reasoning, text, calls) in [
        (answer as fn() -> Vec<Act>, "It is Rome.", "Rome\n.", 0),
        (all_parts, "It is Rome.", "Rome\n.", 2),
        (cut, "hm", "Ro", 0),
        (only_reasoning, "hm", "", 0),
        (nothing, "", "", 0),
    ] {
        let (app, seen) = app(script);
        let check = |path: &str, has_reasoning: bool| {
            let (found, answer, found_calls) = said(&seen.last().messages);
            assert_eq!(answer, text, "{path}");
            assert_eq!(found_calls, vec![json!(["weather", {"town": "Rome"}]); calls], "{path}");
            assert!(!has_reasoning || found == reasoning, "{path}: {found}");
        };
        let result = |id: &Value| json!({"role": "tool", "tool_call_id": id, "content": "sunny"});

        let path = "/v1/chat/completions";
        let reply = post_to(&app, path, &json!({"messages": [user]})).await;
        let message = &reply["choices"][0]["message"];
        let mut messages = vec![user.clone(), message.clone()];
        let called = message["tool_calls"].as_array().into_iter().flatten();
        messages.extend(called.map(|call| result(&call["id"])));
        messages.push(user.clone());
        post_to(&app, path, &json!({"messages": messages})).await;
        check(path, true);

        let path = "/v1/responses";
        let reply = post_to(&app, path, &json!({"input": [user]})).await;
        let mut input = vec![user.clone()];
        let output = reply["output"].as_array().unwrap();
        input.extend(output.iter().cloned());
        let called = output.iter().filter(|item| item["type"] == "function_call");
        input.extend(called.map(|call| {
            json!({"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"})
        }));
        input.push(user.clone());
        post_to(&app, path, &json!({"input": input})).await;
        check(path, true);

        let path = "/v1/messages";
        let reply = post_to(
            &app,
            path,
            &json!({"messages": [user], "max_tokens": 9,
                    "thinking": {"type": "enabled", "budget_tokens": 1024}}),
        )
        .await;
        let content = &reply["content"];
        let called = content.as_array().unwrap().iter().filter(|block| block["type"] == "tool_use");
        let results = called.map(
            |block| json!({"type": "tool_result", "tool_use_id": block["id"], "content": "sunny"}),
        );
        let mut last: Vec<Value> = results.collect();
        last.push(json!({"type": "text", "text": "Hi"}));
        let messages = json!([user, {"role": "assistant", "content": content},
                              {"role": "user", "content": last}]);
        post_to(&app, path, &json!({"messages": messages, "max_tokens": 9})).await;
        check(path, true);

        let path = "/api/chat";
        let reply = post_to(&app, path, &json!({"messages": [user], "stream": false})).await;
        let message = &reply["message"];
        let mut messages = vec![user.clone(), message.clone()];
        let called = message["tool_calls"].as_array().into_iter().flatten();
        messages.extend(called.map(|call| {
            json!({"role": "tool", "tool_name": call["function"]["name"], "content": "sunny"})
        }));
        messages.push(user.clone());
        post_to(&app, path, &json!({"messages": messages, "stream": false})).await;
        check(path, true);
    }
}

/// F28: OpenAI's own assistant messages have refusals, as a field or as a part, and annotations.
#[tokio::test]
async fn refusals_and_annotations_of_other_servers_are_accepted_as_history() {
    let (app, seen) = app(answer);
    let cited = json!([{"type": "url_citation", "url_citation": {"url": "u", "title": "t",
                                                                 "start_index": 0, "end_index": 1}}]);
    for (message, text, notes) in [
        (json!({"role": "assistant", "content": null, "refusal": "I cannot."}), "I cannot.", 1),
        (
            json!({"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}),
            "I cannot.",
            1,
        ),
        (
            json!({"role": "assistant", "content": [{"type": "text", "text": "No: "},
                                                    {"type": "refusal", "refusal": "it is."}]}),
            "No: it is.",
            1,
        ),
        (json!({"role": "assistant", "content": "a", "annotations": cited}), "a", 2),
        (json!({"role": "assistant", "content": "a", "refusal": null, "annotations": []}), "a", 1),
    ] {
        let user = json!({"role": "user", "content": "Hi"});
        let (status, reply) = chat(&app, body(json!({"messages": [user, message, user]}))).await;
        assert_eq!(status, StatusCode::OK, "{message}: {reply}");
        assert_eq!(said(&seen.last().messages).1, text);
        let found = reply["steersman"]["notes"].as_array().unwrap();
        assert_eq!(found.len(), notes, "{found:?}");
    }
    for (message, param) in [
        (json!({"role": "user", "content": "a", "refusal": "no"}), "messages[0].refusal"),
        (json!({"role": "user", "content": "a", "annotations": cited}), "messages[0].annotations"),
        (
            json!({"role": "user", "content": [{"type": "refusal", "refusal": "a"}]}),
            "messages[0].content[0].type",
        ),
        (json!({"role": "assistant", "content": "a", "refusal": 3}), "messages[0].refusal"),
    ] {
        let (status, reply) = chat(&app, body(json!({"messages": [message]}))).await;
        assert_eq!((status.as_u16(), &reply["error"]["param"]), (400, &json!(param)), "{reply}");
    }
}
