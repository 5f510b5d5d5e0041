//! Answer text passes the policies before the client has it, whoever writes it and however it is decoded.

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::json;

use super::scripted::*;
use super::tool_calls::writes;
use crate::config::{Config, DraftKind};
use crate::decode::Decoder;
use crate::measure::verify::DecodePath;
use crate::policy::{Action, HELD_BYTES, Step, TextChange, TextVerdict, TextView};
use crate::request::{FinishReason, Request};
use crate::sequence::outlet::ADDED_BYTES;

fn decoder() -> Decoder {
    family("qwen3_next", Config::default(), true)
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Replaces `secret`, and holds back what may become it.
fn redacting(secret: &'static str) -> impl FnMut(&TextView) -> TextVerdict + Send {
    move |view: &TextView| {
        let tail = (1..secret.len()).rev().find(|&n| view.text.ends_with(&secret[..n]));
        let hold = tail.unwrap_or(0) as u32;
        if !view.text.contains(secret) {
            return if hold > 0 { TextVerdict::Hold(hold) } else { TextVerdict::Pass };
        }
        let text = view.text[..view.text.len() - hold as usize].replace(secret, "***");
        TextVerdict::Replace(TextChange { text, hold })
    }
}

fn with_text(
    steps: impl FnMut(&Step) -> Vec<Action> + Send + 'static,
    texts: impl FnMut(&TextView) -> TextVerdict + Send + 'static,
) -> Script {
    Script { texts: Some(Box::new(texts)), ..Script::new(steps) }
}

/// Injects this text once, after five tokens.
fn injecting(text: &'static str) -> impl FnMut(&Step) -> Vec<Action> + Send {
    let mut written = false;
    move |step| {
        let now = step.index >= 5 && !std::mem::replace(&mut written, step.index >= 5);
        if now { vec![Action::Inject(text.into())] } else { Vec::new() }
    }
}

#[test]
fn replaced_text_is_the_same_on_every_path_and_never_reaches_a_client() {
    let decoder = &mut decoder();
    let request = ask("Where is the river?", false, 60);
    let script = || with_text(injecting("the key is 4711!"), redacting("4711"));
    let plain = run_plain(decoder, &request, script());
    assert!(plain.written.contains("key is 4711"), "{}", plain.written);
    assert_eq!(plain.answer, plain.written.replace("4711", "***"));
    let stream = Request { revisable: false, ..request.clone() };
    assert_eq!(run_plain(decoder, &stream, script()).answer, plain.answer);
    let slow = Script { is_quick: false, ..script() };
    assert_eq!(run_plain(decoder, &stream, slow).answer, plain.answer);
    for path in [DecodePath::Drafted(DraftKind::Ngram), DecodePath::Preempted(None)] {
        let other = run(decoder, &stream, script(), path, Some(&plain.tokens));
        assert_eq!((other.answer, other.tokens), (plain.answer.clone(), plain.tokens.clone()));
    }
}

#[test]
fn held_text_precedes_a_call_and_comes_at_the_end() {
    let decoder = &mut decoder();
    let tool = json!({"type": "function", "function": {"name": "look", "parameters": {}}});
    let tokens = [
        bytes("Wait"),
        vec![OPEN_CALL],
        bytes(r#"{"name": "look", "arguments": {}}"#),
        vec![CLOSE_CALL],
        bytes("Done"),
        vec![END],
    ]
    .concat();
    let request = Request { tools: vec![tool], revisable: false, ..ask("Where?", false, 80) };
    let seen: Arc<Mutex<Vec<(String, bool)>>> = Arc::default();
    let log = seen.clone();
    let script = with_text(writes(tokens, |_| Vec::new()), move |view| {
        log.lock().push((view.text.clone(), view.end));
        TextVerdict::Hold(u32::MAX)
    });
    let ran = run_plain(decoder, &request, script);
    assert_eq!(ran.calls.len(), 1);
    assert_eq!(ran.answer, ran.written);
    assert!(ran.answer.contains("Wait") && ran.answer.contains("Done"), "{}", ran.answer);
    let ends: Vec<_> = seen.lock().iter().filter(|(_, end)| *end).cloned().collect();
    assert_eq!(ends.len(), 2, "before the call, and at the end: {ends:?}");
    assert!(ends[0].0.ends_with("Wait") && ends[1].0.contains("Done"), "{ends:?}");
}

#[test]
fn a_stop_string_ends_the_text_that_policies_see() {
    let decoder = &mut decoder();
    let request =
        Request { stop: vec!["STOP".into()], revisable: false, ..ask("Where?", false, 60) };
    let script = with_text(injecting("all xSTOP secret"), redacting("secret"));
    let ran = run_plain(decoder, &request, script);
    assert!(ran.answer.ends_with("all x"), "{}", ran.answer);
    assert_eq!(ran.reason, FinishReason::StopString("STOP".into()));
}

/// Text that a streaming client has cannot be taken back, and what is held can.
#[test]
fn held_text_can_be_rewound_and_sent_text_cannot() {
    let decoder = &mut decoder();
    let rewinding = || {
        let mut inject = injecting("abcdef");
        let mut is_rewound = false;
        move |step: &Step| {
            // After the injected text and one more token.
            let is_due = step.index == 12 && !std::mem::replace(&mut is_rewound, step.index == 12);
            if is_due { vec![Action::Rewind(4)] } else { inject(step) }
        }
    };
    for (holds, revisable) in [(true, false), (true, true), (false, false), (false, true)] {
        let request = Request { revisable, ..ask("Where is the river?", false, 40) };
        let positions: Arc<Mutex<Vec<u32>>> = Arc::default();
        let log = positions.clone();
        let script = with_text(rewinding(), move |view| {
            log.lock().push(view.position);
            if holds { TextVerdict::Hold(64) } else { TextVerdict::Pass }
        });
        let ran = run_plain(decoder, &request, script);
        assert_eq!(ran.answer, ran.written, "{holds} {revisable}");
        let is_rewound = holds || revisable;
        assert_eq!(ran.noted("rewound 4 tokens"), is_rewound, "{:?}", ran.notes);
        assert_eq!(ran.noted("the client already has the text"), !is_rewound);
        let positions = positions.lock();
        let falls = positions.windows(2).any(|pair| pair[1] < pair[0]);
        assert_eq!(falls, !holds && revisable, "{positions:?}");
        // What was held was never sent.
        assert_eq!(ran.rewound.is_empty(), holds || !revisable);
    }
}

#[test]
fn what_is_held_and_what_is_added_are_bounded() {
    let decoder = &mut decoder();
    let request = Request { revisable: false, ..ask("Where is the river?", false, 30) };
    let most = Arc::new(Mutex::new(0));
    let seen = most.clone();
    let mut first = true;
    let script = with_text(injecting("x"), move |view| {
        let mut most = seen.lock();
        *most = view.text.len().max(*most);
        let text =
            if std::mem::take(&mut first) { "y".repeat(2 * HELD_BYTES) } else { String::new() };
        TextVerdict::Replace(TextChange { text, hold: u32::MAX })
    });
    let ran = run_plain(decoder, &request, script);
    assert!(*most.lock() <= HELD_BYTES + 64, "{most:?}");
    // The end releases what is held.
    assert_eq!(ran.answer, "y".repeat(2 * HELD_BYTES) + &ran.written);

    let script = with_text(
        |_| Vec::new(),
        |view| {
            let text = format!("{}{}", view.text, "z".repeat(16 << 10));
            TextVerdict::Replace(TextChange { text, hold: 0 })
        },
    );
    let ran = run_plain(decoder, &request, script);
    assert!(
        matches!(&ran.reason, FinishReason::Policy(why) if why.contains("bytes to the answer"))
    );
    assert!(ran.answer.len() <= ADDED_BYTES + (17 << 10), "{}", ran.answer.len());
}
