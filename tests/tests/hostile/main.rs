//! Policies that loop, trap, grow, flood or lie are stopped within their limits, and the request
//! goes on or ends as its profile says.
//!
//! The guests are written as text, for [`steersman_tests::guest`].

mod contract;
mod corpus;
mod imports;
mod refused;
mod shipped;

use std::sync::Arc;
use std::time::{Duration, Instant};

use corpus::{FOREVER, hostile, stepper};
use steersman_engine::Result;
use steersman_engine::config::{Grant, OnFailure, PolicyConfig, Profile};
use steersman_engine::policy::breaker::Breaker;
use steersman_engine::policy::guarded::Guarded;
use steersman_engine::policy::native::HINT;
use steersman_engine::policy::wasm::{Component, Host, Instance, Scene};
use steersman_engine::policy::{
    Action, EarlierCall, LoopReport, Phase, Plan, Policies, Policy, PromptView, Replacement,
    RequestView, Step, Summary, ToolCallView, Verdict, disk,
};
use steersman_engine::request::{FinishReason, Request};
use steersman_tests::{Running, ask, policies, steer};

/// Longest that the calls of one request may take here: some 10 ms each where fuel runs out, times
/// what a busy machine adds.
const PATIENCE: Duration = Duration::from_secs(5);

/// Limits under which fuel runs out first, on a busy machine too.
fn limits() -> PolicyConfig {
    PolicyConfig { deadline_ms: 10_000, ..PolicyConfig::default() }
}

fn host(limits: &PolicyConfig) -> Host {
    Host::new(limits, &disk::in_memory()).expect("a host")
}

fn compile(host: &Host, bytes: &[u8]) -> Arc<Component> {
    Arc::new(Component::load(host, "guest", bytes).unwrap_or_else(|error| panic!("{error}")))
}

/// An instance that is not of any request.
fn trial(host: &Host, bytes: &[u8]) -> Instance {
    compile(host, bytes).instantiate(&Scene::trial()).unwrap_or_else(|error| panic!("{error}"))
}

/// An instance whose failures are handled as a profile says.
fn guarded(component: &Arc<Component>, on_failure: OnFailure) -> Guarded {
    let start = || Ok(Box::new(component.instantiate(&Scene::trial())?) as Box<dyn Policy>);
    Guarded::start(component.name(), on_failure, Arc::<Breaker>::default(), start)
        .unwrap_or_else(|error| panic!("{error}"))
}

fn prompt() -> PromptView {
    PromptView { system: vec!["Be brief. Today is Monday.".into()], ..PromptView::default() }
}

fn view() -> RequestView {
    RequestView {
        user: "Who is the tallest?".into(),
        can_think: true,
        context_left: 8192,
        ..RequestView::default()
    }
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

fn tool_call() -> ToolCallView {
    let earlier = EarlierCall { name: "search".into(), ..EarlierCall::default() };
    ToolCallView {
        name: "search".into(),
        arguments: r#"{"query": "height"}"#.into(),
        earlier: vec![earlier],
        ..ToolCallView::default()
    }
}

/// What a policy decided in each hook.
#[derive(Debug, PartialEq)]
struct Decisions {
    replacements: Vec<Replacement>,
    plan: Plan,
    actions: Vec<Action>,
    verdict: Verdict,
}

/// Calls all hooks, within [`PATIENCE`]; the first error, if any.
fn run(policy: &mut dyn Policy) -> Result<Decisions> {
    let started = Instant::now();
    let decisions = Decisions {
        replacements: policy.on_prompt(&prompt())?,
        plan: policy.on_request(&view())?,
        actions: policy.on_step(&looping())?,
        verdict: policy.on_tool_call(&tool_call())?,
    };
    policy.on_finish(&Summary { reason: "stop".into(), ..Summary::default() })?;
    assert!(started.elapsed() < PATIENCE, "took {:?}", started.elapsed());
    Ok(decisions)
}

#[test]
fn a_hostile_policy_is_stopped_and_the_native_one_goes_on_where_failure_is_open() {
    let host = host(&limits());
    for (name, bytes, hook, cause) in hostile() {
        let mut policy = guarded(&compile(&host, &bytes), OnFailure::Open);
        let decisions = run(&mut policy).unwrap_or_else(|e| panic!("{name}: {e}"));
        let notes = policy.take_notes().join("\n");
        assert!(notes.contains(&format!("policy `guest`: {hook}: ")), "{name}: {notes:?}");
        assert!(notes.to_lowercase().contains(cause), "{name}: {notes:?}");
        assert_eq!(notes.lines().count(), 1, "{name}: {notes}");
        assert_eq!(decisions.replacements, [], "{name}");
        assert_eq!(decisions.verdict, Verdict::Accept, "{name}");
        if ["on-prompt", "on-request"].contains(&hook) {
            assert!(decisions.plan.loops.is_some(), "{name}: no native plan");
        }
        if ["on-prompt", "on-request", "on-step"].contains(&hook) {
            assert_eq!(decisions.actions, [Action::CloseThinking(HINT.into())], "{name}");
        }
    }
}

#[test]
fn a_hostile_policy_ends_the_request_where_failure_is_closed() {
    let host = host(&limits());
    for (name, bytes, hook, cause) in hostile() {
        let mut policy = guarded(&compile(&host, &bytes), OnFailure::Closed);
        let outcome = run(&mut policy);
        if hook == "on-finish" {
            // The request has ended already.
            outcome.unwrap_or_else(|e| panic!("{name}: {e}"));
            continue;
        }
        let error = outcome.expect_err(name).to_string();
        assert!(error.starts_with(&format!("policy `guest`: {hook}: ")), "{name}: {error}");
        assert!(error.to_lowercase().contains(cause), "{name}: {error}");
        assert_eq!(error.lines().count(), 1, "{name}: {error}");
    }
}

#[test]
fn a_hostile_policy_harms_no_other_request_of_its_host() {
    let host = host(&limits());
    let default = include_bytes!("../../../policies/default/default.wasm");
    let default = compile(&host, default);
    let undisturbed = run(&mut default.instantiate(&Scene::trial()).unwrap()).unwrap();
    assert_eq!(undisturbed.plan.thinking, Some(true));
    for (name, bytes, _, _) in hostile() {
        let mut bystander = default.instantiate(&Scene::trial()).unwrap();
        let plan = bystander.on_request(&view()).unwrap();
        let _ = run(&mut trial(&host, &bytes));
        assert_eq!(plan, undisturbed.plan, "{name}");
        assert_eq!(bystander.on_step(&looping()).unwrap(), undisturbed.actions, "{name}");
        bystander.on_finish(&Summary::default()).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[test]
fn a_policy_with_fuel_to_burn_is_stopped_by_its_deadline() {
    let host = host(&PolicyConfig { fuel: u64::MAX, deadline_ms: 20, ..PolicyConfig::default() });
    let forever = compile(&host, &stepper(FOREVER, ""));
    for _ in 0..3 {
        let real = Scene { recorded: None, ..Scene::trial() };
        let error = run(&mut forever.instantiate(&real).unwrap()).unwrap_err().to_string();
        assert!(error.ends_with("on-step: exceeded its deadline of 20 ms"), "{error}");
    }
}

#[test]
fn what_a_hook_cost_is_its_fuel_which_repeats_and_its_time() {
    let host = host(&limits());
    let spin = |turns: u32| {
        let body = format!(
            "(local $n i32) (loop $l (br_if $l (i32.lt_u
               (local.tee $n (i32.add (local.get $n) (i32.const 1))) (i32.const {turns}))))
             i32.const 0"
        );
        let mut policy = trial(&host, &stepper(&body, ""));
        policy.on_step(&looping()).unwrap();
        policy.cost()
    };
    let (short, long) = (spin(10), spin(10_000));
    assert!(short.fuel > 0 && short.nanoseconds > 0, "{short:?}");
    assert!((9990..200_000).contains(&(long.fuel - short.fuel)), "{short:?} {long:?}");
    assert_eq!(spin(10).fuel, short.fuel);
    let mut failed = trial(&host, &stepper(FOREVER, ""));
    failed.on_step(&looping()).unwrap_err();
    assert_eq!(failed.cost().fuel, limits().fuel, "what fails has its cost, too");
}

#[test]
fn one_requests_globals_are_not_anothers() {
    // Rewinds a token at its second call.
    let body = "(global.set $n (i32.add (global.get $n) (i32.const 1)))
        (i32.store (i32.const 0) (i32.const 16))
        (i32.store (i32.const 4) (i32.gt_u (global.get $n) (i32.const 1)))
        (i32.store (i32.const 16) (i32.const 2)) i32.const 0";
    let host = host(&limits());
    let component = compile(&host, &stepper(body, "(global $n (mut i32) (i32.const 0))"));
    let mut first = component.instantiate(&Scene::trial()).unwrap();
    let mut second = component.instantiate(&Scene::trial()).unwrap();
    assert_eq!(first.on_step(&looping()).unwrap().len(), 0);
    assert_eq!(first.on_step(&looping()).unwrap().len(), 1);
    assert_eq!(second.on_step(&looping()).unwrap().len(), 0);
}

fn load(bytes: &[u8], on_failure: OnFailure) -> Result<Policies> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("guest.wasm");
    std::fs::write(&path, bytes).expect("a file in it");
    let policies_of_it = vec![path.display().to_string()];
    let grants = Grant::ALL.to_vec();
    let profile = Profile { policies: policies_of_it, on_failure, grants, ..Profile::default() };
    policies(&limits(), [("default".into(), profile)])
}

#[test]
fn a_policy_that_keeps_failing_is_not_called_any_more() {
    let policies = load(&stepper("unreachable", ""), OnFailure::Open).unwrap();
    let note = |policies: &Policies| {
        let mut policy = steer(policies, "default").unwrap();
        run(&mut *policy).unwrap();
        policy.take_notes().join("\n")
    };
    for _ in 0..8 {
        assert!(note(&policies).contains("on-step: trapped"));
    }
    assert!(note(&policies).contains("failed too often and rests"));
}

/// Some of the same guests, each under a request that the engine really decodes: a thought that
/// would not end comes to its answer all the same.
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
    let mut config = steersman_tests::config();
    config.store.enabled = false;
    for (name, bytes, _, _) in &guests {
        let path = folder.path().join(format!("{}.wasm", name.replace(' ', "-")));
        std::fs::write(&path, bytes).expect("a file in it");
        let profile = Profile {
            policies: vec![path.display().to_string()],
            grants: Grant::ALL.to_vec(),
            ..Profile::default()
        };
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
        let reply = steersman_tests::run(&engine, request);
        let finished = reply.finished();
        assert!(finished.usage.reasoning_tokens < 35, "{name}: {finished:?}");
        if !["on-request", "on-step"].contains(&hook) {
            // It has no other hook, and this one fails late or is not called: nobody hints at the
            // answer, and a bare `</think>` is no help.
            assert_eq!(finished.reason, FinishReason::Length, "{name}: {finished:?}");
            continue;
        }
        assert_eq!(finished.reason, FinishReason::Stop, "{name}: {finished:?}");
        assert!(reply.answer.contains("The tallest is Anna."), "{name}: {reply:?}");
    }
}
