//! Time that policies add to a request: `cargo bench -p steersman-policy-host` (or `cargo test --bench
//! step`, which uses the profile of tests).
//!
//! On a quiet machine `on-step` of the default policy should take less than 1 us at the median and less
//! than 5 us at the 99th percentile, through the whole path.

#[path = "../tests/policies/hostile/view.rs"]
mod view;

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use steersman_policy_host::{
    Candidate, Component, Context, DrawnToken, Host, LoopReport, Observations, Phase, Policies,
    Policy, PolicyConfig, ProfilePolicies, Session, Step, Storage, no_vocabulary, shipped,
};
use steersman_test_support::guest::importing;
use steersman_test_support::hostile::stepper;
use view::view;

/// Calls of each row.
const CALLS: usize = 20_000;

/// Prints a row of the table: percentiles of the duration of `call`.
fn measure(what: &str, mut call: impl FnMut()) {
    let time = |_| {
        let start = Instant::now();
        call();
        start.elapsed()
    };
    let mut times: Vec<Duration> = (0..CALLS).map(time).collect();
    times.sort();
    let microseconds = |time: Duration| time.as_secs_f64() * 1e6;
    let (p50, p99) = (times[CALLS / 2], times[CALLS * 99 / 100]);
    println!("{what:52} {:8.2} {:8.2}", microseconds(p50), microseconds(p99));
}

/// A step without an event, as `plan.every` brings them.
fn quiet() -> Step {
    Step { phase: Phase::Reasoning, tokens: vec![7; 8], text: " and".into(), ..Step::default() }
}

fn component(host: &Host, bytes: &[u8]) -> Arc<Component> {
    Arc::new(Component::load(host, "bench", bytes).expect("the component is valid"))
}

fn session(trace_requests: usize, trace_text: bool) -> (Policies, Session) {
    let config = PolicyConfig { trace_requests, ..PolicyConfig::default() };
    let profile = ProfilePolicies { trace_text, ..ProfilePolicies::default() };
    let profiles = BTreeMap::from([("default".to_owned(), profile)]);
    let policies = Policies::load(&config, &profiles, &Storage::in_memory());
    let policies = policies.expect("the default policy loads");
    let mut session = policies.start("default", "bench", &no_vocabulary()).expect("it starts");
    session.ask(&view()).expect("it plans");
    (policies, session)
}

fn main() {
    let host = Host::new(&PolicyConfig::default(), &Storage::in_memory()).expect("a host");
    let quiet = quiet();
    let default = component(&host, shipped("default").expect("it ships").0);
    let real = Context { recorded: None, ..Context::dry_run() };
    println!("{:52} {:>8} {:>8}", "microseconds", "p50", "p99");

    let mut instance = default.instantiate(&real).expect("it starts");
    let policy: &mut dyn Policy = &mut instance;
    policy.ask(&view()).expect("it plans");
    measure("default policy, instance: on-step", || {
        black_box(policy.ask(&quiet).expect("no failure"));
    });
    let loop_found = Some(LoopReport { period: 3, repeats: 50, exact: true });
    let looping = Step { loop_found, ..quiet.clone() };
    measure("default policy, instance: on-step with a loop", || {
        black_box(policy.ask(&looping).expect("no failure"));
    });
    let candidates: Vec<_> =
        (0..8).map(|token| Candidate { token, logprob: -0.5 * f64::from(token) as f32 }).collect();
    let token = DrawnToken { index: 0, token: 7, entropy: 1.2, margin: 0.5, candidates };
    let observed = Observations { drawn: vec![token], ..Observations::default() };
    let one = Step { tokens: vec![7], observed: Some(observed), ..quiet.clone() };
    measure("default policy, instance: on-step, 8 candidates", || {
        black_box(policy.ask(&one).expect("no failure"));
    });
    measure("default policy, instance: on-request", || {
        black_box(policy.ask(&view()).expect("no failure"));
    });
    measure("default policy, instance: instantiate and drop", || {
        drop(default.instantiate(&real).expect("it starts"));
    });

    for (what, requests, text) in [
        ("session: on-step, not traced", 0, false),
        ("session: on-step, masked trace", 256, false),
        ("session: on-step, trace with text", 256, true),
    ] {
        let (_policies, mut session) = session(requests, text);
        measure(what, || {
            black_box(session.ask(&quiet).expect("no failure"));
        });
    }
    let (policies, _session) = session(256, false);
    measure("session: start and end", || {
        drop(policies.start("default", "bench", &no_vocabulary()).expect("it starts"));
    });

    let empty = component(&host, &stepper("i32.const 0", ""));
    let policy: &mut dyn Policy = &mut empty.instantiate(&real).expect("it starts");
    measure("empty guest, instance: on-step", || {
        black_box(policy.ask(&quiet).expect("no failure"));
    });
    let get = "(call $kv.get (i32.const 512) (i32.const 3) (i32.const 64)) i32.const 0";
    let get = component(&host, &importing(&["kv"], &[("on-step", get)], ""));
    let policy: &mut dyn Policy = &mut get.instantiate(&real).expect("it starts");
    measure("empty guest with a kv.get, instance: on-step", || {
        black_box(policy.ask(&quiet).expect("no failure"));
    });
}
