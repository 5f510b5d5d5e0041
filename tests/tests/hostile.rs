//! Policies that loop, trap, grow, flood or lie are stopped within their limits, and the request
//! goes on or ends as its profile says.
//!
//! The guests are written as text, for [`component`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use steersman_engine::Result;
use steersman_engine::config::{OnFailure, PolicyConfig, Profile};
use steersman_engine::policy::native::HINT;
use steersman_engine::policy::wasm::{Component, Host, Scene};
use steersman_engine::policy::{
    Action, LoopReport, Phase, Plan, Policies, Policy, RequestView, Step, Summary, disk,
};
use steersman_engine::request::{FinishReason, Request};
use steersman_tests::guest::{self, TYPES, component};
use steersman_tests::{Running, ask, policies, steer};

/// Longest that the calls of one request may take here: some 10 ms each where fuel runs out, times
/// what a busy machine adds.
const PATIENCE: Duration = Duration::from_secs(5);

/// A component that exports `on-step` alone.
fn stepper(body: &str, extra: &str) -> Vec<u8> {
    component(&[("on-step", body)], extra)
}

const FOREVER: &str = "(loop $l br $l) unreachable";

fn load(bytes: &[u8], on_failure: OnFailure) -> Result<Policies> {
    // Fuel must run out first, on a busy machine too.
    let limits = PolicyConfig { deadline_ms: 10_000, ..PolicyConfig::default() };
    load_within(&limits, bytes, on_failure)
}

fn load_within(limits: &PolicyConfig, bytes: &[u8], on_failure: OnFailure) -> Result<Policies> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("guest.wasm");
    std::fs::write(&path, bytes).expect("a file in it");
    let profile =
        Profile { policies: vec![path.display().to_string()], on_failure, ..Profile::default() };
    policies(limits, [("default".into(), profile)])
}

/// A step in a thought that is a loop: the native policy closes it.
fn looping() -> Step {
    Step {
        phase: Phase::Think,
        tokens: vec![1, 2, 3],
        text: "again and again".into(),
        loop_found: Some(LoopReport { period: 3, repeats: 50, exact: true }),
        ..Step::default()
    }
}

fn view() -> RequestView {
    RequestView {
        user: "Who is the tallest?".into(),
        can_think: true,
        context_left: 8192,
        ..RequestView::default()
    }
}

/// Calls all hooks, each within [`PATIENCE`]; the first error, if any.
fn run(policy: &mut dyn Policy) -> Result<(Plan, Vec<Action>)> {
    let started = Instant::now();
    let plan = policy.on_request(&view())?;
    let actions = policy.on_step(&looping())?;
    policy.on_finish(&Summary { reason: "stop".into(), ..Summary::default() });
    assert!(started.elapsed() < PATIENCE, "took {:?}", started.elapsed());
    Ok((plan, actions))
}

/// Guests that load and then misbehave: name, component, hook, and words of the cause.
fn hostile() -> Vec<(&'static str, Vec<u8>, &'static str, &'static str)> {
    // Each answers with a list of actions; the list's pointer and length stand at byte 0.
    let list = |pointer: u32, length: u32, data: &str| {
        let set = format!(
            "(i32.store (i32.const 0) (i32.const {pointer})) (i32.store (i32.const 4) (i32.const {length})) i32.const 0"
        );
        stepper(&set, data)
    };
    // One action `inject` at byte 16, whose text has the given place and length.
    let text = |pointer: u32, length: u32, grow: u32| {
        let body = format!(
            "(drop (memory.grow (i32.const {grow}))) (i32.store (i32.const 0) (i32.const 16))
             (i32.store (i32.const 4) (i32.const 1)) (i32.store (i32.const 20) (i32.const {pointer}))
             (i32.store (i32.const 24) (i32.const {length})) i32.const 0"
        );
        stepper(&body, r#"(data (i32.const 100) "\c3\28")"#)
    };
    let grow = "(loop $l (drop (memory.grow (i32.const 16))) br $l) unreachable";
    let recursion = "(func $r (param i64 i64) (result i64) (i64.add (call $r (local.get 0) (local.get 1)) (local.get 0)))";
    let table = "(table $t 1 funcref)";
    let grow_table = "(drop (table.grow $t (ref.null func) (i32.const 100000))) unreachable";
    let fill = "(drop (memory.grow (i32.const 200)))
        (loop $l (memory.fill (i32.const 0) (i32.const 1) (i32.const 13000000)) br $l) unreachable";
    vec![
        ("loops in on-step", stepper(FOREVER, ""), "on-step", "fuel"),
        ("loops in on-request", component(&[("on-request", FOREVER)], ""), "on-request", "fuel"),
        ("loops in on-finish", component(&[("on-finish", FOREVER)], ""), "on-finish", "fuel"),
        ("plans 17 keeps", guest::keeper(&[(1, 60); 17]), "on-request", "more than 16 anchors"),
        ("plans 5,000 keeps", guest::keeper(&[(1, 60); 5000]), "on-request", "16384 bytes"),
        ("keeps at an unknown anchor", guest::keeper(&[(4, 60)]), "on-request", ""),
        ("fills memory", stepper(fill, ""), "on-step", "fuel"),
        ("traps", stepper("unreachable", ""), "on-step", "trapped"),
        (
            "reads beyond its memory",
            stepper("(i32.load (i32.const -4))", ""),
            "on-step",
            "out of bounds",
        ),
        ("grows memory", stepper(grow, ""), "on-step", "bytes of memory, may have 16777216"),
        ("grows a table", stepper(grow_table, table), "on-step", "table elements"),
        (
            "recurses",
            stepper("(drop (call $r (i64.const 1) (i64.const 2))) i32.const 0", recursion),
            "on-step",
            "call stack exhausted",
        ),
        ("returns a megabyte", text(65536, 1 << 20, 32), "on-step", "more than 16384 bytes"),
        ("returns a byte too many", text(4096, 16385, 0), "on-step", "more than 16384 bytes"),
        ("returns 128 MiB", text(0, 128 << 20, 0), "on-step", "out of bounds"),
        ("returns ten million items", list(16, 10_000_000, ""), "on-step", "out of bounds"),
        ("returns 5,000 items", list(16, 5000, ""), "on-step", "more than 16384 bytes"),
        ("returns 17 items", list(16, 17, ""), "on-step", "more than 16 actions"),
        ("returns invalid UTF-8", text(100, 2, 0), "on-step", "utf-8"),
        ("returns an unknown action", list(16, 1, r#"(data (i32.const 16) "\09")"#), "on-step", ""),
        ("returns a wild pointer", stepper("i32.const -16", ""), "on-step", "out of bounds"),
        (
            "traps in realloc",
            stepper(
                "i32.const 0",
                r#"(func $realloc (export "realloc") (param i32 i32 i32 i32) (result i32) unreachable)"#,
            ),
            "on-step",
            "trapped",
        ),
        (
            "allocates beyond its memory",
            stepper(
                "i32.const 0",
                r#"(func $realloc (export "realloc") (param i32 i32 i32 i32) (result i32) i32.const -8)"#,
            ),
            "on-step",
            "",
        ),
    ]
}

#[test]
fn a_hostile_policy_is_stopped_and_the_native_one_goes_on_where_failure_is_open() {
    for (name, bytes, hook, cause) in hostile() {
        let policies = load(&bytes, OnFailure::Open).unwrap_or_else(|e| panic!("{name}: {e}"));
        let mut policy = steer(&policies, "default").unwrap();
        let (plan, actions) = run(&mut *policy).unwrap_or_else(|e| panic!("{name}: {e}"));
        let notes = policy.take_notes().join("\n");
        assert!(notes.contains(&format!("{hook}: ")), "{name}: {notes:?}");
        assert!(notes.to_lowercase().contains(cause), "{name}: {notes:?}");
        if hook == "on-request" {
            assert!(plan.loops.is_some(), "{name}: no native plan");
        }
        if hook == "on-step" {
            assert_eq!(actions, [Action::CloseThinking(HINT.into())], "{name}");
        }
    }
}

#[test]
fn a_hostile_policy_ends_the_request_where_failure_is_closed() {
    for (name, bytes, hook, cause) in hostile() {
        let policies = load(&bytes, OnFailure::Closed).unwrap_or_else(|e| panic!("{name}: {e}"));
        let outcome = run(&mut *steer(&policies, "default").unwrap());
        if hook == "on-finish" {
            // The request has ended already.
            outcome.unwrap_or_else(|e| panic!("{name}: {e}"));
            continue;
        }
        let error = outcome.expect_err(name).to_string();
        assert!(error.contains(&format!("guest`: {hook}: ")), "{name}: {error}");
        assert!(error.to_lowercase().contains(cause), "{name}: {error}");
        assert_eq!(error.lines().count(), 1, "{name}: {error}");
    }
}

#[test]
fn a_policy_with_fuel_to_burn_is_stopped_by_its_deadline() {
    let limits = PolicyConfig { fuel: u64::MAX, deadline_ms: 20, ..PolicyConfig::default() };
    let policies = load_within(&limits, &stepper(FOREVER, ""), OnFailure::Closed).unwrap();
    for _ in 0..3 {
        let error = run(&mut *steer(&policies, "default").unwrap()).unwrap_err().to_string();
        assert!(error.ends_with("on-step: exceeded its deadline of 20 ms"), "{error}");
    }
}

#[test]
fn a_policy_that_cannot_work_is_refused_at_load_with_its_reason() {
    let valid = stepper("i32.const 0", "");
    let importing = |import: &str| {
        let with = format!("(import {import})(core module");
        let text = format!("(component {TYPES} {with}))", with = with);
        wat::parse_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
    };
    let start = |body: &str| stepper("i32.const 0", &format!("(func $s {body}) (start $s)"));
    let old = wat::parse_str(
        r#"(component (instance $i) (export "steersman:policy/on-step@0.9.0" (instance $i)))"#,
    )
    .unwrap();
    let newer_hook = wat::parse_str(
        r#"(component (instance $i) (export "steersman:policy/on-prompt@0.1.0" (instance $i)))"#,
    )
    .unwrap();
    let shape = wat::parse_str(
        r#"(component
             (core module $m (func (export "f")))
             (core instance $i (instantiate $m))
             (func $f (canon lift (core func $i "f")))
             (instance $h (export "on-step" (func $f)))
             (export "steersman:policy/on-step@0.1.0" (instance $h)))"#,
    )
    .unwrap();
    let wasi = r#""wasi:cli/environment@0.2.0" (instance (export "get-arguments" (func (result (list string)))))"#;
    let cases = [
        ("WASI", importing(wasi), "imports `wasi:cli/environment@0.2.0`"),
        ("host", importing(r#""host" (func)"#), "imports `host`"),
        (
            "types",
            importing(r#""steersman:policy/types@0.2.0" (instance (export "f" (func)))"#),
            "imports `steersman:policy/types@0.2.0`",
        ),
        ("no hook", wat::parse_str("(component)").unwrap(), "exports none of the hooks"),
        ("old", old, "speaks contract 0.9.0, this server speaks 0.1.0"),
        ("newer hook", newer_hook, "exports `on-prompt`"),
        ("shape", shape, "a hook of another shape"),
        ("core module", wat::parse_str("(module)").unwrap(), "is not a valid component"),
        ("text", b"(component)".to_vec(), "is not a valid component"),
        ("empty", Vec::new(), "is not a valid component"),
        ("truncated", valid[..valid.len() / 2].to_vec(), "is not a valid component"),
        ("start loops", start("(loop $l br $l)"), "start: used up its fuel"),
        ("start traps", start("unreachable"), "start: trapped"),
        ("start grows", start("(drop (memory.grow (i32.const 1000)))"), "start: wanted"),
        ("huge memory", stepper("i32.const 0", "(memory $big 1000)"), ""),
        ("huge table", stepper("i32.const 0", "(table 1000000 funcref)"), ""),
    ];
    for (name, bytes, reason) in cases {
        // A profile that fails open is refused too: what never worked was never meant to.
        for on_failure in [OnFailure::Open, OnFailure::Closed] {
            let error = load(&bytes, on_failure).err().unwrap_or_else(|| panic!("{name} loads"));
            let error = error.to_string();
            assert!(error.contains(reason), "{name}: {error}");
            assert!(error.ends_with("(profile `default`)"), "{name}: {error}");
            assert_eq!(error.lines().count(), 1, "{name}: {error}");
        }
    }
}

#[test]
fn damaged_and_random_bytes_never_harm_the_loader() {
    let mut seed = 1u64;
    let mut random = move || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize
    };
    let host = Host::new(&PolicyConfig::default(), &Arc::new(disk::in_memory())).unwrap();
    let valid = stepper("i32.const 0", "");
    for _ in 0..300 {
        let mut bytes = valid.clone();
        for _ in 0..1 + random() % 4 {
            let at = random() % bytes.len();
            bytes[at] = random() as u8;
        }
        bytes.truncate(bytes.len() - random() % 8);
        // Some changes leave it valid; then it must run within its limits.
        if let Ok(component) = Component::load(&host, "damaged", &bytes)
            && let Ok(mut instance) = std::sync::Arc::new(component).instantiate(&Scene::trial())
        {
            let _ = run(&mut instance);
        }
        let noise: Vec<u8> = (0..random() % 200).map(|_| random() as u8).collect();
        assert!(Component::load(&host, "noise", &noise).is_err());
    }
}

#[test]
fn a_component_that_exports_on_step_alone_steers_and_the_rest_is_left_to_the_engine() {
    let stop = "(i32.store (i32.const 0) (i32.const 16)) (i32.store (i32.const 4) (i32.const 1))
        (i32.store (i32.const 16) (i32.const 2)) (i32.store (i32.const 20) (i32.const 100))
        (i32.store (i32.const 24) (i32.const 4)) i32.const 0";
    let policies =
        load(&stepper(stop, r#"(data (i32.const 100) "done")"#), OnFailure::Closed).unwrap();
    let mut policy = steer(&policies, "default").unwrap();
    let (plan, actions) = run(&mut *policy).unwrap();
    assert_eq!(plan, Plan::default());
    assert_eq!(actions, [Action::Stop("done".into())]);
    assert_eq!(policy.take_notes(), [""; 0]);
}

#[test]
fn one_requests_globals_are_not_anothers() {
    // Stops at its second call.
    let body = "(global.set $n (i32.add (global.get $n) (i32.const 1)))
        (i32.store (i32.const 0) (i32.const 16))
        (i32.store (i32.const 4) (i32.gt_u (global.get $n) (i32.const 1)))
        (i32.store (i32.const 16) (i32.const 2)) i32.const 0";
    let bytes = stepper(body, "(global $n (mut i32) (i32.const 0))");
    let policies = load(&bytes, OnFailure::Closed).unwrap();
    let mut first = steer(&policies, "default").unwrap();
    let mut second = steer(&policies, "default").unwrap();
    assert_eq!(first.on_step(&looping()).unwrap().len(), 0);
    assert_eq!(first.on_step(&looping()).unwrap().len(), 1);
    assert_eq!(second.on_step(&looping()).unwrap().len(), 0);
}

#[test]
fn a_policy_that_keeps_failing_is_not_called_any_more() {
    let policies = load(&stepper("unreachable", ""), OnFailure::Open).unwrap();
    let note = |policies: &Policies| {
        let mut policy = steer(&policies, "default").unwrap();
        run(&mut *policy).unwrap();
        policy.take_notes().join("\n")
    };
    for _ in 0..8 {
        assert!(note(&policies).contains("on-step: trapped"));
    }
    assert!(note(&policies).contains("failed too often and rests"));
}

fn policies_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies")
}

/// Requests and steps that reach every decision of the shipped policies.
fn decisions(bytes: &[u8]) -> Vec<String> {
    let host = Host::new(&PolicyConfig::default(), &Arc::new(disk::in_memory())).unwrap();
    let component = std::sync::Arc::new(Component::load(&host, "policy", bytes).unwrap());
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
}

/// The same guests, each under a request that the engine really decodes: a thought that would not
/// end comes to its answer all the same.
#[test]
fn a_request_under_a_hostile_policy_ends_well() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut config = steersman_tests::config();
    config.store.enabled = false;
    for (name, bytes, _, _) in hostile() {
        let path = folder.path().join(format!("{}.wasm", name.replace(' ', "-")));
        std::fs::write(&path, bytes).expect("a file in it");
        let profile = Profile { policies: vec![path.display().to_string()], ..Profile::default() };
        config.profiles.insert(name.into(), profile);
    }
    let engine = Running::start(config, folder.path());
    for (name, _, hook, _) in hostile() {
        let question = "Logic puzzle: Anna is taller than Boris. Boris is taller than Clara. Who \
                        is the tallest?";
        let request = Request {
            profile: name.into(),
            thinking: Some(true),
            think_budget: Some(30),
            max_tokens: Some(60),
            ..ask(question)
        };
        let reply = steersman_tests::run(&engine, request);
        let finished = reply.finished();
        assert!(finished.usage.reasoning_tokens < 35, "{name}: {finished:?}");
        if hook == "on-finish" {
            // It has no other hook: nobody hints at the answer, and a bare `</think>` is no help.
            assert_eq!(finished.reason, FinishReason::Length, "{name}: {finished:?}");
            continue;
        }
        assert_eq!(finished.reason, FinishReason::Stop, "{name}: {finished:?}");
        assert!(reply.answer.contains("The tallest is Anna."), "{name}: {reply:?}");
    }
}
