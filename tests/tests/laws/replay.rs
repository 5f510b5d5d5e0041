//! The recorded calls of a decoded request replay to the same decisions.
//!
//! `engine/policy-host/tests/policies/replay.rs` has the same without an engine.

use std::sync::Arc;

use steersman_engine::Engine;
use steersman_engine::config::Profile;
use steersman_engine::policy::{Answer, Call, Component, Golden, PolicyConfig, Record, shipped};
use steersman_engine::request::Request;
use steersman_test_support::hostile::counting;
use steersman_tests::{Reply, Running, ask, host, message, run};

const QUESTION: &str =
    "Logic puzzle: Anna is taller than Boris. Boris is taller than Clara. Who is the tallest?";

fn compiled(name: &str) -> Arc<Component> {
    let host = host(&PolicyConfig::default());
    Arc::new(Component::load(&host, name, shipped(name).unwrap().0).unwrap())
}

/// A request with a system text, whose reasoning would exceed its budget.
fn reasoner(profile: &str) -> Request {
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

/// The reply to a request of each profile, and its records.
fn replies(profiles: Vec<(&str, Profile)>) -> Vec<(Reply, Vec<Record>)> {
    let folder = tempfile::tempdir().unwrap();
    let mut config = steersman_tests::config();
    config.store.enabled = false;
    config
        .profiles
        .extend(profiles.iter().map(|(name, profile)| ((*name).into(), profile.clone())));
    let engine = Running::start(config, folder.path());
    let one = |(name, _): &(&str, Profile)| {
        let request = reasoner(name);
        let id = request.id.clone();
        let reply = run(&engine, request);
        let records =
            engine.policies().traces().get(&id).expect("the newest requests are in memory");
        (reply, records)
    };
    profiles.iter().map(one).collect()
}

fn lines(records: &[Record]) -> String {
    records.iter().map(|record| serde_json::to_string(record).unwrap() + "\n").collect()
}

#[test]
fn a_recorded_request_replays_to_the_same_decisions_bit_for_bit() {
    let mut open = Profile::default();
    open.policy.trace_text = true;
    let (reply, records) = replies(vec![("open", open)]).remove(0);
    assert!(reply.finished().usage.reasoning_tokens < 45, "{reply:?}");
    let component = compiled("default");
    let sha256: String = component.sha256().iter().map(|byte| format!("{byte:02x}")).collect();
    let exported = component.hooks();
    for record in &records {
        assert_eq!((&*record.link.policy, &record.link.sha256), ("default", &sha256));
        let hook = record.call.hook().name();
        assert_eq!(record.cost.fuel > 0, exported.contains(&hook), "{hook}: {record:?}");
    }
    let hooks: Vec<_> = records.iter().map(|record| record.call.hook().name()).collect();
    assert_eq!(hooks, ["on-prompt", "on-request", "on-step", "on-finish"]);
    let Call::Step(step) = &records[2].call else { panic!("{records:?}") };
    let Some(Answer::Step(actions)) = &records[2].answer else { panic!("{records:?}") };
    assert!(step.budget_reached && actions.len() == 1, "{records:?}");

    let golden = Golden::parse(&lines(&records)).unwrap();
    assert_eq!(golden.inexact(), None);
    assert_eq!(golden.check(&component), []);
    let replayed = golden.replay(&component);
    let again = golden.replay(&compiled("default"));
    assert_eq!(serde_json::to_string(&replayed).unwrap(), serde_json::to_string(&again).unwrap());
    assert_eq!(replayed.len(), records.len());
    for (decision, record) in replayed.iter().zip(&records) {
        assert_eq!(decision.fuel, record.cost.fuel, "{decision:?}");
    }
    // Another policy makes other decisions.
    assert_ne!(golden.check(&compiled("passthrough")), []);
}

/// A policy that computes for long at every step, beside two other requests.
#[test]
fn calls_on_threads_are_recorded_and_replay_as_those_on_the_engine_thread() {
    let guest = counting(400_000);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("counting.wasm");
    std::fs::write(&path, &guest).unwrap();
    let host = host(&PolicyConfig::default());
    let component = Arc::new(Component::load(&host, "counting", &guest).unwrap());
    let traces = [0, 2].map(|threads| {
        let mut config = steersman_tests::config();
        (config.store.enabled, config.engine.policy_threads) = (false, threads);
        let mut profile = steersman_tests::profile(path.display().to_string());
        profile.policy.trace_text = true;
        config.profiles.insert("slow".into(), profile);
        let running = Running::start(config, folder.path());
        let engine: &Engine = &running;
        let reply = std::thread::scope(|scope| {
            for question in ["What is the capital of Italy?", QUESTION] {
                scope.spawn(|| run(engine, ask(question)));
            }
            run(engine, Request { seed: Some(7), ..reasoner("slow") })
        });
        let mut records = engine.policies().traces().get("of slow").unwrap();
        let golden = Golden::parse(&lines(&records)).unwrap();
        assert_eq!(golden.inexact(), None);
        assert_eq!(golden.check(&component), []);
        for record in &mut records {
            record.cost.nanoseconds = 0;
            if let Call::Request(view) = &mut record.call {
                view.to_mut().time = 0;
            }
        }
        assert!(records.len() > 40, "{}", records.len());
        (reply.reasoning + &reply.answer, lines(&records))
    });
    assert_eq!(traces[0], traces[1]);
}

#[test]
fn a_masked_trace_has_no_text_of_the_conversation_and_no_exact_replay() {
    let (reply, records) = replies(vec![("masked", Profile::default())]).remove(0);
    let text = lines(&records);
    for secret in ["puzzle", "Anna", "tallest", reply.answer.trim(), reply.reasoning.trim()] {
        assert!(!secret.is_empty() && !text.contains(secret), "{secret} in {text}");
    }
    let golden = Golden::parse(&text).unwrap();
    let reason =
        "line 1: texts and tokens are masked; `trace_text = true` in the profile records them";
    assert_eq!(golden.inexact(), Some(reason));
}

#[test]
fn a_shadow_changes_no_reply_and_its_decisions_are_recorded() {
    let alone = steersman_tests::profile("passthrough");
    let mut shadowed = alone.clone();
    shadowed.policy.shadow.push("default".into());
    let replies = replies(vec![("alone", alone), ("shadowed", shadowed)]);
    let [(alone, without), (shadowed, with)] = &replies[..] else { panic!("two replies") };
    assert_eq!(alone.answer, shadowed.answer);
    assert_eq!(alone.reasoning, shadowed.reasoning);
    assert_eq!(alone.finished().notes, shadowed.finished().notes);
    // Cached and drafted tokens depend on earlier requests and on time.
    let tokens = |reply: &Reply| {
        let usage = &reply.finished().usage;
        (usage.prompt_tokens, usage.reasoning_tokens, usage.answer_tokens)
    };
    assert_eq!(tokens(alone), tokens(shadowed));
    assert!(without.iter().all(|record| !record.link.shadow));
    let of_shadow: Vec<_> = with.iter().filter(|record| record.link.shadow).collect();
    assert_eq!(of_shadow.len(), without.len());
    assert!(
        of_shadow.iter().all(|record| record.link.policy == "default" && record.link.index == 1)
    );
    let acted = of_shadow
        .iter()
        .any(|record| matches!(&record.answer, Some(Answer::Step(list)) if !list.is_empty()));
    assert!(acted, "{of_shadow:?}");
    // Its decisions can be replayed although they were not applied.
    let mut golden = Golden::parse(&lines(with)).unwrap();
    golden.retain_policy("default");
    assert_eq!(golden.cases.len(), 1);
}
