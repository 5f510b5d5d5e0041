//! Actions of policies, on a hybrid, a sliding and a dense model: after any actions, each sampled token
//! is the one that plain decoding samples after the tokens before it, the client has the text of the
//! remaining tokens, and the saved state is the state of these tokens.

use std::sync::Arc;

use super::scripted::*;
use crate::config::{Config, DraftKind};
use crate::measure::verify::DecodePath;
use crate::policy::{
    Action, Ban, Bias, PromptEdit, Replacement, SamplingChange, SamplingPatch, Step, TokenBias,
};
use crate::request::{FinishReason, Request, Sampling};
use crate::sequence::commit::RERUN_TOKENS;
use crate::sequence::limits::INJECTED_TOKENS;
use crate::sequence::steering::REWOUND_TOKENS;

/// A hybrid, a sliding and a dense family.
const FAMILIES: [&str; 3] = ["qwen3_next", "gemma3_text", "llama"];

/// Tokens that start or end a phase, which a model with random weights samples anywhere.
const MARKERS: [u32; 3] = [CLOSE_REASONING, OPEN_REASONING, END];

fn ban(tokens: &[u32], steps: u32) -> Action {
    Action::Ban(Ban { tokens: tokens.to_vec(), steps })
}

fn bias(token: u32, bias: f32, steps: u32) -> Action {
    Action::Bias(Bias { tokens: vec![TokenBias { token, bias }], steps })
}

fn resample(sampling: SamplingPatch, steps: u32) -> Action {
    Action::Sampling(SamplingChange { sampling, steps })
}

fn inject(text: &str) -> Action {
    Action::Inject(text.into())
}

/// Bans [`MARKERS`] at once, and does `more` from then on.
fn markers_banned(mut more: impl FnMut(&Step) -> Vec<Action> + Send + 'static) -> Script {
    Script::new(move |step| {
        let mut actions = more(step);
        if step.index == 1 {
            actions.push(ban(&MARKERS, 0));
        }
        actions
    })
}

/// The paths that are compared with the plain one.
const PATHS: [DecodePath; 2] = [DecodePath::Rewound, DecodePath::Drafted(DraftKind::Ngram)];

/// Runs the same script on all paths and checks that the replies are equal; returns the plain one.
fn on_all_paths(
    decoder: &mut crate::decode::Decoder,
    request: &Request,
    script: impl Fn() -> Script,
) -> Transcript {
    let plain = run_plain(decoder, request, script());
    for path in PATHS {
        let ran = run(decoder, request, script(), path, Some(&plain.tokens));
        assert_eq!(ran.reply(), plain.reply(), "{path:?}");
        assert_eq!((&ran.reasoning, &ran.answer), (&plain.reasoning, &plain.answer), "{path:?}");
        assert_eq!(ran.notes, plain.notes, "{path:?}");
        if path == DecodePath::Rewound {
            assert!(ran.usage.drafted_tokens > ran.usage.accepted_tokens, "{:?}", ran.usage);
        }
    }
    plain
}

/// Rewinds the reasoning, injects text, closes the reasoning, and rewinds the answer.
fn rewinds(count: u32, checkpoint_every: u32) -> Script {
    let (mut reasoning, mut closed, mut answer) = (false, false, false);
    let mut script = markers_banned(move |step| {
        if !reasoning && step.index == 30 {
            reasoning = true;
            return vec![inject("No: "), Action::Rewind(count)];
        }
        if reasoning && !closed && step.reasoning_tokens >= 40 {
            closed = true;
            return vec![Action::CloseReasoning("So ".into())];
        }
        if !answer && step.answer_tokens == 28 {
            answer = true;
            return vec![Action::Rewind(count), Action::Rewind(count / 2), inject("But ")];
        }
        Vec::new()
    });
    script.plan.checkpoint_every = checkpoint_every;
    script
}

/// Which tokens of `reply` belong to these texts or close the reasoning, with the line break before.
fn injected(reply: &[u32], texts: &[&str]) -> Vec<bool> {
    let mut found = vec![false; reply.len()];
    for text in texts.iter().chain(&["\n\nSo "]) {
        let run: Vec<u32> = text.bytes().map(u32::from).collect();
        for at in (0..reply.len()).filter(|&at| reply[at..].starts_with(&run)) {
            found[at..at + run.len()].fill(true);
        }
    }
    for at in (0..reply.len()).filter(|&at| reply[at] == CLOSE_REASONING) {
        found[at.saturating_sub(1)..=at].fill(true);
    }
    found
}

/// Checks that each token of `ran` was injected or is the one that plain decoding samples there.
fn check_samples(
    decoder: &crate::decode::Decoder,
    ran: &Transcript,
    sampling: &Sampling,
    texts: &[&str],
) {
    let injected = injected(ran.reply(), texts);
    let free = plain_samples(decoder, ran, sampling, &[]);
    let banned = plain_samples(decoder, ran, sampling, &MARKERS);
    for (i, &token) in ran.reply().iter().enumerate() {
        // The ban came after the first token.
        let expected = if i == 0 { free[i] } else { banned[i] };
        assert!(injected[i] || token == expected, "token {i} is {token}, not {expected}: {ran:?}");
    }
}

#[test]
fn rewound_reply_continues_as_if_the_rewound_tokens_never_existed() {
    let quantized = |bits| {
        let mut config = Config::default();
        (config.engine.kv_bits, config.engine.kv_bits_from) = (bits, 30);
        config
    };
    let greedy = Sampling::default();
    for (name, bits) in FAMILIES.map(|name| (name, 0)).into_iter().chain([("qwen3_next", 8)]) {
        let decoder = &mut family(name, quantized(bits), false);
        let request = ask("Where does the fox live?", true, 100);
        for count in [1, 7, 22, 1000] {
            let plain = on_all_paths(decoder, &request, || rewinds(count, 0));
            let checkpoints = on_all_paths(decoder, &request, || rewinds(count, 16));
            assert_eq!(plain.tokens, checkpoints.tokens, "{name}, {bits} bits, {count}");
            // The line breaks after `</think>` are tokens of the phase, but not of the answer.
            let (reasoning, answer) = (count.min(30), count.min(30));
            for what in [
                format!("rewound {reasoning} tokens after 30 tokens"),
                format!("rewound {answer} tokens after"),
                "injected text after".into(),
            ] {
                assert!(plain.noted(&what), "{what}: {:?}", plain.notes);
            }
            if bits == 0 {
                check_samples(decoder, &plain, &greedy, &["No: ", "But "]);
            }
            // A rewind reaches neither into the prompt nor from the answer into the reasoning.
            assert!(plain.reply().contains(&CLOSE_REASONING));
            assert!(count < 1000 || plain.reasoning.starts_with("No: "), "{plain:?}");
            assert!(count < 1000 || plain.answer.starts_with("But "), "{plain:?}");
        }
    }
}

/// At a temperature, without injected text.
#[test]
fn sampled_reply_rewinds_equally_on_all_paths() {
    for name in FAMILIES {
        let decoder = &mut family(name, Config::default(), false);
        let mut request = ask("Where does the owl live?", false, 60);
        request.sampling.temperature = Some(0.9);
        let warm = Sampling { temperature: 0.9, ..Sampling::default() };
        for (count, every) in [(5, 0), (33, 16), (1000, 16)] {
            let script = move || {
                let mut done = false;
                let mut script = markers_banned(move |step| {
                    let now = step.index == 40 && !std::mem::replace(&mut done, step.index == 40);
                    if now { vec![Action::Rewind(count)] } else { Vec::new() }
                });
                script.plan.checkpoint_every = every;
                script
            };
            let ran = on_all_paths(decoder, &request, script);
            assert!(ran.noted("rewound"), "{:?}", ran.notes);
            assert_eq!(ran.reply().len(), 60);
            check_samples(decoder, &ran, &warm, &[]);
        }
    }
}

/// Logits after the saved state, computed from it, equal those computed from all tokens.
#[test]
fn saved_state_of_a_rewound_reply_is_the_state_of_its_tokens() {
    for name in FAMILIES {
        let decoder = &mut family(name, Config::default(), false);
        decoder.saved.set_min_tokens(1);
        for (path, every) in
            [(DecodePath::Plain, 0), (DecodePath::Plain, 16), (DecodePath::Rewound, 16)]
        {
            let request = ask("Where does the hare live?", false, 60);
            // Rewinds at the very end as well, and stops there.
            let script = move || {
                let mut times = 0;
                let mut script = markers_banned(move |step| match (step.index, times) {
                    (30, 0) | (44, 1) => {
                        times += 1;
                        vec![Action::Rewind(9), inject("Or ")]
                    }
                    (50, 2) => vec![Action::Stop("enough".into()), Action::Rewind(4)],
                    (50, _) => unreachable!("the rewinds come first"),
                    _ => Vec::new(),
                });
                script.plan.checkpoint_every = every;
                script
            };
            let plain = run_plain(decoder, &request, script());
            *decoder.saved.prefixes_mut() =
                crate::prefix::Prefixes::new(decoder.saved.prefixes().empty(), 1 << 26, None, 0)
                    .unwrap();
            let ran = run(decoder, &request, script(), path, Some(&plain.tokens));
            assert_eq!(ran.tokens, plain.tokens);
            assert_eq!(ran.reason, FinishReason::Policy("enough".into()));
            // The actions after the stop are dropped.
            assert_eq!(ran.reply().len(), 50);
            assert_eq!(ran.notes.iter().filter(|note| note.contains("rewound")).count(), 2);
            assert!(ran.saved + 1 >= ran.tokens.len(), "{name}: {} of {ran:?}", ran.saved);
            let next = [&ran.tokens[..], &[65, 66]].concat();
            let (mut cache, length) = decoder.saved.prefixes_mut().resume(&next).unwrap();
            assert_eq!(length, ran.saved);
            let rest = &next[length..];
            let rows = rest.len() as i32;
            let ids = mlx_rs::Array::from_slice(rest, &[rows]);
            let span = crate::cache::Span { rows, cache: &mut cache };
            let hidden = decoder.network.forward(&ids, &mut [span]).unwrap();
            let resumed = decoder.network.logits(&hidden).unwrap().squeeze_axes(&[0]).unwrap();
            let whole = logits(decoder, &next);
            let last = |a: &mlx_rs::Array| {
                let columns = a.dim(1) as usize;
                a.as_slice::<f32>()[(a.dim(0) as usize - 1) * columns..].to_vec()
            };
            for (a, b) in last(&resumed).iter().zip(last(&whole)) {
                assert!((a - b).abs() < 1e-3, "{name}: {a} is not {b}");
            }
        }
    }
}

#[test]
fn streamed_answer_is_not_rewound_but_streamed_reasoning_is() {
    let decoder = &mut family("qwen3_next", Config::default(), false);
    let request = Request { revisable: false, ..ask("Where?", true, 90) };
    let ran = on_all_paths(decoder, &request, || rewinds(10, 16));
    assert!(ran.noted("rewound 10 tokens after 30 tokens"), "{:?}", ran.notes);
    assert!(ran.noted("the client already has the text"), "{:?}", ran.notes);
    assert!(ran.rewound.iter().all(|(_, answer)| *answer == 0), "{:?}", ran.rewound);
    check_samples(decoder, &ran, &Sampling::default(), &["No: ", "But "]);
}

/// Text held back by a stop string was never sent, so its rewind is not reported.
#[test]
fn rewind_reports_sent_text_only() {
    let decoder = &mut family("llama", Config::default(), false);
    let mut request = ask("Where?", false, 40);
    request.stop = vec!["Hello there".into()];
    for (count, taken, left) in [(5, 0, "And so: Hell"), (12, 3, "And s")] {
        let script = markers_banned(move |step| match step.index {
            3 => vec![inject("And so: Hello th"), bias(u32::from(b'e'), 100.0, 1)],
            20 => vec![Action::Rewind(count), Action::Stop("done".into())],
            _ => Vec::new(),
        });
        let ran = run_plain(decoder, &request, script);
        assert_eq!(ran.rewound.iter().map(|(_, answer)| answer).sum::<usize>(), taken);
        assert!(ran.answer.ends_with(left), "{ran:?}");
    }
}

#[test]
fn endless_rewinds_and_injections_are_stopped() {
    let decoder = &mut family("qwen3_next", Config::default(), false);
    let request = ask("Where?", false, 500);
    let mut script = markers_banned(|step| match step.index {
        60.. => vec![Action::Rewind(50)],
        _ => Vec::new(),
    });
    script.rewound = REWOUND_TOKENS - 120;
    let ran = run_plain(decoder, &request, script);
    let reason = format!("the policy rewound more than {REWOUND_TOKENS} tokens");
    assert_eq!(ran.reason, FinishReason::Policy(reason));
    assert_eq!((ran.rewound.len(), ran.reply().len()), (2, 60));

    let script = markers_banned(|_| vec![inject(&"again and ".repeat(100))]);
    let request = Request { max_tokens: Some(50_000), ..request };
    Arc::get_mut(decoder.policies.preparer_mut()).unwrap().context = 50_000;
    let ran = run_plain(decoder, &request, script);
    let reason = format!("the policy injected more than {INJECTED_TOKENS} tokens");
    assert_eq!(ran.reason, FinishReason::Policy(reason));
}

/// One token at a time stayed within [`REWOUND_TOKENS`] for hours: each made the whole reply run
/// again.
#[test]
fn rewinds_that_make_the_model_run_much_again_are_stopped() {
    for name in FAMILIES {
        let decoder = &mut family(name, Config::default(), false);
        let script = markers_banned(|step| match step.index {
            40.. => vec![Action::Rewind(1)],
            _ => Vec::new(),
        });
        let ran = run_plain(decoder, &ask("Where?", false, 500), script);
        let reason = format!("the policy made the model run more than {RERUN_TOKENS} tokens again");
        assert_eq!(ran.reason, FinishReason::Policy(reason), "{name}");
        // A rewind of the cache counts as 16 tokens at least. A token that is rewound before its row has run does not need
        // one; the next sample has run when it is committed.
        assert!(ran.rewound.len() <= RERUN_TOKENS / 8 + 2, "{name}: {}", ran.rewound.len());
    }
}

/// A policy that stops at a word did not see it in the text of another one.
#[test]
fn the_policies_of_a_chain_see_injected_text_and_a_single_one_does_not() {
    for (policies, expected) in [(1, false), (2, true)] {
        let decoder = &mut family("llama", Config::default(), false);
        let seen = Arc::new(parking_lot::Mutex::new(String::new()));
        let text = seen.clone();
        let mut script = markers_banned(move |step| {
            text.lock().push_str(&step.text);
            if step.index == 20 { vec![inject("FORBIDDEN")] } else { Vec::new() }
        });
        script.policies = policies;
        let ran = run_plain(decoder, &ask("Where?", false, 60), script);
        assert!(ran.answer.contains("FORBIDDEN"), "{ran:?}");
        assert_eq!(seen.lock().contains("FORBIDDEN"), expected, "{policies} policies");
    }
}

#[test]
fn notes_are_limited() {
    let decoder = &mut family("llama", Config::default(), false);
    let script = markers_banned(|_| vec![inject(""), ban(&[], 1)]);
    let ran = run_plain(decoder, &ask("Where?", false, 140), script);
    assert_eq!((ran.notes.len(), ran.notes[256].as_str()), (257, "further notes dropped"));
}

#[test]
fn banned_token_is_never_sampled() {
    let decoder = &mut family("qwen3_next", Config::default(), false);
    for temperature in [0.0, 1.0] {
        let mut request = ask("Where does the bear live?", false, 64);
        request.sampling.temperature = Some(temperature);
        let free = run_plain(decoder, &request, markers_banned(|_| Vec::new()));
        // Tokens 10 to 39 of the unbanned reply, in two bans that accumulate.
        let banned: Vec<u32> = free.reply()[10..40].to_vec();
        let (first, second) = (banned[..15].to_vec(), banned[15..].to_vec());
        let script = || {
            let (first, second) = (first.clone(), second.clone());
            markers_banned(move |step| match step.index {
                10 => vec![ban(&first, 0), bias(first[0], 100.0, 0)],
                12 => vec![ban(&second, 0)],
                // A shorter ban of the same tokens does not shorten the first.
                14 => vec![ban(&first, 1), ban(&second, 2)],
                _ => Vec::new(),
            })
        };
        let ran = on_all_paths(decoder, &request, script);
        assert_eq!(ran.reply()[..10], free.reply()[..10]);
        assert!(!ran.reply()[10..].iter().any(|token| first.contains(token)), "{ran:?}");
        assert!(!ran.reply()[12..].iter().any(|token| second.contains(token)), "{ran:?}");
    }
}

/// The next token is already sampled when the policy sees the last one: it is sampled again.
#[test]
fn ban_for_one_step_changes_one_token() {
    for name in FAMILIES {
        let decoder = &mut family(name, Config::default(), false);
        let request = ask("Where does the otter live?", false, 40);
        let free = run_plain(decoder, &request, markers_banned(|_| Vec::new()));
        let next = free.reply()[20];
        let script = || {
            markers_banned(
                move |step| {
                    if step.index == 20 { vec![ban(&[next], 1)] } else { Vec::new() }
                },
            )
        };
        let ran = on_all_paths(decoder, &request, script);
        assert_eq!(ran.reply()[..20], free.reply()[..20]);
        let greedy = Sampling::default();
        let second = plain_samples(decoder, &ran, &greedy, &[&MARKERS[..], &[next]].concat())[20];
        assert_eq!(ran.reply()[20], second, "{name}");
        let after = plain_samples(decoder, &ran, &greedy, &MARKERS);
        assert_eq!(ran.reply()[21..], after[21..], "{name}");
    }
}

#[test]
fn bias_forces_or_excludes_a_token_and_the_latest_applies() {
    let decoder = &mut family("llama", Config::default(), false);
    let request = ask("Where?", false, 30);
    let free = run_plain(decoder, &request, markers_banned(|_| Vec::new()));
    let (forced, excluded) = (u32::from(b'Q'), free.reply()[25]);
    let script = || {
        markers_banned(move |step| match step.index {
            5 => vec![bias(forced, 100.0, 3)],
            10 => vec![bias(forced, 100.0, 0)],
            12 => vec![bias(forced, -100.0, 0), bias(excluded, -100.0, 0)],
            // A ban takes precedence over a bias, in any order.
            20 => vec![ban(&[forced], 1), bias(forced, 100.0, 2)],
            _ => Vec::new(),
        })
    };
    let ran = on_all_paths(decoder, &request, script);
    assert_eq!(ran.reply()[5..8], [forced; 3]);
    assert_eq!(ran.reply()[10..12], [forced; 2]);
    assert!(!ran.reply()[12..21].contains(&forced), "{ran:?}");
    assert_eq!(ran.reply()[21], forced);
    assert!(!ran.reply()[12..].contains(&excluded), "{ran:?}");
}

/// Sampling from NaN, or a banned token, would be wrong: the request ends instead.
#[test]
fn ban_of_all_tokens_ends_the_request() {
    let decoder = &mut family("qwen3_next", Config::default(), false);
    let filtered = SamplingPatch {
        temperature: Some(1.0),
        top_p: Some(0.9),
        top_k: Some(5),
        min_p: Some(0.1),
    };
    for sampling in [SamplingPatch::default(), filtered] {
        let script = |spare: Option<u32>| {
            let mut script = markers_banned(move |step| {
                let all: Vec<u32> = (0..256).filter(|token| Some(*token) != spare).collect();
                if step.index == 8 { vec![ban(&all, 0), resample(sampling, 0)] } else { Vec::new() }
            });
            script.plan.checkpoint_every = 16;
            script
        };
        let request = ask("Where?", false, 12);
        let ran = on_drafted_path(decoder, &request, || script(None));
        assert_eq!(ran.reason, FinishReason::Policy("all tokens are banned".into()));
        assert_eq!(ran.reply().len(), 8);
        assert!(ran.noted("all tokens are banned"), "{:?}", ran.notes);
        let ran = run_plain(decoder, &request, script(Some(66)));
        assert_eq!(ran.reply()[8..], [66; 4]);
    }
}

/// As [`on_all_paths`], for replies too short to have rejected drafts on the rewound path.
fn on_drafted_path(
    decoder: &mut crate::decode::Decoder,
    request: &Request,
    script: impl Fn() -> Script,
) -> Transcript {
    let plain = run_plain(decoder, request, script());
    let ran = run(decoder, request, script(), DecodePath::Drafted(DraftKind::Ngram), None);
    assert_eq!(ran.reply(), plain.reply());
    plain
}

#[test]
fn temporary_sampling_change_ends() {
    let decoder = &mut family("qwen3_next", Config::default(), false);
    let request = ask("Where does the hare live?", false, 50);
    let hot = SamplingPatch { temperature: Some(5.0), ..SamplingPatch::default() };
    let script = || {
        markers_banned(move |step| match step.index {
            10 => vec![resample(hot, 12)],
            30 => vec![resample(SamplingPatch { top_k: Some(3), ..hot }, 0)],
            _ => Vec::new(),
        })
    };
    let ran = on_all_paths(decoder, &request, script);
    let greedy = plain_samples(decoder, &ran, &Sampling::default(), &MARKERS);
    let hot = Sampling { temperature: 5.0, ..Sampling::default() };
    let hot_samples = plain_samples(decoder, &ran, &hot, &MARKERS);
    let few = plain_samples(decoder, &ran, &Sampling { top_k: 3, ..hot }, &MARKERS);
    assert_eq!(ran.reply()[1..10], greedy[1..10]);
    assert_eq!(ran.reply()[10..22], hot_samples[10..22]);
    assert_eq!(ran.reply()[22..30], greedy[22..30]);
    assert_eq!(ran.reply()[30..], few[30..]);
    assert!(ran.reply()[10..22] != greedy[10..22], "the temperature makes a difference");
}

#[test]
fn sampling_of_the_plan_overrides_the_client() {
    let decoder = &mut family("llama", Config::default(), false);
    let mut request = ask("Where?", false, 30);
    request.sampling.temperature = Some(2.0);
    let mut script = markers_banned(|_| Vec::new());
    script.plan.sampling.temperature = Some(0.0);
    let ran = run_plain(decoder, &request, script);
    check_samples(decoder, &ran, &Sampling::default(), &[]);
}

/// The actions are given in the opposite order, with a second rewind, and more after the stop.
#[test]
fn actions_apply_in_the_order_of_the_contract() {
    let decoder = &mut family("llama", Config::default(), false);
    let request = ask("Where?", false, 40);
    let script = || {
        markers_banned(|step| {
            if step.index != 20 {
                return Vec::new();
            }
            let mut actions =
                vec![inject("one "), Action::Rewind(3), ban(&[1, 2], 0), inject("two")];
            actions.extend([Action::Rewind(8), Action::Stop("why".into())]);
            actions.extend([inject("lost"), Action::Rewind(20)]);
            actions
        })
    };
    let free = run_plain(decoder, &request, markers_banned(|_| Vec::new()));
    let ran = on_drafted_path(decoder, &request, script);
    let expected = [&free.reply()[..12], &b"one two".map(u32::from)].concat();
    assert_eq!(ran.reply(), expected);
    assert_eq!(ran.reason, FinishReason::Policy("why".into()));
    let order = ["rewound 8", "banned 2", "injected", "injected", "stopped after 19 tokens"];
    let notes = &ran.notes[ran.notes.len() - order.len()..];
    for (note, words) in notes.iter().zip(order) {
        assert!(note.starts_with(words), "{:?}", ran.notes);
    }
}

/// Each remaining token is shown once.
#[test]
fn steps_show_committed_tokens_without_rewound_ones() {
    let decoder = &mut family("qwen3_next", Config::default(), false);
    let (mut shown, mut done): (Vec<u32>, [bool; 2]) = Default::default();
    let mut script = Script::new(move |step| {
        assert_eq!(step.tokens.len(), 2);
        shown.extend(&step.tokens);
        assert_eq!(step.index as usize, shown.len(), "{step:?}");
        let ascii = step.tokens.iter().all(|token| *token < 128);
        let text: Vec<u32> = step.text.bytes().map(u32::from).collect();
        assert!(!ascii || text.ends_with(&step.tokens), "{step:?}");
        if step.index == 20 && !std::mem::replace(&mut done[0], true) {
            shown.truncate(16);
            return vec![Action::Rewind(4)];
        }
        if step.index == 30 && !std::mem::replace(&mut done[1], true) {
            shown.truncate(26);
            shown.extend(b"abcdef".map(u32::from));
            return vec![Action::Rewind(4), inject("abcdef")];
        }
        if step.index == 2 { vec![ban(&MARKERS, 0)] } else { Vec::new() }
    });
    script.plan.every = 2;
    let ran = run_plain(decoder, &ask("Where?", false, 50), script);
    assert_eq!(ran.notes.iter().filter(|note| note.contains("rewound 4")).count(), 2);
}

/// The policy strips a header that changes with every request.
#[test]
fn prompts_equal_after_replacement_share_state() {
    let decoder = &mut family("qwen3_next", Config::default(), false);
    decoder.saved.set_min_tokens(16);
    let header = |hour: u32| format!("It is {hour} o'clock. ");
    let mut ran = |hour: u32, strip: bool| {
        let mut request = ask("Where does the fox live?", false, 8);
        let rules = "Be brief and kind. ".repeat(8);
        request.messages.insert(0, message("system", &(header(hour) + &rules)));
        let mut script = Script::new(|_| Vec::new());
        if strip {
            let (old, new) = (header(hour), String::new());
            script.edits = vec![PromptEdit::Replace(Replacement { message: 0, old, new })];
        }
        run_plain(decoder, &request, script)
    };
    let (first, second) = (ran(7, true), ran(8, true));
    assert_eq!(first.usage.cached_tokens, 0);
    assert!(second.usage.cached_tokens > 100, "{:?}", second.usage);
    assert_eq!(first.tokens, second.tokens);
    assert_eq!(second.notes, ["replaced 17 bytes of system message 0 with 0 bytes"]);
    let (third, fourth) = (ran(10, false), ran(11, false));
    assert_eq!((third.usage.cached_tokens, fourth.usage.cached_tokens), (0, 0));
}

/// The policy strips the header of both turns.
#[test]
fn next_turn_of_an_edited_prompt_reuses_the_previous_turn() {
    let decoder = &mut family("llama", Config::default(), false);
    decoder.saved.set_min_tokens(16);
    let mut request = ask("Where does the fox live?", false, 8);
    request.messages.insert(0, message("system", "At 7: be brief."));
    let script = |old: &str| {
        let mut script = markers_banned(|_| Vec::new());
        let (old, new) = (old.into(), String::new());
        script.edits = vec![PromptEdit::Replace(Replacement { message: 0, old, new })];
        script
    };
    let first = run_plain(decoder, &request, script("At 7: "));
    request.messages[0].content = "At 8: be brief.".into();
    request.messages.extend([message("it", &first.answer), message("user", "Why?")]);
    let second = run_plain(decoder, &request, script("At 8: "));
    assert!(second.usage.cached_tokens as usize + 8 > first.prompt, "{:?}", second.usage);
}

/// On the bundled model, which drafts with its MTP layer, its first layers and itself as well: the
/// state of each drafter is rewound with the text.
#[test]
fn all_drafters_continue_after_rewinds_and_injections() {
    let mut config = Config::default();
    config.speculation.draft_model = super::bundled_model().to_string_lossy().into_owned();
    let mut decoder = super::load(config);
    decoder.speculation.set_exit_layers(Some(5));
    let mut request =
        ask("Write a story about a fox named Nora who lives near the river.", false, 80);
    request.seed = None;
    let script = |count| {
        move || {
            let mut times = 0;
            let mut script = Script::new(move |step| match (step.index, times) {
                (20, 0) | (44, 1) => {
                    times += 1;
                    vec![Action::Rewind(count), inject(" In the end, ")]
                }
                (60, 2) => vec![ban(&step.tokens, 3)],
                _ => Vec::new(),
            });
            script.plan.checkpoint_every = if count > 10 { 16 } else { 0 };
            script
        }
    };
    for count in [1, 6, 18] {
        let script = script(count);
        let plain = run_plain(&mut decoder, &request, script());
        assert!(plain.noted(&format!("rewound {count} tokens")), "{:?}", plain.notes);
        for kind in DraftKind::ALL {
            let ran = run(&mut decoder, &request, script(), DecodePath::Drafted(kind), None);
            assert_eq!(ran.tokens, plain.tokens, "{kind:?}, {count}");
            assert_eq!(ran.notes, plain.notes, "{kind:?}, {count}");
            assert!(ran.usage.accepted_tokens > 0, "{kind:?}: {:?}", ran.usage);
        }
    }
}

/// A sequence that is rewound to the end of its cache samples again from logits that it has: that token is not
/// committed yet. A draft after it had one row too few, and the request failed.
#[test]
fn drafts_after_a_rewind_of_one_token_equal_plain_decoding() {
    let mut decoder = super::load(Config::default());
    let mut request =
        ask("Write a story about a fox named Nora who lives near the river.", false, 80);
    request.seed = None;
    let script = || {
        let mut newest = 0;
        Script::new(move |step| {
            let is_due = step.index % 5 == 4 && step.index > newest;
            newest = newest.max(step.index);
            if is_due { vec![Action::Rewind(1)] } else { Vec::new() }
        })
    };
    let plain = run_plain(&mut decoder, &request, script());
    assert!(plain.noted("rewound 1 tokens"), "{:?}", plain.notes);
    for kind in [DraftKind::Ngram, DraftKind::Mtp] {
        let ran = run(&mut decoder, &request, script(), DecodePath::Drafted(kind), None);
        assert_eq!(ran.tokens, plain.tokens, "{kind:?}");
        assert!(ran.usage.drafted_tokens > 0, "{kind:?}: {:?}", ran.usage);
    }
}
