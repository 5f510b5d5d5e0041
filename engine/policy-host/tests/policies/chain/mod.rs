//! Policies in a chain: each is called as if it were alone, and a later one loosens nothing that an
//! earlier one decided.

mod added;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use steersman_policy_host::{
    Action, Answer, AnswerForm, Ban, Bias, Call, Cause, Chain, Counted, Failure, HookInput, Labels,
    Link, LoopReport, LoopRule, MAX_REPAIRS, Phase, Plan, Policy, PolicyConfig, PromptEdit,
    PromptView, Recorder, Refusal, Replacement, RequestView, Retention, STEP_TOKENS,
    SamplingChange, SamplingPatch, SavePoint, Step, Summary, TextChange, TextVerdict, TextView,
    TokenBias, ToolCallView, Traces, Verdict, WatchedToken, apply_edits,
};
use steersman_test_support::Random;

/// The calls of a policy, in order.
type Log = Arc<Mutex<Vec<Call<'static>>>>;

/// Returns answers that are written beforehand, and logs its calls.
#[derive(Default, Clone)]
struct Scripted {
    edits: Vec<PromptEdit>,
    /// The verdict of on-text by the text that it sees; without one, the text passes.
    text: Option<fn(&TextView) -> TextVerdict>,
    labels: Labels,
    plan: Plan,
    /// The actions of each step; later steps have none.
    actions: Vec<Vec<Action>>,
    verdict: Option<Verdict>,
    /// Whether each step fails.
    fails: bool,
    steps: usize,
    log: Log,
}

impl Policy for Scripted {
    fn call(&mut self, call: &Call<'_>) -> Result<Answer, Failure> {
        self.log.lock().unwrap().push(call.to_owned());
        Ok(match call {
            Call::Params(_) => call.default_answer(),
            Call::Prompt(_) => Answer::Prompt(self.edits.clone()),
            Call::Request(_) => Answer::Request(self.plan.clone()),
            Call::Step(_) if self.fails => {
                let cause = Cause::Message("on purpose".into());
                return Err(Failure { policy: "scripted".into(), hook: "on-step", cause });
            }
            Call::Step(_) => {
                self.steps += 1;
                Answer::Step(self.actions.get(self.steps - 1).cloned().unwrap_or_default())
            }
            Call::ToolCall(_) => Answer::ToolCall(self.verdict.clone().unwrap_or(Verdict::Accept)),
            Call::Text(view) => {
                Answer::Text(self.text.map_or(TextVerdict::Pass, |text| text(view)))
            }
            Call::Finish(_) => Answer::Finish(self.labels.clone()),
        })
    }
}

impl Scripted {
    fn calls(&self) -> Vec<Call<'static>> {
        self.log.lock().unwrap().clone()
    }
}

fn boxed(policies: impl IntoIterator<Item = Scripted>) -> Box<dyn Policy> {
    Box::new(chain(policies))
}

fn link(policy: Scripted, shadow: bool) -> Link {
    Link { name: "scripted".into(), sha256: [7; 32], shadow, policy: Box::new(policy) }
}

fn chain(policies: impl IntoIterator<Item = Scripted>) -> Chain {
    let links = policies.into_iter().map(|policy| link(policy, false)).collect();
    Chain::new(links, Recorder::off())
}

/// Replaces a span of the first system message.
fn replace(old: &str, new: &str) -> PromptEdit {
    PromptEdit::Replace(Replacement { message: 0, old: old.into(), new: new.into() })
}

/// `value` or `None`.
fn maybe<T>(random: &mut Random, value: T) -> Option<T> {
    (random.below(2) == 0).then_some(value)
}

fn some_sampling(random: &mut Random) -> SamplingPatch {
    let fraction = random.below(100) as f32 / 100.0;
    SamplingPatch {
        temperature: maybe(random, fraction),
        top_p: maybe(random, 1.0 - fraction),
        top_k: maybe(random, 40),
        min_p: maybe(random, fraction / 2.0),
    }
}

fn some_plan(random: &mut Random) -> Plan {
    let save_points = [SavePoint::System, SavePoint::Turns, SavePoint::Prompt, SavePoint::Reply];
    let rule = LoopRule {
        max_period: random.below(99) as u32,
        repeats: 3,
        min_tokens: 96,
        similarity: 0.9,
    };
    let retain = (0..random.below(6))
        .map(|_| Retention { at: random.of(&save_points), seconds: random.below(5) as u32 })
        .collect();
    let (budget, reserve) = (random.below(1000) as u32, random.below(1000) as u32);
    let reasoning = random.below(2) == 0;
    Plan {
        reasoning: maybe(random, reasoning),
        reasoning_budget: maybe(random, budget),
        answer_reserve: maybe(random, reserve),
        sampling: some_sampling(random),
        loops: maybe(random, rule),
        every: random.below(4) as u32 * 6,
        checkpoint_every: random.below(4) as u32 * 16,
        note: maybe(random, format!("note {budget}")),
        retain: maybe(random, retain),
        form: {
            let form = AnswerForm::Regex(format!("a{{{}}}", random.below(9)));
            maybe(random, form)
        },
        refuse: {
            let message = format!("refusal {}", random.below(99));
            maybe(random, Refusal { status: 403, message, retry_after: None })
        },
        max_tokens: maybe(random, budget + 1),
        stop: (0..random.below(4)).map(|_| format!("stop {}", random.below(4))).collect(),
        tools: {
            let tools = (0..random.below(4)).map(|_| format!("tool {}", random.below(4)));
            let tools = tools.collect();
            maybe(random, tools)
        },
        on_phase: random.below(2) == 0,
        on_newline: random.below(2) == 0,
        on_texts: (0..random.below(3)).map(|_| format!("text {}", random.below(4))).collect(),
        on_tokens: (0..random.below(3)).map(|_| random.below(4) as u32).collect(),
        candidates: random.below(3) as u32 * 4,
        route: {
            let route = format!("route {}", random.below(4));
            maybe(random, route)
        },
        watch: {
            let all = [
                WatchedToken::ReasoningEnd,
                WatchedToken::Token(1),
                WatchedToken::Text("so".into()),
            ];
            all.into_iter().filter(|_| random.below(2) == 0).collect()
        },
        limit_counts: {
            let counted = [Counted::Answer, Counted::Reply][random.below(2)];
            maybe(random, counted)
        },
    }
}

fn some_action(random: &mut Random) -> Action {
    let token = |random: &mut Random| random.below(6) as u32;
    let steps = random.below(3) as u32;
    match random.below(14) {
        0..3 => Action::Inject(format!("text {}", random.below(99))),
        3 => Action::CloseReasoning(format!("hint {}", random.below(99))),
        4..6 => Action::Rewind(random.below(9) as u32),
        6..8 => Action::Ban(Ban { tokens: vec![token(random), token(random)], steps }),
        8..10 => {
            let token = token(random);
            let bias = random.below(9) as f32;
            Action::Bias(Bias { tokens: vec![TokenBias { token, bias }], steps })
        }
        10..13 => Action::Sampling(SamplingChange { sampling: some_sampling(random), steps }),
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
        phase: random.of(&[Phase::Reasoning, Phase::Answer]),
        tokens: (0..count).collect(),
        text: "ab".repeat(count as usize),
        loop_found: (random.below(4) == 0).then_some(report),
        budget_reached: random.below(4) == 0,
        ..Step::default()
    }
}

#[test]
fn a_chain_of_one_equals_its_policy() {
    let mut random = Random(1);
    for _ in 0..500 {
        let policy = Scripted {
            edits: vec![replace("be ", "")],
            plan: some_plan(&mut random),
            actions: (0..8).map(|_| some_actions(&mut random)).collect(),
            verdict: Some(random.of(&[&Verdict::Accept, &Verdict::Repair("again".into())]).clone()),
            ..Scripted::default()
        };
        let chained = Scripted { log: Log::default(), ..policy.clone() };
        let (alone_log, chained_log) = (policy.log.clone(), chained.log.clone());
        let mut alone: Box<dyn Policy> = Box::new(policy);
        let mut chain = boxed([chained]);
        let prompt = PromptView { system: vec!["be brief".into()], ..PromptView::default() };
        assert_eq!(chain.ask(&prompt).unwrap(), alone.ask(&prompt).unwrap());
        let request = RequestView { user: "hi".into(), ..RequestView::default() };
        assert_eq!(chain.ask(&request).unwrap(), alone.ask(&request).unwrap());
        for _ in 0..8 {
            // Including steps without event or tokens: the engine decides when to call.
            let step = some_step(&mut random);
            assert_eq!(chain.ask(&step).unwrap(), alone.ask(&step).unwrap());
        }
        let call = ToolCallView { name: "search".into(), ..ToolCallView::default() };
        assert_eq!(chain.ask(&call).unwrap(), alone.ask(&call).unwrap());
        alone.ask(&Summary::default()).unwrap();
        chain.ask(&Summary::default()).unwrap();
        assert_eq!(*alone_log.lock().unwrap(), *chained_log.lock().unwrap());
    }
}

/// Commits tokens as the engine does: calls `policy` every `plan.every` tokens and at `events`.
fn decode(policy: &mut dyn Policy, tokens: u32, events: &[u32]) {
    let every = policy.ask(&RequestView::default()).unwrap().every;
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
        policy.ask(&step).unwrap();
    }
}

#[test]
fn each_policy_of_a_chain_is_called_as_if_it_were_alone() {
    let mut random = Random(2);
    let periods = [0, 1, 2, 3, 8, 12, 100, 1024, 1500, 2500, 3000, 5003];
    for _ in 0..60 {
        let policies: Vec<_> = (0..1 + random.below(3))
            .map(|_| {
                let plan = Plan { every: random.of(&periods), ..Plan::default() };
                Scripted { plan, ..Scripted::default() }
            })
            .collect();
        let events: Vec<u32> = (0..random.below(4)).map(|_| random.below(6000) as u32).collect();
        decode(&mut chain(policies.clone()), 6000, &events);
        for policy in policies {
            let mut alone = Scripted { log: Log::default(), ..policy.clone() };
            decode(&mut alone, 6000, &events);
            let (alone, chained) = (alone.calls(), policy.calls());
            assert!(
                alone == chained,
                "every {} with events at {events:?}: {} calls alone, {} in the chain",
                policy.plan.every,
                alone.len(),
                chained.len(),
            );
        }
    }
}

#[test]
fn tokens_that_one_policy_rewinds_are_not_shown_to_the_others() {
    let rewind = vec![vec![], vec![], vec![Action::Rewind(2), Action::Inject("x".into())]];
    let rewinding = Scripted {
        plan: Plan { every: 1, ..Plan::default() },
        actions: rewind,
        ..Scripted::default()
    };
    // Of three tokens two are rewound, and `x` is injected. The engine shows it if there are several.
    let several: [(u32, &[u32], &str); 4] =
        [(1, &[10], "a"), (2, &[11], "b"), (3, &[12], "c"), (3, &[99, 13], "xd")];
    let one: [(u32, &[u32], &str); 4] =
        [(1, &[10], "a"), (2, &[11], "b"), (3, &[12], "c"), (3, &[13], "d")];
    for (shadow, steps, expected) in
        [(false, several, (&[10, 99, 13][..], "axd")), (true, one, (&[10, 13], "ad"))]
    {
        let other = Scripted::default();
        let links = vec![link(rewinding.clone(), false), link(other.clone(), shadow)];
        let mut chain: Box<dyn Policy> = Box::new(Chain::new(links, Recorder::off()));
        chain.ask(&RequestView::default()).unwrap();
        for (index, tokens, text) in steps {
            let budget_reached = tokens.contains(&13);
            let (tokens, text) = (tokens.to_vec(), text.into());
            let step = Step { index, tokens, text, budget_reached, ..Step::default() };
            chain.ask(&step).unwrap();
        }
        let calls = other.calls();
        let [_, Call::Step(seen)] = &calls[..] else { panic!("{calls:?}") };
        assert_eq!((&seen.tokens[..], &*seen.text), expected);
    }
}

fn merged(plans: &[Plan]) -> Plan {
    let scripted = |plan: &Plan| Scripted { plan: plan.clone(), ..Scripted::default() };
    boxed(plans.iter().map(scripted)).ask(&RequestView::default()).unwrap()
}

#[test]
fn a_merged_plan_has_the_tightest_limits_and_the_first_choice() {
    let mut random = Random(3);
    for _ in 0..5000 {
        let plans: Vec<_> = (0..1 + random.below(4)).map(|_| some_plan(&mut random)).collect();
        let merged = merged(&plans);
        let shown = format!("{plans:#?}\nmerged: {merged:#?}");
        fn first<T>(plans: &[Plan], of: impl Fn(&Plan) -> Option<T>) -> Option<T> {
            plans.iter().find_map(of)
        }
        assert_eq!(merged.reasoning, first(&plans, |plan| plan.reasoning), "{shown}");
        assert_eq!(merged.form, first(&plans, |plan| plan.form.clone()), "{shown}");
        assert_eq!(merged.refuse, first(&plans, |plan| plan.refuse.clone()), "{shown}");
        for plan in &plans {
            let has = |stop| merged.stop.contains(stop);
            assert!(plan.stop.iter().all(has), "{shown}");
            if let Some(tools) = &plan.tools {
                let offered = merged.tools.as_ref().expect("a policy leaves tools out");
                assert!(offered.iter().all(|name| tools.contains(name)), "{shown}");
            }
        }
        assert_eq!(
            merged.tools.is_some(),
            plans.iter().any(|plan| plan.tools.is_some()),
            "{shown}"
        );
        assert_eq!(merged.on_phase, plans.iter().any(|plan| plan.on_phase), "{shown}");
        assert_eq!(merged.on_newline, plans.iter().any(|plan| plan.on_newline), "{shown}");
        assert_eq!(merged.route, first(&plans, |plan| plan.route.clone()), "{shown}");
        let candidates = plans.iter().map(|plan| plan.candidates).max();
        assert_eq!(Some(merged.candidates), candidates, "{shown}");
        for plan in &plans {
            assert!(plan.on_texts.iter().all(|text| merged.on_texts.contains(text)), "{shown}");
            assert!(plan.on_tokens.iter().all(|id| merged.on_tokens.contains(id)), "{shown}");
            assert!(plan.watch.iter().all(|one| merged.watch.contains(one)), "{shown}");
        }
        assert_eq!(merged.loops, first(&plans, |plan| plan.loops), "{shown}");
        let temperature = |plan: &Plan| plan.sampling.temperature;
        assert_eq!(merged.sampling.temperature, first(&plans, temperature), "{shown}");
        assert_eq!(merged.sampling.top_p, first(&plans, |plan| plan.sampling.top_p), "{shown}");
        assert_eq!(merged.sampling.top_k, first(&plans, |plan| plan.sampling.top_k), "{shown}");
        assert_eq!(merged.sampling.min_p, first(&plans, |plan| plan.sampling.min_p), "{shown}");
        let all = |of: fn(&Plan) -> Option<u32>| plans.iter().filter_map(of);
        assert_eq!(merged.reasoning_budget, all(|plan| plan.reasoning_budget).min(), "{shown}");
        assert_eq!(merged.max_tokens, all(|plan| plan.max_tokens).min(), "{shown}");
        let counts: Vec<_> = plans.iter().filter_map(|plan| plan.limit_counts).collect();
        let tightest = counts.iter().find(|counted| **counted == Counted::Reply);
        assert_eq!(merged.limit_counts, tightest.or(counts.first()).copied(), "{shown}");
        assert_eq!(merged.answer_reserve, all(|plan| plan.answer_reserve).max(), "{shown}");
        let dense = all(|plan| Some(plan.checkpoint_every).filter(|every| *every > 0)).min();
        assert_eq!(merged.checkpoint_every, dense.unwrap_or(0), "{shown}");
        let periods: Vec<_> = all(|plan| Some(plan.every).filter(|every| *every > 0)).collect();
        assert_eq!(merged.every == 0, periods.is_empty(), "{shown}");
        assert!(periods.iter().all(|every| every % merged.every == 0), "{shown}");
        let notes: Vec<_> = plans.iter().filter_map(|plan| plan.note.clone()).collect();
        assert_eq!(merged.note.unwrap_or_default(), notes.join("; "), "{shown}");
        let lists: Vec<_> = plans.iter().filter_map(|plan| plan.retain.as_ref()).collect();
        assert_eq!(merged.retain.is_some(), !lists.is_empty(), "{shown}");
        let longest = |list: &[Retention], at| {
            list.iter().filter(|one| one.at == at).map(|one| one.seconds).max()
        };
        for at in [SavePoint::System, SavePoint::Turns, SavePoint::Prompt, SavePoint::Reply] {
            let wanted: Option<Vec<_>> = lists.iter().map(|list| longest(list, at)).collect();
            let expected = wanted.and_then(|seconds| seconds.into_iter().min());
            let retained = longest(merged.retain.as_deref().unwrap_or_default(), at);
            assert_eq!(retained, expected, "{at:?} in {shown}");
        }
    }
}

/// The effect of a list of actions: up to its stop, with sampling and biases combined.
#[derive(Debug, Default, PartialEq)]
struct Effect {
    rewind: Option<u32>,
    bans: Vec<Ban>,
    biases: BTreeMap<u32, f32>,
    sampling: SamplingPatch,
    texts: Vec<Action>,
    stop: Option<String>,
}

fn effect(actions: &[Action]) -> Effect {
    let mut decided = Effect::default();
    for action in actions {
        match action {
            Action::Rewind(tokens) => decided.rewind = decided.rewind.max(Some(*tokens)),
            Action::Ban(ban) => decided.bans.push(ban.clone()),
            Action::Bias(bias) => {
                let pairs = bias.tokens.iter().map(|biased| (biased.token, biased.bias));
                decided.biases.extend(pairs);
            }
            Action::Sampling(SamplingChange { sampling: new, .. }) => {
                let old = decided.sampling;
                decided.sampling = SamplingPatch {
                    temperature: new.temperature.or(old.temperature),
                    top_p: new.top_p.or(old.top_p),
                    top_k: new.top_k.or(old.top_k),
                    min_p: new.min_p.or(old.min_p),
                };
            }
            Action::Inject(_) | Action::CloseReasoning(_) => decided.texts.push(action.clone()),
            Action::Stop(reason) => {
                decided.stop = Some(reason.clone());
                break;
            }
        }
    }
    decided
}

#[test]
fn merged_actions_include_all_effects_of_the_first_policy() {
    let mut random = Random(4);
    for _ in 0..5000 {
        let scripts: Vec<Vec<Vec<Action>>> = (0..2 + random.below(3))
            .map(|_| (0..5).map(|_| some_actions(&mut random)).collect())
            .collect();
        let scripted =
            |actions: &Vec<_>| Scripted { actions: actions.clone(), ..Scripted::default() };
        let mut chain = boxed(scripts.iter().map(scripted));
        chain.ask(&RequestView::default()).unwrap();
        // What the first policy set in earlier steps for the rest of the reply.
        let mut lasting = Effect::default();
        for at in 0..5 {
            let step = Step { tokens: vec![1], budget_reached: true, ..Step::default() };
            let got = chain.ask(&step).unwrap();
            let shown = format!(
                "{:#?}\nmerged: {got:#?}",
                scripts.iter().map(|s| &s[at]).collect::<Vec<_>>()
            );
            let (got, first) = (effect(&got), effect(&scripts[0][at]));
            assert!(got.rewind >= first.rewind, "{shown}");
            assert!(first.bans.iter().all(|ban| got.bans.contains(ban)), "{shown}");
            assert!(got.texts.starts_with(&first.texts), "{shown}");
            let stops = scripts.iter().find_map(|script| effect(&script[at]).stop);
            assert_eq!(got.stop, stops, "{shown}");
            for (token, bias) in &first.biases {
                assert_eq!(got.biases.get(token), Some(bias), "{shown}");
            }
            for token in lasting.biases.keys().filter(|token| !first.biases.contains_key(token)) {
                assert_eq!(got.biases.get(token), None, "loosened: {shown}");
            }
            let values = |of: fn(&SamplingPatch) -> bool| {
                (of(&first.sampling), of(&lasting.sampling), of(&got.sampling))
            };
            if first.sampling.temperature.is_some() {
                assert_eq!(got.sampling.temperature, first.sampling.temperature, "{shown}");
            }
            for of in [
                (|s| s.temperature.is_some()) as fn(&SamplingPatch) -> bool,
                |s| s.top_p.is_some(),
                |s| s.top_k.is_some(),
                |s| s.min_p.is_some(),
            ] {
                let (now, before, got) = values(of);
                assert!(!now || got, "{shown}");
                assert!(now || !before || !got, "loosened: {shown}");
            }
            // A value lasts if the first policy's last change of it does.
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
                    Action::Sampling(SamplingChange { sampling, steps }) => {
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
fn a_later_policy_may_change_a_value_once_the_earlier_change_has_expired() {
    let heat = |temperature, steps| {
        let sampling = SamplingPatch { temperature: Some(temperature), ..SamplingPatch::default() };
        Action::Sampling(SamplingChange { sampling, steps })
    };
    let earlier = Scripted { actions: vec![vec![heat(0.0, 3)]], ..Scripted::default() };
    let later = Scripted { actions: vec![vec![heat(1.0, 0)]; 9], ..Scripted::default() };
    let mut chain = boxed([earlier, later]);
    chain.ask(&RequestView::default()).unwrap();
    let mut step = || {
        let step = Step { tokens: vec![1], budget_reached: true, ..Step::default() };
        chain.ask(&step).unwrap()
    };
    assert_eq!(step(), [heat(0.0, 3)]);
    assert_eq!(step(), []);
    assert_eq!(step(), []);
    assert_eq!(step(), [heat(1.0, 0)]);
}

#[test]
fn the_strictest_verdict_wins_and_the_earlier_of_equals() {
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
            let scripted = |verdict: &Verdict| Scripted {
                verdict: Some(verdict.clone()),
                ..Scripted::default()
            };
            let mut chain = boxed([first, second].map(scripted));
            let got = chain.ask(&ToolCallView::default()).unwrap();
            let expected = if weight(second) > weight(first) { second } else { first };
            assert_eq!(got, *expected, "{first:?}, {second:?}");
        }
    }
}

#[test]
fn each_policy_sees_the_replacements_of_the_earlier_ones() {
    let replacing =
        |old: &str, new: &str| Scripted { edits: vec![replace(old, new)], ..Scripted::default() };
    let (first, second) = (replacing("at 10:15 you", "you"), replacing("you are", "be"));
    let shadow = replacing("be", "never");
    let last = replacing("be brief", "be short");
    let prompt = |text: &str| PromptView { system: vec![text.into()], ..PromptView::default() };
    let links = vec![
        link(first.clone(), false),
        link(second.clone(), false),
        link(shadow.clone(), true),
        link(last.clone(), false),
    ];
    let mut chain: Box<dyn Policy> = Box::new(Chain::new(links, Recorder::off()));
    let all = chain.ask(&prompt("at 10:15 you are brief")).unwrap();
    let expected = [&first, &second, &last].map(|policy| policy.edits[0].clone());
    assert_eq!(all, expected);
    for (policy, saw) in
        [(first, "at 10:15 you are brief"), (second, "you are brief"), (shadow, "be brief")]
    {
        assert_eq!(policy.calls(), [prompt(saw).call().to_owned()]);
    }
    let mut wrong = boxed([replacing("nowhere", "")]);
    let error = wrong.ask(&prompt("text")).unwrap_err().to_string();
    assert_eq!(error, "policy `scripted`: on-prompt: edit 0: message 0 does not contain its span");
}

#[test]
fn own_parameters_take_precedence_over_shared_ones() {
    let params = |list: &[(&str, &str)]| {
        list.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    };
    let given = params(&[("a", "all"), ("b", "all"), ("one.a", "own"), ("two.c", "other")]);
    let policies = [Scripted::default(), Scripted::default()];
    let links = policies
        .iter()
        .zip(["one", "other"])
        .map(|(policy, name)| Link { name: name.into(), ..link(policy.clone(), false) });
    let mut chain: Box<dyn Policy> = Box::new(Chain::new(links.collect(), Recorder::off()));
    let prompt = PromptView { params: given, ..PromptView::default() };
    chain.ask(&prompt).unwrap();
    let request = RequestView { params: prompt.params, ..RequestView::default() };
    chain.ask(&request).unwrap();
    for (policy, seen) in
        policies.iter().zip([&[("a", "own"), ("b", "all")], &[("a", "all"), ("b", "all")]])
    {
        let prompt = PromptView { params: params(seen), ..PromptView::default() };
        let request = RequestView { params: params(seen), ..RequestView::default() };
        assert_eq!(policy.calls(), [prompt.call().to_owned(), request.call().to_owned()]);
    }
}

#[test]
fn a_shadow_is_called_and_recorded_and_changes_nothing() {
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
            verdict: Some(Verdict::Stop("no".into())),
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
            let recorder = traces.recorder(id, "default", true);
            let mut chain: Box<dyn Policy> = Box::new(Chain::new(links, recorder));
            let plan = chain.ask(&RequestView::default()).unwrap();
            let actions: Vec<_> =
                steps.iter().map(|step| effect(&chain.ask(step).unwrap())).collect();
            let verdict = chain.ask(&ToolCallView::default()).unwrap();
            chain.ask(&Summary::default()).unwrap();
            let plan = Plan {
                every: 0,
                on_phase: false,
                on_newline: false,
                on_texts: Vec::new(),
                on_tokens: Vec::new(),
                candidates: 0,
                watch: Vec::new(),
                ..plan
            };
            (plan, actions, verdict, chain.take_report().notes)
        };
        assert_eq!(run(true), run(false));
        let records = traces.get("with").unwrap();
        let of_shadow: Vec<_> = records.iter().filter(|record| record.link.shadow).collect();
        if shadow.fails {
            let failed = of_shadow.last().unwrap();
            let error = failed.failure.as_ref().unwrap().to_string();
            assert_eq!(error, "policy `scripted`: on-step: failed: on purpose");
            assert_eq!(of_shadow.len(), 2, "it is not called again");
            continue;
        }
        let answered: Vec<_> = of_shadow
            .iter()
            .filter_map(|record| match &record.answer {
                Some(Answer::Step(actions)) => Some(actions.clone()),
                _ => None,
            })
            .collect();
        assert_eq!(answered, shadow.actions);
        assert_eq!(of_shadow.len(), 12);
    }
}
