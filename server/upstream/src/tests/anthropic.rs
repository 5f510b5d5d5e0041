//! Anthropic's messages.

use steersman_policy_host::{Retention, SamplingPatch, SavePoint};
use steersman_request::{Effort, Form, FunctionCall, ResponseFormat, ToolCall, ToolChoice};

use super::*;
use crate::{Protocol, ReasoningField};

fn claude(url: &str) -> UpstreamModel {
    model(url, |config| config.protocol = Protocol::Anthropic)
}

fn event(json: Value) -> Act {
    Say(json)
}

fn block(index: u32, content: Value) -> Act {
    event(json!({"type": "content_block_start", "index": index, "content_block": content}))
}

fn piece(index: u32, delta: Value) -> Act {
    event(json!({"type": "content_block_delta", "index": index, "delta": delta}))
}

fn stop(index: u32) -> Act {
    event(json!({"type": "content_block_stop", "index": index}))
}

fn message(acts: Vec<Act>, reason: &str) -> Reaction {
    let usage = json!({"input_tokens": 10, "cache_read_input_tokens": 90, "output_tokens": 1});
    let mut all = vec![
        Raw("event: message_start\n"),
        event(json!({"type": "message_start", "message": {"id": "msg_1", "usage": usage}})),
        event(json!({"type": "ping"})),
    ];
    all.extend(acts);
    all.push(event(json!({"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 50}})));
    all.push(event(json!({"type": "message_stop"})));
    streamed(all)
}

#[tokio::test]
async fn a_reply_is_passed_on_and_its_reasoning_goes_back_with_its_call() {
    let acts = vec![
        block(0, json!({"type": "thinking", "thinking": "", "signature": ""})),
        piece(0, json!({"type": "thinking_delta", "thinking": "I need the time."})),
        piece(0, json!({"type": "signature_delta", "signature": "c2ln"})),
        stop(0),
        block(1, json!({"type": "redacted_thinking", "data": "aGlkZGVu"})),
        stop(1),
        block(2, json!({"type": "text", "text": ""})),
        piece(2, json!({"type": "text_delta", "text": "One moment."})),
        stop(2),
        block(3, json!({"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {}})),
        piece(3, json!({"type": "input_json_delta", "partial_json": "{\"zone\": \"UTC\"}"})),
        stop(3),
    ];
    let text = vec![
        block(0, json!({"type": "text", "text": ""})),
        piece(0, json!({"type": "text_delta", "text": "Noon."})),
        stop(0),
    ];
    let upstream =
        Scripted::start(vec![message(acts, "tool_use"), message(text, "end_turn")]).await;
    let model = claude(&upstream.url);
    let tool = json!({"type": "function", "function": {"name": "clock", "description": "Tells the time",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}});
    let request = Request {
        tools: vec![tool],
        reasoning: Some(true),
        reasoning_budget: Some(2000),
        max_tokens: Some(4000),
        ..ask("What time is it?")
    };
    let events = all(begin(&model, request.clone())).await;
    assert_eq!(texts(&events), ("I need the time.".into(), "One moment.".into()));
    let Finished { reason, usage, .. } = finished(&events);
    assert_eq!(reason, FinishReason::ToolCalls);
    assert_eq!((usage.prompt_tokens, usage.cached_tokens, usage.reply_tokens()), (100, 90, 50));
    assert!(matches!(events[0], Event::Started { prompt_tokens: 100, cached_tokens: 90, .. }));
    assert!(!events.iter().any(|event| matches!(event, Event::PromptCounted { .. })));
    let sent = upstream.body(0);
    assert_eq!(sent["thinking"], json!({"type": "enabled", "budget_tokens": 2000}));
    assert_eq!(sent["max_tokens"], 4000);
    assert_eq!(sent["tools"][0]["input_schema"]["properties"]["zone"]["type"], "string");
    assert_eq!(sent["tools"][0]["description"], "Tells the time");
    assert_eq!(upstream.header(0, "x-api-key").unwrap(), KEY);
    assert_eq!(upstream.header(0, "anthropic-version").unwrap(), "2023-06-01");

    let call = events.into_iter().find_map(|event| match event {
        Event::ToolCall(call) => Some(call),
        _ => None,
    });
    let mut next = request;
    next.messages.push(Message {
        role: "assistant".into(),
        content: "One moment.".into(),
        reasoning_content: Some("I need the time.".into()),
        tool_calls: call.into_iter().collect(),
        ..Message::default()
    });
    next.messages.push(Message {
        role: "tool".into(),
        content: "12:00".into(),
        tool_call_id: Some("toolu_1".into()),
        ..Message::default()
    });
    let events = all(begin(&model, next)).await;
    assert_eq!(texts(&events).1, "Noon.");
    let turns = upstream.body(1)["messages"].clone();
    let expected = json!([
        {"type": "thinking", "thinking": "I need the time.", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "aGlkZGVu"},
        {"type": "text", "text": "One moment."},
        {"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {"zone": "UTC"}},
    ]);
    assert_eq!(turns[1], json!({"role": "assistant", "content": expected}));
    let result = json!({"type": "tool_result", "tool_use_id": "toolu_1", "content": "12:00"});
    assert_eq!(turns[2], json!({"role": "user", "content": [result]}));
}

#[tokio::test]
async fn reasoning_that_is_not_known_any_more_switches_it_off_with_a_note() {
    let upstream = Scripted::start(vec![message(Vec::new(), "end_turn")]).await;
    let function = FunctionCall { name: "f".into(), arguments: Default::default() };
    let call = ToolCall { id: "call_other".into(), kind: "function".into(), function };
    let mut request = Request { reasoning: Some(true), ..ask("?") };
    request.messages.push(Message {
        role: "assistant".into(),
        tool_calls: vec![call],
        ..Message::default()
    });
    request.messages.push(Message {
        role: "tool".into(),
        tool_call_id: Some("call_other".into()),
        ..Message::default()
    });
    let events = all(begin(&claude(&upstream.url), request)).await;
    assert_eq!(upstream.body(0)["thinking"], Value::Null);
    assert!(finished(&events).notes[0].contains("does not have its reasoning"));
}

#[tokio::test]
async fn fields_are_those_of_messages() {
    let upstream = Scripted::start(vec![message(Vec::new(), "stop_sequence")]).await;
    let system = |role: &str, text: &str| Message {
        role: role.into(),
        content: text.into(),
        ..Message::default()
    };
    let mut request = Request {
        sampling: SamplingPatch {
            temperature: Some(0.7),
            top_k: Some(5),
            ..SamplingPatch::default()
        },
        stop: vec!["END".into()],
        max_answer_tokens: Some(33),
        tool_choice: ToolChoice { is_single: true, ..ToolChoice::default() },
        tools: vec![json!({"type": "function", "function": {"name": "f"}})],
        response_format: Some(ResponseFormat {
            field: "output_config.format",
            form: Form::JsonSchema(json!({"type": "object"})),
        }),
        retain: vec![
            Retention { at: SavePoint::System, seconds: 3600 },
            Retention { at: SavePoint::Prompt, seconds: 300 },
        ],
        ..ask("Hi")
    };
    request.messages.insert(0, system("system", "Be brief."));
    request.messages.push(system("user", "And?"));
    all(begin(&claude(&upstream.url), request)).await;
    let expected = json!({
        "model": "m",
        "stream": true,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "max_tokens": 33,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": true},
        "temperature": 0.7,
        "top_k": 5,
        "stop_sequences": ["END"],
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "Hi"},
            {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
        ]}],
    });
    assert_eq!(upstream.body(0), expected);
}

#[tokio::test]
async fn newer_models_are_told_an_effort() {
    let upstream = Scripted::start(vec![message(Vec::new(), "end_turn")]).await;
    let model = model(&upstream.url, |config| {
        config.protocol = Protocol::Anthropic;
        config.capabilities.reasoning = Some(ReasoningField::Adaptive);
    });
    let request = Request { reasoning: Some(true), effort: Some(Effort::High), ..ask("?") };
    all(begin(&model, request)).await;
    assert_eq!(upstream.body(0)["thinking"], json!({"type": "adaptive"}));
    assert_eq!(upstream.body(0)["output_config"], json!({"effort": "high"}));
}

/// A budget above the limit of the reply, which may be the profile's, raised that limit.
#[tokio::test]
async fn a_budget_is_within_the_limit_of_the_reply() {
    for (limit, budget) in [(4000, 3999), (100, 1024)] {
        let upstream = Scripted::start(vec![message(Vec::new(), "end_turn")]).await;
        let request = Request {
            reasoning: Some(true),
            reasoning_budget: Some(100_000),
            max_tokens: Some(limit),
            ..ask("?")
        };
        all(begin(&claude(&upstream.url), request)).await;
        let sent = upstream.body(0);
        assert_eq!(sent["thinking"], json!({"type": "enabled", "budget_tokens": budget}));
        // The API has no smaller budget.
        assert_eq!(sent["max_tokens"], limit.max(budget + 1));
    }
}

/// The API refused the requests of a profile with a small `top_p`, and those whose prompt is saved longer than its
/// system text.
#[tokio::test]
async fn combinations_that_the_api_refuses_are_not_sent() {
    let upstream = Scripted::start(vec![message(Vec::new(), "end_turn")]).await;
    for (top_p, is_sent) in [(0.9, false), (0.97, true)] {
        let sampling =
            SamplingPatch { top_p: Some(top_p), temperature: Some(0.7), ..Default::default() };
        let mut request = Request {
            reasoning: Some(true),
            sampling,
            retain: vec![
                Retention { at: SavePoint::System, seconds: 300 },
                Retention { at: SavePoint::Prompt, seconds: 3600 },
            ],
            ..ask("?")
        };
        request
            .messages
            .insert(0, Message { role: "system".into(), ..ask("Hi").messages.remove(0) });
        let events = all(begin(&claude(&upstream.url), request)).await;
        let sent = upstream.body(upstream.count() - 1);
        assert_eq!(sent.get("top_p").is_some(), is_sent);
        assert_eq!(sent.get("temperature"), None);
        let notes = finished(&events).notes.join(";");
        assert_eq!(notes.contains("left out `top_p`"), !is_sent, "{notes}");
        assert!(notes.contains("left out `temperature`"), "{notes}");
        for part in [&sent["system"][0], &sent["messages"][0]["content"][0]] {
            assert_eq!(part["cache_control"]["ttl"], "1h", "{sent}");
        }
    }
}

#[tokio::test]
async fn what_messages_do_not_have_is_refused_by_name() {
    let model = claude("http://127.0.0.1:1");
    for (request, words) in [
        (Request { seed: Some(1), ..ask("?") }, "seed: "),
        (Request { logprobs: Some(1), ..ask("?") }, "logprobs: "),
        (
            Request {
                response_format: Some(ResponseFormat {
                    field: "response_format",
                    form: Form::JsonObject,
                }),
                ..ask("?")
            },
            "response_format: a form of the kind `json-object`",
        ),
    ] {
        let error = model.submit(request).unwrap_err().to_string();
        assert!(error.starts_with(words), "{error}");
    }
}

#[tokio::test]
async fn an_error_in_the_stream_is_the_error_of_the_request() {
    let error =
        json!({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}});
    let acts = vec![
        block(0, json!({"type": "text", "text": ""})),
        piece(0, json!({"type": "text_delta", "text": "half"})),
        event(error),
    ];
    let upstream = Scripted::start(vec![streamed(acts)]).await;
    let events = all(begin(&claude(&upstream.url), ask("?"))).await;
    assert_eq!(failure(&events), "the upstream `work` failed: Overloaded");
}
