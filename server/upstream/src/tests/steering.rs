//! Policies that change what was written.

use steersman_policy_host::{
    Action, AnswerForm, LoopRule, Phase, Plan, SamplingPatch, Step, TextChange, TextVerdict,
    ToolCallView, Verdict,
};
use steersman_request::Continued;

use super::*;
use crate::{CapabilityConfig, Continues, Kind, WithoutContinuation};

/// Reasoning that repeats itself.
fn looping() -> Vec<Act> {
    (0..400)
        .flat_map(|_| ["But wait, ", "let me check ", "the price again. "])
        .map(|text| delta(json!({"reasoning_content": text})))
        .collect()
}

fn kind(kind: Kind) -> impl FnOnce(&mut UpstreamConfig) {
    move |config| config.capabilities.kind = Some(kind)
}

/// Whether a step has seen `text` alone.
fn has_found(step: &Step, text: &str) -> bool {
    step.observed.as_ref().is_some_and(|observed| observed.texts_found == [text])
}

/// A policy that looks for loops, and answers each with `actions`.
fn on_loop(actions: Vec<Action>) -> Session {
    let rule = LoopRule { max_period: 64, repeats: 2, min_tokens: 96, similarity: 1.0 };
    let policy = move |call: &Call<'_>| match call {
        Call::Request(_) => Some(Answer::Request(Plan { loops: Some(rule), ..Plan::default() })),
        Call::Step(step) if step.loop_found.is_some() => Some(Answer::Step(actions.clone())),
        _ => None,
    };
    session(policy, false, false)
}

#[tokio::test]
async fn a_loop_in_the_reasoning_is_cut_and_the_answer_follows_the_hint() {
    for of in [Kind::Steersman, Kind::Vllm] {
        let upstream = Scripted::start(vec![streamed(looping()), says(" it is 26.")]).await;
        let model = model(&upstream.url, kind(of));
        let actions = vec![Action::CloseReasoning("**Answer:**".into())];
        let events = all(begin_with(&model, ask("?"), on_loop(actions))).await;
        let (reasoning, answer) = texts(&events);
        assert_eq!(answer, "**Answer:** it is 26.");
        // Two repeats and 96 pieces were enough of 400 times 10.
        assert!(reasoning.len() < 2000, "{} bytes", reasoning.len());
        assert_eq!(upstream.count(), 2);
        let body = upstream.body(1);
        assert_eq!(
            (&body["continue_final_message"], &body["add_generation_prompt"]),
            (&json!(true), &json!(false))
        );
        let last = body["messages"].as_array().unwrap().last().unwrap().clone();
        let expected = match of {
            Kind::Steersman => {
                json!({"role": "assistant", "content": "**Answer:**", "reasoning_content": reasoning})
            }
            _ => {
                let content = format!("<think>\n{reasoning}\n</think>\n\n**Answer:**");
                json!({"role": "assistant", "content": content})
            }
        };
        assert_eq!(last, expected);
        let notes = finished(&events).notes.join("; ");
        assert!(notes.contains("closed the reasoning") && notes.contains("loop of"), "{notes}");
        assert_eq!(reason(&events), FinishReason::Stop);
    }
}

/// Parsers that look for the end of the reasoning in the new text took the answer for reasoning, which was then closed
/// again and again.
#[tokio::test]
async fn what_follows_closed_reasoning_is_the_answer_whatever_the_server_calls_it() {
    let mut acts = vec![delta(json!({"reasoning_content": " it is 26."}))];
    acts.extend(end("stop", 1, 1));
    let upstream = Scripted::start(vec![streamed(looping()), streamed(acts)]).await;
    let model = model(&upstream.url, kind(Kind::Vllm));
    let actions = vec![Action::CloseReasoning("So".into())];
    let events = all(begin_with(&model, ask("?"), on_loop(actions))).await;
    assert_eq!(texts(&events).1, "So it is 26.");
}

#[tokio::test]
async fn without_continuation_the_configuration_says_what_becomes_of_a_cut() {
    for (without, ends) in [(WithoutContinuation::End, true), (WithoutContinuation::Ignore, false)]
    {
        let mut acts = looping();
        acts.extend(end("stop", 1, 1));
        let upstream = Scripted::start(vec![streamed(acts)]).await;
        let model = model(&upstream.url, |config| config.without_continuation = without);
        let actions = vec![Action::CloseReasoning("Answer:".into())];
        let events = all(begin_with(&model, ask("?"), on_loop(actions))).await;
        assert_eq!(upstream.count(), 1);
        let notes = finished(&events).notes.join("; ");
        assert!(notes.contains("the upstream cannot continue a message here"), "{notes}");
        match reason(&events) {
            FinishReason::Policy(why) => assert!(ends && why.contains("loop of"), "{why}"),
            other => assert!(!ends && other == FinishReason::Stop, "{other:?}"),
        }
        assert_eq!(texts(&events).0.len() < 2000, ends);
    }
}

#[tokio::test]
async fn a_budget_is_passed_on_and_kept_here_too() {
    let acts = looping();
    let upstream = Scripted::start(vec![streamed(acts), says("So 26.")]).await;
    let model = model(&upstream.url, kind(Kind::Vllm));
    let request = Request { reasoning_budget: Some(50), reasoning: Some(true), ..ask("?") };
    let events = all(begin(&model, request)).await;
    assert_eq!(texts(&events).1, "So 26.");
    assert!(texts(&events).0.len() < 400, "{}", texts(&events).0);
    assert_eq!(upstream.body(0)["thinking_token_budget"], 50);
    assert_eq!(upstream.body(0)["chat_template_kwargs"]["enable_thinking"], true);
    assert_eq!(upstream.body(1)["thinking_token_budget"], Value::Null);
    assert!(finished(&events).notes.join(";").contains("budget reached"));

    // One that cannot continue ends there.
    let upstream = Scripted::start(vec![streamed(looping())]).await;
    let vendor = super::model(&upstream.url, |_| ());
    let request = Request { reasoning_budget: Some(50), ..ask("?") };
    let events = all(begin(&vendor, request)).await;
    assert_eq!(reason(&events), FinishReason::Length);
    assert_eq!(upstream.body(0)["reasoning_effort"], Value::Null);
}

/// The upstream counts tokens, of which there are fewer than pieces in some scripts: the reply ended within its
/// reasoning.
#[tokio::test]
async fn the_limit_of_a_reply_is_no_budget_of_its_reasoning() {
    let mut acts =
        vec![delta(json!({"reasoning_content": "思".repeat(60)})), delta(json!({"content": "好"}))];
    acts.extend(end("stop", 1, 40));
    let upstream = Scripted::start(vec![streamed(acts)]).await;
    let request = Request { max_tokens: Some(50), ..ask("?") };
    let events = all(begin(&model(&upstream.url, |_| ()), request)).await;
    assert_eq!(texts(&events).1, "好");
    assert_eq!(reason(&events), FinishReason::Stop);
}

#[tokio::test]
async fn a_rewind_takes_text_back_and_injected_text_follows() {
    let acts = vec![
        delta(json!({"content": "The capital is "})),
        delta(json!({"content": "Paris, of course"})),
        Hang,
    ];
    let upstream = Scripted::start(vec![streamed(acts), says(".")]).await;
    let policy = |call: &Call<'_>| match call {
        Call::Request(_) => {
            Some(Answer::Request(Plan { on_texts: vec!["Paris".into()], ..Plan::default() }))
        }
        Call::Step(step) if step.phase == Phase::Answer && has_found(step, "Paris") => {
            // " Paris", ",", " of" and " course".
            Some(Answer::Step(vec![Action::Inject(" Rome".into()), Action::Rewind(4)]))
        }
        _ => None,
    };
    let model = model(&upstream.url, kind(Kind::Vllm));
    let request = Request { revisable: true, ..ask("?") };
    let events = all(begin_with(&model, request, session(policy, false, false))).await;
    assert_eq!(texts(&events).1, "The capital is Rome.");
    let last = upstream.body(1)["messages"][1].clone();
    assert_eq!(last["content"], "The capital is Rome");
    // A client of a stream has the text already.
    let acts = vec![delta(json!({"content": "Paris"}))];
    let upstream =
        Scripted::start(vec![streamed(acts.into_iter().chain(end("stop", 1, 1)).collect())]).await;
    let model = super::model(&upstream.url, kind(Kind::Vllm));
    let rewinds = |call: &Call<'_>| match call {
        Call::Request(_) => {
            Some(Answer::Request(Plan { on_texts: vec!["Paris".into()], ..Plan::default() }))
        }
        Call::Step(_) => Some(Answer::Step(vec![Action::Rewind(1)])),
        _ => None,
    };
    let events = all(begin_with(&model, ask("?"), session(rewinds, false, false))).await;
    assert!(finished(&events).notes[0].contains("the client already has the text"));
}

/// A part of the stream that is longer than the rewind was taken back as a whole.
#[tokio::test]
async fn a_rewind_within_a_part_gives_policies_of_text_the_rest_again() {
    let acts = vec![delta(json!({"content": "one two three"})), Hang];
    let upstream = Scripted::start(vec![streamed(acts), says(" four")]).await;
    let policy = |call: &Call<'_>| match call {
        Call::Request(_) => {
            Some(Answer::Request(Plan { on_texts: vec!["three".into()], ..Plan::default() }))
        }
        Call::Step(_) => Some(Answer::Step(vec![Action::Rewind(1)])),
        Call::Text(view) => {
            let text = view.text.replace("two", "2");
            Some(Answer::Text(TextVerdict::Replace(TextChange { text, hold: 0 })))
        }
        _ => None,
    };
    let model = model(&upstream.url, kind(Kind::Vllm));
    let request = Request { revisable: true, ..ask("?") };
    let events = all(begin_with(&model, request, session(policy, true, false))).await;
    assert_eq!(texts(&events).1, "one 2 four");
    assert_eq!(upstream.body(1)["messages"][1]["content"], "one two");
}

#[tokio::test]
async fn a_stop_ends_the_reply_and_the_request() {
    let acts = vec![delta(json!({"content": "one two three"})), Hang];
    let upstream = Scripted::start(vec![streamed(acts)]).await;
    let policy = |call: &Call<'_>| match call {
        Call::Request(_) => Some(Answer::Request(Plan { every: 1, ..Plan::default() })),
        Call::Step(_) => Some(Answer::Step(vec![Action::Stop("enough".into())])),
        _ => None,
    };
    let model = model(&upstream.url, |_| ());
    let events = all(begin_with(&model, ask("?"), session(policy, false, false))).await;
    assert_eq!(reason(&events), FinishReason::Policy("enough".into()));
    tokio::time::timeout(Duration::from_secs(60), upstream.closed()).await.unwrap();
}

#[tokio::test]
async fn policies_that_never_stop_cutting_end_the_reply() {
    let upstream = Scripted::start(vec![says("again")]).await;
    let policy = |call: &Call<'_>| match call {
        Call::Request(_) => {
            Some(Answer::Request(Plan { on_texts: vec!["again".into()], ..Plan::default() }))
        }
        Call::Step(_) => Some(Answer::Step(vec![Action::Inject(" and".into())])),
        _ => None,
    };
    let model = model(&upstream.url, kind(Kind::Steersman));
    let events = all(begin_with(&model, ask("?"), session(policy, false, false))).await;
    assert!(matches!(reason(&events), FinishReason::Policy(why) if why.contains("cut the reply")));
    assert_eq!(upstream.count(), 32);
}

#[tokio::test]
async fn calls_get_their_verdict_before_the_client_has_them() {
    let call = |name: &str| json!({"index": 0, "id": "a", "function": {"name": name, "arguments": "{\"x\": 1}"}});
    let mut acts = vec![
        delta(json!({"content": "I delete it."})),
        delta(json!({"tool_calls": [call("delete")]})),
    ];
    acts.extend(end("tool_calls", 1, 1));
    let judge = |verdict: Verdict| {
        let policy = move |asked: &Call<'_>| match asked {
            Call::ToolCall(view) => {
                let ToolCallView { name, arguments, .. } = &**view;
                assert_eq!((name.as_str(), arguments.as_str()), ("delete", "{\"x\":1}"));
                Some(Answer::ToolCall(verdict.clone()))
            }
            _ => None,
        };
        session(policy, false, true)
    };
    let request = || Request { streams_calls: true, ..ask("?") };
    let has_call = |events: &[Event]| {
        events.iter().any(|event| matches!(event, Event::ToolCall(_) | Event::CallDelta(_)))
    };

    let upstream = Scripted::start(vec![streamed(acts.clone())]).await;
    let stops = judge(Verdict::Stop("not allowed".into()));
    let events = all(begin_with(&model(&upstream.url, |_| ()), request(), stops)).await;
    assert_eq!(reason(&events), FinishReason::Policy("not allowed".into()));
    assert!(!has_call(&events));

    let upstream = Scripted::start(vec![streamed(acts.clone()), says(" Sorry.")]).await;
    let repairs = judge(Verdict::Repair(" I must not.".into()));
    let events = all(begin_with(&model(&upstream.url, kind(Kind::Vllm)), request(), repairs)).await;
    assert_eq!(texts(&events).1, "I delete it. I must not. Sorry.");
    assert!(!has_call(&events));

    // Where a message is not continued, the call is accepted, with a note.
    let upstream = Scripted::start(vec![streamed(acts)]).await;
    let repairs = judge(Verdict::Repair(" I must not.".into()));
    let events = all(begin_with(&model(&upstream.url, |_| ()), request(), repairs)).await;
    assert!(has_call(&events));
    assert!(finished(&events).notes[0].contains("without repair"));
}

/// The rest of an answer got a form of its own.
#[tokio::test]
async fn the_rest_of_an_answer_gets_no_form_of_a_policy() {
    for (content, has_form) in [("It is", false), ("", true)] {
        let upstream = Scripted::start(vec![says(" Rome.")]).await;
        let policy = |call: &Call<'_>| match call {
            Call::Request(_) => {
                let form = Some(AnswerForm::JsonObject);
                Some(Answer::Request(Plan { form, ..Plan::default() }))
            }
            _ => None,
        };
        let mut request = Request { continues: Some(Continued::Answer), ..ask("?") };
        request.messages.push(Message {
            role: "assistant".into(),
            content: content.into(),
            reasoning_content: Some("Italy.".into()),
            ..Message::default()
        });
        let model = model(&upstream.url, kind(Kind::Vllm));
        let events = all(begin_with(&model, request, session(policy, false, false))).await;
        assert_eq!(upstream.body(0).get("response_format").is_some(), has_form);
        let notes = finished(&events).notes.join(";");
        assert_eq!(notes.contains("the client continues an answer"), !has_form, "{notes}");
    }
}

#[tokio::test]
async fn the_policy_sees_whether_the_upstream_continues_messages() {
    for (continues, family) in [(Continues::Never, "openai"), (Continues::Told, "openai+continue")]
    {
        let upstream = Scripted::start(vec![says("x")]).await;
        let model = model(&upstream.url, |config| {
            config.capabilities =
                CapabilityConfig { continues: Some(continues), ..CapabilityConfig::default() };
        });
        let seen: Arc<Mutex<String>> = Arc::default();
        let families = seen.clone();
        let policy = move |call: &Call<'_>| match call {
            Call::Request(view) => {
                *families.lock() = format!("{} {}", view.family, view.model);
                let sampling = SamplingPatch {
                    temperature: Some(0.5),
                    top_k: Some(7),
                    ..SamplingPatch::default()
                };
                Some(Answer::Request(Plan { sampling, ..Plan::default() }))
            }
            _ => None,
        };
        let events = all(begin_with(&model, ask("?"), session(policy, false, false))).await;
        assert_eq!(*seen.lock(), format!("{family} work/m"));
        assert_eq!(upstream.body(0)["temperature"], 0.5);
        assert!(finished(&events).notes.join(";").contains("left out `top_k`"));
    }
}
