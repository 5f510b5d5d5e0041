//! The limits of a reply: `max_tokens` counts reasoning, answer and injected text alike, on all paths.

use super::scripted::*;
use crate::config::{Config, DraftKind};
use crate::decode::verify::DecodePath;
use crate::policy::{Action, Ban, Plan};
use crate::request::{FinishReason, Form, Request, ResponseFormat};

/// Tokens of reasoning after which the scripts below close it.
const REASONING: u32 = 20;

/// The text that follows.
const HINT: &str = "So: ";

/// A policy that bans tokens that start or end a phase, closes the reasoning after [`REASONING`] tokens, and
/// writes [`HINT`].
fn closes() -> Script {
    Script::new(|step| match step.index {
        1 => {
            let tokens = vec![CLOSE_REASONING, OPEN_REASONING, OPEN_CALL, END];
            vec![Action::Ban(Ban { tokens, steps: 0 })]
        }
        REASONING => vec![Action::CloseReasoning(HINT.into())],
        _ => Vec::new(),
    })
}

/// The limits end the reply within the reasoning, at its last token, within the injected text, at its end,
/// and in the answer.
#[test]
fn a_reply_has_max_tokens_on_every_path() {
    for name in ["qwen3_next", "gemma3_text", "llama"] {
        let decoder = &mut family(name, Config::default(), true);
        let whole = run_plain(decoder, &ask("Where?", true, 60), closes());
        assert!(whole.usage.reasoning_tokens > REASONING && whole.usage.answer_tokens > 20);
        let injected = whole.usage.reasoning_tokens + HINT.len() as u32;
        for limit in [1, 2, 5, REASONING, REASONING + 1, injected - 1, injected, 40] {
            for path in
                [DecodePath::Plain, DecodePath::Rewound, DecodePath::Drafted(DraftKind::Ngram)]
            {
                let request = ask("Where?", true, limit);
                let ran = run(decoder, &request, closes(), path, Some(&whole.tokens));
                assert_eq!(
                    ran.reply(),
                    &whole.reply()[..limit as usize],
                    "{name} {path:?} {limit}"
                );
                assert_eq!((ran.reason, ran.usage.reply_tokens()), (FinishReason::Length, limit));
                // The second token is the last: a draft would go beyond it.
                let drafted = ran.usage.drafted_tokens;
                assert!(limit > 2 || drafted == 0, "{name} {path:?} {limit}: {drafted}");
                assert!(limit < 40 || path != DecodePath::Rewound || drafted > 0, "{name}");
            }
        }
    }
}

#[test]
fn injected_text_is_cut_off_at_the_limit_and_noted() {
    let decoder = &mut family("llama", Config::default(), false);
    let script = || {
        Script::new(|step| match step.index {
            1 => vec![Action::Ban(Ban { tokens: vec![OPEN_REASONING, END], steps: 0 })],
            5 => vec![Action::Inject("four more and the rest".into())],
            _ => Vec::new(),
        })
    };
    let ran = run_plain(decoder, &ask("Where?", false, 9), script());
    assert!(ran.answer.ends_with("four"), "{ran:?}");
    assert!(ran.noted("cut off by a limit"), "{:?}", ran.notes);
    let ran = run_plain(decoder, &ask("Where?", false, 90), script());
    assert!(ran.answer.contains("four more and the rest"), "{ran:?}");
    assert!(!ran.noted("cut off"), "{:?}", ran.notes);
}

#[test]
fn reasoning_that_takes_all_tokens_leaves_none_for_a_form() {
    let decoder = &mut family("llama", Config::default(), true);
    let form = ResponseFormat { field: "format", form: Form::Choice(vec!["yes".into()]) };
    for (limit, expected) in [(REASONING, ""), (REASONING + 40, "yes")] {
        let request = Request { response_format: Some(form.clone()), ..ask("Is it?", true, limit) };
        let ran = run_plain(decoder, &request, closes());
        assert_eq!(ran.answer.trim(), expected, "{ran:?}");
        let reason = if expected.is_empty() { FinishReason::Length } else { FinishReason::Stop };
        assert_eq!(ran.reason, reason);
    }
    // The line breaks before the form are cut off too.
    for limit in REASONING..REASONING + 6 {
        let request = Request { response_format: Some(form.clone()), ..ask("Is it?", true, limit) };
        let ran = run_plain(decoder, &request, closes());
        assert_eq!(ran.usage.reply_tokens(), limit, "{ran:?}");
        assert_eq!(ran.reason, FinishReason::Length);
    }
}

#[test]
fn reasoning_leaves_the_reserve_of_the_plan_for_the_answer() {
    let decoder = &family("llama", Config::default(), false);
    let limits = |max_tokens, answer_reserve, reasoning_budget, asked| {
        let mut script = Script::new(|_| Vec::new());
        script.plan = Plan { answer_reserve, reasoning_budget, ..Plan::default() };
        let request = Request { max_tokens, reasoning_budget: asked, ..ask("Where?", true, 1) };
        let (prepared, _receiver) = prepare(decoder, request, script);
        (prepared.limits, prepared.prompt.len())
    };
    for (max_tokens, reserve, budget, asked, expected) in [
        (100, None, None, None, 100),
        (100, Some(30), None, None, 70),
        (100, Some(30), Some(60), None, 60),
        (100, Some(30), Some(60), Some(10), 10),
        // At most half of the reply is reserved.
        (100, Some(100), None, None, 50),
        (1, Some(100), None, None, 1),
        (0, Some(100), None, None, 0),
    ] {
        let (found, _) = limits(Some(max_tokens), reserve, budget, asked);
        assert_eq!((found.reply, found.reasoning), (max_tokens, expected), "{reserve:?}");
    }
    // The reserve is of the context too.
    let (found, prompt) = limits(Some(u32::MAX), Some(30), None, None);
    assert_eq!(found.reasoning as usize, decoder.preparer.context - prompt - 30);
    let (found, _) = limits(None, None, None, None);
    assert_eq!(found.reply, Config::default().engine.max_tokens);
}
