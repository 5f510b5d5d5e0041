//! The limits of a reply. `max_tokens` counts reasoning, answer and injected text alike; `max_answer_tokens` counts the
//! answer; both on all paths.

use super::scripted::*;
use crate::config::{Config, DraftKind, ProfileLimits};
use crate::measure::verify::DecodePath;
use crate::policy::{Action, Ban, Counted, Plan};
use crate::request::{FinishReason, Form, RawPrompt, Request, ResponseFormat};
use crate::sequence::limits::Bounds;

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
    assert_eq!(found.reasoning as usize, decoder.policies.preparer().context - prompt - 30);
    let (found, _) = limits(None, None, None, None);
    assert_eq!(found.reply, Config::default().engine.max_tokens);
}

/// `max_tokens` of chats once counted the reasoning: a client that did not ask for any got half an answer, or none.
#[test]
fn an_answer_has_max_answer_tokens_on_every_path() {
    for name in ["qwen3_next", "gemma3_text", "llama"] {
        let decoder = &mut family(name, Config::default(), true);
        let whole = run_plain(decoder, &ask("Where?", true, 60), closes());
        let reasoning = whole.usage.reasoning_tokens;
        assert!(reasoning > REASONING && whole.usage.answer_tokens > 20);
        for limit in [1, 2, HINT.len() as u32, 16] {
            for path in
                [DecodePath::Plain, DecodePath::Rewound, DecodePath::Drafted(DraftKind::Ngram)]
            {
                let max_answer_tokens = Some(limit);
                let request =
                    Request { max_tokens: None, max_answer_tokens, ..ask("Where?", true, 1) };
                let ran = run(decoder, &request, closes(), path, Some(&whole.tokens));
                let expected = &whole.reply()[..(reasoning + limit) as usize];
                assert_eq!(ran.reply(), expected, "{name} {path:?} {limit}");
                let counts = (ran.usage.reasoning_tokens, ran.usage.answer_tokens);
                assert_eq!((ran.reason, counts), (FinishReason::Length, (reasoning, limit)));
            }
        }
    }
}

/// The end of the reasoning is up to the engine if neither the model nor a policy closes it, and the empty line after
/// it does not cost the answer a token.
#[test]
fn reasoning_without_an_end_is_closed_and_the_whole_answer_follows() {
    let mut config = Config::default();
    config.engine.max_tokens = 30;
    let decoder = &mut family("llama", config, true);
    let tokens = vec![CLOSE_REASONING, OPEN_REASONING, OPEN_CALL, END];
    let bans = move |step: &crate::policy::Step| match step.index {
        1 => vec![Action::Ban(Ban { tokens: tokens.clone(), steps: 0 })],
        _ => Vec::new(),
    };
    for limit in [1, 5] {
        let max_answer_tokens = Some(limit);
        let request = Request { max_tokens: None, max_answer_tokens, ..ask("Where?", true, 1) };
        let ran = run_plain(decoder, &request, Script::new(bans.clone()));
        assert_eq!((ran.reason, ran.usage.answer_tokens), (FinishReason::Length, limit));
        // The marker with the line breaks around it follows 30 tokens.
        assert!((31..=36).contains(&ran.usage.reasoning_tokens), "{:?}", ran.usage);
    }
    // A model that answers at once has the same limit.
    let request = Request { max_answer_tokens: Some(5), ..ask("Where?", false, 30) };
    let ran = run_plain(decoder, &request, Script::new(bans));
    assert_eq!((ran.reason, ran.usage.reply_tokens()), (FinishReason::Length, 5));
}

/// What client, profile and plan say, and what may become of it: the budget of the reasoning, the limit of the answer,
/// and that of the whole reply. `max_tokens` was once given another meaning, and a budget was lost without a red test.
#[test]
fn each_limit_counts_what_it_says() {
    const ANSWER: Option<Counted> = Some(Counted::Answer);
    const REPLY: Option<Counted> = Some(Counted::Reply);
    /// `engine.max_tokens`.
    const DEFAULT: u32 = 1000;
    /// Tokens that a policy may inject beside the budget of the reasoning.
    const INJECTED: u32 = crate::sequence::limits::INJECTED_TOKENS as u32;
    /// Tokens of the context after the prompt.
    const LEFT: usize = 3000;
    struct Cell {
        client: (Option<u32>, Option<u32>),
        profile: (u32, Option<Counted>),
        plan: (Option<u32>, Option<u32>, Option<Counted>),
        is_raw: bool,
        expected: (u32, u32, u32),
    }
    let cell =
        |client, profile, plan, expected| Cell { client, profile, plan, is_raw: false, expected };
    let raw =
        |client, profile, plan, expected| Cell { client, profile, plan, is_raw: true, expected };
    let free = (0, None);
    let nothing = (None, None, None);
    let reserves = (Some(200), None, None);
    let cells = [
        // No limit of the client: that of the engine, on the whole reply.
        cell((None, None), free, nothing, (1000, 1000, 1000)),
        cell((None, None), free, reserves, (800, 1000, 1000)),
        cell((None, None), (300, None), reserves, (150, 300, 300)),
        cell((None, None), (5000, None), nothing, (1000, 1000, 1000)),
        // A limit on the whole reply, of which the plan reserves a part, at most half.
        cell((Some(100), None), free, nothing, (100, 100, 100)),
        cell((Some(100), None), free, reserves, (50, 100, 100)),
        cell((Some(600), None), free, reserves, (400, 600, 600)),
        cell((Some(600), None), (100, None), nothing, (100, 100, 100)),
        cell((Some(600), None), free, (None, Some(90), None), (90, 90, 90)),
        cell((Some(90), None), free, (None, Some(600), None), (90, 90, 90)),
        // A limit on the answer. The reasoning has the engine's, and leaves the answer its tokens of the context.
        cell((None, Some(16)), free, nothing, (1000, 16, 1016 + INJECTED)),
        cell((None, Some(16)), free, reserves, (1000, 16, 1016 + INJECTED)),
        cell((None, Some(2000)), free, nothing, (1000, 2000, 3000 + INJECTED)),
        cell((None, Some(u32::MAX)), free, nothing, (1000, u32::MAX, u32::MAX)),
        // The profile's limit is one on the whole reply.
        cell((None, Some(16)), (300, None), nothing, (284, 16, 300)),
        cell((None, Some(400)), (300, None), nothing, (150, 300, 300)),
        // So is that of a plan.
        cell((None, Some(16)), free, (None, Some(300), None), (284, 16, 300)),
        cell((None, Some(16)), (200, None), (None, Some(300), None), (184, 16, 200)),
        // The earlier rounds of a reply left both.
        cell((Some(50), Some(16)), free, nothing, (34, 16, 50)),
        // A profile or a plan changes what the client's limit counts.
        cell((None, Some(16)), (0, REPLY), nothing, (16, 16, 16)),
        cell((Some(16), None), (0, ANSWER), nothing, (1000, 16, 1016 + INJECTED)),
        cell((None, Some(16)), free, (None, None, REPLY), (16, 16, 16)),
        cell((Some(16), None), free, (None, None, ANSWER), (1000, 16, 1016 + INJECTED)),
        // The tighter one of both applies, and it changes the client's limit only.
        cell((Some(16), None), (0, REPLY), (None, None, ANSWER), (16, 16, 16)),
        cell((Some(16), None), (0, ANSWER), (None, None, REPLY), (16, 16, 16)),
        cell((Some(16), None), (90, ANSWER), nothing, (74, 16, 90)),
        cell((Some(16), None), free, (None, Some(90), ANSWER), (74, 16, 90)),
        cell((None, None), (0, ANSWER), nothing, (1000, 1000, 1000)),
        // Everything of a raw prompt counts.
        raw((Some(16), None), (0, ANSWER), (None, None, ANSWER), (16, 16, 16)),
        raw((Some(0), None), free, nothing, (0, 0, 0)),
    ];
    for (index, cell) in cells.into_iter().enumerate() {
        let (max_tokens, max_answer_tokens) = cell.client;
        let prompt = cell.is_raw.then(|| RawPrompt::Text("a".into()));
        let request = Request { max_tokens, max_answer_tokens, prompt, ..Request::default() };
        let (max_tokens, limit_counts) = cell.profile;
        let profile = ProfileLimits { max_tokens, limit_counts, ..ProfileLimits::default() };
        let (answer_reserve, max_tokens, limit_counts) = cell.plan;
        let plan = Plan { answer_reserve, max_tokens, limit_counts, ..Plan::default() };
        let (bounds, _) = Bounds::planned(&request, profile, DEFAULT, &plan);
        let limits = bounds.limits(&plan, None, 0, [4000, LEFT]);
        let found = (limits.reasoning, limits.answer, limits.reply);
        assert_eq!(found, cell.expected, "cell {index}");
        // A budget of anybody lowers that of the reasoning and nothing else.
        let budgeted = Plan { reasoning_budget: Some(9), ..plan.clone() };
        let [of_plan, of_client, of_profile] =
            [(&budgeted, None, 0), (&plan, Some(9), 0), (&plan, None, 9)]
                .map(|(plan, client, profile)| bounds.limits(plan, client, profile, [4000, LEFT]));
        for limits in [of_plan, of_client, of_profile] {
            let lower = cell.expected.0.min(9);
            let found = (limits.reasoning, limits.answer, limits.reply);
            assert_eq!(found, (lower, cell.expected.1, cell.expected.2), "cell {index}");
        }
    }
    // The notes name who lowered what the client set.
    let request = Request { max_answer_tokens: Some(101), ..Request::default() };
    let profile = ProfileLimits { max_tokens: 100, ..ProfileLimits::default() };
    let (_, note) = Bounds::new(&request, profile, DEFAULT);
    assert_eq!(note.unwrap(), "max_tokens 101 exceeds the profile's limit of 100");
    let plan = Plan { max_tokens: Some(90), ..Plan::default() };
    let (_, note) = Bounds::planned(&request, profile, DEFAULT, &plan);
    assert_eq!(note.unwrap(), "max_tokens 90 by a policy");
    let (_, note) = Bounds::new(&Request::default(), profile, DEFAULT);
    assert_eq!(note, None);
}
