//! Requests under hostile policies end within their limits.
//!
//! `engine/policy-host/tests/policies/hostile` has all hostile policies without an engine.

use steersman_engine::policy::Grant;
use steersman_engine::request::{FinishReason, Request};
use steersman_test_support::hostile::hostile;
use steersman_tests::{Running, ask, config, run};

/// Reasoning that would not end gets its budget, and its answer if a hint follows it.
#[test]
fn a_request_under_a_hostile_policy_ends_well() {
    const SOME: [&str; 8] = [
        "loops in on-request",
        "loops in on-step",
        "loops in on-finish",
        "grows memory",
        "returns 128 MiB",
        "plans at NaN",
        "biases by NaN",
        "floods kv.set",
    ];
    let guests: Vec<_> = hostile().into_iter().filter(|(name, ..)| SOME.contains(name)).collect();
    assert_eq!(guests.len(), SOME.len());
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut config = config();
    config.store.enabled = false;
    for (name, bytes, _, _) in &guests {
        let path = folder.path().join(format!("{}.wasm", name.replace(' ', "-")));
        std::fs::write(&path, bytes).expect("a file in the folder");
        let mut profile = steersman_tests::profile(path.display().to_string());
        profile.policy.grants = Grant::ALL.to_vec();
        config.profiles.insert((*name).into(), profile);
    }
    let engine = Running::start(config, folder.path());
    for &(name, _, hook, _) in &guests {
        let question = "Logic puzzle: Anna is taller than Boris. Boris is taller than Clara. Who \
                        is the tallest?";
        let request = Request {
            profile: name.into(),
            reasoning: Some(true),
            reasoning_budget: Some(30),
            max_tokens: Some(60),
            ..ask(question)
        };
        let reply = run(&engine, request);
        let finished = reply.finished();
        assert!(finished.usage.reasoning_tokens < 35, "{name}: {finished:?}");
        if !["on-request", "on-step"].contains(&hook) {
            // The policy exports no other hook, so the native policy adds no hint, and `</think>` alone
            // does not lead to an answer.
            assert_eq!(finished.reason, FinishReason::Length, "{name}: {finished:?}");
            continue;
        }
        assert_eq!(finished.reason, FinishReason::Stop, "{name}: {finished:?}");
        assert!(reply.answer.contains("The tallest is Anna."), "{name}: {reply:?}");
    }
}
