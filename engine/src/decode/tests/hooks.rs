//! Policies that are called on threads: their own request waits for them and nobody else, and no token
//! changes.

use std::sync::mpsc::{Receiver, Sender, channel};

use tokio::sync::mpsc::UnboundedReceiver;

use super::scripted::*;
use crate::config::{Config, DraftKind};
use crate::decode::Decoder;
use crate::error::{Error, RequestError};
use crate::measure::verify::DecodePath;
use crate::policy::{Action, Ban, Bias, SamplingChange, SamplingPatch, Step, TokenBias, Verdict};
use crate::request::{Event, Request};
use crate::sequence::Sequence;

/// A policy that is not known to be quick. Each call of `on-step` waits until the test allows it, or drops
/// the sender.
fn gated(
    mut steps: impl FnMut(&Step) -> Vec<Action> + Send + 'static,
) -> (Script, Sender<()>, Receiver<String>) {
    let (allow, gate) = channel();
    let (finished, finish) = channel();
    let mut script = Script::new(move |step| {
        let _ = gate.recv();
        steps(step)
    });
    script.is_quick = false;
    script.finish = Box::new(move |summary| finished.send(summary.reason.clone()).unwrap());
    (script, allow, finish)
}

/// Actions of every kind, some at the same step.
fn acts(step: &Step) -> Vec<Action> {
    let ban = |tokens: &[u32], steps| Action::Ban(Ban { tokens: tokens.to_vec(), steps });
    match step.index {
        1 => vec![ban(&[CLOSE_REASONING, OPEN_REASONING, END], 0)],
        5 => vec![Action::Inject("So: ".into())],
        13 => {
            let sampling = SamplingPatch { top_k: Some(20), ..SamplingPatch::default() };
            vec![Action::Sampling(SamplingChange { sampling, steps: 6 })]
        }
        // Once: the same step comes again after it, with an `i`.
        24 if step.tokens.last() != Some(&105) => vec![
            Action::Rewind(3),
            Action::Bias(Bias { tokens: vec![TokenBias { token: 105, bias: 100.0 }], steps: 3 }),
        ],
        30 => vec![Action::CloseReasoning("In short: ".into()), Action::Inject("it ".into())],
        _ => Vec::new(),
    }
}

fn tokens_of(decoder: &Decoder) -> Vec<usize> {
    decoder.schedule.running().iter().map(|sequence| sequence.reply().len()).collect()
}

/// Steps until one sequence or none is left.
fn step_until(decoder: &mut Decoder, left: usize) {
    for _ in 0..100_000 {
        if decoder.schedule.running().len() + decoder.schedule.preempted().len() <= left {
            return;
        }
        decoder.wait_for_policies(decoder.schedule.running());
        decoder.step();
    }
    panic!("{} sequences are left", decoder.schedule.running().len());
}

/// The text of a reply, and its last event.
fn read(mut events: UnboundedReceiver<Event>) -> (String, Event) {
    let mut text = String::new();
    loop {
        match events.blocking_recv().expect("the last event has not come") {
            Event::Reasoning(more) | Event::Answer(more) => text += &more,
            Event::Rewound { reasoning, answer } => text.truncate(text.len() - reasoning - answer),
            event @ (Event::Finished(_) | Event::Failed(_)) => return (text, event),
            _ => {}
        }
    }
}

fn text(transcript: &Transcript) -> String {
    transcript.reasoning.clone() + &transcript.answer
}

fn quiet() -> Script {
    Script::new(|_| Vec::new())
}

/// Before, the engine thread waited for each call, and with it every other request.
#[test]
fn a_policy_that_does_not_answer_stops_no_other_request() {
    let decoder = &mut family("qwen3_next", Config::default(), false);
    let request = ask("Where is the river?", true, 80);
    let mut quick = Script::new(acts);
    quick.plan.reasoning_budget = Some(60);
    let alone = run_plain(decoder, &request, quick);
    let beside = run_plain(decoder, &ask("Who?", false, 30), quiet());

    let (mut script, allow, finish) = gated(acts);
    script.plan.reasoning_budget = Some(60);
    let slow = start(decoder, request.clone(), script);
    let other = start(decoder, ask("Who?", false, 30), quiet());
    step_until(decoder, 1);
    // Its first token has been committed, and the policy has not answered.
    assert_eq!(tokens_of(decoder), [1]);
    assert_eq!(decoder.activity.report().awaiting_policy, 1);
    assert_eq!(read(other).0, text(&beside));
    // Each answer is worth one token, or what it injects.
    let passes = decoder.activity.report().passes;
    for tokens in 2..5 {
        allow.send(()).unwrap();
        while tokens_of(decoder) != [tokens] {
            decoder.step();
        }
        (0..5).for_each(|_| decoder.step());
        assert_eq!(tokens_of(decoder), [tokens]);
    }
    assert!(decoder.activity.report().passes <= passes + 4);
    drop(allow);
    step_until(decoder, 0);
    assert_eq!(read(slow).0, text(&alone));
    assert_eq!(finish.recv().unwrap(), "length");
    assert_eq!(decoder.activity.report().awaiting_policy, 0);
}

/// Greedy and sampled, plain and with drafts, on a hybrid, a sliding and a dense model.
#[test]
fn where_a_policy_is_called_changes_no_token() {
    let paths = [DecodePath::Plain, DecodePath::Rewound, DecodePath::Drafted(DraftKind::Ngram)];
    for name in ["qwen3_next", "gemma3_text", "llama"] {
        let decoder = &mut family(name, Config::default(), false);
        for (temperature, every) in [(0.0, 1), (0.9, 1), (0.0, 3), (0.9, 3)] {
            let mut request = ask("Where does the hare live?", true, 80);
            request.sampling.temperature = Some(temperature);
            let script = |is_quick| {
                let mut script = Script::new(acts);
                (script.is_quick, script.plan.every) = (is_quick, every);
                script.plan.checkpoint_every = 16;
                script
            };
            let quick = run_plain(decoder, &request, script(true));
            for path in paths {
                let slow = run(decoder, &request, script(false), path, Some(&quick.tokens));
                assert_eq!(slow.tokens, quick.tokens, "{name} {path:?} {temperature} {every}");
                assert_eq!((&slow.notes, &slow.reason), (&quick.notes, &quick.reason));
                // After each token the policy is called; nothing is drafted before its answer.
                let drafts = path == DecodePath::Rewound && every > 1;
                assert!(!drafts || slow.usage.accepted_tokens > 0, "{name} {:?}", slow.usage);
            }
        }
    }
}

/// Several running requests, each with a policy on a thread.
#[test]
fn requests_that_wait_for_their_policies_together_equal_those_alone() {
    let decoder = &mut family("qwen3_5", Config::default(), false);
    let requests: Vec<Request> = (0..4)
        .map(|i| {
            let mut request = ask(["Where?", "Who?", "When is it?", "Why?"][i], i % 2 == 0, 36);
            request.sampling.temperature = Some((i / 2) as f32);
            request
        })
        .collect();
    let alone: Vec<String> = requests
        .iter()
        .map(|request| text(&run_plain(decoder, request, Script::new(acts))))
        .collect();
    let slow = |request: &Request, decoder: &mut Decoder| {
        let script = Script { is_quick: false, ..Script::new(acts) };
        start(decoder, request.clone(), script)
    };
    let events: Vec<_> = requests.iter().map(|request| slow(request, decoder)).collect();
    step_until(decoder, 0);
    for (events, alone) in events.into_iter().zip(alone) {
        assert_eq!(read(events).0, alone);
    }
}

/// The verdict is a call like any other.
#[test]
fn a_tool_call_waits_for_a_verdict_on_a_thread() {
    const CALL: &str = "<tool_call>{\"name\": \"look\", \"arguments\": {}}</tool_call>";
    let decoder = &mut family("llama", Config::default(), false);
    let tool =
        serde_json::json!({"type": "function", "function": {"name": "look", "parameters": {}}});
    let request = Request { tools: vec![tool], ..ask("Where?", false, 160) };
    for verdict in [
        Verdict::Accept,
        Verdict::Repair("Look again: ".into()),
        Verdict::Repair(format!("Again: {CALL}")),
        Verdict::Stop("no".into()),
    ] {
        let script = |is_quick| {
            let text = CALL.bytes().map(u32::from).collect();
            let mut script = Script::new(super::tool_calls::writes(text, |_| Vec::new()));
            let verdict = verdict.clone();
            script.calls = Box::new(move |_| verdict.clone());
            script.is_quick = is_quick;
            script
        };
        let quick = run_plain(decoder, &request, script(true));
        let slow = run_plain(decoder, &request, script(false));
        assert_eq!(slow.tokens, quick.tokens, "{verdict:?}");
        assert_eq!((&slow.calls, &slow.reason), (&quick.calls, &quick.reason), "{verdict:?}");
        assert_eq!(slow.notes, quick.notes);
        assert!(!quick.notes.is_empty() && (quick.calls.len() == 1 || verdict != Verdict::Accept));
    }
}

/// A policy had answered, and the end of its reply waited for a pass over a chunk of another prompt.
#[test]
fn the_end_of_a_reply_waits_for_no_prompt_of_others() {
    let decoder = &mut family("llama", Config::default(), false);
    let (script, allow, _finish) = gated(|_| vec![Action::Stop("enough".into())]);
    let ended = start(decoder, ask("Where?", false, 40), script);
    until_away(decoder);
    let other = start(decoder, ask(&"Who is it? ".repeat(100), false, 4), quiet());
    allow.send(()).unwrap();
    while !decoder.schedule.running()[0].is_back() {
        std::thread::yield_now();
    }
    // Rows that were computed for another request need not run.
    let rows = decoder.schedule.running()[1].timeline().position();
    decoder.step();
    assert!(matches!(read(ended).1, Event::Finished(_)));
    let [other_sequence] = decoder.schedule.running() else { panic!("one has ended") };
    assert_eq!(other_sequence.timeline().position(), rows, "no row of the other prompt has run");
    step_until(decoder, 0);
    assert!(matches!(read(other).1, Event::Finished(_)));
}

/// Steps until the policy of the only sequence is called on a thread.
fn until_away(decoder: &mut Decoder) {
    while !decoder.schedule.running()[0].is_away() {
        decoder.step();
    }
}

#[test]
fn a_client_that_disconnects_waits_for_no_policy() {
    let decoder = &mut family("llama", Config::default(), false);
    let (script, allow, finish) = gated(acts);
    let events = start(decoder, ask("Where?", false, 40), script);
    until_away(decoder);
    drop(events);
    decoder.step();
    assert_eq!((decoder.schedule.running().len(), decoder.activity.report().running), (0, 0));
    assert!(finish.try_recv().is_err(), "it is being called");
    drop(allow);
    assert_eq!(finish.recv().unwrap(), "cancelled");
    assert!(finish.recv().is_err(), "on-finish is called once, and the session is dropped");
}

#[test]
fn a_deadline_waits_for_no_policy() {
    let decoder = &mut family("llama", Config::default(), false);
    let (script, allow, finish) = gated(acts);
    let events = start(decoder, ask("Where?", false, 40), script);
    until_away(decoder);
    decoder.schedule.running_mut()[0].set_deadline(std::time::Instant::now());
    decoder.step();
    match read(events).1 {
        Event::Failed(Error::Request(RequestError::Deadline { stage })) => {
            assert_eq!(stage, "being decoded");
        }
        other => panic!("{other:?}"),
    }
    drop(allow);
    assert_eq!(finish.recv().unwrap(), "error");
}

#[test]
fn a_panic_on_a_thread_ends_one_request() {
    let decoder = &mut family("llama", Config::default(), false);
    let request = ask("Who?", false, 30);
    let alone = run_plain(decoder, &request, quiet());
    for _ in 0..2 * Config::default().engine.policy_threads {
        let mut panics = Script::new(|step| {
            assert!(step.index < 3, "on purpose");
            Vec::new()
        });
        panics.is_quick = false;
        let broken = start(decoder, request.clone(), panics);
        let slow = Script { is_quick: false, ..quiet() };
        let events =
            [start(decoder, request.clone(), quiet()), start(decoder, request.clone(), slow)];
        step_until(decoder, 0);
        match read(broken).1 {
            Event::Failed(Error::Panic { message, .. }) => assert_eq!(message, "on purpose"),
            other => panic!("{other:?}"),
        }
        for events in events {
            assert_eq!(read(events).0, text(&alone));
        }
    }
}

/// Its answer applies after it has resumed.
#[test]
fn a_request_preempted_while_its_policy_is_called_equals_one_that_never_was() {
    for name in ["qwen3_next", "gemma3_text", "llama"] {
        let decoder = &mut family(name, Config::default(), false);
        for temperature in [0.0, 0.9] {
            let mut request = ask("Where does the hare live?", true, 80);
            request.sampling.temperature = Some(temperature);
            let alone = run_plain(decoder, &request, Script::new(acts));
            let (script, allow, _finish) = gated(acts);
            let events = start(decoder, request, script);
            let mut preemptions = 0;
            while let Some(sequence) = decoder.schedule.running().first() {
                if sequence.is_away() && !sequence.is_back() {
                    let mut sequence = decoder.schedule.running_mut().remove(0);
                    decoder.drop_state(&mut sequence).unwrap();
                    preemptions += 1;
                    let answer = |sequence: &Sequence| {
                        allow.send(()).unwrap();
                        while !sequence.is_back() {
                            std::thread::yield_now();
                        }
                    };
                    // Every other answer comes while it is preempted.
                    let is_early = preemptions % 2 == 0;
                    if is_early {
                        answer(&sequence);
                    }
                    decoder.schedule.push_preempted(sequence);
                    decoder.step();
                    if !is_early {
                        answer(&decoder.schedule.running()[0]);
                    }
                }
                decoder.wait_for_policies(decoder.schedule.running());
                decoder.step();
            }
            assert!(preemptions > 20);
            assert_eq!(read(events).0, text(&alone), "{name} {temperature}");
        }
    }
}

/// `on-finish` may be slow too: the request ends after it, and holds no memory meanwhile.
#[test]
fn on_finish_on_a_thread_delays_its_own_request_only() {
    let decoder = &mut family("llama", Config::default(), false);
    let (allow, gate) = channel::<()>();
    let mut script = quiet();
    script.is_quick = false;
    script.finish = Box::new(move |_| {
        let _ = gate.recv();
    });
    let mut slow = start(decoder, ask("Where?", false, 4), script);
    step_until(decoder, 0);
    assert_eq!(decoder.policies.hooks().finishing(), 1);
    while let Ok(event) = slow.try_recv() {
        assert!(!matches!(event, Event::Finished(_)), "{event:?}");
    }
    let other = start(decoder, ask("Where?", false, 4), quiet());
    step_until(decoder, 0);
    assert!(matches!(read(other).1, Event::Finished(_)));
    drop(allow);
    assert!(matches!(read(slow).1, Event::Finished(_)));
}
