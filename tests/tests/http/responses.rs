//! OpenAI's responses: items, typed events, and responses that continue others.

mod labels;

use axum::http::{Method, StatusCode, header};
use serde_json::{Value, json};
use steersman::config::{ProfileAccess, ServerConfig};
use steersman_engine::request::{
    Effort, Event, FinishReason, Form, FunctionCall, Logprob, ResponseFormat, TokenLogprob,
    ToolCall,
};
use steersman_engine::{Error, RequestError};

use crate::*;

fn request(method: Method, path: &str, body: &Value) -> axum::http::Request<Body> {
    axum::http::Request::builder()
        .method(method)
        .uri(path)
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into())
        .unwrap()
}

async fn create(app: &Router, body: Value) -> (StatusCode, Value) {
    let response = send(app, request(Method::POST, "/v1/responses", &body)).await;
    (response.status(), json_of(response).await)
}

async fn call(app: &Router, method: Method, path: &str) -> (u16, Value) {
    let response = send(app, request(method, path, &json!({}))).await;
    (response.status().as_u16(), json_of(response).await)
}

/// The events of a stream, each checked to have its type as its name, and to be numbered.
async fn events(app: &Router, body: Value) -> Vec<Value> {
    let response = send(app, request(Method::POST, "/v1/responses", &body)).await;
    assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
    let text = String::from_utf8(bytes(response).await.to_vec()).unwrap();
    let event = |(number, event): (usize, &str)| {
        let (name, data) = event.split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(name, format!("event: {}", data["type"].as_str().unwrap()));
        assert_eq!(data["sequence_number"], number);
        data
    };
    text.split_terminator("\n\n").enumerate().map(event).collect()
}

fn reasons_and_calls() -> Vec<Act> {
    let arguments = json!({"city": "Rome"}).as_object().unwrap().clone();
    let function = FunctionCall { name: "weather".into(), arguments: arguments.into() };
    let call = ToolCall { id: "call_a".into(), kind: "function".into(), function };
    vec![
        Say(Event::Reasoning("The city".into())),
        Say(Event::Reasoning(" is Rome.".into())),
        Say(Event::Answer("I look.".into())),
        Say(Event::ToolCall(call)),
        finished(FinishReason::ToolCalls),
    ]
}

/// An app that stores responses in `folder`.
fn storing(folder: &std::path::Path) -> (Router, Arc<Seen>) {
    app_wired(&ServerConfig::default(), storing_in(folder), answer)
}

#[tokio::test]
async fn response_has_an_item_for_each_part_of_the_reply() {
    let (app, _) = app(reasons_and_calls);
    let (status, reply) = create(&app, json!({"input": "Hi", "metadata": {"k": "v"}})).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    let digits = reply["id"].as_str().unwrap().strip_prefix("resp_").unwrap();
    assert_eq!(
        reply["output"],
        json!([
            {"id": format!("rs_{digits}_0"), "type": "reasoning", "summary": [],
             "content": [{"type": "reasoning_text", "text": "The city is Rome."}],
             "status": "completed"},
            {"id": format!("msg_{digits}_1"), "type": "message", "role": "assistant",
             "status": "completed", "content": [{"type": "output_text", "text": "I look.",
                                                 "annotations": [], "logprobs": []}]},
            {"id": format!("fc_{digits}_2"), "type": "function_call", "call_id": "call_a",
             "status": "completed", "name": "weather", "arguments": "{\"city\":\"Rome\"}"}
        ])
    );
    assert_eq!(
        reply["usage"],
        json!({"input_tokens": 20, "input_tokens_details": {"cached_tokens": 16},
               "output_tokens": 12, "output_tokens_details": {"reasoning_tokens": 5},
               "total_tokens": 32})
    );
    for (field, value) in [
        ("object", json!("response")),
        ("status", json!("completed")),
        ("model", json!("owner/tiny")),
        ("metadata", json!({"k": "v"})),
        ("error", Value::Null),
        ("incomplete_details", Value::Null),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("parallel_tool_calls", json!(true)),
        ("text", json!({"format": {"type": "text"}})),
        ("store", json!(false)),
    ] {
        assert_eq!(reply[field], value, "{field}");
    }
}

#[tokio::test]
async fn stream_has_typed_events_that_add_up_to_the_response() {
    let (app, _) = app(reasons_and_calls);
    let events = events(&app, json!({"input": "Hi", "stream": true})).await;
    let kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(
        kinds,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let response = &events.last().unwrap()["response"];
    let done: Vec<_> = events.iter().filter(|e| e["type"] == "response.output_item.done").collect();
    for (index, event) in done.iter().enumerate() {
        assert_eq!(
            (&event["item"], &event["output_index"]),
            (&response["output"][index], &json!(index))
        );
    }
    assert_eq!(events[0]["response"]["id"], response["id"]);
    assert_eq!(events[0]["response"]["status"], "in_progress");
    assert_eq!(events[2]["item"]["content"], json!([]));
    assert_eq!(events[4]["delta"], "The city");
    assert_eq!(events[6]["text"], "The city is Rome.");
    assert_eq!(events[15]["item"]["arguments"], "");
    assert_eq!(events[17]["arguments"], "{\"city\":\"Rome\"}");
    assert_eq!(events[17]["item_id"], response["output"][2]["id"]);
}

#[tokio::test]
async fn reasoning_is_a_summary_for_clients_that_ask_for_one() {
    let (app, seen) = app(reasons_and_calls);
    let body = json!({"input": "Hi", "stream": true,
                      "reasoning": {"effort": "low", "summary": "auto"}});
    let events = events(&app, body).await;
    let kinds: Vec<_> = events[3..8].iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(
        kinds,
        [
            "response.reasoning_summary_part.added",
            "response.reasoning_summary_text.delta",
            "response.reasoning_summary_text.delta",
            "response.reasoning_summary_text.done",
            "response.reasoning_summary_part.done",
        ]
    );
    let item = &events.last().unwrap()["response"]["output"][0];
    assert_eq!(item["summary"], json!([{"type": "summary_text", "text": "The city is Rome."}]));
    assert_eq!(item["content"], json!([]));
    let request = seen.last();
    assert_eq!((request.reasoning, request.reasoning_budget), (Some(true), Some(1024)));
    assert_eq!(request.effort, Some(Effort::Low), "the template may have a variable for it");
}

/// The shape of Codex's requests.
#[tokio::test]
async fn items_reach_the_engine_as_a_conversation() {
    let (app, seen) = app(answer);
    let text = |kind: &str, text: &str| json!([{"type": kind, "text": text}]);
    let body = json!({
        "model": "owner/tiny",
        "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "developer", "content": text("input_text", "Be brief.")},
            {"role": "user", "content": "a"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": null,
             "content": text("reasoning_text", "hm")},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f",
             "arguments": "{\"z\": 1}", "status": "completed"},
            {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{"},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "function_call_output", "call_id": "c2",
             "output": text("input_text", "two")},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "message", "role": "developer", "content": text("input_text", "Late.")},
            {"type": "message", "role": "user", "content": text("input_text", "b")}
        ],
        "tools": [
            {"type": "function", "name": "f", "description": "d", "strict": false,
             "parameters": {"type": "object"}},
            {"type": "namespace", "name": "n", "tools": []},
            {"type": "web_search", "external_web_access": false},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}
        ],
        "tool_choice": "auto", "parallel_tool_calls": false, "store": false, "stream": false,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
        "text": {"verbosity": "low"}, "client_metadata": {"x": "y"},
        "max_output_tokens": 100, "temperature": 0.5, "top_p": 0.9
    });
    let (status, reply) = create(&app, body).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    let request = seen.last();
    let function = |arguments: Value| json!({"name": "f", "arguments": arguments});
    let call = |id: &str, arguments: Value| json!({"id": id, "type": "function", "function": function(arguments)});
    let expected = json!([
        {"role": "system", "content": "You are an agent."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm",
         "tool_calls": [call("c1", json!({"z": 1})), call("c2", json!({"arguments": "{"}))]},
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
        {"role": "tool", "content": "two", "tool_call_id": "c2"},
        {"role": "developer", "content": "Late."},
        {"role": "user", "content": "b"}
    ]);
    assert_eq!(serde_json::to_value(&request.messages).unwrap(), expected);
    let function = json!({"name": "f", "description": "d", "parameters": {"type": "object"}});
    assert_eq!(request.tools, [json!({"type": "function", "function": function})]);
    assert_eq!((request.max_answer_tokens, request.tool_choice.is_single), (Some(100), true));
    let notes = reply["steersman"]["notes"].as_array().unwrap();
    assert_eq!(notes.len(), 6, "{notes:?}");
}

/// Before, they were dropped without a word.
#[tokio::test]
async fn unknown_fields_of_items_are_noted() {
    let (app, seen) = app(answer);
    let body = json!({"input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a", "colour": "red"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x", "depth": 3,
         "content": [{"type": "reasoning_text", "text": "hm"}], "status": "completed"},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "phase": "final_answer", "mood": null,
         "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}",
         "status": "completed", "namespace": "n"},
        {"type": "function_call_output", "call_id": "c1", "output": "one", "seconds": 2},
        {"type": "function_call_output", "call_id": "c2", "output": "two", "seconds": 3},
        {"role": "user", "content": "c"}
    ]});
    let (status, reply) = create(&app, body).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    assert_eq!(seen.last().messages.len(), 5, "the conversation is whole");
    let left_out = "left out, because the field is not known";
    let expected = [
        format!("input[0].content[0].colour: {left_out}"),
        format!("input[1].depth: {left_out}"),
        format!("input[3].namespace: {left_out}"),
        format!("input[4].seconds: {left_out}, also in 1 other place"),
        "routed: plain".into(),
    ];
    assert_eq!(reply["steersman"]["notes"], json!(expected));
}

fn with_logprobs() -> Vec<Act> {
    let logprob = |text: &str| {
        let one = |bytes: &[u8], logprob| TokenLogprob { bytes: bytes.to_vec(), logprob };
        let token = one(text.as_bytes(), -0.5);
        Say(Event::Logprob(Logprob { top: vec![token.clone(), one(b"x", -1.5)], token }))
    };
    let mut acts = vec![
        Say(Event::Reasoning("hm".into())),
        logprob("I"),
        Say(Event::Answer("I".into())),
        logprob(" lo"),
        logprob("ok"),
        Say(Event::Answer(" look".into())),
        // The tag of a call has no text.
        logprob("<tool_call>"),
    ];
    acts.extend(call_in_pieces(FinishReason::ToolCalls).drain(..3));
    acts.extend([
        logprob("<tool_call>"),
        Say(Event::Reasoning("hm".into())),
        logprob("So"),
        Say(Event::Answer("So".into())),
        logprob("<|im_end|>"),
        finished(FinishReason::Stop),
    ]);
    acts
}

fn tokens(logprobs: &Value) -> Vec<&str> {
    let all = logprobs.as_array().unwrap().iter();
    all.map(|logprob| logprob["token"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn logprobs_belong_to_the_text_of_their_tokens() {
    let (app, seen) = app(with_logprobs);
    let body = json!({"input": "Hi", "include": ["message.output_text.logprobs"],
                      "top_logprobs": 2});
    let (status, reply) = create(&app, body.clone()).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    assert_eq!((seen.last().logprobs, &reply["top_logprobs"]), (Some(2), &json!(2)));
    let logprobs = |item: usize| &reply["output"][item]["content"][0]["logprobs"];
    let one = |token: &str, logprob: f32| json!({"token": token, "logprob": logprob, "bytes": token.as_bytes()});
    let mut expected = one("I", -0.5);
    expected["top_logprobs"] = json!([one("I", -0.5), one("x", -1.5)]);
    assert_eq!(logprobs(1)[0], expected);
    assert_eq!(tokens(logprobs(1)), ["I", " lo", "ok", "<tool_call>"]);
    assert_eq!(tokens(logprobs(4)), ["So", "<|im_end|>"]);

    let mut body = body;
    body["stream"] = true.into();
    let events = events(&app, body).await;
    let of = |kind: &'static str| events.iter().filter(move |event| event["type"] == kind);
    let deltas: Vec<_> = of("response.output_text.delta").map(|e| tokens(&e["logprobs"])).collect();
    assert_eq!(deltas, [vec!["I"], vec![" lo", "ok"], vec!["So"]]);
    let done: Vec<_> = of("response.output_text.done").map(|event| &event["logprobs"]).collect();
    assert_eq!(done, [logprobs(1), logprobs(4)]);
    let items: Vec<_> = of("response.output_item.done").map(|event| &event["item"]).collect();
    let output = events.last().unwrap()["response"]["output"].as_array().unwrap();
    assert_eq!(items, output.iter().collect::<Vec<_>>());
    assert_eq!(&output[1]["content"][0]["logprobs"], logprobs(1));
    assert_eq!(&output[4]["content"][0]["logprobs"], logprobs(4));

    // Without `include`, there are none.
    create(&app, json!({"input": "Hi", "include": ["reasoning.encrypted_content"]})).await;
    assert_eq!(seen.last().logprobs, None);
    create(&app, json!({"input": "Hi", "include": ["message.output_text.logprobs"]})).await;
    assert_eq!(seen.last().logprobs, Some(0));
    for (body, param) in [
        (json!({"input": "Hi", "top_logprobs": 2}), "top_logprobs"),
        (
            json!({"input": "Hi", "top_logprobs": 21, "include": ["message.output_text.logprobs"]}),
            "top_logprobs",
        ),
        (json!({"input": "Hi", "include": "all"}), "include"),
    ] {
        let (status, reply) = create(&app, body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{reply}");
        assert_eq!(reply["error"]["param"], param, "{reply}");
    }
}

#[tokio::test]
async fn form_and_tool_choice_reach_the_engine() {
    let (app, seen) = app(answer);
    let schema = json!({"type": "object"});
    let text = |format: Value| json!({"input": "a", "text": {"format": format}});
    for (body, field, form) in [
        (text(json!({"type": "json_object"})), "text.format", Form::JsonObject),
        (
            text(json!({"type": "json_schema", "name": "x", "strict": true, "schema": schema})),
            "text.format.schema",
            Form::JsonSchema(schema.clone()),
        ),
    ] {
        assert_eq!(create(&app, body).await.0, StatusCode::OK);
        let expected = Some(ResponseFormat { field, form });
        assert_eq!(seen.last().response_format, expected);
    }
    let tools = json!([{"type": "function", "name": "f", "strict": true, "parameters": schema}]);
    let choice = json!({"type": "function", "name": "f"});
    let body = json!({"input": "a", "tools": tools, "tool_choice": choice});
    assert_eq!(create(&app, body).await.0, StatusCode::OK);
    let request = seen.last();
    assert_eq!(request.tool_choice.allowed, Some(vec!["f".to_string()]));
    assert_eq!(request.tools[0]["function"]["strict"], true);
}

#[tokio::test]
async fn response_continues_a_stored_one() {
    let folder = tempfile::tempdir().unwrap();
    let (app, seen) = storing(folder.path());
    let (_, first) = create(&app, json!({"input": "one", "instructions": "Old."})).await;
    assert_eq!(first["store"], true);
    let id = first["id"].as_str().unwrap();
    // A new process finds it.
    let (app, seen_later) = storing(folder.path());
    let body = json!({"input": "two", "previous_response_id": id, "instructions": "New."});
    let (status, second) = create(&app, body).await;
    assert_eq!(status, StatusCode::OK, "{second}");
    assert_eq!(second["previous_response_id"], id);
    let expected = json!([
        {"role": "system", "content": "New."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Rome\n.", "reasoning_content": "It is Rome."},
        {"role": "user", "content": "two"}
    ]);
    assert_eq!(serde_json::to_value(&seen_later.last().messages).unwrap(), expected);
    assert_eq!(seen.last().messages.len(), 2);

    let path = format!("/v1/responses/{id}");
    let (status, stored) = call(&app, Method::GET, &path).await;
    assert_eq!((status, &stored), (200, &first));
    let (_, items) = call(&app, Method::GET, &format!("{path}/input_items")).await;
    assert_eq!(items["data"][0]["content"][0]["text"], "one");
    let (status, deleted) = call(&app, Method::DELETE, &path).await;
    assert_eq!((status, &deleted["deleted"]), (200, &json!(true)));
    for (method, path) in [(Method::GET, path.as_str()), (Method::DELETE, "/v1/responses/..%2Fx")] {
        let (status, reply) = call(&app, method, path).await;
        assert_eq!((status, &reply["error"]["code"]), (404, &json!("response_not_found")));
    }
    let (status, reply) = create(&app, json!({"input": "three", "previous_response_id": id})).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert_eq!(reply["error"]["param"], "previous_response_id");
}

#[tokio::test]
async fn response_that_is_not_to_be_stored_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let (app, _) = storing(folder.path());
    let (_, reply) = create(&app, json!({"input": "one", "store": false})).await;
    assert_eq!(reply["store"], false);
    let path = format!("/v1/responses/{}", reply["id"].as_str().unwrap());
    assert_eq!(call(&app, Method::GET, &path).await.0, 404);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    // A stream is stored like a whole reply.
    let events = events(&app, json!({"input": "one", "stream": true})).await;
    let response = &events.last().unwrap()["response"];
    let path = format!("/v1/responses/{}", response["id"].as_str().unwrap());
    assert_eq!(call(&app, Method::GET, &path).await, (200, response.clone()));
}

/// Fault A14: on a full disk the reply said 200 and `"store": true`, and the next turn of the conversation got 404. The
/// folder is a file here: root may write to every disk.
#[tokio::test]
async fn a_response_that_cannot_be_stored_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("responses");
    std::fs::write(&file, "in the way").unwrap();
    let (app, _) = storing(&file);
    let (status, reply) = create(&app, json!({"input": "one"})).await;
    assert_eq!(status, StatusCode::OK);
    let last = events(&app, json!({"input": "one", "stream": true})).await.pop().unwrap();
    for response in [&reply, &last["response"]] {
        assert_eq!(response["store"], false, "{response}");
        let notes = response["steersman"]["notes"].to_string();
        assert!(
            notes.contains("was not stored") && notes.contains("previous_response_id"),
            "{notes}"
        );
    }
    let metrics = send(&app, request(Method::GET, "/metrics", &Value::Null)).await;
    let metrics = String::from_utf8(bytes(metrics).await.to_vec()).unwrap();
    assert!(metrics.contains("steersman_responses_not_stored_total 2\n"), "{metrics}");
    // What the client did not ask to store has no note.
    let (_, reply) = create(&app, json!({"input": "one", "store": false})).await;
    assert_eq!(reply["steersman"]["notes"], json!(["routed: plain"]));
}

#[tokio::test]
async fn stored_response_belongs_to_its_profile() {
    let folder = tempfile::tempdir().unwrap();
    let access =
        |key: &str| ProfileAccess { api_keys: vec![key.into()], ..ProfileAccess::default() };
    let config = ServerConfig {
        profiles: [("strict".to_string(), access("sk-strict"))].into(),
        ..ServerConfig::default()
    };
    let (app, _) = app_wired(&config, storing_in(folder.path()), answer);
    let mut with_key = request(Method::POST, "/v1/responses", &json!({"input": "secret"}));
    with_key.headers_mut().insert("authorization", "Bearer sk-strict".parse().unwrap());
    let reply = json_of(send(&app, with_key).await).await;
    let id = reply["id"].as_str().unwrap();
    assert_eq!(call(&app, Method::GET, &format!("/v1/responses/{id}")).await.0, 403);
    let body = json!({"input": "what was it?", "previous_response_id": id});
    assert_eq!(create(&app, body).await.0, StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn reply_that_is_cut_or_fails_says_so() {
    let (cut, _) = app(|| vec![Say(Event::Answer("a".into())), finished(FinishReason::Length)]);
    let (_, reply) = create(&cut, json!({"input": "Hi"})).await;
    assert_eq!(reply["status"], "incomplete");
    assert_eq!(reply["incomplete_details"], json!({"reason": "max_output_tokens"}));
    let last = events(&cut, json!({"input": "Hi", "stream": true})).await.pop().unwrap();
    assert_eq!(last["type"], "response.incomplete");

    fn fails() -> Vec<Act> {
        vec![Say(Event::Answer("a".into())), Say(Event::Failed(Error::Array("x".into())))]
    }
    let (failing, _) = app(fails);
    let last = events(&failing, json!({"input": "Hi", "stream": true})).await.pop().unwrap();
    assert_eq!(last["type"], "response.failed");
    assert_eq!(last["response"]["error"]["code"], "internal_error");
    let (long, _) = app(|| {
        let error = RequestError::ContextTooLong { tokens: 99, limit: 10 };
        vec![Say(Event::Failed(error.into()))]
    });
    let (status, reply) = create(&long, json!({"input": "Hi", "stream": true})).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(reply["error"]["code"], "context_length_exceeded");
}

#[tokio::test]
async fn errors_name_the_field() {
    let (app, _) = app(answer);
    let item = |item: Value| json!({"input": [item]});
    for (body, code, param) in [
        (json!({}), "missing_required_parameter", "input"),
        (json!({"input": 3}), "invalid_type", "input"),
        (json!({"input": []}), "missing_required_parameter", "input"),
        (json!({"input": "a", "colour": 1}), "unknown_parameter", "colour"),
        (json!({"input": "a", "background": true}), "unsupported_parameter", "background"),
        (json!({"input": "a", "max_output_tokens": 0}), "invalid_value", "max_output_tokens"),
        (
            json!({"input": "a", "reasoning": {"effort": "huge"}}),
            "invalid_type",
            "reasoning.effort",
        ),
        (
            json!({"input": "a", "text": {"format": {"type": "yaml"}}}),
            "invalid_value",
            "text.format",
        ),
        (item(json!({"role": "robot", "content": "a"})), "invalid_value", "input[0].role"),
        (
            item(json!({"role": "user", "content": [{"type": "input_image"}]})),
            "unsupported_parameter",
            "input[0].content[0].type",
        ),
        (
            item(json!({"type": "item_reference", "id": "x"})),
            "unsupported_parameter",
            "input[0].type",
        ),
        (item(json!({"type": "function_call", "name": "f"})), "invalid_type", "input[0]"),
        (
            item(json!({"type": "function_call", "call_id": 5, "name": "f", "arguments": "{}"})),
            "invalid_type",
            "input[0].call_id",
        ),
        (json!({"input": "a", "tool_choice": "sometimes"}), "invalid_value", "tool_choice"),
    ] {
        let (status, reply) = create(&app, body.clone()).await;
        let error = &reply["error"];
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body} {reply}");
        assert_eq!(
            (&error["code"], &error["param"]),
            (&json!(code), &json!(param)),
            "{body} {error}"
        );
    }
}

#[tokio::test]
async fn calls_are_streamed_while_they_are_written() {
    let (app, _) = app(|| call_in_pieces(FinishReason::ToolCalls));
    let events = events(&app, json!({"input": "Hi", "stream": true})).await;
    let of = |kind: &str| -> Vec<&Value> { events.iter().filter(|e| e["type"] == kind).collect() };
    let deltas = of("response.function_call_arguments.delta");
    let pieces: Vec<_> = deltas.iter().map(|e| e["delta"].as_str().unwrap()).collect();
    assert_eq!(pieces, ["{\"town\":", "\"Rome\"}", "{\"town\":\"Rome\"}"]);
    let done = of("response.function_call_arguments.done");
    assert_eq!(done[0]["arguments"], "{\"town\":\"Rome\"}");
    assert_eq!((done[0]["name"].as_str(), done.len()), (Some("weather"), 2));
    let added = of("response.output_item.added");
    assert_eq!(
        (&added[0]["item"]["call_id"], &added[0]["item"]["arguments"]),
        (&json!("call_a"), &json!(""))
    );
    let items: Vec<_> = of("response.output_item.done").iter().map(|e| e["item"].clone()).collect();
    assert_eq!(json!(items), events.last().unwrap()["response"]["output"]);
}

#[tokio::test]
async fn call_that_a_limit_cuts_off_is_incomplete() {
    let (app, _) = app(cut_call);
    let events = events(&app, json!({"input": "Hi", "stream": true})).await;
    let last = &events.last().unwrap()["response"];
    let call = &last["output"][0];
    assert_eq!((&last["status"], &call["status"]), (&json!("incomplete"), &json!("incomplete")));
    assert_eq!((&call["name"], &call["arguments"]), (&json!("weather"), &json!("{\"town\":")));
    assert!(events.iter().all(|e| e["type"] != "response.function_call_arguments.done"));
}

/// F19: in a response that a limit cut off, the item that was cut had the status `completed`, in its stream, too.
#[tokio::test]
async fn the_item_that_a_limit_cuts_is_incomplete() {
    fn cut(part: Event) -> Vec<Act> {
        let mut acts = call_in_pieces(FinishReason::Length);
        acts.drain(3..);
        acts.extend([Say(part), finished(FinishReason::Length)]);
        acts
    }
    for (script, kinds) in [
        ((|| cut(Event::Answer("a".into()))) as fn() -> Vec<Act>, ["completed", "incomplete"]),
        (|| cut(Event::Reasoning("a".into())), ["completed", "incomplete"]),
        (
            || {
                let mut acts = vec![Say(Event::Answer("a".into()))];
                acts.extend(cut_call());
                acts
            },
            ["completed", "incomplete"],
        ),
        // A call that is whole stays one, whatever ends the reply after it.
        (
            || {
                let mut acts = vec![Say(Event::Answer("a".into()))];
                acts.extend(call_in_pieces(FinishReason::Length).drain(..3));
                acts.push(finished(FinishReason::Length));
                acts
            },
            ["completed", "completed"],
        ),
    ] {
        let (app, _) = app(script);
        let (_, whole) = create(&app, json!({"input": "Hi"})).await;
        let events = events(&app, json!({"input": "Hi", "stream": true})).await;
        let last = &events.last().unwrap()["response"];
        let done = events.iter().filter(|event| event["type"] == "response.output_item.done");
        let done: Vec<_> = done.map(|event| event["item"]["status"].clone()).collect();
        assert_eq!(done, kinds);
        for response in [&whole, last] {
            assert_eq!(response["status"], "incomplete");
            let items = response["output"].as_array().unwrap().iter();
            assert_eq!(items.map(|item| item["status"].clone()).collect::<Vec<_>>(), kinds);
        }
    }
}
