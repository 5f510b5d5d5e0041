//! The shipped policies: what is committed is what the sources say, and what it costs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use steersman_engine::config::{PolicyConfig, Profile};
use steersman_engine::policy::wasm::Scene;
use steersman_engine::policy::{LoopReport, Phase, Policy, RequestView, Step};
use steersman_tests::guest::importing;
use steersman_tests::{policies, steer};

use super::corpus::stepper;
use super::{compile, host, looping, trial, view};

fn policies_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies")
}

/// Requests and steps that reach every decision of the shipped policies.
fn decisions(bytes: &[u8]) -> Vec<String> {
    let component = compile(&host(&PolicyConfig::default()), bytes);
    let users = [
        "Extract the names as JSON.",
        "Write a Python function that sorts a list.",
        "Optimize this SQL query: SELECT 1",
        "Translate to French: the red house",
        "What is the secret code of project Onyx?",
        "Schreibe eine Funktion in Rust",
    ];
    let mut decisions = Vec::new();
    for user in users {
        for (thinking, system_chars, context_left, tools) in [
            (None, 5000, 8192, vec![]),
            (Some(false), 5000, 8192, vec![]),
            (None, 0, 60, vec!["search".to_owned()]),
            (None, 0, 100_000, vec![]),
        ] {
            let mut policy = component.instantiate(&Scene::trial()).unwrap();
            let view = RequestView {
                user: user.into(),
                can_think: true,
                params: BTreeMap::from([("hint_sql".into(), "SQL now:\n".into())]),
                thinking,
                system_chars,
                context_left,
                tools,
                ..RequestView::default()
            };
            decisions.push(format!("{user}: {:?}", policy.on_request(&view).unwrap()));
            decisions.push(format!("{:?}", policy.on_step(&looping()).unwrap()));
            let loop_found = Some(LoopReport { period: 100, repeats: 40, exact: true });
            let answer = Step { loop_found, ..Step::default() };
            decisions.push(format!("{:?}", policy.on_step(&answer).unwrap()));
            decisions.push(format!("{:?}", policy.on_step(&Step::default()).unwrap()));
        }
    }
    decisions
}

#[test]
fn a_rebuilt_policy_decides_as_the_committed_one() {
    let build = policies_folder().join("build.sh");
    let check = std::process::Command::new(&build).arg("--check").output().unwrap();
    if !check.status.success() {
        println!("skipped: {}", String::from_utf8_lossy(&check.stderr));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let built =
        std::process::Command::new(&build).arg("--into").arg(folder.path()).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    for name in ["default", "passthrough"] {
        let file = format!("{name}.wasm");
        let committed = std::fs::read(policies_folder().join(name).join(&file)).unwrap();
        let rebuilt = std::fs::read(folder.path().join(&file)).unwrap();
        for (rebuilt, committed) in decisions(&rebuilt).iter().zip(decisions(&committed)) {
            assert_eq!(*rebuilt, committed, "{name}");
        }
    }
}

/// `cargo test -p steersman-tests --test hostile -- --ignored --nocapture cost`
#[test]
#[ignore = "prints a measurement"]
fn cost_of_the_default_policy() {
    let profiles = [("default".into(), Profile::default())];
    let policies = policies(&PolicyConfig::default(), profiles).unwrap();
    let time = |what: &str, mut work: Box<dyn FnMut()>| {
        let mut times: Vec<Duration> = (0..20_000)
            .map(|_| {
                let start = Instant::now();
                work();
                start.elapsed()
            })
            .collect();
        times.sort();
        println!(
            "{what}: p50 {:?}, p99 {:?}",
            times[times.len() / 2],
            times[times.len() * 99 / 100]
        );
    };
    let quiet = Step { phase: Phase::Think, tokens: vec![7; 8], ..Step::default() };
    let mut policy = steer(&policies, "default").unwrap();
    policy.on_request(&view()).unwrap();
    time("on-step, no event", Box::new(|| drop(policy.on_step(&quiet).unwrap())));
    let mut policy = steer(&policies, "default").unwrap();
    policy.on_request(&view()).unwrap();
    time("on-step, a loop", Box::new(|| drop(policy.on_step(&looping()).unwrap())));
    let mut policy = steer(&policies, "default").unwrap();
    time("on-request", Box::new(|| drop(policy.on_request(&view()).unwrap())));
    time("start and end", Box::new(|| drop(steer(&policies, "default").unwrap())));
    let host = host(&PolicyConfig::default());
    let mut policy = trial(&host, &stepper("i32.const 0", ""));
    time("on-step that decides nothing", Box::new(|| drop(policy.on_step(&quiet).unwrap())));
    let get = "(call $kv.get (i32.const 512) (i32.const 3) (i32.const 64)) i32.const 0";
    let mut policy = trial(&host, &importing(&["kv"], &[("on-step", get)], ""));
    time("the same after a kv.get", Box::new(|| drop(policy.on_step(&quiet).unwrap())));
}
