//! Tool calls: none reaches the client without a verdict of the policy.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::scripted::*;
use crate::config::{Config, DraftKind};
use crate::decode::Decoder;
use crate::measure::verify::DecodePath;
use crate::policy::{Action, Bias, MAX_REPAIRS, Step, TokenBias, ToolCallView, Verdict};
use crate::request::{FinishReason, FunctionCall, Request, Sampling, ToolCall};

const CALL: &str = r#"{"name": "look", "arguments": {"b": 2, "a": [1, {"d": 0, "c": "é"}]}}"#;

fn with_tools(thinking: bool, max_tokens: u32) -> Request {
    let tool = json!({"type": "function", "function": {"name": "look", "parameters": {}}});
    Request { tools: vec![tool], revisable: false, ..ask("Where?", thinking, max_tokens) }
}

/// Forces these tokens after the first one, by biases; then runs `then`.
pub fn writes(
    tokens: Vec<u32>,
    then: impl Fn(&Step) -> Vec<Action>,
) -> impl FnMut(&Step) -> Vec<Action> {
    let mut written = 0;
    move |step| match tokens.get(written) {
        Some(&token) => {
            written += 1;
            let tokens = vec![TokenBias { token, bias: 100.0 }];
            vec![Action::Bias(Bias { tokens, steps: 1 })]
        }
        None => then(step),
    }
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// A call in tags that are tokens.
fn call(text: &str, close: u32) -> Vec<u32> {
    [&[OPEN_CALL], &bytes(text)[..], &[close]].concat()
}

/// A script with a list of verdicts, and the views it was called with.
fn judged(
    steps: impl FnMut(&Step) -> Vec<Action> + Send + 'static,
    verdicts: &[Verdict],
) -> (Script, Arc<Mutex<Vec<ToolCallView>>>) {
    let seen: Arc<Mutex<Vec<ToolCallView>>> = Arc::default();
    let (shown, mut verdicts) = (seen.clone(), VecDeque::from(verdicts.to_vec()));
    let mut script = Script::new(steps);
    script.calls = Box::new(move |view| {
        shown.lock().push(view.clone());
        verdicts.pop_front().unwrap_or(Verdict::Accept)
    });
    (script, seen)
}

fn tokens_model() -> Decoder {
    family("llama", Config::default(), true)
}

#[test]
fn call_gets_its_verdict_before_the_client_receives_it() {
    let decoder = &mut tokens_model();
    let request = with_tools(false, 200);
    let end = |_: &Step| vec![Action::Stop("enough".into())];
    let (script, seen) = judged(writes(call(CALL, CLOSE_CALL), end), &[Verdict::Accept]);
    let ran = run_plain(decoder, &request, script);
    assert_eq!(ran.calls.len(), 1);
    let view = seen.lock()[0].clone();
    assert_eq!((view.name.as_str(), view.index), ("look", 0));
    assert_eq!(view.arguments, r#"{"b":2,"a":[1,{"d":0,"c":"é"}]}"#);
    assert_eq!(view.earlier, []);

    let (script, _) = judged(
        writes(call(CALL, CLOSE_CALL), |_| Vec::new()),
        &[Verdict::Stop("no more calls".into())],
    );
    let ran = run_plain(decoder, &request, script);
    assert_eq!((ran.calls.len(), ran.reason), (0, FinishReason::Policy("no more calls".into())));
}

/// The reply is rewound to the opening tag and continues as if the text had been there.
#[test]
fn repaired_call_is_replaced_by_the_text() {
    for name in ["qwen3_next", "llama"] {
        for call_tokens in [true, false] {
            let decoder = &mut family(name, Config::default(), call_tokens);
            // An incomplete character before the call would be completed by it, and sent.
            let mut request = with_tools(false, 150);
            while run_plain(decoder, &request, Script::new(|_| Vec::new())).reply()[0] > 127 {
                request.messages[0].content.push('?');
            }
            let text = if call_tokens {
                call(CALL, CLOSE_CALL)
            } else {
                bytes(&format!("<tool_call>{CALL}</tool_call>"))
            };
            let script = || {
                let verdicts = [Verdict::Repair("Look again: ".into())];
                judged(writes(text.clone(), |_| Vec::new()), &verdicts).0
            };
            let ran = run_plain(decoder, &request, script());
            assert_eq!(ran.calls.len(), 0, "{ran:?}");
            assert_eq!(ran.reply()[1..13], bytes("Look again: "), "{ran:?}");
            assert_eq!(ran.rewound, []);
            assert!(ran.noted("removed a call of `look`"), "{:?}", ran.notes);
            let plain = plain_samples(decoder, &ran, &Sampling::default(), &[]);
            assert_eq!(ran.reply()[13..], plain[13..]);
            let ran = run(decoder, &request, script(), DecodePath::Drafted(DraftKind::Ngram), None);
            assert_eq!(ran.reply()[13..], plain[13..]);
        }
    }
}

/// Where the tags of calls are no tokens, they are found in any text: a policy's text became a call.
#[test]
fn injected_text_is_no_call_whatever_the_tokenizer_knows() {
    let whole = format!("So <tool_call>{CALL}</tool_call>");
    let (first, second) = ("So <tool_ca".to_owned(), format!("ll>{CALL}</tool_call>"));
    let (third, fourth) = ("So <".to_owned(), format!("tool_call>{CALL}</tool_call>"));
    for call_tokens in [true, false] {
        for is_reasoning in [true, false] {
            for texts in [vec![&whole], vec![&first, &second], vec![&third, &fourth]] {
                for as_hint in [false, true] {
                    let decoder = &mut family("llama", Config::default(), call_tokens);
                    let mut texts: Vec<String> = texts.iter().rev().map(|t| (*t).clone()).collect();
                    let script = Script::new(move |step| {
                        let mut actions = match texts.pop() {
                            Some(text) if as_hint => vec![Action::CloseReasoning(text)],
                            Some(text) => vec![Action::Inject(text)],
                            None => Vec::new(),
                        };
                        if step.index == 1 {
                            let tokens = vec![CLOSE_REASONING, OPEN_REASONING, OPEN_CALL, END];
                            actions.push(Action::Ban(crate::policy::Ban { tokens, steps: 0 }));
                        }
                        actions
                    });
                    let ran = run_plain(decoder, &with_tools(is_reasoning, 200), script);
                    assert!(
                        ran.calls.is_empty(),
                        "{call_tokens} {is_reasoning} {as_hint}: {ran:?}"
                    );
                }
            }
        }
    }
    // Nor does the text of a repair.
    let decoder = &mut family("llama", Config::default(), false);
    let written = bytes(&format!("<tool_call>{CALL}</tool_call>"));
    let (script, _) = judged(writes(written, |_| Vec::new()), &[Verdict::Repair(whole)]);
    let ran = run_plain(decoder, &with_tools(false, 150), script);
    assert!(ran.calls.is_empty(), "{ran:?}");
    assert!(ran.noted("left out the text of a repair"), "{:?}", ran.notes);
}

#[test]
fn calls_are_accepted_after_the_limit_of_repairs() {
    let decoder = &mut tokens_model();
    let request = with_tools(false, 600);
    let nothing: fn(&Step) -> Vec<Action> = |_| Vec::new();
    let mut again = writes(Vec::new(), nothing);
    let steps = move |step: &Step| {
        // Starts to write the call again after the text of each repair.
        if step.phase == crate::policy::Phase::Answer {
            again = writes(call(CALL, CLOSE_CALL), nothing);
        }
        again(step)
    };
    // After this text the random model writes whole characters, so that nothing of them is sent after the tag.
    let verdicts = vec![Verdict::Repair("Once more: ".into()); 10];
    let (script, seen) = judged(steps, &verdicts);
    let ran = run_plain(decoder, &request, script);
    assert!(!ran.calls.is_empty());
    assert_eq!(seen.lock().len(), ran.calls.len() + MAX_REPAIRS as usize);
    let index: Vec<u32> = seen.lock().iter().map(|view| view.index).collect();
    assert_eq!(index[..6], [0, 0, 0, 0, 0, 1], "{ran:?}");
}

/// The end of the reply completes a call without a closing tag.
#[test]
fn call_completed_by_the_end_of_the_reply_gets_a_verdict() {
    let decoder = &mut tokens_model();
    let request = with_tools(false, 120);
    let script = |verdict: Verdict| {
        let end = |_: &Step| Vec::new();
        judged(writes(call(CALL, END), end), &[verdict]).0
    };
    let ran = run_plain(decoder, &request, script(Verdict::Accept));
    assert_eq!((ran.calls.len(), ran.reason.clone()), (1, FinishReason::ToolCalls));
    assert_eq!(ran.tokens.last(), Some(&END));
    let ran = run_plain(decoder, &request, script(Verdict::Stop("why".into())));
    assert_eq!((ran.calls.len(), ran.reason.clone()), (0, FinishReason::Policy("why".into())));
    let ran = run_plain(decoder, &request, script(Verdict::Repair("Well: ".into())));
    assert_eq!(ran.calls.len(), 0);
    assert_eq!(ran.reply()[1..7], bytes("Well: "));
    let plain = plain_samples(decoder, &ran, &Sampling::default(), &[]);
    assert_eq!(ran.reply()[7..], plain[7..]);
    // If the limit completes the call, no tokens are left for a repair.
    let length = 1 + 1 + CALL.len() as u32;
    let short = Request { max_tokens: Some(length), ..request };
    let ran = run_plain(decoder, &short, script(Verdict::Repair("Well: ".into())));
    assert_eq!((ran.calls.len(), ran.reason.clone()), (0, FinishReason::Length));
    assert!(ran.noted("no tokens left to repair it"), "{:?}", ran.notes);
}

/// The opening tag of the second call closes the first; the second is repaired and the first stays.
#[test]
fn each_of_several_calls_gets_its_own_verdict() {
    let decoder = &mut tokens_model();
    let request = with_tools(false, 400);
    let second = r#"{"name": "look", "arguments": {"c": 3}}"#;
    let text = [&[OPEN_CALL][..], &bytes(CALL), &call(second, CLOSE_CALL)].concat();
    let end = |_: &Step| vec![Action::Stop("enough".into())];
    let (script, seen) = judged(writes(text.clone(), end), &[]);
    let ran = run_plain(decoder, &request, script);
    assert_eq!(ran.calls.len(), 2);
    let seen = seen.lock();
    assert_eq!((seen[1].index, seen[1].earlier.len()), (1, 1));
    assert_eq!(seen[1].earlier[0].arguments, seen[0].digest);
    assert_eq!(seen[1].earlier[0].answered, None);

    let verdicts = [Verdict::Accept, Verdict::Repair("Enough.".into())];
    let (script, _) = judged(writes(text, end), &verdicts);
    let ran = run_plain(decoder, &request, script);
    assert_eq!(ran.calls.len(), 1, "{ran:?}");
    let expected = [&call(CALL, CLOSE_CALL)[..], &bytes("Enough.")].concat();
    assert!(ran.reply()[1..].starts_with(&expected), "{ran:?}");

    // Two calls in one pair of tags are sent together or not at all.
    let both = format!("[{CALL}, {second}]");
    let (script, seen) = judged(writes(call(&both, CLOSE_CALL), end), &verdicts);
    let ran = run_plain(decoder, &request, script);
    assert_eq!((seen.lock().len(), ran.calls.len()), (2, 0));
    let (script, _) = judged(writes(call(&both, CLOSE_CALL), end), &[]);
    assert_eq!(run_plain(decoder, &request, script).calls.len(), 2);
}

/// A rewind inside a call removes it with its tag, and no call that the client has.
#[test]
fn rewind_inside_a_call_stops_at_its_opening_tag() {
    let decoder = &mut tokens_model();
    let request = with_tools(false, 300);
    let mut text = call(CALL, CLOSE_CALL);
    text.extend([OPEN_CALL]);
    text.extend(bytes(r#"{"name": "lo"#));
    let length = 1 + text.len() as u32;
    let steps = writes(text, move |step| {
        if step.index != length {
            return Vec::new();
        }
        vec![Action::Rewind(1000), Action::Inject("Done.".into()), Action::Stop("why".into())]
    });
    let ran = run_plain(decoder, &request, judged(steps, &[]).0);
    let expected = [&call(CALL, CLOSE_CALL)[..], &bytes("Done.")].concat();
    assert_eq!(ran.reply()[1..], expected);
    assert_eq!(ran.calls.len(), 1);
}

/// The end of the reasoning may complete a call in it.
#[test]
fn call_in_reasoning_is_repaired_in_reasoning() {
    let decoder = &mut tokens_model();
    let request = with_tools(true, 200);
    let text = [&call(CALL, CLOSE_REASONING)[..], &bytes("x")].concat();
    let steps = writes(text, |_| vec![Action::Stop("enough".into())]);
    let (script, _) = judged(steps, &[Verdict::Repair("Hm, ".into())]);
    let ran = run_plain(decoder, &request, script);
    assert_eq!(ran.calls.len(), 0);
    assert_eq!(ran.reply()[1..5], bytes("Hm, "));
    assert!(ran.usage.reasoning_tokens > 0 && ran.usage.answer_tokens == 0, "{:?}", ran.usage);
}

/// Digests of arguments do not depend on key order. Results belong to the call they name, else to the
/// oldest call without one.
#[test]
fn policy_sees_calls_and_results_of_the_conversation() {
    let decoder = &mut tokens_model();
    let mut request = with_tools(false, 200);
    let arguments = |value: Value| value.as_object().unwrap().clone();
    let made = |id: &str, value: Value| ToolCall {
        id: id.into(),
        kind: "function".into(),
        function: FunctionCall { name: "look".into(), arguments: arguments(value).into() },
    };
    let mut assistant = message("assistant", "");
    assistant.tool_calls = vec![
        made("one", json!({"a": [1, {"c": "é", "d": 0}], "b": 2})),
        made("two", json!({"b": 3})),
        made("three", json!({})),
    ];
    let result = |id: Option<&str>, text: &str| {
        let mut result = message("tool", text);
        result.tool_call_id = id.map(Into::into);
        result
    };
    request.messages.extend([assistant, result(Some("two"), "same"), result(None, "same")]);
    let end = |_: &Step| vec![Action::Stop("enough".into())];
    let (script, seen) = judged(writes(call(CALL, CLOSE_CALL), end), &[]);
    run_plain(decoder, &request, script);
    let view = &seen.lock()[0];
    let [one, two, three] = &view.earlier[..] else { panic!("{view:?}") };
    assert_eq!(one.arguments, view.digest);
    // `printf '{"a":[1,{"c":"é","d":0}],"b":2}' | sha256sum`, and of `same`.
    assert_eq!(view.digest, "13a39eff05876b93");
    assert!(two.arguments != one.arguments && three.arguments != two.arguments);
    assert_eq!(one.answered.as_deref(), Some("0967115f2813a354"));
    assert_eq!((&two.answered, &three.answered), (&one.answered, &None));
}

/// The arguments of the calls that a client was sent in pieces.
fn streamed(ran: &Transcript) -> Vec<(String, String)> {
    let mut calls: Vec<(String, String)> = Vec::new();
    for delta in &ran.deltas {
        match (&delta.name, calls.last_mut()) {
            (Some(name), _) => calls.push((name.clone(), delta.arguments.clone())),
            (None, Some((_, all))) => all.push_str(&delta.arguments),
            (None, None) => panic!("{delta:?}"),
        }
    }
    calls
}

fn without_verdicts(steps: impl FnMut(&Step) -> Vec<Action> + Send + 'static) -> Script {
    Script { judges_calls: false, ..Script::new(steps) }
}

/// A verdict is on a whole call, so pieces are sent only where no policy gives verdicts.
#[test]
fn calls_are_sent_while_they_are_written_only_without_verdicts() {
    let decoder = &mut tokens_model();
    let whole = with_tools(false, 400);
    let request = Request { streams_calls: true, ..whole.clone() };
    let second = r#"{"name": "look", "arguments": {"c": 3}}"#;
    let text = call(&format!("[{CALL}, {second}]"), CLOSE_CALL);
    let end = |_: &Step| vec![Action::Stop("enough".into())];
    let script = || without_verdicts(writes(text.clone(), end));
    for drafted in [DecodePath::Plain, DecodePath::Drafted(DraftKind::Ngram)] {
        let ran = run(decoder, &request, script(), drafted, None);
        let arguments = [r#"{"b":2,"a":[1,{"d":0,"c":"é"}]}"#, r#"{"c":3}"#];
        let expected = arguments.map(|all| ("look".to_string(), all.to_string()));
        assert_eq!(streamed(&ran), expected);
        assert!(ran.deltas.len() > 10, "{:?}", ran.deltas);
        assert_eq!(ran.calls.len(), 2);
        assert_eq!(ran.deltas[0].id, ran.calls[0].id);
    }
    let ran = run_plain(decoder, &request, judged(writes(text.clone(), end), &[]).0);
    assert_eq!((ran.deltas.len(), ran.calls.len()), (0, 2));
    let ran = run_plain(decoder, &whole, script());
    assert_eq!((ran.deltas.len(), ran.calls.len()), (0, 2));
    // With one call only, nothing of the second is sent.
    let mut single = request;
    single.tool_choice.is_single = true;
    let ran = run_plain(decoder, &single, script());
    assert_eq!((streamed(&ran).len(), ran.calls.len()), (1, 1), "{ran:?}");
}

/// Fault F5: the reply of a stream with half a call ended with `tool_calls`, so clients ran it. It ends as at a
/// limit, for all protocols.
#[test]
fn a_stream_with_a_malformed_call_ends_as_at_a_limit() {
    let decoder = &mut tokens_model();
    let whole = with_tools(false, 400);
    let malformed = r#"{"name": "look", "arguments": {"a": "rm "x" y"}}"#;
    let text = [call(malformed, CLOSE_CALL), call(CALL, END)].concat();
    let script = || without_verdicts(writes(text.clone(), |_: &Step| Vec::new()));
    let ran = run_plain(decoder, &whole, script());
    assert_eq!((ran.calls.len(), ran.reason.clone()), (1, FinishReason::ToolCalls));
    let ran = run_plain(decoder, &Request { streams_calls: true, ..whole }, script());
    assert_eq!((ran.calls.len(), ran.reason.clone()), (1, FinishReason::Length));
    assert_eq!(streamed(&ran)[0], ("look".to_string(), r#"{"a":"rm ""#.to_string()));
    assert!(ran.noted("did not complete a malformed call of `look`"), "{:?}", ran.notes);
}

#[test]
fn rewind_does_not_remove_what_the_client_has_of_a_call() {
    let decoder = &mut tokens_model();
    let request = Request { streams_calls: true, ..with_tools(false, 300) };
    let text = [&[OPEN_CALL][..], &bytes(r#"{"name": "look", "arguments": {"a": "xyz"#)].concat();
    let length = 1 + text.len() as u32;
    let steps = writes(text.clone(), move |step| {
        if step.index != length {
            return Vec::new();
        }
        vec![Action::Rewind(1000), Action::Inject("Done.".into()), Action::Stop("why".into())]
    });
    let ran = run_plain(decoder, &request, without_verdicts(steps));
    assert_eq!(ran.reply()[1..=text.len()], text);
    assert_eq!(streamed(&ran), [("look".to_string(), r#"{"a":"xyzDone."#.to_string())]);
    assert_eq!(ran.calls.len(), 0);
    assert!(ran.noted("did not complete a call of `look`"), "{:?}", ran.notes);
    assert_eq!(ran.reason, FinishReason::Length, "a client must not run it");
}
