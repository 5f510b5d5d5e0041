//! The recorded calls of a session replay to the same answers.
//!
//! `tests/tests/laws/replay.rs` has the same for requests that the engine decodes.

use std::collections::BTreeMap;
use std::sync::Arc;

use steersman_policy_host::{
    Action, Answer, Component, Golden, Grant, Host, Phase, Policies, PolicyConfig, ProfilePolicies,
    PromptView, Record, RequestView, Step, Summary, ToolCallView, no_vocabulary, shipped,
};
use steersman_test_support::guest::{data, importing};

use crate::storage;

const SYSTEM: &str = "You solve puzzles.";
const USER: &str = "Anna is taller than Boris. Who is the tallest?";
const REASONING: &str = "So Anna is taller";

fn component(name: &str, bytes: &[u8]) -> Arc<Component> {
    let host = Host::new(&PolicyConfig::default(), &storage()).unwrap();
    Arc::new(Component::load(&host, name, bytes).unwrap())
}

fn lines(records: &[Record]) -> String {
    records.iter().map(|record| serde_json::to_string(record).unwrap() + "\n").collect()
}

fn policies(profile: ProfilePolicies) -> Policies {
    let config = PolicyConfig { deadline_ms: 10_000, ..PolicyConfig::default() };
    let profiles = BTreeMap::from([("default".to_owned(), profile)]);
    Policies::load(&config, &profiles, &storage()).unwrap()
}

/// A request whose reasoning uses up its budget; its records.
fn request(policies: &Policies, id: &str) -> Vec<Record> {
    let mut session = policies.start("default", id, &no_vocabulary()).unwrap();
    let prompt = PromptView {
        params: session.params.to_vec(),
        system: vec![SYSTEM.into()],
        ..PromptView::default()
    };
    session.ask(&prompt).unwrap();
    let view = RequestView {
        id: id.into(),
        user: USER.into(),
        can_reason: true,
        context_left: 8192,
        ..RequestView::default()
    };
    session.ask(&view).unwrap();
    let step = Step {
        index: 12,
        phase: Phase::Reasoning,
        tokens: (0..12).collect(),
        text: REASONING.into(),
        budget_reached: true,
        ..Step::default()
    };
    session.ask(&step).unwrap();
    let call = ToolCallView { name: "search".into(), arguments: "{}".into(), ..Default::default() };
    session.ask(&call).unwrap();
    session.ask(&Summary { reason: "stop".into(), ..Summary::default() }).unwrap();
    drop(session);
    policies.traces().get(id).expect("the newest request is in memory")
}

#[test]
fn a_recorded_session_replays_to_the_same_decisions_bit_for_bit() {
    let profile = ProfilePolicies { trace_text: true, ..ProfilePolicies::default() };
    let records = request(&policies(profile), "request");
    let component = component("default", shipped("default").unwrap().0);
    let exported = component.hooks();
    for record in &records {
        assert_eq!(&*record.link.policy, "default");
        assert_eq!(record.link.sha256, hex::encode(component.sha256()));
        let hook = record.call.hook().name();
        assert_eq!(record.cost.fuel > 0, exported.contains(&hook), "{hook}: {record:?}");
    }
    let hooks: Vec<_> = records.iter().map(|record| record.call.hook().name()).collect();
    assert_eq!(hooks, ["on-prompt", "on-request", "on-step", "on-tool-call", "on-finish"]);
    let Some(Answer::Step(actions)) = &records[2].answer else { panic!("{records:?}") };
    assert!(matches!(actions[..], [Action::CloseReasoning(_)]), "{actions:?}");

    let golden = Golden::parse(&lines(&records)).unwrap();
    assert_eq!(golden.inexact(), None);
    assert_eq!(golden.check(&component), []);
    let replayed = golden.replay(&component);
    assert_eq!(replayed, golden.replay(&self::component("default", shipped("default").unwrap().0)));
    assert_eq!(replayed.len(), records.len());
    for (decision, record) in replayed.iter().zip(&records) {
        assert_eq!(decision.fuel, record.cost.fuel, "{decision:?}");
    }
    // Another policy makes other decisions.
    let passthrough = self::component("passthrough", shipped("passthrough").unwrap().0);
    assert_ne!(golden.check(&passthrough), []);
}

/// The stored value differs between the requests, so a replay without recorded results would differ.
#[test]
fn a_replay_returns_the_recorded_results_of_imports() {
    let body = "(call $kv.get (i32.const 512) (i32.const 3) (i32.const 64))
        (call $kv.set (i32.const 512) (i32.const 3) (i32.const 512) (i32.const 3) (i32.const 128))
        (if (i32.load8_u (i32.const 64)) (then (unreachable))) i32.const 0";
    let bytes = importing(&["kv"], &[("on-request", body)], &data(512, b"key"));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("guest.wasm");
    std::fs::write(&file, &bytes).unwrap();
    let profile = ProfilePolicies {
        policies: vec![file.to_str().unwrap().into()],
        grants: vec![Grant::Kv],
        trace_text: true,
        ..ProfilePolicies::default()
    };
    let policies = policies(profile);
    let (first, second) = (request(&policies, "first"), request(&policies, "second"));
    assert_eq!(first[1].failure, None);
    assert!(second[1].failure.is_some() && second[1].replaced, "{:?}", second[1]);
    let component = component("guest", &bytes);
    // After the failure the native policy answered, and its answers are not replayed.
    for (records, decisions) in [(first, 5), (second, 2)] {
        let golden = Golden::parse(&lines(&records)).unwrap();
        assert_eq!(golden.inexact(), None);
        assert_eq!(golden.check(&component), [], "{records:?}");
        assert_eq!(golden.replay(&component).len(), decisions, "{records:?}");
    }
}

#[test]
fn a_masked_trace_has_no_text_of_the_conversation_and_no_exact_replay() {
    let records = request(&policies(ProfilePolicies::default()), "request");
    let text = lines(&records);
    for secret in ["puzzles", "Anna", "tallest", "taller"] {
        assert!(!text.contains(secret), "{secret} in {text}");
    }
    let golden = Golden::parse(&text).unwrap();
    let reason =
        "line 1: texts and tokens are masked; `trace_text = true` in the profile records them";
    assert_eq!(golden.inexact(), Some(reason));
}

#[test]
fn a_shadow_changes_no_answer_and_its_decisions_replay() {
    let alone = ProfilePolicies {
        policies: vec!["passthrough".into()],
        trace_text: true,
        ..ProfilePolicies::default()
    };
    let shadowed = ProfilePolicies { shadow: vec!["default".into()], ..alone.clone() };
    let without = request(&policies(alone), "request");
    let with = request(&policies(shadowed), "request");
    let (of_shadow, applied): (Vec<_>, Vec<_>) = with.iter().partition(|record| record.link.shadow);
    let answers = |records: &mut dyn Iterator<Item = &Record>| -> Vec<_> {
        records.map(|record| record.answer.clone()).collect()
    };
    assert_eq!(answers(&mut applied.into_iter()), answers(&mut without.iter()));
    assert_eq!(of_shadow.len(), without.len());
    assert!(
        of_shadow.iter().all(|record| record.link.policy == "default" && record.link.index == 1)
    );
    let acted = |record: &&Record| matches!(&record.answer, Some(Answer::Step(actions)) if !actions.is_empty());
    assert!(of_shadow.iter().any(acted), "{of_shadow:?}");
    let mut golden = Golden::parse(&lines(&with)).unwrap();
    golden.retain_policy("default");
    assert_eq!(golden.cases.len(), 1);
    assert_eq!(golden.check(&component("default", shipped("default").unwrap().0)), []);
}
