//! Counts, since the start of the server, what each policy did in each profile: calls by hook, their time, failures,
//! and loops that it closed.
//!
//! The counts belong to the name of a policy, not to a version ([`crate::breaker`] has those of a version), so that
//! they only grow. A [`Counted`] policy counts its own calls: a few additions for each.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::contract::{Action, Answer, Call, CallReport, Hook, Policy};
use crate::error::{Cause, Failure};

/// Counts of one policy in one profile. A shadow has counts of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyCounts {
    /// Name of the policy.
    pub policy: String,
    /// The profile.
    pub profile: String,
    /// Whether the policy is a shadow there.
    pub shadow: bool,
    /// Calls of the hooks that were called, in the order of [`Hook::ALL`].
    pub calls: Vec<HookCounts>,
    /// Requests in which the policy failed, without those that began while it was paused.
    pub failures: u64,
    /// Requests that began while the policy was paused because it had failed too often.
    pub paused: u64,
    /// Loops after which the policy, or the native one in its place, closed the reasoning or ended the request.
    pub loops_closed: u64,
}

/// Calls of one hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HookCounts {
    /// The hook.
    pub hook: Hook,
    /// Calls.
    pub calls: u64,
    /// Duration of all of them.
    pub nanoseconds: u64,
}

/// The counts of all policies, by policy, profile, and whether it is a shadow.
#[derive(Default)]
pub struct Tallies(Mutex<BTreeMap<(String, String, bool), Arc<Tally>>>);

impl Tallies {
    /// The counts of a policy in a profile, created if missing. The configuration bounds their number.
    pub fn of(&self, policy: &str, profile: &str, shadow: bool) -> Arc<Tally> {
        self.0.lock().entry((policy.into(), profile.into(), shadow)).or_default().clone()
    }

    /// All counts, sorted by policy and profile.
    pub fn report(&self) -> Vec<PolicyCounts> {
        let all = self.0.lock();
        let counts = all.iter().map(|((policy, profile, shadow), tally)| PolicyCounts {
            policy: policy.clone(),
            profile: profile.clone(),
            shadow: *shadow,
            calls: tally.calls(),
            failures: tally.failures.load(Ordering::Relaxed),
            paused: tally.paused.load(Ordering::Relaxed),
            loops_closed: tally.loops_closed.load(Ordering::Relaxed),
        });
        counts.collect()
    }
}

/// The counts of one policy in one profile, while they grow.
#[derive(Debug, Default)]
pub struct Tally {
    /// Calls and nanoseconds, by the number of the hook.
    hooks: [(AtomicU64, AtomicU64); Hook::ALL.len()],
    failures: AtomicU64,
    paused: AtomicU64,
    loops_closed: AtomicU64,
}

impl Tally {
    /// Counts a failure.
    pub fn failed(&self, failure: &Failure) {
        let count = match failure.cause {
            Cause::Paused(_) => &self.paused,
            _ => &self.failures,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    fn called(&self, hook: Hook, nanoseconds: u64) {
        let (calls, time) = &self.hooks[hook as usize];
        calls.fetch_add(1, Ordering::Relaxed);
        time.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    fn calls(&self) -> Vec<HookCounts> {
        let counts = Hook::ALL.into_iter().zip(&self.hooks).map(|(hook, (calls, time))| {
            let (calls, nanoseconds) =
                (calls.load(Ordering::Relaxed), time.load(Ordering::Relaxed));
            HookCounts { hook, calls, nanoseconds }
        });
        counts.filter(|counts| counts.calls > 0).collect()
    }
}

/// A guarded policy whose calls are counted.
pub struct Counted {
    policy: Box<dyn Policy>,
    tally: Arc<Tally>,
    /// Name of the policy, for spans.
    name: String,
    shadow: bool,
    /// The hook of the last call.
    hook: Option<Hook>,
}

impl Counted {
    /// The policy `name`, whose calls `tally` counts.
    pub fn new(name: String, shadow: bool, policy: Box<dyn Policy>, tally: Arc<Tally>) -> Self {
        Self { policy, tally, name, shadow, hook: None }
    }

    /// The span of one call, in traces of requests.
    fn span(&self) -> tracing::Span {
        tracing::debug_span!("policy", policy = self.name, shadow = self.shadow)
    }
}

impl Policy for Counted {
    fn call(&mut self, call: &Call<'_>) -> Result<Answer, Failure> {
        self.hook = Some(call.hook());
        let answer = self.span().in_scope(|| self.policy.call(call));
        if let (Call::Step(step), Ok(Answer::Step(actions))) = (call, &answer)
            && step.loop_found.is_some()
            && actions.iter().any(ends_loop)
        {
            self.tally.loops_closed.fetch_add(1, Ordering::Relaxed);
        }
        answer
    }

    fn is_quick(&self, hook: Hook) -> bool {
        self.policy.is_quick(hook)
    }

    fn has(&self, hook: Hook) -> bool {
        self.policy.has(hook)
    }

    fn take_report(&mut self) -> CallReport {
        let report = self.policy.take_report();
        // A failure at the start comes with the report of the first call, which the guest did not get.
        let was_called = match &report.failure {
            Some(failure) => failure.hook != "start",
            None => !report.replaced,
        };
        if let Some(hook) = self.hook.take()
            && was_called
        {
            self.tally.called(hook, report.cost.nanoseconds);
        }
        if let Some(failure) = &report.failure {
            self.tally.failed(failure);
        }
        report
    }
}

/// Whether an action ends a loop.
fn ends_loop(action: &Action) -> bool {
    matches!(action, Action::CloseReasoning(_) | Action::Stop(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::breaker::Breaker;
    use crate::config::OnFailure;
    use crate::contract::{LoopReport, Phase, RequestView, Step};
    use crate::guard::Guard;

    /// Closes the reasoning at a loop, and fails at `on-request` if its field says so.
    struct Fake {
        fails: bool,
    }

    impl Policy for Fake {
        fn call(&mut self, call: &Call<'_>) -> Result<Answer, Failure> {
            match call {
                Call::Request(_) if self.fails => Err(failure("on-request")),
                Call::Step(step) if step.loop_found.is_some() => {
                    Ok(Answer::Step(vec![Action::CloseReasoning("So:".into())]))
                }
                call => Ok(call.default_answer()),
            }
        }
    }

    fn failure(hook: &'static str) -> Failure {
        Failure { policy: "fake".into(), hook, cause: Cause::Message("on purpose".into()) }
    }

    fn counted(tallies: &Tallies, start: Result<Fake, Failure>) -> Counted {
        let start = || start.map(|fake| Box::new(fake) as Box<dyn Policy>);
        let guard = Guard::start("fake", OnFailure::Open, Arc::new(Breaker::default()), start);
        Counted::new(
            "fake".into(),
            false,
            Box::new(guard.unwrap()),
            tallies.of("fake", "agent", false),
        )
    }

    fn step(is_loop: bool) -> Step {
        let found = LoopReport { period: 7, repeats: 4, exact: true };
        Step { phase: Phase::Reasoning, loop_found: is_loop.then_some(found), ..Step::default() }
    }

    /// Asks for a plan and three steps, of which the last reports a loop.
    fn run(mut policy: Counted) {
        drop(policy.call(&Call::Request(std::borrow::Cow::Owned(RequestView::default()))));
        policy.take_report();
        for is_loop in [false, false, true] {
            drop(policy.call(&Call::Step(std::borrow::Cow::Owned(step(is_loop)))));
            policy.take_report();
        }
    }

    #[test]
    fn calls_failures_and_closed_loops_are_counted_by_policy_and_profile() {
        let tallies = Tallies::default();
        run(counted(&tallies, Ok(Fake { fails: false })));
        let [counts] = &tallies.report()[..] else { panic!("one policy in one profile") };
        let calls: Vec<_> = counts.calls.iter().map(|counts| (counts.hook, counts.calls)).collect();
        assert_eq!(calls, [(Hook::OnRequest, 1), (Hook::OnStep, 3)]);
        assert_eq!((counts.failures, counts.paused, counts.loops_closed), (0, 0, 1));
        assert_eq!((counts.policy.as_str(), counts.profile.as_str()), ("fake", "agent"));

        // The failed call counts, those that the native policy answers do not; it closes the loop.
        run(counted(&tallies, Ok(Fake { fails: true })));
        let counts = tallies.report().remove(0);
        let calls: Vec<_> = counts.calls.iter().map(|counts| (counts.hook, counts.calls)).collect();
        assert_eq!(calls, [(Hook::OnRequest, 2), (Hook::OnStep, 3)]);
        assert_eq!((counts.failures, counts.loops_closed), (1, 2));

        // A policy that did not start was not called.
        run(counted(&tallies, Err(failure("start"))));
        let counts = tallies.report().remove(0);
        assert_eq!(counts.calls.iter().map(|counts| counts.calls).sum::<u64>(), 5);
        assert_eq!((counts.failures, counts.loops_closed), (2, 3));
    }

    #[test]
    fn a_request_that_begins_in_a_pause_is_no_further_failure() {
        let tally = Tally::default();
        tally.failed(&Failure { cause: Cause::Paused(30), ..failure("start") });
        tally.failed(&failure("on-step"));
        assert_eq!(tally.paused.load(Ordering::Relaxed), 1);
        assert_eq!(tally.failures.load(Ordering::Relaxed), 1);
    }
}
