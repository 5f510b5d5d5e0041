//! Random chains of two to four policies with random answers, through whole requests: nothing that an earlier one
//! stopped, banned, bounded or replaced reaches the client.
//!
//! A ban binds the sampler. Text that a policy injects is no sample: it is written as it is.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use steersman_test_support::Random;

use super::scripted::*;
use crate::config::{Config, DraftKind};
use crate::measure::verify::DecodePath;
use crate::policy::{
    Action, Ban, Bias, Plan, SamplingChange, SamplingPatch, Step, TextChange, TextVerdict,
    TextView, TokenBias,
};
use crate::request::{FinishReason, Request};

/// Tokens that are banned: letters that no injected text has.
const BANNED: std::ops::Range<u32> = 97..112;

/// What the policies of a chain did.
#[derive(Default)]
struct Done {
    /// Tokens of the reply after which a token was banned for the rest of it.
    banned: Vec<(u32, u32)>,
    /// Number of the step, policy and text.
    injected: Vec<(usize, usize, String)>,
    /// Number of the step, and the policy that stopped.
    stopped: Option<(usize, usize)>,
    /// Number of the step, with its index and the policy that was called last.
    step: (usize, u32, usize),
    /// Policies that have replaced their secret.
    replaced: BTreeSet<usize>,
    /// Attempts to bring one back.
    attempts: usize,
}

type Log = Arc<Mutex<Done>>;

fn secret(policy: usize) -> String {
    format!("[S{policy}]")
}

fn action(random: &mut Random, policy: usize, number: usize) -> Action {
    let (steps, tokens) = (random.below(6) as u32, 1 + random.below(3));
    let letters: Vec<u32> =
        (0..tokens).map(|_| BANNED.start + random.below(BANNED.len()) as u32).collect();
    match random.below(12) {
        0..3 => {
            let words = if random.below(2) == 0 { secret(random.below(4)) } else { String::new() };
            Action::Inject(format!("<{policy}.{number}{words}>"))
        }
        3..6 => Action::Ban(Ban { tokens: letters, steps: steps / 2 * 3 }),
        6 => {
            let tokens = letters.into_iter().map(|token| TokenBias { token, bias: 50.0 }).collect();
            Action::Bias(Bias { tokens, steps })
        }
        7..9 => Action::Rewind(1 + random.below(5) as u32),
        9..11 => {
            let temperature = Some(random.below(20) as f32 / 10.0);
            let sampling = SamplingPatch { temperature, ..SamplingPatch::default() };
            Action::Sampling(SamplingChange { sampling, steps })
        }
        _ if random.below(6) == 0 => Action::Stop(format!("policy {policy}")),
        _ => Action::Rewind(1),
    }
}

/// A policy that answers at random, as number `policy` of its chain.
fn random_policy(seed: u64, policy: usize, log: &Log) -> Script {
    let mut random = Random(seed);
    let max_tokens = 20 + random.below(60) as u32;
    let (log, every) = (log.clone(), random.of(&[0, 1, 1, 2, 5]));
    let text_log = log.clone();
    let redacts = random.below(3) > 0;
    let mut script = Script::new({
        let mut random = Random(seed + 1);
        move |step: &Step| {
            let mut log = log.lock();
            // A chain calls its policies in order.
            let (number, index, last) = log.step;
            let is_new = index != step.index || policy <= last;
            let number = number + usize::from(is_new);
            log.step = (number, step.index, policy);
            assert!(log.stopped.is_none_or(|(at, _)| at == number), "called after a stop");
            let count = random.below(3);
            let mut actions = Vec::new();
            for i in 0..count {
                let action = action(&mut random, policy, number * 10 + i);
                match &action {
                    Action::Ban(Ban { tokens, steps: 0 }) => {
                        log.banned.extend(tokens.iter().map(|token| (step.index, *token)));
                    }
                    Action::Inject(text) => log.injected.push((number, policy, text.clone())),
                    Action::Stop(_) if log.stopped.is_none() => {
                        log.stopped = Some((number, policy));
                    }
                    _ => {}
                }
                let is_stop = matches!(action, Action::Stop(_));
                actions.push(action);
                if is_stop {
                    break;
                }
            }
            actions
        }
    });
    script.plan = Plan { every, max_tokens: Some(max_tokens), ..Plan::default() };
    if redacts {
        let mut random = Random(seed + 2);
        script.texts = Some(Box::new(move |view: &TextView| {
            let own = secret(policy);
            let mut log = text_log.lock();
            if view.text.contains(&own) {
                log.replaced.insert(policy);
                let text = view.text.replace(&own, "-");
                return TextVerdict::Replace(TextChange { text, hold: 0 });
            }
            let begins = (1..own.len()).rev().find(|&n| view.text.ends_with(&own[..n]));
            if let Some(hold) = begins.filter(|_| !view.end) {
                return TextVerdict::Hold(hold as u32);
            }
            // What a policy before it has replaced, if it can.
            let earlier = log.replaced.iter().copied().find(|other| *other < policy);
            if let Some(other) = earlier.filter(|_| random.below(3) == 0) {
                log.attempts += 1;
                let text = format!("{}{}", view.text, secret(other));
                return TextVerdict::Replace(TextChange { text, hold: 0 });
            }
            TextVerdict::Pass
        }));
    }
    script
}

#[test]
fn nothing_that_an_earlier_policy_decided_is_undone_by_a_later_one() {
    let decoder = &mut family("qwen3_next", Config::default(), false);
    let (mut stops, mut replacements, mut attempts, mut bans) = (0, 0, 0, 0);
    for number in 0..100 {
        let mut random = Random(1000 + number);
        let log = Log::default();
        let count = 2 + random.below(3);
        let scripts: Vec<_> =
            (0..count).map(|i| random_policy(number * 97 + 7 * i as u64, i, &log)).collect();
        let redacts: Vec<bool> = scripts.iter().map(|script| script.texts.is_some()).collect();
        let limit = scripts.iter().filter_map(|script| script.plan.max_tokens).min();
        let revisable = random.below(2) == 0;
        let request = Request { revisable, ..ask("Where is the river?", false, 100) };
        let path = match random.below(3) {
            0 => DecodePath::Drafted(DraftKind::Ngram),
            1 => DecodePath::Governed,
            _ => DecodePath::Plain,
        };
        let ran = run_session(decoder, &request, chain(scripts), 0, path, None);
        let log = log.lock();
        let shown = format!("chain {number}: {ran:?}\nstopped: {:?}", log.stopped);

        // Bounded: the smallest limit.
        assert!(ran.reply().len() as u32 <= limit.unwrap(), "{shown}");
        // Stopped: the reply ends with that step, without what later policies wrote in it.
        if let Some((step, by)) = log.stopped {
            assert!(
                matches!(ran.reason, FinishReason::Policy(_) | FinishReason::Length),
                "{shown}"
            );
            for (at, policy, text) in &log.injected {
                let is_dropped = *at == step && *policy > by;
                assert!(!is_dropped || !ran.written.contains(text), "{text} in {shown}");
            }
            stops += 1;
        }
        // Banned for the rest: no such token was sampled after it. No injected text has one.
        for (at, token) in &log.banned {
            let rest = &ran.reply()[(*at as usize).min(ran.reply().len())..];
            assert!(!rest.contains(token), "{token} after {at} in {shown}");
        }
        bans += log.banned.len();
        // Replaced: the client never has it. Whoever wrote it, the policy sees it, or its replacement is recalled.
        for policy in (0..count).filter(|policy| redacts[*policy]) {
            let is_there = ran.answer.contains(&secret(policy));
            assert!(!is_there, "{} in {shown}", secret(policy));
        }
        replacements += log.replaced.len();
        attempts += log.attempts;
    }
    assert!(stops > 10 && bans > 100, "{stops} {bans}");
    assert!(replacements > 20 && attempts > 20, "{replacements} {attempts}");
}
