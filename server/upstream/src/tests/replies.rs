//! Replies of servers that speak as vLLM, Gemini's and Grok's endpoints do.

use steersman_policy_host::{Plan, Summary, TextChange, TextVerdict};

use super::*;

#[tokio::test]
async fn a_reply_with_reasoning_and_calls_is_passed_on_as_it_comes() {
    let call = |call: Value| delta(json!({"tool_calls": [call]}));
    let mut acts = vec![
        delta(json!({"role": "assistant", "content": ""})),
        delta(json!({"reasoning_content": "Let me "})),
        delta(json!({"reasoning_content": "see."})),
        delta(json!({"content": "I look it up."})),
        call(
            json!({"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}),
        ),
        call(json!({"index": 0, "function": {"arguments": "{\"word\":"}})),
        call(json!({"index": 0, "function": {"arguments": " \"x\"}"}})),
    ];
    acts.extend(end("tool_calls", 30, 20));
    let upstream = Scripted::start(vec![streamed(acts)]).await;
    let model = model(&upstream.url, |_| ());
    let request = Request { streams_calls: true, revisable: false, ..ask("What is x?") };
    let events = all(begin(&model, request)).await;
    assert_eq!(texts(&events), ("Let me see.".into(), "I look it up.".into()));
    let deltas: String = events
        .iter()
        .filter_map(|event| match event {
            Event::CallDelta(delta) => Some(delta.arguments.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(deltas, "{\"word\": \"x\"}");
    let called = events.iter().find_map(|event| match event {
        Event::ToolCall(call) => Some(call.clone()),
        _ => None,
    });
    let called = called.unwrap();
    assert_eq!((called.id.as_str(), called.function.name.as_str()), ("call_1", "look"));
    let Finished { reason, usage, .. } = finished(&events);
    assert_eq!(reason, FinishReason::ToolCalls);
    assert_eq!((usage.prompt_tokens, usage.reply_tokens()), (30, 20));
    assert!(
        usage.reasoning_tokens > 0 && usage.answer_tokens > usage.reasoning_tokens,
        "{usage:?}"
    );
    // The prompt was counted after the reply had begun.
    assert!(matches!(events[0], Event::Started { prompt_tokens: 0, .. }), "{:?}", events[0]);
    let counted = |event: &Event| matches!(event, Event::PromptCounted { prompt_tokens: 30, .. });
    assert!(events.iter().any(counted));
    assert_eq!(upstream.header(0, "authorization").unwrap(), format!("Bearer {KEY}"));
}

#[tokio::test]
async fn an_upstream_that_does_not_stream_is_read_too() {
    let message = json!({"role": "assistant", "content": "Rome.", "reasoning_content": "Italy."});
    let usage = json!({"prompt_tokens": 3, "completion_tokens": 4,
        "completion_tokens_details": {"reasoning_tokens": 1}});
    let reply = json!({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage});
    let upstream = Scripted::start(vec![whole(200, &reply)]).await;
    let events = all(begin(&model(&upstream.url, |_| ()), ask("?"))).await;
    assert_eq!(texts(&events), ("Italy.".into(), "Rome.".into()));
    let usage = finished(&events).usage;
    assert_eq!((usage.prompt_tokens, usage.reasoning_tokens, usage.answer_tokens), (3, 1, 3));
}

#[tokio::test]
async fn policies_shape_the_answer_and_see_its_end() {
    let upstream = Scripted::start(vec![says("the secret is 42")]).await;
    let seen: Arc<Mutex<Vec<Summary>>> = Arc::default();
    let summaries = seen.clone();
    let policy = move |call: &Call<'_>| match call {
        Call::Text(view) if view.text.contains("42") => {
            let text = view.text.replace("42", "--");
            Some(Answer::Text(TextVerdict::Replace(TextChange { text, hold: 0 })))
        }
        Call::Finish(summary) => {
            summaries.lock().push(summary.clone().into_owned());
            Some(Answer::Finish(vec![("cost".into(), "low".into())]))
        }
        _ => None,
    };
    let model = model(&upstream.url, |_| ());
    let events = all(begin_with(&model, ask("?"), session(policy, true, false))).await;
    assert_eq!(texts(&events).1, "the secret is --");
    assert_eq!(finished(&events).labels, [("cost".to_string(), "low".to_string())]);
    let summary = seen.lock()[0].clone();
    assert_eq!(
        (summary.reason.as_str(), summary.prompt_tokens, summary.answer_tokens),
        ("stop", 12, 5)
    );
}

#[tokio::test]
async fn tokens_are_counted_by_model_profile_and_key() {
    let upstream = Scripted::start(vec![says("hello")]).await;
    let model = model(&upstream.url, |_| ());
    for _ in 0..2 {
        let mut request = ask("?");
        request.caller.key = "0123".into();
        all(begin(&model, request)).await;
    }
    let report = model.upstream().report();
    let [(who, used)] = &report.used[..] else { panic!("{report:?}") };
    assert_eq!(
        (who.model.as_str(), who.profile.as_str(), who.key.as_str()),
        ("m", "default", "0123")
    );
    assert_eq!((used.requests, used.prompt_tokens, used.reply_tokens), (2, 24, 10));
    assert_eq!(report.tokens_today, 34);
}

#[tokio::test]
async fn what_a_vendor_wants_back_with_a_call_comes_back() {
    let extra = json!({"google": {"thought_signature": "c2ln"}});
    let call = json!({"index": 0, "id": "call_9", "function": {"name": "f", "arguments": "{}"}, "extra_content": extra});
    let mut acts = vec![delta(json!({"tool_calls": [call]}))];
    acts.extend(end("stop", 1, 1));
    let upstream = Scripted::start(vec![streamed(acts), says("done")]).await;
    let model = model(&upstream.url, |_| ());
    let first = all(begin(&model, ask("?"))).await;
    // Gemini says `stop`.
    assert_eq!(reason(&first), FinishReason::ToolCalls);
    let call = first.into_iter().find_map(|event| match event {
        Event::ToolCall(call) => Some(call),
        _ => None,
    });
    let mut request = ask("?");
    request.messages.push(Message {
        role: "assistant".into(),
        tool_calls: call.into_iter().collect(),
        ..Message::default()
    });
    request.messages.push(Message {
        role: "tool".into(),
        content: "7".into(),
        tool_call_id: Some("call_9".into()),
        ..Message::default()
    });
    all(begin(&model, request)).await;
    let message = upstream.body(1)["messages"][1].clone();
    assert_eq!(message["tool_calls"][0]["extra_content"], extra);
    assert_eq!(message["tool_calls"][0]["function"]["arguments"], "{}");
    assert_eq!(message["content"], Value::Null);
}

/// A reply that is not streamed went to the policies as one text, which may be longer than they can take.
#[tokio::test]
async fn a_long_text_comes_to_policies_in_parts() {
    let text = "wörd ".repeat(40_000) + "last";
    let message = json!({"role": "assistant", "content": text});
    let whole = whole(200, &json!({"choices": [{"message": message, "finish_reason": "stop"}]}));
    let upstream = Scripted::start(vec![whole]).await;
    let longest: Arc<Mutex<[usize; 2]>> = Arc::default();
    let lengths = longest.clone();
    let policy = move |call: &Call<'_>| {
        let [of_text, of_step] = &mut *lengths.lock();
        match call {
            Call::Request(_) => {
                let on_texts = vec!["last".into()];
                return Some(Answer::Request(Plan { on_texts, ..Plan::default() }));
            }
            Call::Text(view) => *of_text = view.text.len().max(*of_text),
            Call::Step(step) => *of_step = step.text.len().max(*of_step),
            _ => {}
        }
        None
    };
    let request = Request { max_tokens: Some(100_000), ..ask("?") };
    let session = session(policy, true, false);
    let events = all(begin_with(&model(&upstream.url, |_| ()), request, session)).await;
    assert_eq!(texts(&events).1, text);
    let [of_text, of_step] = *longest.lock();
    assert!((1..=32 << 10).contains(&of_text), "{of_text}");
    assert!((1..=64 << 10).contains(&of_step), "{of_step}");
}

/// The letters of the arguments were counted as letters of the reasoning, until fewer than none were left.
#[tokio::test]
async fn reasoning_between_the_arguments_of_a_call_is_told_apart() {
    let call = |call: Value| delta(json!({"tool_calls": [call]}));
    let arguments = |text: &str| call(json!({"index": 0, "function": {"arguments": text}}));
    let reasoning = |text: &str| delta(json!({"reasoning_content": text}));
    let mut acts = vec![
        reasoning("a b"),
        call(
            json!({"index": 0, "id": "call_1", "function": {"name": "f", "arguments": "{\"y\": \""}}),
        ),
        reasoning(" c d"),
        arguments("abcdefghijklmno"),
        reasoning("e"),
        arguments("\"}"),
    ];
    acts.extend(end("tool_calls", 1, 1));
    let upstream = Scripted::start(vec![streamed(acts)]).await;
    let events = all(begin(&model(&upstream.url, |_| ()), ask("?"))).await;
    assert_eq!(texts(&events), ("a b c de".into(), String::new()));
    let called = events.iter().find_map(|event| match event {
        Event::ToolCall(call) => Some(call.function.arguments.to_json()),
        _ => None,
    });
    assert_eq!(called.as_deref(), Some("{\"y\":\"abcdefghijklmno\"}"));
}

/// An upstream that never ends a call would fill the memory.
#[tokio::test]
async fn arguments_without_end_are_cut_off_at_the_limit_of_the_reply() {
    let call = |arguments: &str| json!({"index": 0, "id": "a", "function": {"name": "f", "arguments": arguments}});
    let mut acts: Vec<Act> =
        (0..100).map(|_| delta(json!({"tool_calls": [call("[[1, 2, 3], ")]}))).collect();
    acts.push(Hang);
    let upstream = Scripted::start(vec![streamed(acts)]).await;
    let request = Request { max_tokens: Some(40), ..ask("?") };
    let events = all(begin(&model(&upstream.url, |_| ()), request)).await;
    assert_eq!(reason(&events), FinishReason::Length);
    assert!(!events.iter().any(|event| matches!(event, Event::ToolCall(_))));
}

#[tokio::test]
async fn malformed_arguments_are_no_call() {
    let call = json!({"index": 0, "id": "a", "function": {"name": "f", "arguments": "{\"x\": "}});
    let mut acts = vec![delta(json!({"tool_calls": [call]}))];
    acts.extend(end("length", 1, 1));
    let upstream = Scripted::start(vec![streamed(acts)]).await;
    let events = all(begin(&model(&upstream.url, |_| ()), ask("?"))).await;
    assert_eq!(reason(&events), FinishReason::Length);
    assert!(!events.iter().any(|event| matches!(event, Event::ToolCall(_))));
    assert!(finished(&events).notes[0].contains("it was cut off"));
}

/// Servers end a response some time after `[DONE]`. Its connection was closed there, so that each request opened another:
/// with TLS, three times the way to the vendor before its first piece.
#[tokio::test]
async fn a_connection_serves_further_requests_if_its_response_ends_after_the_reply() {
    let mut acts = vec![delta(json!({"content": "Rome"}))];
    acts.extend(end("stop", 3, 1));
    acts.push(Wait(Duration::from_millis(50)));
    let upstream = Scripted::start(vec![streamed(acts)]).await;
    let model = model(&upstream.url, |_| ());
    for _ in 0..100 {
        assert_eq!(texts(&all(begin(&model, ask("?"))).await).1, "Rome");
        // A busy machine may need longer to end the response.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let peers = upstream.peers();
        if peers.len() > 1 && peers[peers.len() - 1] == peers[peers.len() - 2] {
            return;
        }
    }
    panic!("no two requests shared a connection: {:?}", upstream.peers());
}
