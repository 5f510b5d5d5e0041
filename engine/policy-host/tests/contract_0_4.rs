//! Components built for contract 0.4 are served beside those of today's.
//!
//! `fixtures/default-0.4.wasm` is the policy `default` as it was built for 0.4, with its golden file.
//! `fixtures/imports-0.4.wasm` uses every import of 0.4 in `on-finish`: it sets a key of `kv`, traps unless it
//! reads 5 bytes back, deletes it, writes a line, encodes a text, decodes tokens, and adds to a counter.
//! `fixtures/budget-0.4.wasm` is the policy `budget`, which adds to a number of `kv` and lets it expire.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use steersman_policy_host::{
    Answer, Component, Context, Golden, Grant, Host, Observations, Phase, Policies, Policy,
    PolicyConfig, ProfilePolicies, PromptView, RequestView, Step, Storage, Summary, apply_edits,
    no_vocabulary, shipped,
};
use steersman_test_support::guest::component;

fn host() -> Host {
    let config = PolicyConfig { deadline_ms: 10_000, ..PolicyConfig::default() };
    Host::new(&config, &Storage::in_memory()).unwrap()
}

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)).unwrap()
}

fn old() -> Vec<u8> {
    fixture("default-0.4.wasm")
}

/// A component for 0.4, made of one for today's contract that uses only what both have.
fn renamed(mut bytes: Vec<u8>) -> Vec<u8> {
    let (now, before) = (b"@0.5.0", b"@0.4.0");
    let mut found = 0;
    for at in 0..bytes.len() - now.len() {
        if bytes[at..].starts_with(now) {
            bytes[at..at + now.len()].copy_from_slice(before);
            found += 1;
        }
    }
    assert!(found > 0, "a component names the contract");
    bytes
}

#[test]
fn a_policy_built_for_0_4_decides_as_before() {
    let component = Arc::new(Component::load(&host(), "default", &old()).unwrap());
    let hooks = ["on-finish", "on-params", "on-prompt", "on-request", "on-step", "on-tool-call"];
    assert!(component.hooks().iter().all(|hook| hooks.contains(hook)), "{:?}", component.hooks());
    assert!(component.hooks().contains(&"on-step"));
    let golden = include_str!("fixtures/default-0.4.jsonl");
    let golden = Golden::parse(golden).unwrap();
    assert_eq!(golden.check(&component), []);
    assert!(golden.cases.len() > 5);
    // And as today's version, whose decisions are the same but for the default thresholds of loops.
    let now = Component::load(&host(), "default", shipped("default").unwrap().0).unwrap();
    let now = Arc::new(now);
    let decisions = |component: &Arc<Component>| {
        let decisions = golden.replay(component).into_iter();
        decisions
            .map(|mut decision| {
                if let Some(Answer::Request(plan)) = &mut decision.answer {
                    plan.loops = None;
                }
                format!("{:?} {:?}", decision.answer, decision.error)
            })
            .collect()
    };
    let (before, now): (Vec<String>, Vec<String>) = (decisions(&component), decisions(&now));
    assert_eq!(before, now);
}

#[test]
fn policies_of_both_versions_form_a_chain_and_their_trace_replays() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("old.wasm"), old()).unwrap();
    let config = PolicyConfig {
        folder: folder.path().into(),
        deadline_ms: 10_000,
        ..PolicyConfig::default()
    };
    let profile = ProfilePolicies {
        policies: vec!["old".into(), "passthrough".into()],
        trace_text: true,
        ..ProfilePolicies::default()
    };
    let profiles = BTreeMap::from([("default".to_owned(), profile)]);
    let policies = Policies::load(&config, &profiles, &Storage::in_memory()).unwrap();
    let mut session = policies.start("default", "r", &no_vocabulary()).unwrap();
    let view = RequestView {
        user: "Who is the tallest?".into(),
        can_reason: true,
        context_left: 8192,
        time: 5,
        ..RequestView::default()
    };
    let plan = session.ask(&view).unwrap();
    assert!(plan.reasoning_budget.is_some() && plan.loops.is_some(), "{plan:?}");
    let step = Step {
        index: 12,
        phase: Phase::Reasoning,
        tokens: (0..12).collect(),
        text: "So Anna is taller".into(),
        budget_reached: true,
        observed: Some(Observations {
            texts_found: vec!["not of 0.4".into()],
            ..Observations::default()
        }),
        ..Step::default()
    };
    assert_eq!(session.ask(&step).unwrap().len(), 1);
    session.ask(&Summary { reason: "stop".into(), ..Summary::default() }).unwrap();
    drop(session);
    let records = policies.traces().get("r").unwrap();
    assert!(records.iter().all(|record| record.failure.is_none()), "{records:?}");
    let lines: String = records
        .iter()
        .filter(|record| record.link.policy == "old")
        .map(|record| serde_json::to_string(record).unwrap() + "\n")
        .collect();
    let component = Arc::new(Component::load(&host(), "old", &old()).unwrap());
    assert_eq!(Golden::parse(&lines).unwrap().check(&component), []);
}

#[test]
fn imports_of_0_4_do_what_they_did() {
    let host = host();
    let bytes = fixture("imports-0.4.wasm");
    let component = Arc::new(Component::load(&host, "guest", &bytes).unwrap());
    let mut imports = component.imports().to_vec();
    imports.sort_unstable();
    assert_eq!(imports, [Grant::Log, Grant::Kv, Grant::Tokenizer, Grant::Counters]);
    let refused = component.check_grants(&[Grant::Log]).unwrap_err().to_string();
    assert!(refused.contains("imports `steersman:policy/kv@0.4.0`"), "{refused}");
    let mut instance = component.instantiate(&Context::dry_run()).unwrap();
    let policy: &mut dyn Policy = &mut instance;
    policy.ask(&Summary::default()).unwrap();
    let calls: Vec<_> = policy.take_report().imports.into_iter().map(|call| call.call).collect();
    assert_eq!(calls, ["kv.set", "kv.get", "kv.delete", "tokenizer.encode", "tokenizer.decode"]);
}

#[test]
fn a_policy_of_0_4_adds_to_a_number_of_kv() {
    let bytes = fixture("budget-0.4.wasm");
    let component = Arc::new(Component::load(&host(), "budget", &bytes).unwrap());
    let golden = Golden::parse(include_str!("fixtures/budget-0.4.jsonl")).unwrap();
    assert_eq!(golden.check(&component), []);
    let mut instance = component.instantiate(&Context::dry_run()).unwrap();
    let policy: &mut dyn Policy = &mut instance;
    policy.ask(&RequestView::default()).unwrap();
    policy.take_report();
    let labels = policy.ask(&Summary { answer_tokens: 7, ..Summary::default() }).unwrap();
    assert_eq!(labels, [], "0.4 has none");
    let calls: Vec<_> = policy.take_report().imports.into_iter().map(|call| call.call).collect();
    assert_eq!(calls, ["kv.add", "kv.expire"]);
}

#[test]
fn a_policy_of_0_4_is_not_called_without_system_text() {
    let old = Arc::new(Component::load(&host(), "old", &old()).unwrap());
    let mut instance = old.instantiate(&Context::dry_run()).unwrap();
    let policy: &mut dyn Policy = &mut instance;
    assert_eq!(policy.ask(&PromptView::default()).unwrap(), []);
    let header = "x-anthropic-billing-header: 1\nBe brief.";
    let prompt = PromptView { system: vec![header.into()], ..PromptView::default() };
    let edits = policy.ask(&prompt).unwrap();
    let mut system = prompt.system;
    apply_edits(&mut system, &edits).unwrap();
    assert_eq!(system, ["Be brief."]);
}

#[test]
fn what_a_version_does_not_have_is_refused_by_its_name() {
    let refusal = |bytes: Vec<u8>| {
        Component::load(&host(), "guest", &bytes).err().expect("is refused").to_string()
    };
    let refused = refusal(renamed(component(&[("on-text", "i32.const 0")], "")));
    assert!(refused.contains("exports `on-text`, which contract 0.4.0 does not have"), "{refused}");
    // Today's record under the name of 0.4.
    let other = renamed(component(&[("on-request", "i32.const 0")], ""));
    let component = Arc::new(Component::load(&host(), "guest", &other).unwrap());
    let failure =
        component.instantiate(&Context::dry_run()).err().expect("another type").to_string();
    assert!(failure.contains("exports a hook with another type than the contract"), "{failure}");
}
