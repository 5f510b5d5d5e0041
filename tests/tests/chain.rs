//! Policies in a chain: each is asked as it would be alone, and a later one loosens nothing that an
//! earlier one decided.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use steersman_engine::config::PolicyConfig;
use steersman_engine::policy::chain::{Chain, Link};
use steersman_engine::policy::trace::{Call, Recorder, Traces};
use steersman_engine::policy::{
    Action, Anchor, Ban, Bias, Keep, LoopReport, LoopRule, Phase, Plan, Policy, PromptView,
    Replacement, RequestView, Resample, STEP_TOKENS, SamplingChange, Step, Summary, TokenBias,
    ToolCallView, Verdict,
};
use steersman_engine::{Error, Result};
use steersman_tests::Random;

/// What a policy was asked, in order.
type Log = Rc<RefCell<Vec<String>>>;

/// Answers what it is told to, and writes down what it is asked.
#[derive(Default, Clone)]
struct Scripted {
    replacements: Vec<Replacement>,
    plan: Plan,
    /// Of one step after the other; then nothing.
    actions: Vec<Vec<Action>>,
    verdict: Verdict,
    /// From the first step on.
    fails: bool,
    steps: usize,
    log: Log,
}

impl Scripted {
    fn heard(&self, hook: &str, asked: &dyn std::fmt::Debug) {
        self.log.borrow_mut().push(format!("{hook}: {asked:?}"));
    }
}

impl Policy for Scripted {
    fn on_prompt(&mut self, prompt: &PromptView) -> Result<Vec<Replacement>> {
        self.heard("prompt", prompt);
        Ok(self.replacements.clone())
    }

    fn on_request(&mut self, request: &RequestView) -> Result<Plan> {
        self.heard("request", request);
        Ok(self.plan.clone())
    }

    fn on_step(&mut self, step: &Step) -> Result<Vec<Action>> {
        self.heard("step", step);
        if self.fails {
            return Err(Error::Policy { policy: "scripted".into(), problem: "on-step".into() });
        }
        self.steps += 1;
        Ok(self.actions.get(self.steps - 1).cloned().unwrap_or_default())
    }

    fn on_tool_call(&mut self, call: &ToolCallView) -> Result<Verdict> {
        self.heard("call", call);
        Ok(self.verdict.clone())
    }

    fn on_finish(&mut self, summary: &Summary) -> Result<()> {
        self.heard("finish", summary);
        Ok(())
    }
}

fn link(policy: Scripted, shadow: bool) -> Link {
    Link { name: "scripted".into(), sha256: [7; 32], shadow, policy: Box::new(policy) }
}

fn chain(policies: impl IntoIterator<Item = Scripted>) -> Chain {
    let links = policies.into_iter().map(|policy| link(policy, false)).collect();
    Chain::new(links, Recorder::off())
}

fn maybe<T>(random: &mut Random, value: T) -> Option<T> {
    (random.below(2) == 0).then_some(value)
}

fn some_sampling(random: &mut Random) -> SamplingChange {
    let fraction = random.below(100) as f32 / 100.0;
    SamplingChange {
        temperature: maybe(random, fraction),
        top_p: maybe(random, 1.0 - fraction),
        top_k: maybe(random, 40),
        min_p: maybe(random, fraction / 2.0),
    }
}

fn some_plan(random: &mut Random) -> Plan {
    let anchors = [Anchor::System, Anchor::Turns, Anchor::Prompt, Anchor::Reply];
    let rule = LoopRule {
        max_period: random.below(99) as u32,
        repeats: 3,
        min_tokens: 96,
        similarity: 0.9,
    };
    let keeps = (0..random.below(6))
        .map(|_| Keep { at: random.of(&anchors), seconds: random.below(5) as u32 })
        .collect();
    let (budget, reserve) = (random.below(1000) as u32, random.below(1000) as u32);
    let thinking = random.below(2) == 0;
    Plan {
        thinking: maybe(random, thinking),
        think_budget: maybe(random, budget),
        answer_reserve: maybe(random, reserve),
        sampling: some_sampling(random),
        loops: maybe(random, rule),
        every: random.below(4) as u32 * 6,
        checkpoint_every: random.below(4) as u32 * 16,
        note: maybe(random, format!("note {budget}")),
        keep: maybe(random, keeps),
    }
}

fn some_action(random: &mut Random) -> Action {
    let token = |random: &mut Random| random.below(6) as u32;
    let steps = random.below(3) as u32;
    match random.below(14) {
        0..3 => Action::Inject(format!("text {}", random.below(99))),
        3 => Action::CloseThinking(format!("hint {}", random.below(99))),
        4..6 => Action::Rewind(random.below(9) as u32),
        6..8 => Action::Ban(Ban { tokens: vec![token(random), token(random)], steps }),
        8..10 => {
            let token = token(random);
            let bias = random.below(9) as f32;
            Action::Bias(Bias { tokens: vec![TokenBias { token, bias }], steps })
        }
        10..13 => Action::Sampling(Resample { sampling: some_sampling(random), steps }),
        _ => Action::Stop(format!("reason {}", random.below(99))),
    }
}

fn some_actions(random: &mut Random) -> Vec<Action> {
    (0..random.below(6)).map(|_| some_action(random)).collect()
}

fn some_step(random: &mut Random) -> Step {
    let report = LoopReport { period: 3, repeats: 9, exact: true };
    let count = random.below(4) as u32;
    Step {
        index: random.below(1000) as u32,
        phase: random.of(&[Phase::Think, Phase::Answer]),
        tokens: (0..count).collect(),
        text: "ab".repeat(count as usize),
        loop_found: (random.below(4) == 0).then_some(report),
        budget_reached: random.below(4) == 0,
        ..Step::default()
    }
}

#[test]
fn a_chain_of_one_is_its_policy() {
    let mut random = Random(1);
    for _ in 0..500 {
        let policy = Scripted {
            plan: some_plan(&mut random),
            actions: (0..8).map(|_| some_actions(&mut random)).collect(),
            verdict: random.of(&[&Verdict::Accept, &Verdict::Repair("again".into())]).clone(),
            ..Scripted::default()
        };
        let (mut alone, mut chained) = (policy.clone(), policy);
        chained.log = Log::default();
        let (asked_alone, asked_chained) = (alone.log.clone(), chained.log.clone());
        let mut chain = chain([chained]);
        let prompt = PromptView { system: vec!["be brief".into()], ..PromptView::default() };
        assert_eq!(chain.on_prompt(&prompt).unwrap(), alone.on_prompt(&prompt).unwrap());
        let request = RequestView { user: "hi".into(), ..RequestView::default() };
        assert_eq!(chain.on_request(&request).unwrap(), alone.on_request(&request).unwrap());
        for _ in 0..8 {
            // Steps without an event and with no token, too: the engine decides when to ask.
            let step = some_step(&mut random);
            assert_eq!(chain.on_step(&step).unwrap(), alone.on_step(&step).unwrap());
        }
        let call = ToolCallView { name: "search".into(), ..ToolCallView::default() };
        assert_eq!(chain.on_tool_call(&call).unwrap(), alone.on_tool_call(&call).unwrap());
        alone.on_finish(&Summary::default()).unwrap();
        chain.on_finish(&Summary::default()).unwrap();
        assert_eq!(asked_alone, asked_chained);
    }
}

/// Commits tokens as the engine does: `policy` is asked every `every` tokens and at `events`.
fn decode(policy: &mut dyn Policy, tokens: u32, events: &[u32]) {
    let every = policy.on_request(&RequestView::default()).unwrap().every;
    let mut unseen: Vec<u32> = Vec::new();
    let mut text = String::new();
    for index in 1..=tokens {
        unseen.push(index);
        text.push(char::from(b'a' + (index % 26) as u8));
        let event = events.contains(&index);
        if !event && (every == 0 || unseen.len() < every as usize) {
            continue;
        }
        let step = Step {
            index,
            tokens: unseen[unseen.len().saturating_sub(STEP_TOKENS)..].to_vec(),
            text: std::mem::take(&mut text),
            budget_reached: event,
            ..Step::default()
        };
        unseen.clear();
        policy.on_step(&step).unwrap();
    }
}

#[test]
fn each_policy_of_a_chain_is_asked_as_it_would_be_alone() {
    let mut random = Random(2);
    let cadences = [0, 1, 2, 3, 8, 12, 100, 1024, 1500, 2500, 3000, 5003];
    for _ in 0..60 {
        let policies: Vec<_> = (0..1 + random.below(3))
            .map(|_| {
                let plan = Plan { every: random.of(&cadences), ..Plan::default() };
                Scripted { plan, ..Scripted::default() }
            })
            .collect();
        let events: Vec<u32> = (0..random.below(4)).map(|_| random.below(6000) as u32).collect();
        decode(&mut chain(policies.clone()), 6000, &events);
        for policy in policies {
            let mut alone = Scripted { log: Log::default(), ..policy.clone() };
            decode(&mut alone, 6000, &events);
            assert!(
                *alone.log.borrow() == *policy.log.borrow(),
                "every {} with events at {events:?}: {} calls alone, {} in the chain",
                policy.plan.every,
                alone.log.borrow().len(),
                policy.log.borrow().len(),
            );
        }
    }
}

#[test]
fn what_one_policy_rewinds_the_others_never_see() {
    let rewind = vec![vec![], vec![], vec![Action::Rewind(2), Action::Inject("x".into())]];
    let eager = Scripted {
        plan: Plan { every: 1, ..Plan::default() },
        actions: rewind,
        ..Scripted::default()
    };
    let patient = Scripted::default();
    let mut chain = chain([eager, patient.clone()]);
    chain.on_request(&RequestView::default()).unwrap();
    // Two of three tokens are taken back, one goes in: the next is the third again.
    for (index, token, text) in [(1, 10, "a"), (2, 11, "b"), (3, 12, "c"), (3, 13, "d")] {
        let (tokens, text, budget_reached) = (vec![token], text.into(), token == 13);
        let step = Step { index, tokens, text, budget_reached, ..Step::default() };
        chain.on_step(&step).unwrap();
    }
    let heard = patient.log.borrow();
    assert_eq!(heard.len(), 2, "{heard:?}");
    assert!(heard[1].contains(r#"tokens: [10, 13], text: "ad""#), "{heard:?}");
}

fn merged(plans: &[Plan]) -> Plan {
    let scripted = |plan: &Plan| Scripted { plan: plan.clone(), ..Scripted::default() };
    chain(plans.iter().map(scripted)).on_request(&RequestView::default()).unwrap()
}

#[test]
fn a_merged_plan_is_as_tight_as_each_and_says_what_the_first_that_speaks_says() {
    let mut random = Random(3);
    for _ in 0..5000 {
        let plans: Vec<_> = (0..1 + random.below(4)).map(|_| some_plan(&mut random)).collect();
        let merged = merged(&plans);
        let told = format!("{plans:#?}\nbecame {merged:#?}");
        fn first<T>(plans: &[Plan], of: impl Fn(&Plan) -> Option<T>) -> Option<T> {
            plans.iter().find_map(of)
        }
        assert_eq!(merged.thinking, first(&plans, |plan| plan.thinking), "{told}");
        assert_eq!(merged.loops, first(&plans, |plan| plan.loops), "{told}");
        let temperature = |plan: &Plan| plan.sampling.temperature;
        assert_eq!(merged.sampling.temperature, first(&plans, temperature), "{told}");
        assert_eq!(merged.sampling.top_p, first(&plans, |plan| plan.sampling.top_p), "{told}");
        assert_eq!(merged.sampling.top_k, first(&plans, |plan| plan.sampling.top_k), "{told}");
        assert_eq!(merged.sampling.min_p, first(&plans, |plan| plan.sampling.min_p), "{told}");
        let all = |of: fn(&Plan) -> Option<u32>| plans.iter().filter_map(of);
        assert_eq!(merged.think_budget, all(|plan| plan.think_budget).min(), "{told}");
        assert_eq!(merged.answer_reserve, all(|plan| plan.answer_reserve).max(), "{told}");
        let dense = all(|plan| Some(plan.checkpoint_every).filter(|every| *every > 0)).min();
        assert_eq!(merged.checkpoint_every, dense.unwrap_or(0), "{told}");
        let cadences: Vec<_> = all(|plan| Some(plan.every).filter(|every| *every > 0)).collect();
        assert_eq!(merged.every == 0, cadences.is_empty(), "{told}");
        assert!(cadences.iter().all(|every| every % merged.every == 0), "{told}");
        let notes: Vec<_> = plans.iter().filter_map(|plan| plan.note.clone()).collect();
        assert_eq!(merged.note.unwrap_or_default(), notes.join("; "), "{told}");
        let lists: Vec<_> = plans.iter().filter_map(|plan| plan.keep.as_ref()).collect();
        assert_eq!(merged.keep.is_some(), !lists.is_empty(), "{told}");
        let longest = |list: &[Keep], at| {
            list.iter().filter(|keep| keep.at == at).map(|keep| keep.seconds).max()
        };
        for at in [Anchor::System, Anchor::Turns, Anchor::Prompt, Anchor::Reply] {
            let wanted: Option<Vec<_>> = lists.iter().map(|list| longest(list, at)).collect();
            let expected = wanted.and_then(|seconds| seconds.into_iter().min());
            let kept = longest(merged.keep.as_deref().unwrap_or_default(), at);
            assert_eq!(kept, expected, "{at:?} in {told}");
        }
    }
}

/// A list as it counts: up to its stop, and the sampling and biases of each in one.
#[derive(Debug, Default, PartialEq)]
struct Decided {
    rewind: Option<u32>,
    bans: Vec<Ban>,
    biases: BTreeMap<u32, f32>,
    sampling: SamplingChange,
    texts: Vec<Action>,
    stop: Option<String>,
}

fn decided(actions: &[Action]) -> Decided {
    let mut decided = Decided::default();
    for action in actions {
        match action {
            Action::Rewind(tokens) => decided.rewind = decided.rewind.max(Some(*tokens)),
            Action::Ban(ban) => decided.bans.push(ban.clone()),
            Action::Bias(bias) => {
                let pairs = bias.tokens.iter().map(|biased| (biased.token, biased.bias));
                decided.biases.extend(pairs);
            }
            Action::Sampling(Resample { sampling: new, .. }) => {
                let old = decided.sampling;
                decided.sampling = SamplingChange {
                    temperature: new.temperature.or(old.temperature),
                    top_p: new.top_p.or(old.top_p),
                    top_k: new.top_k.or(old.top_k),
                    min_p: new.min_p.or(old.min_p),
                };
            }
            Action::Inject(_) | Action::CloseThinking(_) => decided.texts.push(action.clone()),
            Action::Stop(reason) => {
                decided.stop = Some(reason.clone());
                break;
            }
        }
    }
    decided
}

#[test]
fn merged_actions_do_all_that_the_first_policy_wants_whatever_the_others_say() {
    let mut random = Random(4);
    for _ in 0..5000 {
        let scripts: Vec<Vec<Vec<Action>>> = (0..2 + random.below(3))
            .map(|_| (0..5).map(|_| some_actions(&mut random)).collect())
            .collect();
        let scripted =
            |actions: &Vec<_>| Scripted { actions: actions.clone(), ..Scripted::default() };
        let mut chain = chain(scripts.iter().map(scripted));
        chain.on_request(&RequestView::default()).unwrap();
        // What the first set to the end of the reply, in earlier steps.
        let mut lasting = Decided::default();
        for at in 0..5 {
            let step = Step { tokens: vec![1], budget_reached: true, ..Step::default() };
            let got = chain.on_step(&step).unwrap();
            let told = format!(
                "{:#?}\nbecame {got:#?}",
                scripts.iter().map(|s| &s[at]).collect::<Vec<_>>()
            );
            let (got, first) = (decided(&got), decided(&scripts[0][at]));
            assert!(got.rewind >= first.rewind, "{told}");
            assert!(first.bans.iter().all(|ban| got.bans.contains(ban)), "{told}");
            assert!(got.texts.starts_with(&first.texts), "{told}");
            let stops = scripts.iter().find_map(|script| decided(&script[at]).stop);
            assert_eq!(got.stop, stops, "{told}");
            for (token, bias) in &first.biases {
                assert_eq!(got.biases.get(token), Some(bias), "{told}");
            }
            for token in lasting.biases.keys().filter(|token| !first.biases.contains_key(token)) {
                assert_eq!(got.biases.get(token), None, "loosened: {told}");
            }
            let values = |of: fn(&SamplingChange) -> bool| {
                (of(&first.sampling), of(&lasting.sampling), of(&got.sampling))
            };
            if first.sampling.temperature.is_some() {
                assert_eq!(got.sampling.temperature, first.sampling.temperature, "{told}");
            }
            for of in [
                (|s| s.temperature.is_some()) as fn(&SamplingChange) -> bool,
                |s| s.top_p.is_some(),
                |s| s.top_k.is_some(),
                |s| s.min_p.is_some(),
            ] {
                let (now, before, got) = values(of);
                assert!(!now || got, "{told}");
                assert!(now || !before || !got, "loosened: {told}");
            }
            // A value lasts where the last that the first said of it is to last.
            for action in &scripts[0][at] {
                match action {
                    Action::Bias(Bias { tokens, steps }) => {
                        for TokenBias { token, bias } in tokens {
                            lasting.biases.remove(token);
                            if *steps == 0 {
                                lasting.biases.insert(*token, *bias);
                            }
                        }
                    }
                    Action::Sampling(Resample { sampling, steps }) => {
                        let set = |slot: &mut Option<f32>, value: Option<f32>| {
                            if value.is_some() {
                                *slot = value.filter(|_| *steps == 0);
                            }
                        };
                        set(&mut lasting.sampling.temperature, sampling.temperature);
                        set(&mut lasting.sampling.top_p, sampling.top_p);
                        set(&mut lasting.sampling.min_p, sampling.min_p);
                        if sampling.top_k.is_some() {
                            lasting.sampling.top_k = sampling.top_k.filter(|_| *steps == 0);
                        }
                    }
                    Action::Stop(_) => break,
                    _ => {}
                }
            }
        }
    }
}

#[test]
fn what_an_earlier_policy_set_a_later_one_may_change_when_its_time_is_over() {
    let warm = |temperature, steps| {
        let sampling =
            SamplingChange { temperature: Some(temperature), ..SamplingChange::default() };
        Action::Sampling(Resample { sampling, steps })
    };
    let earlier = Scripted { actions: vec![vec![warm(0.0, 3)]], ..Scripted::default() };
    let later = Scripted { actions: vec![vec![warm(1.0, 0)]; 9], ..Scripted::default() };
    let mut chain = chain([earlier, later]);
    chain.on_request(&RequestView::default()).unwrap();
    let mut step = || {
        let step = Step { tokens: vec![1], budget_reached: true, ..Step::default() };
        chain.on_step(&step).unwrap()
    };
    assert_eq!(step(), [warm(0.0, 3)]);
    assert_eq!(step(), []);
    assert_eq!(step(), []);
    assert_eq!(step(), [warm(1.0, 0)]);
}

#[test]
fn the_strictest_verdict_counts_and_of_two_alike_the_earlier() {
    let verdicts = [
        Verdict::Accept,
        Verdict::Repair("a".into()),
        Verdict::Repair("b".into()),
        Verdict::Stop("c".into()),
        Verdict::Stop("d".into()),
    ];
    let weight = |verdict: &Verdict| match verdict {
        Verdict::Accept => 0,
        Verdict::Repair(_) => 1,
        Verdict::Stop(_) => 2,
    };
    for first in &verdicts {
        for second in &verdicts {
            let scripted =
                |verdict: &Verdict| Scripted { verdict: verdict.clone(), ..Scripted::default() };
            let mut chain = chain([first, second].map(scripted));
            let got = chain.on_tool_call(&ToolCallView::default()).unwrap();
            let expected = if weight(second) > weight(first) { second } else { first };
            assert_eq!(got, *expected, "{first:?}, {second:?}");
        }
    }
}

#[test]
fn each_policy_sees_the_system_text_as_the_earlier_ones_left_it() {
    let replacing = |old: &str, new: &str| Scripted {
        replacements: vec![Replacement { message: 0, old: old.into(), new: new.into() }],
        ..Scripted::default()
    };
    let (first, second) = (replacing("at 10:15 you", "you"), replacing("you are", "be"));
    let shadow = replacing("be", "never");
    let last = replacing("be brief", "say little");
    let prompt = |text: &str| PromptView { system: vec![text.into()], ..PromptView::default() };
    let links = vec![
        link(first.clone(), false),
        link(second.clone(), false),
        link(shadow.clone(), true),
        link(last.clone(), false),
    ];
    let mut chain = Chain::new(links, Recorder::off());
    let all = chain.on_prompt(&prompt("at 10:15 you are brief")).unwrap();
    let expected = [&first, &second, &last].map(|policy| policy.replacements[0].clone());
    assert_eq!(all, expected);
    for (policy, saw) in
        [(first, "at 10:15 you are brief"), (second, "you are brief"), (shadow, "be brief")]
    {
        let expected = format!("prompt: {:?}", prompt(saw));
        assert_eq!(*policy.log.borrow(), [expected]);
    }
    let mut wrong = self::chain([replacing("nowhere", "")]);
    let error = wrong.on_prompt(&prompt("text")).unwrap_err().to_string();
    assert_eq!(
        error,
        "policy `scripted`: on-prompt: replacement 0: message 0 does not have its span"
    );
}

#[test]
fn a_policy_is_shown_the_parameters_of_all_and_its_own_which_go_first() {
    let params = |list: &[(&str, &str)]| {
        list.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    };
    let asked = params(&[("a", "all"), ("b", "all"), ("one.a", "own"), ("two.c", "other")]);
    let policies = [Scripted::default(), Scripted::default()];
    let links = policies
        .iter()
        .zip(["one", "other"])
        .map(|(policy, name)| Link { name: name.into(), ..link(policy.clone(), false) });
    let mut chain = Chain::new(links.collect(), Recorder::off());
    let prompt = PromptView { params: asked, ..PromptView::default() };
    chain.on_prompt(&prompt).unwrap();
    let request = RequestView { params: prompt.params, ..RequestView::default() };
    chain.on_request(&request).unwrap();
    for (policy, seen) in
        policies.iter().zip([&[("a", "own"), ("b", "all")], &[("a", "all"), ("b", "all")]])
    {
        let prompt = PromptView { params: params(seen), ..PromptView::default() };
        let request = RequestView { params: params(seen), ..RequestView::default() };
        let expected = [format!("prompt: {prompt:?}"), format!("request: {request:?}")];
        assert_eq!(*policy.log.borrow(), expected);
    }
}

#[test]
fn a_shadow_is_asked_and_recorded_and_changes_nothing() {
    let mut random = Random(5);
    for round in 0..300 {
        let deciding = Scripted {
            plan: some_plan(&mut random),
            actions: (0..9).map(|_| some_actions(&mut random)).collect(),
            ..Scripted::default()
        };
        let shadow = Scripted {
            plan: some_plan(&mut random),
            actions: (0..9).map(|_| some_actions(&mut random)).collect(),
            verdict: Verdict::Stop("no".into()),
            fails: round % 3 == 0,
            ..Scripted::default()
        };
        let steps: Vec<_> =
            (0..9).map(|_| Step { budget_reached: true, ..some_step(&mut random) }).collect();
        let traces = Traces::new(&PolicyConfig::default()).unwrap();
        let run = |with_shadow: bool| {
            let mut links = vec![link(deciding.clone(), false)];
            links.extend(with_shadow.then(|| link(shadow.clone(), true)));
            let id = if with_shadow { "with" } else { "without" };
            let mut chain = Chain::new(links, traces.recorder(id, "default", true));
            let plan = chain.on_request(&RequestView::default()).unwrap();
            let actions: Vec<_> =
                steps.iter().map(|step| decided(&chain.on_step(step).unwrap())).collect();
            let verdict = chain.on_tool_call(&ToolCallView::default()).unwrap();
            chain.on_finish(&Summary::default()).unwrap();
            (Plan { every: 0, ..plan }, actions, verdict, chain.take_notes())
        };
        assert_eq!(run(true), run(false));
        let records = traces.get("with").unwrap();
        let of_shadow: Vec<_> = records.iter().filter(|record| record.shadow).collect();
        if shadow.fails {
            let failed = of_shadow.last().unwrap();
            assert_eq!(failed.error.as_deref(), Some("policy `scripted`: on-step"));
            assert_eq!(of_shadow.len(), 2, "it is not asked again");
            continue;
        }
        let answered: Vec<_> = of_shadow
            .iter()
            .filter_map(|record| match &record.call {
                Call::Step(_, answer) => answer.clone(),
                _ => None,
            })
            .collect();
        assert_eq!(answered, shadow.actions);
        assert_eq!(of_shadow.len(), 12);
    }
}
