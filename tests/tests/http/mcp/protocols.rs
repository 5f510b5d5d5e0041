//! What responses, Anthropic's messages and Ollama's chats show of calls that the server ran.

use axum::http::Method;
use serde_json::{Value, json};
use steersman_engine::request::Request;

use super::{app_that, calls, config, folder, program, reads, requests};
use crate::*;

async fn posted(app: &Router, path: &str, body: Value) -> Response {
    let request = axum::http::Request::builder().method(Method::POST).uri(path);
    let request = request.header(header::CONTENT_TYPE, "application/json");
    send(app, request.body(body.to_string().into()).unwrap()).await
}

#[tokio::test]
async fn responses_have_calls_as_items_and_keep_them_in_the_conversation() {
    let (folder, stored) = (folder(), folder());
    let config = config(program(folder.path()));
    enable_log();
    let (engine, seen) = engine_that("owner/tiny", 8, reads());
    let app = steersman::app_with(engine, &config, storing_in(stored.path()));
    let request = json!({"input": "Read it.", "stream": true});
    let text = bytes(posted(&app, "/v1/responses", request).await).await;
    let text = std::str::from_utf8(&text).unwrap();
    let events: Vec<Value> = text
        .lines()
        .filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok())
        .collect();
    let of_call: Vec<_> = events
        .iter()
        .filter(|event| event["output_index"] == 2)
        .map(|event| event["type"].as_str().unwrap())
        .collect();
    let expected = [
        "response.output_item.added",
        "response.mcp_call.in_progress",
        "response.mcp_call_arguments.done",
        "response.mcp_call.completed",
        "response.output_item.done",
    ];
    assert_eq!(of_call, expected);
    let response = &events.last().unwrap()["response"];
    let output = response["output"].as_array().unwrap();
    let kinds: Vec<_> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "mcp_call", "reasoning", "message"]);
    let mut call = output[2].clone();
    assert!(call["id"].take().as_str().unwrap().starts_with("mcp_"));
    let expected = json!({
        "id": null, "type": "mcp_call", "status": "completed", "server_label": "files",
        "name": "read", "arguments": "{\"path\":\"a.txt\"}", "output": "contents of a.txt",
        "error": null, "approval_request_id": null,
    });
    assert_eq!(call, expected);
    let done = events
        .iter()
        .rfind(|event| event["output_index"] == 2 && event["type"] == "response.output_item.done");
    assert_eq!(done.unwrap()["item"], output[2]);

    // The next turn has the call, whether the server kept it or the client sends it back.
    let turns = |request: &Request| {
        let turn = |message: &steersman_engine::request::Message| {
            let calls = message.tool_calls.iter().map(|call| call.function.name.clone());
            (message.role.clone(), message.content.clone(), calls.collect::<Vec<_>>())
        };
        request.messages.iter().map(turn).collect::<Vec<_>>()
    };
    let text = |role: &str, content: &str| (role.to_string(), content.to_string(), Vec::new());
    let mut asks = text("assistant", "Let me look.");
    asks.2.push("files__read".into());
    let expected = [
        text("user", "Read it."),
        asks,
        text("tool", "contents of a.txt"),
        text("assistant", "It returned: contents of a.txt"),
        text("user", "And now?"),
    ];
    let next = json!({"input": "And now?", "previous_response_id": response["id"]});
    posted(&app, "/v1/responses", next).await;
    assert_eq!(turns(&seen.last()), expected);
    let mut items = vec![json!({"role": "user", "content": "Read it."})];
    items.extend(output.clone());
    items.push(json!({"role": "user", "content": "And now?"}));
    posted(&app, "/v1/responses", json!({"input": items})).await;
    let sent_back: Vec<_> = turns(&seen.last())
        .into_iter()
        .map(|(role, content, calls)| (role, content.trim().to_string(), calls))
        .collect();
    assert_eq!(sent_back, expected);
}

#[tokio::test]
async fn a_failed_call_is_an_item_with_an_error() {
    let folder = folder();
    let (app, _) = app_that(&config(program(folder.path())), calls("files__fail", json!({})));
    let response = json_of(posted(&app, "/v1/responses", json!({"input": "Read."})).await).await;
    let call = &response["output"][2];
    assert_eq!((&call["error"], &call["output"]), (&json!("no such file"), &Value::Null));
    assert_eq!(call["status"], "failed");
}

#[tokio::test]
async fn messages_and_ollamas_chats_have_the_text_of_all_rounds() {
    let folder = folder();
    let (app, _) = app_that(&config(program(folder.path())), reads());
    let turns = json!([{"role": "user", "content": "Read it."}]);
    let request = json!({"model": "owner/tiny", "max_tokens": 100, "messages": turns});
    let message = json_of(posted(&app, "/v1/messages", request.clone()).await).await;
    let kinds = message["content"].as_array().unwrap().iter().map(|block| &block["type"]);
    assert_eq!(kinds.collect::<Vec<_>>(), ["thinking", "text", "thinking", "text"]);
    assert_eq!(message["stop_reason"], "end_turn");
    assert_eq!(message["steersman"]["tool_runs"][0]["name"], "files__read");
    let mut streamed = request;
    streamed["stream"] = true.into();
    let stream = bytes(posted(&app, "/v1/messages", streamed).await).await;
    let stream = std::str::from_utf8(&stream).unwrap();
    assert_eq!(stream.matches("event: content_block_start").count(), 4);
    assert!(!stream.contains("tool_use"), "{stream}");
    let request = json!({"model": "owner/tiny", "messages": turns, "stream": false});
    let reply = json_of(posted(&app, "/api/chat", request).await).await;
    let content = "Let me look.\n\nIt returned: contents of a.txt";
    assert_eq!(reply["message"]["content"], content);
    assert_eq!(reply["steersman"]["tool_runs"][0]["name"], "files__read");
}

#[tokio::test]
async fn counted_tokens_include_offered_tools() {
    let folder = folder();
    let count = async |config: &ServerConfig| {
        let (app, _) = app_that(config, |_| answer());
        let turns = json!([{"role": "user", "content": "Read it."}]);
        let request = json!({"model": "owner/tiny", "messages": turns});
        let reply = posted(&app, "/v1/messages/count_tokens", request.clone()).await;
        let counted = json_of(reply).await["input_tokens"].as_u64().unwrap();
        let reply = json_of(posted(&app, "/tokenize", request).await).await;
        [counted, reply["count"].as_u64().unwrap()]
    };
    let without = count(&ServerConfig::default()).await;
    let with = count(&config(program(folder.path()))).await;
    for (with, without) in with.into_iter().zip(without) {
        assert!(with > without + 100, "{with} {without}");
    }
}

/// The result of a tool was continued as if the model had begun it.
#[tokio::test]
async fn a_round_ends_the_message_that_the_client_wants_continued() {
    let folder = folder();
    let (app, seen) = app_that(&config(program(folder.path())), reads());
    let mut body = body(json!({"continue_final_message": true}));
    let begun = json!({"role": "assistant", "content": "Well. ", "reasoning_content": "First, "});
    body["messages"].as_array_mut().unwrap().push(begun);
    let (status, reply) = chat(&app, body).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    let [first, second] = &requests(&seen)[..] else { panic!("two rounds") };
    assert!(first.continues.is_some() && second.continues.is_none());
    let [_, turn, result] = &second.messages[..] else { panic!("{:?}", second.messages) };
    assert_eq!(turn.content, "Well. Let me look.");
    assert_eq!(turn.reasoning_content.as_deref(), Some("First, I look."));
    assert_eq!((turn.tool_calls.len(), result.role.as_str()), (1, "tool"));
}
