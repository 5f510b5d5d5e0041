//! Anthropic's protocol: messages, streams, tools, counts of tokens, errors.

use axum::http::{StatusCode, header};
use serde_json::{Value, json};
use steersman::config::ServerConfig;
use steersman_engine::policy::SavePoint;
use steersman_engine::request::{
    Event, FinishReason, Form, FunctionCall, ResponseFormat, ToolCall, ToolChoice,
};
use steersman_engine::{Error, RequestError};

use crate::*;

fn messages(path: &str, body: &Value) -> axum::http::Request<Body> {
    axum::http::Request::post(path)
        .header(header::CONTENT_TYPE, "application/json")
        .header("anthropic-version", "2023-06-01")
        .header("x-api-key", "sk-one")
        .body(body.to_string().into())
        .unwrap()
}

fn with(extra: Value) -> Value {
    body(json!({"max_tokens": 100, "extra": null})).merged(extra)
}

trait Merged {
    fn merged(self, extra: Value) -> Value;
}

impl Merged for Value {
    fn merged(mut self, extra: Value) -> Value {
        self.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        self
    }
}

async fn create(app: &Router, body: Value) -> (StatusCode, Value) {
    let response = send(app, messages("/v1/messages?beta=true", &body)).await;
    (response.status(), json_of(response).await)
}

/// The events of a stream, each checked to have its type as its name.
async fn events(app: &Router, body: Value) -> Vec<Value> {
    let response = send(app, messages("/v1/messages", &body)).await;
    assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
    let text = String::from_utf8(bytes(response).await.to_vec()).unwrap();
    let event = |event: &str| {
        let (name, data) = event.split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(name, format!("event: {}", data["type"].as_str().unwrap()));
        data
    };
    text.split_terminator("\n\n").map(event).collect()
}

fn call() -> ToolCall {
    let arguments = json!({"city": "Rome"}).as_object().unwrap().clone();
    let function = FunctionCall { name: "weather".into(), arguments: arguments.into() };
    ToolCall { id: "call_a".into(), kind: "function".into(), function }
}

fn reasons_and_calls() -> Vec<Act> {
    vec![
        Say(Event::Reasoning("The city".into())),
        Say(Event::Reasoning(" is Rome.".into())),
        Say(Event::Answer("I look.".into())),
        Say(Event::ToolCall(call())),
        finished(FinishReason::ToolCalls),
    ]
}

#[tokio::test]
async fn message_has_anthropics_format() {
    let (app, seen) = app(reasons_and_calls);
    let (status, mut reply) = create(&app, with(json!({}))).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    let id = reply["id"].take();
    assert!(id.as_str().unwrap().starts_with("msg_"));
    let expected = json!({
        "id": null, "type": "message", "role": "assistant", "model": "owner/tiny",
        "content": [
            {"type": "thinking", "thinking": "The city is Rome.", "signature": id},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Rome"}}
        ],
        "stop_reason": "tool_use", "stop_sequence": null,
        "usage": {"input_tokens": 4, "cache_creation_input_tokens": 0,
                  "cache_read_input_tokens": 16, "output_tokens": 12,
                  "output_tokens_details": {"thinking_tokens": USAGE.reasoning_tokens}},
        "steersman": {"profile": "default", "notes": ["routed: plain"],
            "labels": {"tier": "plain"}}
    });
    assert_eq!(reply, expected);
    assert_eq!(seen.last().reasoning, Some(false), "thinking is off unless it is asked for");
}

#[tokio::test]
async fn stream_has_all_event_types_in_order() {
    let (app, _) = app(reasons_and_calls);
    let mut events = events(&app, with(json!({"stream": true}))).await;
    let id = events[0]["message"]["id"].take();
    let usage = |output: u32| {
        let thinking = if output == 0 { 0 } else { USAGE.reasoning_tokens };
        json!({"input_tokens": 4, "cache_creation_input_tokens": 0,
               "cache_read_input_tokens": 16, "output_tokens": output,
               "output_tokens_details": {"thinking_tokens": thinking}})
    };
    let start = |index: u32, block: Value| json!({"type": "content_block_start", "index": index, "content_block": block});
    let delta = |index: u32, delta: Value| json!({"type": "content_block_delta", "index": index, "delta": delta});
    let stop = |index: u32| json!({"type": "content_block_stop", "index": index});
    let expected = vec![
        json!({"type": "message_start", "message": {
            "id": null, "type": "message", "role": "assistant", "model": "owner/tiny",
            "content": [], "stop_reason": null, "stop_sequence": null, "usage": usage(0)
        }}),
        json!({"type": "ping"}),
        start(0, json!({"type": "thinking", "thinking": "", "signature": ""})),
        delta(0, json!({"type": "thinking_delta", "thinking": "The city"})),
        delta(0, json!({"type": "thinking_delta", "thinking": " is Rome."})),
        delta(0, json!({"type": "signature_delta", "signature": id})),
        stop(0),
        start(1, json!({"type": "text", "text": ""})),
        delta(1, json!({"type": "text_delta", "text": "I look."})),
        stop(1),
        start(2, json!({"type": "tool_use", "id": "call_a", "name": "weather", "input": {}})),
        delta(2, json!({"type": "input_json_delta", "partial_json": "{\"city\":\"Rome\"}"})),
        stop(2),
        json!({"type": "message_delta",
               "delta": {"stop_reason": "tool_use", "stop_sequence": null}, "usage": usage(12),
               "steersman": {"profile": "default", "notes": ["routed: plain"],
            "labels": {"tier": "plain"}}}),
        json!({"type": "message_stop"}),
    ];
    assert_eq!(events, expected);
}

/// The shape of Claude Code's requests.
#[tokio::test]
async fn conversation_reaches_the_engine() {
    let (app, seen) = app(answer);
    let ephemeral = json!({"type": "ephemeral"});
    let (status, reply) = create(
        &app,
        with(json!({
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: a=1;"},
                {"type": "text", "text": "Be brief.", "cache_control": ephemeral}
            ],
            "messages": [
                {"role": "system", "content": "Early."},
                {"role": "user", "content": [
                    {"type": "text", "text": "a"},
                    {"type": "text", "text": "b", "cache_control": ephemeral}
                ]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    {"type": "text", "text": "I look.", "citations": null},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"z": 1, "a": [2]}},
                    {"type": "tool_use", "id": "c2", "name": "f", "input": {}}
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
                    {"type": "tool_result", "tool_use_id": "c2", "is_error": true,
                     "content": [{"type": "text", "text": "two"}]},
                    {"type": "text", "text": "go on"}
                ]},
                {"role": "system", "content": [{"type": "text", "text": "Late."}]},
                {"role": "assistant", "content": "ok"},
                {"role": "user", "content": "c"}
            ],
            "tools": [
                {"name": "f", "description": "d", "input_schema": {"type": "object"},
                 "cache_control": ephemeral},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
            ],
            "tool_choice": {"type": "auto"}, "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"}, "metadata": {"user_id": "u"},
            "temperature": 1, "top_k": 5, "stop_sequences": ["X"], "max_tokens": 32000,
        })),
    )
    .await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    let request = seen.last();
    let call = |id: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}});
    let expected = json!([
        {"role": "system", "content": "x-anthropic-billing-header: a=1;\n\nBe brief."},
        {"role": "system", "content": "Early."},
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm",
         "tool_calls": [call("c1", json!({"z": 1, "a": [2]})), call("c2", json!({}))]},
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
        {"role": "tool", "content": "Error: two", "tool_call_id": "c2"},
        {"role": "user", "content": "go on"},
        {"role": "system", "content": "Late."},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "c"}
    ]);
    assert_eq!(serde_json::to_value(&request.messages).unwrap(), expected);
    let function = json!({"name": "f", "description": "d", "parameters": {"type": "object"}});
    assert_eq!(request.tools, [json!({"type": "function", "function": function})]);
    assert_eq!((request.reasoning, request.reasoning_budget), (None, Some(8192)));
    assert_eq!((request.max_tokens, request.sampling.top_k), (Some(32000), Some(5)));
    assert_eq!(request.stop, ["X"]);
    let retain: Vec<_> = request.retain.iter().map(|entry| (entry.at, entry.seconds)).collect();
    let (system, turns) = ((SavePoint::System, 300), (SavePoint::Turns, 300));
    assert_eq!(retain, [system, system, turns]);
    assert!(reply["steersman"]["notes"][0].as_str().unwrap().starts_with("tools[1]: left out"));
}

/// Before, they were dropped without a word.
#[tokio::test]
async fn unknown_fields_of_blocks_are_noted() {
    let (app, seen) = app(answer);
    let text = |text: &str| json!({"type": "text", "text": text, "citations": null});
    let body = with(json!({
        "system": [{"type": "text", "text": "Be brief.", "style": "terse"}],
        "thinking": {"type": "adaptive", "display": "summarized", "depth": 3},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "colour": "red"}, text("b")]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s", "depth": 1},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {}, "toolset_name": "t",
                 "caller": {"type": "direct"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "is_error": false,
                 "content": [{"type": "text", "text": "one", "colour": "blue"}]}]}
        ]
    }));
    let (status, reply) = create(&app, body).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    let contents: Vec<_> = seen.last().messages.into_iter().map(|m| m.content).collect();
    assert_eq!(contents, ["Be brief.", "a\n\nb", "", "one"], "the conversation is whole");
    let left_out = "left out, because the field is not known";
    let expected = [
        format!("thinking.depth: {left_out}"),
        format!("system[0].style: {left_out}"),
        format!("messages[0].content[0].colour: {left_out}, also in 1 other place"),
        format!("messages[1].content[0].depth: {left_out}"),
        format!("messages[1].content[1].toolset_name: {left_out}"),
        "routed: plain".into(),
    ];
    assert_eq!(reply["steersman"]["notes"], json!(expected));
}

/// Before, such a tool was left out, with a note that told the client to offer it as a function.
#[tokio::test]
async fn tools_as_openai_writes_them_are_rejected() {
    let (app, _) = app(answer);
    let tool = json!({"type": "function", "function": {"name": "book", "parameters": {}}});
    let (status, reply) = create(&app, with(json!({"tools": [tool]}))).await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{reply}");
    let message = reply["error"]["message"].as_str().unwrap();
    assert!(message.contains("tools[0]") && message.contains("`input_schema`"), "{message}");
}

#[tokio::test]
async fn thinking_has_three_types() {
    let (app, seen) = app(answer);
    for (thinking, reasoning, budget) in [
        (Value::Null, Some(false), None),
        (json!({"type": "disabled"}), Some(false), None),
        (json!({"type": "adaptive"}), None, None),
        (json!({"type": "adaptive", "display": "summarized"}), None, None),
        (json!({"type": "enabled", "budget_tokens": 2000}), Some(true), Some(2000)),
    ] {
        let (status, reply) = create(&app, with(json!({"thinking": thinking}))).await;
        assert_eq!(status, StatusCode::OK, "{reply}");
        let request = seen.last();
        assert_eq!((request.reasoning, request.reasoning_budget), (reasoning, budget));
    }
}

#[tokio::test]
async fn form_and_tool_choice_reach_the_engine() {
    let (app, seen) = app(answer);
    let tools = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    for (choice, is_required, allowed, is_single) in [
        (json!({"type": "auto", "disable_parallel_tool_use": true}), false, None, true),
        (json!({"type": "any"}), true, None, false),
        (json!({"type": "tool", "name": "f"}), true, Some(vec!["f".to_string()]), false),
    ] {
        let (status, reply) =
            create(&app, with(json!({"tools": tools, "tool_choice": choice}))).await;
        assert_eq!(status, StatusCode::OK, "{reply}");
        let expected = ToolChoice { is_required, allowed, is_single };
        assert_eq!(seen.last().tool_choice, expected);
    }
    let hidden = with(json!({"tools": tools, "tool_choice": {"type": "none"}}));
    assert_eq!(create(&app, hidden).await.0, StatusCode::OK);
    assert!(seen.last().tools.is_empty());
    let format = json!({"type": "json_schema", "schema": {"type": "object"}});
    create(&app, with(json!({"output_config": {"format": format}}))).await;
    let form = Form::JsonSchema(json!({"type": "object"}));
    let expected = ResponseFormat { field: "output_config.format.schema", form };
    assert_eq!(seen.last().response_format, Some(expected));
}

#[tokio::test]
async fn reason_for_stopping_is_in_anthropics_words() {
    type Script = fn() -> Vec<Act>;
    let cases: [(Script, &str, Value); 3] = [
        (|| vec![finished(FinishReason::Stop)], "end_turn", Value::Null),
        (|| vec![finished(FinishReason::Length)], "max_tokens", Value::Null),
        (|| vec![finished(FinishReason::StopString("X".into()))], "stop_sequence", json!("X")),
    ];
    for (script, reason, sequence) in cases {
        let (app, _) = app(script);
        let (_, reply) = create(&app, with(json!({}))).await;
        assert_eq!((&reply["stop_reason"], &reply["stop_sequence"]), (&json!(reason), &sequence));
    }
}

#[tokio::test]
async fn tokens_are_counted_as_in_the_prompt() {
    let (app, seen) = app(answer);
    let count = |body: Value| {
        let request = messages("/v1/messages/count_tokens?beta=true", &body);
        let app = app.clone();
        async move { json_of(send(&app, request).await).await["input_tokens"].as_u64().unwrap() }
    };
    let short = count(body(json!({}))).await;
    assert!((5..40).contains(&short), "{short}");
    let tools = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    assert!(count(body(json!({"tools": tools}))).await > short + 20);
    let text = "one two three ".repeat(100);
    let long = json!({"messages": [{"role": "user", "content": text}]});
    assert!(count(body(long)).await > short + 250);
    assert!(seen.requests.lock().unwrap().is_empty(), "nothing reaches the engine's queue");
}

#[tokio::test]
async fn errors_have_anthropics_format() {
    let config = ServerConfig { api_keys: vec!["sk-one".into()], ..ServerConfig::default() };
    let (app, _) = app_with(&config, answer);
    let image = json!({"type": "image", "source": {"type": "base64"}});
    let user = |block: Value| json!({"messages": [{"role": "user", "content": [block]}]});
    for (extra, status, kind, words) in [
        (json!({"model": "gpt"}), 404, "not_found_error", "no model `gpt`"),
        (json!({"messages": []}), 400, "invalid_request_error", "messages"),
        (json!({"colour": 1}), 400, "invalid_request_error", "`colour`"),
        (json!({"max_tokens": 0}), 400, "invalid_request_error", "max_tokens"),
        (
            json!({"max_tokens": 9_223_372_036_854_775_808_u64}),
            400,
            "invalid_request_error",
            "max_tokens: is 9223372036854775808, expected a whole number of at most",
        ),
        (
            json!({"max_tokens": 1e300}),
            400,
            "invalid_request_error",
            "max_tokens: is 1e300, expected",
        ),
        (
            json!({"thinking": {"type": "enabled"}}),
            400,
            "invalid_request_error",
            "thinking.budget_tokens: missing",
        ),
        (
            json!({"thinking": {"type": "enabled", "budget_tokens": -1}}),
            400,
            "invalid_request_error",
            "thinking.budget_tokens: is -1",
        ),
        (
            json!({"tool_choice": {"type": "tool"}}),
            400,
            "invalid_request_error",
            "tool_choice.name",
        ),
        (json!({"output_config": {"format": {}}}), 400, "invalid_request_error", "output_config"),
        (
            user(json!({"type": "text", "text": 5})),
            400,
            "invalid_request_error",
            "messages[0].content[0].text: is 5, expected a string",
        ),
        (user(image), 400, "invalid_request_error", "messages[0].content[0].type: is `image`"),
        (
            user(json!({"type": "tool_use", "id": "a", "name": "b", "input": {}})),
            400,
            "invalid_request_error",
            "messages[0].content[0].type",
        ),
    ] {
        let (got, reply) = create(&app, with(extra)).await;
        assert_eq!(got.as_u16(), status, "{reply}");
        assert_eq!((&reply["type"], &reply["error"]["type"]), (&json!("error"), &json!(kind)));
        let message = reply["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "`{words}` is not in `{message}`");
    }
    // By this code, Anthropic's tool runners know that they have to send whole conversations.
    let (_, reply) = create(&app, with(json!({"thread": {"type": "create"}}))).await;
    let details = json!({"error_code": "thread_unsupported_request", "unsupported": ["thread"]});
    assert_eq!(reply["error"]["details"], details);
    let mut request = messages("/v1/messages", &with(json!({})));
    request.headers_mut().insert("x-api-key", "sk-two".parse().unwrap());
    let response = send(&app, request).await;
    assert_eq!(response.status(), StatusCode::UNAUTHORIZED);
    assert_eq!(json_of(response).await["error"]["type"], "authentication_error");
}

#[tokio::test]
async fn cache_control_protects_saved_state() {
    let (app, seen) = app(answer);
    let hour = json!({"type": "ephemeral", "ttl": "1h"});
    let result = json!([{"type": "text", "text": "one", "cache_control": hour}]);
    let user = |content: Value| json!({"role": "user", "content": content});
    for (extra, expected) in [
        (json!({}), vec![]),
        (json!({"cache_control": null}), vec![]),
        (json!({"cache_control": {"type": "ephemeral"}}), vec![(SavePoint::Prompt, 300)]),
        (
            json!({"messages": [
                user(json!([{"type": "text", "text": "a", "cache_control": hour}])),
                {"role": "assistant", "content": [
                    {"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                user(json!([{"type": "tool_result", "tool_use_id": "c", "content": result}])),
            ]}),
            vec![(SavePoint::Turns, 3600), (SavePoint::Prompt, 3600)],
        ),
    ] {
        let (status, reply) = create(&app, with(extra)).await;
        assert_eq!(status, StatusCode::OK, "{reply}");
        let retain = seen.last().retain;
        let retain: Vec<_> = retain.iter().map(|entry| (entry.at, entry.seconds)).collect();
        assert_eq!(retain, expected);
    }
    for (extra, param) in [
        (json!({"cache_control": {"type": "forever"}}), "cache_control"),
        (
            json!({"system": [{"type": "text", "text": "a",
                               "cache_control": {"type": "ephemeral", "ttl": "2d"}}]}),
            "system[0].cache_control",
        ),
    ] {
        let (status, reply) = create(&app, with(extra)).await;
        assert_eq!((status, &reply["error"]["param"]), (StatusCode::BAD_REQUEST, &json!(param)));
    }
}

/// Clients recognize the words and make the conversation shorter.
#[tokio::test]
async fn prompt_that_is_too_long_has_the_words_that_clients_know() {
    fn too_long() -> Vec<Act> {
        let error = RequestError::ContextTooLong { tokens: 99, limit: 10 };
        vec![Say(Event::Failed(Error::Request(error)))]
    }
    let (app, _) = app(too_long);
    for stream in [false, true] {
        let (status, reply) = create(&app, with(json!({"stream": stream}))).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{reply}");
        let message = reply["error"]["message"].as_str().unwrap();
        assert!(message.starts_with("prompt is too long: "), "{message}");
    }
}

#[tokio::test]
async fn late_error_is_the_last_event() {
    fn fails_late() -> Vec<Act> {
        vec![Say(Event::Answer("Ro".into())), Say(Event::Failed(Error::Array("x".into())))]
    }
    let (app, _) = app(fails_late);
    let events = events(&app, with(json!({"stream": true}))).await;
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("api_error")));
}

#[tokio::test]
async fn input_of_a_call_is_streamed_while_it_is_written() {
    let (app, _) = app(|| call_in_pieces(FinishReason::ToolCalls));
    let events = events(&app, with(json!({"stream": true}))).await;
    let kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let block =
        ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"];
    assert_eq!(kinds[2..6], block);
    assert_eq!(
        events[2]["content_block"],
        json!({"type": "tool_use", "id": "call_a", "name": "weather", "input": {}})
    );
    assert_eq!(
        events[4]["delta"],
        json!({"type": "input_json_delta", "partial_json": "\"Rome\"}"})
    );
    assert_eq!(
        (&events[6]["content_block"]["id"], &events[6]["index"]),
        (&json!("call_b"), &json!(1))
    );
}
