//! Policies that loop, trap, grow, flood or return wrong answers are stopped within their limits, and
//! the request continues or ends as its profile says.

mod contract;
mod imports;
mod refused;
mod shipped;
mod view;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use steersman_policy_host::{
    Action, Breaker, Component, Context, EarlierCall, Error, FAILURES, Failure, Grant, Guard, HINT,
    Host, Instance, LoopReport, OnFailure, Phase, Plan, Policies, Policy, PolicyConfig,
    ProfilePolicies, PromptEdit, PromptView, Step, Storage, Summary, TextVerdict, TextView,
    ToolCallView, Verdict, no_vocabulary,
};
use steersman_test_support::guest::{Answers, case, list, word};
use steersman_test_support::hostile::{FOREVER, hostile, stepper};
use view::view;

/// Limit on the duration of one request's calls: about 10 ms each if fuel runs out, more on a busy
/// machine.
const PATIENCE: Duration = Duration::from_secs(5);

/// Limits under which fuel runs out before the deadline, even on a busy machine.
fn limits() -> PolicyConfig {
    PolicyConfig { deadline_ms: 10_000, ..PolicyConfig::default() }
}

fn host(limits: &PolicyConfig) -> Host {
    Host::new(limits, &Storage::in_memory()).unwrap()
}

fn compile(host: &Host, bytes: &[u8]) -> Arc<Component> {
    Arc::new(Component::load(host, "guest", bytes).unwrap_or_else(|error| panic!("{error}")))
}

/// An instance without a request.
fn dry_run(host: &Host, bytes: &[u8]) -> Instance {
    start(&compile(host, bytes))
}

fn start(component: &Arc<Component>) -> Instance {
    component.instantiate(&Context::dry_run()).unwrap_or_else(|error| panic!("{error}"))
}

/// The policy as the trait object that asks hooks by their records.
fn policy(policy: &mut impl Policy) -> &mut dyn Policy {
    policy
}

/// An instance in a guard.
fn guarded(component: &Arc<Component>, on_failure: OnFailure) -> Guard {
    let start = || Ok(Box::new(component.instantiate(&Context::dry_run())?) as Box<dyn Policy>);
    Guard::start(component.name(), on_failure, Arc::<Breaker>::default(), start)
        .unwrap_or_else(|error| panic!("{error}"))
}

fn prompt() -> PromptView {
    PromptView { system: vec!["Be brief. Today is Monday.".into()], ..PromptView::default() }
}

/// A step whose reasoning loops: the native policy closes it.
fn looping() -> Step {
    Step {
        phase: Phase::Reasoning,
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

/// The answers of all hooks.
#[derive(Debug, PartialEq)]
struct Decisions {
    edits: Vec<PromptEdit>,
    plan: Plan,
    actions: Vec<Action>,
    text: TextVerdict,
    verdict: Verdict,
}

/// Calls all hooks, within [`PATIENCE`]. Returns the first failure, if any.
fn run(policy: &mut dyn Policy) -> Result<Decisions, Failure> {
    let started = Instant::now();
    let decisions = Decisions {
        edits: policy.ask(&prompt())?,
        plan: policy.ask(&view())?,
        actions: policy.ask(&looping())?,
        text: policy.ask(&TextView { text: "So".into(), ..TextView::default() })?,
        verdict: policy.ask(&tool_call())?,
    };
    policy.ask(&Summary { reason: "stop".into(), ..Summary::default() })?;
    assert!(started.elapsed() < PATIENCE, "took {:?}", started.elapsed());
    Ok(decisions)
}

#[test]
fn a_hostile_policy_is_stopped_and_replaced_if_its_profile_fails_open() {
    let host = host(&limits());
    for (name, bytes, hook, cause) in hostile() {
        let mut policy = guarded(&compile(&host, &bytes), OnFailure::Open);
        let decisions = run(&mut policy).unwrap_or_else(|e| panic!("{name}: {e}"));
        let notes = policy.take_report().notes.join("\n");
        assert!(notes.contains(&format!("policy `guest`: {hook}: ")), "{name}: {notes:?}");
        assert!(notes.to_lowercase().contains(cause), "{name}: {notes:?}");
        assert_eq!(notes.lines().count(), 1, "{name}: {notes}");
        assert_eq!((decisions.edits, decisions.text), (vec![], TextVerdict::Pass), "{name}");
        assert_eq!(decisions.verdict, Verdict::Accept, "{name}");
        if ["on-prompt", "on-request"].contains(&hook) {
            assert!(decisions.plan.loops.is_some(), "{name}: no native plan");
        }
        if ["on-prompt", "on-request", "on-step"].contains(&hook) {
            assert_eq!(decisions.actions, [Action::CloseReasoning(HINT.into())], "{name}");
        }
    }
}

#[test]
fn a_hostile_policy_ends_the_request_if_its_profile_fails_closed() {
    let host = host(&limits());
    for (name, bytes, hook, cause) in hostile() {
        let mut policy = guarded(&compile(&host, &bytes), OnFailure::Closed);
        let outcome = run(&mut policy);
        if hook == "on-finish" {
            // The reply is complete.
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
fn a_hostile_policy_harms_no_other_request() {
    let host = host(&limits());
    let default = steersman_policy_host::shipped("default").unwrap().0;
    let default = compile(&host, default);
    let undisturbed = run(&mut start(&default)).unwrap();
    assert_eq!(undisturbed.plan.reasoning, Some(true));
    for (name, bytes, _, _) in hostile() {
        let mut bystander = start(&default);
        let plan = policy(&mut bystander).ask(&view()).unwrap();
        let _ = run(&mut dry_run(&host, &bytes));
        assert_eq!(plan, undisturbed.plan, "{name}");
        assert_eq!(policy(&mut bystander).ask(&looping()).unwrap(), undisturbed.actions, "{name}");
        let finished = policy(&mut bystander).ask(&Summary::default());
        finished.unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[test]
fn a_deadline_stops_a_policy_that_has_fuel_left() {
    let host = host(&PolicyConfig { fuel: u64::MAX, deadline_ms: 20, ..PolicyConfig::default() });
    let forever = compile(&host, &stepper(FOREVER, ""));
    for _ in 0..3 {
        let real = Context { recorded: None, ..Context::dry_run() };
        let error = run(&mut forever.instantiate(&real).unwrap()).unwrap_err().to_string();
        assert!(error.ends_with("on-step: exceeded its deadline of 20 ms"), "{error}");
    }
}

#[test]
fn the_cost_of_a_call_is_its_fuel_which_is_deterministic_and_its_time() {
    let host = host(&limits());
    let spin = |turns: u32| {
        let body = format!(
            "(local $n i32) (loop $l (br_if $l (i32.lt_u
               (local.tee $n (i32.add (local.get $n) (i32.const 1))) (i32.const {turns}))))
             i32.const 0"
        );
        let mut instance = dry_run(&host, &stepper(&body, ""));
        policy(&mut instance).ask(&looping()).unwrap();
        instance.take_report().cost
    };
    let (short, long) = (spin(10), spin(10_000));
    assert!(short.fuel > 0 && short.nanoseconds > 0, "{short:?}");
    assert!((9990..200_000).contains(&(long.fuel - short.fuel)), "{short:?} {long:?}");
    assert_eq!(spin(10).fuel, short.fuel);
    let mut failed = dry_run(&host, &stepper(FOREVER, ""));
    policy(&mut failed).ask(&looping()).unwrap_err();
    assert_eq!(failed.take_report().cost.fuel, limits().fuel, "a failed call has a cost");
}

#[test]
fn globals_are_the_state_of_one_request() {
    // Rewinds a token in its second call; address 0 is an empty list.
    let mut answers = Answers::default();
    let rewind = answers.add("on-step", &list([case("rewind", word(1))]));
    let body = format!(
        "(global.set $n (i32.add (global.get $n) (i32.const 1)))
         (i32.mul (i32.gt_u (global.get $n) (i32.const 1)) (i32.const {rewind}))"
    );
    let global = format!("(global $n (mut i32) (i32.const 0)) {}", answers.data());
    let host = host(&limits());
    let component = compile(&host, &stepper(&body, &global));
    let (mut first, mut second) = (start(&component), start(&component));
    assert_eq!(policy(&mut first).ask(&looping()).unwrap(), []);
    assert_eq!(policy(&mut first).ask(&looping()).unwrap(), [Action::Rewind(1)]);
    assert_eq!(policy(&mut second).ask(&looping()).unwrap(), []);
}

/// The policies of a profile `default` with this policy alone.
fn load(bytes: &[u8], on_failure: OnFailure) -> Result<Policies, Error> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("guest.wasm");
    std::fs::write(&path, bytes).unwrap();
    let policies = vec![path.display().to_string()];
    let grants = Grant::ALL.to_vec();
    let profile = ProfilePolicies { policies, on_failure, grants, ..ProfilePolicies::default() };
    let profiles = BTreeMap::from([("default".to_owned(), profile)]);
    Policies::load(&limits(), &profiles, &Storage::in_memory())
}

#[test]
fn a_policy_that_keeps_failing_is_paused() {
    let policies = load(&stepper("unreachable", ""), OnFailure::Open).unwrap();
    let note = |policies: &Policies| {
        let mut session = policies.start("default", "request", &no_vocabulary()).unwrap();
        run(&mut *session.policy).unwrap();
        session.policy.take_report().notes.join("\n")
    };
    for _ in 0..FAILURES {
        assert!(note(&policies).contains("on-step: trapped"));
    }
    assert!(note(&policies).contains("failed too often and is paused"));
}
