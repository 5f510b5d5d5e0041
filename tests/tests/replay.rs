//! What policies decide in a real request is recorded, and decided again when it is replayed.

use std::sync::Arc;

use steersman_engine::config::{PolicyConfig, Profile};
use steersman_engine::policy::golden::Golden;
use steersman_engine::policy::trace::{Call, Record};
use steersman_engine::policy::wasm::{Component, Host};
use steersman_engine::policy::{Step, disk, registry};
use steersman_engine::request::Request;
use steersman_tests::{Reply, Running, ask, message, run};

const QUESTION: &str =
    "Logic puzzle: Anna is taller than Boris. Boris is taller than Clara. Who is the tallest?";

fn shipped(name: &str) -> Arc<Component> {
    let host = Host::new(&PolicyConfig::default(), &disk::in_memory()).unwrap();
    Arc::new(Component::load(&host, name, registry::embedded(name).unwrap().0).unwrap())
}

/// A request that thinks longer than it may, and has a system text.
fn thinker(profile: &str) -> Request {
    Request {
        id: format!("of {profile}"),
        profile: profile.into(),
        messages: vec![message("system", "You solve puzzles."), message("user", QUESTION)],
        reasoning: Some(true),
        reasoning_budget: Some(30),
        max_tokens: Some(60),
        ..ask(QUESTION)
    }
}

/// The replies of each profile, and what was recorded of them.
fn talk(profiles: Vec<(&str, Profile)>) -> Vec<(Reply, Vec<Record>)> {
    let folder = tempfile::tempdir().unwrap();
    let mut config = steersman_tests::config();
    config.store.enabled = false;
    config
        .profiles
        .extend(profiles.iter().map(|(name, profile)| ((*name).into(), profile.clone())));
    let engine = Running::start(config, folder.path());
    let one = |(name, _): &(&str, Profile)| {
        let request = thinker(name);
        let id = request.id.clone();
        let reply = run(&engine, request);
        let records = engine.policies().traces().get(&id).expect("it is remembered");
        (reply, records)
    };
    profiles.iter().map(one).collect()
}

fn lines(records: &[Record]) -> String {
    records.iter().map(|record| serde_json::to_string(record).unwrap() + "\n").collect()
}

#[test]
fn a_recorded_request_replays_to_the_same_decisions_bit_for_bit() {
    let open = Profile { trace_text: true, ..Profile::default() };
    let (reply, records) = talk(vec![("open", open)]).remove(0);
    assert!(reply.finished().usage.reasoning_tokens < 45, "{reply:?}");
    let component = shipped("default");
    let sha256: String = component.sha256().iter().map(|byte| format!("{byte:02x}")).collect();
    let exported = component.hooks();
    for record in &records {
        assert_eq!((&*record.policy, &record.sha256), ("default", &sha256));
        let hook = record.call.hook().name();
        assert_eq!(record.fuel > 0, exported.contains(&hook), "{hook}: {record:?}");
    }
    let hooks: Vec<_> = records.iter().map(|record| record.call.hook().name()).collect();
    assert_eq!(hooks, ["on-prompt", "on-request", "on-step", "on-finish"]);
    let Call::Step(Step { budget_reached: true, .. }, Some(actions)) = &records[2].call else {
        panic!("{records:?}")
    };
    assert_eq!(actions.len(), 1);

    let golden = Golden::parse(&lines(&records)).unwrap();
    assert_eq!(golden.inexact(), None);
    assert_eq!(golden.check(&component), []);
    let replayed = golden.replay(&component);
    let again = golden.replay(&shipped("default"));
    assert_eq!(serde_json::to_string(&replayed).unwrap(), serde_json::to_string(&again).unwrap());
    assert_eq!(replayed.len(), records.len());
    for (decision, record) in replayed.iter().zip(&records) {
        assert_eq!(decision.fuel, record.fuel, "{decision:?}");
    }
    // Another policy decides otherwise, and that is seen.
    assert_ne!(golden.check(&shipped("passthrough")), []);
}

#[test]
fn a_masked_trace_holds_nothing_of_the_conversation_and_says_that_no_replay_is_exact() {
    let (reply, records) = talk(vec![("masked", Profile::default())]).remove(0);
    let text = lines(&records);
    for said in ["puzzle", "Anna", "tallest", reply.answer.trim(), reply.reasoning.trim()] {
        assert!(!said.is_empty() && !text.contains(said), "{said} in {text}");
    }
    let golden = Golden::parse(&text).unwrap();
    let told =
        "line 1: texts and tokens are masked; `trace_text = true` in the profile records them";
    assert_eq!(golden.inexact(), Some(told));
}

#[test]
fn a_shadow_changes_no_reply_and_its_decisions_are_recorded() {
    let alone = Profile { policies: vec!["passthrough".into()], ..Profile::default() };
    let shadowed = Profile { shadow: vec!["default".into()], ..alone.clone() };
    let replies = talk(vec![("alone", alone), ("shadowed", shadowed)]);
    let [(alone, without), (shadowed, with)] = &replies[..] else { panic!("two replies") };
    assert_eq!(alone.answer, shadowed.answer);
    assert_eq!(alone.reasoning, shadowed.reasoning);
    assert_eq!(alone.finished().notes, shadowed.finished().notes);
    // What is cached and drafted depends on what ran before, and on time.
    let tokens = |reply: &Reply| {
        let usage = &reply.finished().usage;
        (usage.prompt_tokens, usage.reasoning_tokens, usage.answer_tokens)
    };
    assert_eq!(tokens(alone), tokens(shadowed));
    assert!(without.iter().all(|record| !record.shadow));
    let of_shadow: Vec<_> = with.iter().filter(|record| record.shadow).collect();
    assert_eq!(of_shadow.len(), without.len());
    assert!(of_shadow.iter().all(|record| record.policy == "default" && record.link == 1));
    let decided = of_shadow
        .iter()
        .any(|record| matches!(&record.call, Call::Step(_, Some(actions)) if !actions.is_empty()));
    assert!(decided, "{of_shadow:?}");
    // What it would have done can be asked again, though it never had its way.
    let mut golden = Golden::parse(&lines(with)).unwrap();
    golden.only("default");
    assert_eq!(golden.cases.len(), 1);
}

/// `cargo test --workspace --test replay -- --ignored --nocapture cost`
#[test]
#[ignore = "prints a measurement"]
fn cost_of_a_step_of_the_whole_path() {
    use std::time::{Duration, Instant};

    use steersman_engine::policy::{Phase, Policy, RequestView, no_vocabulary};

    let step =
        Step { phase: Phase::Think, tokens: vec![7], text: " and".into(), ..Step::default() };
    let time = |what: &str, policy: &mut dyn Policy| {
        policy.on_request(&RequestView::default()).unwrap();
        let call = || {
            let start = Instant::now();
            drop(policy.on_step(&step).unwrap());
            start.elapsed()
        };
        let mut times: Vec<Duration> = std::iter::repeat_with(call).take(15_000).collect();
        times.sort();
        println!("{what}: p50 {:?}, p99 {:?}", times[7_500], times[14_850]);
    };
    for (what, trace_requests, trace_text) in
        [("not traced", 0, false), ("masked", 256, false), ("with text", 256, true)]
    {
        let config = PolicyConfig { trace_requests, ..PolicyConfig::default() };
        let profile = Profile { trace_text, ..Profile::default() };
        let policies = steersman_tests::policies(&config, [("default".into(), profile)]).unwrap();
        for _ in 0..3 {
            let mut steering = policies.start("default", what, &no_vocabulary()).unwrap();
            time(what, steering.policy.as_mut());
        }
    }
    let scene = steersman_engine::policy::wasm::Scene::trial();
    time("the guest alone", &mut shipped("default").instantiate(&scene).unwrap());
}
