//! The default policy: planted codes are found, endless reasoning is closed, and answers have
//! the requested form.
//!
//! `tests/fixtures/prompts.py` chose prompts that the model itself answers correctly, so a wrong
//! answer is a bug of the engine or the policy.

use serde_json::Value;
use steersman_engine::policy::SamplingPatch;
use steersman_engine::request::{FinishReason, Message, Request};
use steersman_engine::{Error, RequestError};
use steersman_tests::{Running, ask, ask_weather, config, fixture, message, run};

/// Fits the longest prompt with a planted code.
const CONTEXT: usize = 2560;

/// An engine that saves no state, with the profiles `default` and `passthrough`.
fn engine() -> Running {
    engine_with_context(CONTEXT)
}

fn engine_with_context(context: usize) -> Running {
    let mut config = config();
    config.engine.context = context;
    for policy in ["default", "passthrough"] {
        let profile = steersman_tests::profile(policy);
        config.profiles.insert(policy.into(), profile);
    }
    Running::without_store(config)
}

fn cases(kind: &str) -> Vec<Value> {
    fixture("prompts.json")[kind].as_array().unwrap().clone()
}

fn request(case: &Value, profile: &str, reasoning: Option<bool>) -> Request {
    let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
    Request { messages, profile: profile.into(), reasoning, ..ask("") }
}

#[test]
fn planted_codes_are_found_when_the_policy_enables_reasoning() {
    let engine = engine();
    for case in cases("needle") {
        let reply = run(&engine, request(&case, "default", None));
        assert!(reply.answer.contains(text(&case, "code")), "{reply:?}");
        assert!(!reply.reasoning.is_empty());
    }
}

/// `max_tokens` of a chat limits the answer. It once counted the reasoning that the policy enables for such questions:
/// with 160 tokens there was no room for it, and six of six answers were refusals.
#[test]
fn planted_codes_are_found_with_a_small_limit_of_the_answer() {
    let engine = engine();
    for limit in [400, 160, 60, 16] {
        for case in cases("needle") {
            let max_answer_tokens = Some(limit);
            let asked = request(&case, "default", None);
            let reply = run(&engine, Request { max_answer_tokens, ..asked });
            let finished = reply.finished();
            assert!(reply.answer.contains(text(&case, "code")), "{limit}: {reply:?}");
            assert_eq!(finished.reason, FinishReason::Stop, "{limit}: {reply:?}");
            assert!(finished.usage.answer_tokens <= limit && !reply.reasoning.is_empty());
        }
    }
}

#[test]
fn planted_codes_are_refused_without_policy_and_reasoning() {
    let engine = engine();
    for case in cases("needle") {
        let reply = run(&engine, request(&case, "passthrough", Some(false)));
        assert_eq!(reply.answer, text(&case, "without_thinking"));
        assert_eq!((reply.reasoning.as_str(), reply.finished().usage.reasoning_tokens), ("", 0));
    }
}

#[test]
fn endless_reasoning_ends_with_an_answer_in_the_requested_form() {
    let engine = engine();
    for case in cases("loops") {
        let reply = run(&engine, request(&case, "default", Some(true)));
        let expected = format!("{}{}", text(&case, "hint"), text(&case, "completion"));
        let finished = reply.finished();
        assert_eq!(reply.answer, expected, "{}: {:?}", text(&case, "kind"), finished.notes);
        assert_eq!(finished.reason, FinishReason::Stop);
        assert!(finished.notes.iter().any(|note| note.contains("loop")), "{:?}", finished.notes);
        println!("{}: {:?}", text(&case, "kind"), finished.usage);
    }
}

/// Two of each kind, in a small context, since each fills it.
#[test]
fn endless_reasoning_fills_the_context_without_a_policy() {
    let engine = engine_with_context(600);
    for kind in ["invoice", "sql", "puzzle"] {
        let cases = cases("loops");
        for case in cases.iter().filter(|case| case["kind"] == kind).take(2) {
            let reply = run(&engine, request(case, "passthrough", Some(true)));
            let finished = reply.finished();
            assert_eq!(finished.reason, FinishReason::Length, "{kind}");
            assert_eq!(reply.answer, "");
            let usage = finished.usage;
            assert_eq!(usage.prompt_tokens + usage.reasoning_tokens, 600, "{usage:?}");
        }
    }
}

#[test]
fn ordinary_questions_are_answered_with_and_without_reasoning() {
    let engine = engine();
    for case in cases("plain") {
        for reasoning in [true, false] {
            let reply = run(&engine, request(&case, "default", Some(reasoning)));
            assert_eq!(reply.answer, text(&case, "answer"), "reasoning {reasoning}");
            assert_eq!(reply.reasoning.is_empty(), !reasoning);
            assert_eq!(reply.finished().reason, FinishReason::Stop);
        }
    }
}

#[test]
fn reasoning_budget_is_enforced_and_an_answer_follows() {
    let engine = engine();
    let question = "Logic puzzle: Anna is taller than Boris. Boris is taller than Clara. Who is \
                    the tallest?";
    for budget in [1, 10, 40] {
        let request =
            Request { reasoning: Some(true), reasoning_budget: Some(budget), ..ask(question) };
        let reply = run(&engine, request);
        let usage = reply.finished().usage;
        // The marker and the line breaks around it count as reasoning.
        assert!((budget..budget + 4).contains(&usage.reasoning_tokens), "{usage:?}");
        assert!(!reply.answer.is_empty());
    }
}

#[test]
fn max_tokens_limits_reasoning_and_answer_together() {
    let engine = engine();
    let question = ask("What is the capital of Italy?");
    let question = Request { profile: "passthrough".into(), reasoning: Some(true), ..question };
    let whole = run(&engine, question.clone());
    let usage = whole.finished().usage;
    assert!(usage.reasoning_tokens > 2 && usage.answer_tokens > 2, "{usage:?}");
    let in_reasoning = usage.reasoning_tokens - 1;
    for limit in [1, in_reasoning, usage.reasoning_tokens + 2, usage.reply_tokens() - 1] {
        let cut = run(&engine, Request { max_tokens: Some(limit), ..question.clone() });
        let finished = cut.finished();
        assert_eq!(
            (&finished.reason, finished.usage.reply_tokens()),
            (&FinishReason::Length, limit)
        );
        // Line breaks before the end of the reasoning are not part of it.
        assert!(whole.reasoning.starts_with(cut.reasoning.trim_end()), "{cut:?}");
        assert!(whole.answer.starts_with(&cut.answer), "{cut:?}");
        assert_eq!(cut.answer.is_empty(), limit <= in_reasoning, "{cut:?}");
    }
}

/// The default policy leaves room for an answer within `max_tokens`; its hint counts too.
#[test]
fn a_reply_that_ignores_the_end_has_exactly_max_tokens() {
    let engine = engine();
    let looping = ask("Optimize this SQL query: SELECT * FROM items WHERE price = 26;");
    for limit in [1, 3, 60] {
        let request = Request {
            reasoning: Some(true),
            max_tokens: Some(limit),
            ignores_end: true,
            ..looping.clone()
        };
        let reply = run(&engine, request);
        let finished = reply.finished();
        assert_eq!(
            (&finished.reason, finished.usage.reply_tokens()),
            (&FinishReason::Length, limit)
        );
        assert_eq!(reply.answer.is_empty(), limit < 60, "{reply:?}");
    }
}

#[test]
fn equal_seeds_give_equal_samples() {
    let engine = engine();
    let story = "Write a story about a fox named Nora who lives near the river.";
    let reply = |seed| {
        let request = Request {
            sampling: SamplingPatch { temperature: Some(1.0), ..SamplingPatch::default() },
            seed: Some(seed),
            reasoning: Some(false),
            max_tokens: Some(40),
            ..ask(story)
        };
        run(&engine, request).answer
    };
    assert_eq!(reply(1), reply(1));
    assert_ne!(reply(1), reply(2));
}

#[test]
fn tool_call_is_whole_and_typed() {
    let engine = engine();
    let reply = run(&engine, ask_weather());
    assert_eq!(reply.finished().reason, FinishReason::ToolCalls, "{reply:?}");
    assert_eq!(reply.answer, "");
    let [call] = &reply.tool_calls[..] else { panic!("one call, not {:?}", reply.tool_calls) };
    assert_eq!(call.function.name, "get_weather");
    assert_eq!(serde_json::to_string(&call.function.arguments).unwrap(), r#"{"city":"Oslo"}"#);
}

#[test]
fn disconnected_client_frees_the_engine() {
    let engine = engine();
    let question = "Optimize this SQL query: SELECT * FROM items WHERE price = 26;";
    // This reasoning would fill the context.
    let mut events = engine
        .submit(Request { profile: "passthrough".into(), reasoning: Some(true), ..ask(question) })
        .unwrap();
    events.blocking_recv().expect("the reasoning starts");
    drop(events);
    let reply = run(&engine, ask("What is the capital of Italy?"));
    assert_eq!(reply.answer, "The capital of Italy is Rome.");
}

#[test]
fn too_long_prompt_is_rejected_with_its_length() {
    let engine = engine();
    let reply = run(&engine, ask(&"What is the capital of Italy? ".repeat(1000)));
    let Err(Error::Request(RequestError::ContextTooLong { tokens, limit })) = reply.end else {
        panic!("not rejected: {reply:?}")
    };
    assert!(tokens > limit && limit < CONTEXT);
}

#[test]
fn conversation_continues_over_several_turns() {
    let engine = engine();
    let mut request = ask("What is the capital of Peru?");
    for (country, city) in [("Peru", "Lima"), ("Kenya", "Nairobi"), ("Cuba", "Havana")] {
        let question = format!("What is the capital of {country}?");
        request.messages.last_mut().unwrap().content = question;
        let reply = run(&engine, request.clone());
        assert_eq!(reply.answer, format!("The capital of {country} is {city}."));
        request.messages.extend([message("assistant", &reply.answer), message("user", "")]);
    }
}

fn text<'a>(case: &'a Value, key: &str) -> &'a str {
    case[key].as_str().unwrap()
}
