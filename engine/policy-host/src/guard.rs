//! Handles the failures of one policy in one request.
//!
//! After its first failure a policy is not called again. The native policy answers in its place, or
//! the request fails, as the profile says. The native policy works under the plan already made, so a
//! failure loosens no budget.

use std::sync::Arc;

use crate::breaker::Breaker;
use crate::config::OnFailure;
use crate::contract::{Answer, Call, CallReport, Hook, Policy};
use crate::error::{Cause, Failure};
use crate::native;

/// The end of the note of a failure after which the native policy answers.
pub const TOOK_OVER: &str = "the native policy took over";

/// A policy whose failures are handled.
pub struct Guard {
    policy: String,
    on_failure: OnFailure,
    breaker: Arc<Breaker>,
    /// `None` after a failure.
    guest: Option<Box<dyn Policy>>,
    called: bool,
    report: CallReport,
}

impl Guard {
    /// Starts a policy with `start`, unless `breaker` has paused it.
    ///
    /// # Errors
    /// [`Failure`] if the policy cannot start or is paused, and `on_failure` is closed.
    pub fn start(
        policy: &str,
        on_failure: OnFailure,
        breaker: Arc<Breaker>,
        start: impl FnOnce() -> Result<Box<dyn Policy>, Failure>,
    ) -> Result<Self, Failure> {
        let pause = breaker.pause();
        let mut guard = Self {
            policy: policy.into(),
            on_failure,
            breaker,
            guest: None,
            called: false,
            report: CallReport::default(),
        };
        if let Some(pause) = pause {
            let cause = Cause::Paused(pause.as_secs() + 1);
            guard.replace(Failure { policy: policy.into(), hook: "start", cause })?;
            return Ok(guard);
        }
        match start() {
            Ok(guest) => guard.guest = Some(guest),
            Err(failure) => guard.fail(failure)?,
        }
        Ok(guard)
    }

    fn fail(&mut self, failure: Failure) -> Result<(), Failure> {
        self.breaker.failed(&failure);
        self.replace(failure)
    }

    /// Lets the native policy answer from now on, if the profile fails open.
    fn replace(&mut self, failure: Failure) -> Result<(), Failure> {
        self.guest = None;
        self.report.replaced = true;
        self.report.failure = Some(failure.clone());
        match self.on_failure {
            OnFailure::Closed => Err(failure),
            OnFailure::Open => {
                tracing::warn!(policy = self.policy, %failure, "policy replaced by native policy");
                self.report.notes.push(format!("{failure}; {TOOK_OVER}"));
                Ok(())
            }
        }
    }

    /// The reply is complete: a failure is recorded and changes nothing but its labels.
    fn finish(&mut self, call: &Call<'_>) -> Answer {
        match self.call_guest(call) {
            Some(Ok(answer)) => return answer,
            Some(Err(failure)) => {
                self.breaker.failed(&failure);
                tracing::warn!(policy = self.policy, %failure, "on-finish failed");
                self.guest = None;
                self.report.replaced = true;
                self.report.notes.push(failure.to_string());
                self.report.failure = Some(failure);
            }
            None => {}
        }
        call.default_answer()
    }

    fn call_guest(&mut self, call: &Call<'_>) -> Option<Result<Answer, Failure>> {
        let guest = self.guest.as_mut()?;
        self.called = true;
        let answer = guest.call(call);
        let CallReport { cost, imports, .. } = guest.take_report();
        self.report.cost = cost;
        self.report.imports = imports;
        Some(answer)
    }
}

impl Policy for Guard {
    fn call(&mut self, call: &Call<'_>) -> Result<Answer, Failure> {
        if let Call::Finish(_) = call {
            return Ok(self.finish(call));
        }
        match self.call_guest(call) {
            Some(Ok(answer)) => return Ok(answer),
            Some(Err(failure)) => self.fail(failure)?,
            None => {}
        }
        Ok(native::answer(call))
    }

    fn is_quick(&self, hook: Hook) -> bool {
        self.guest.as_ref().is_none_or(|guest| guest.is_quick(hook))
    }

    fn has(&self, hook: Hook) -> bool {
        self.guest.as_ref().map_or(hook != Hook::OnText, |guest| guest.has(hook))
    }

    fn take_report(&mut self) -> CallReport {
        let replaced = self.report.replaced;
        std::mem::replace(&mut self.report, CallReport { replaced, ..CallReport::default() })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.guest.is_some() && self.called {
            self.breaker.succeeded();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use parking_lot::Mutex;

    use super::*;
    use crate::breaker::{FAILURES, FIRST_PAUSE};
    use crate::contract::{Action, LoopReport, Phase, Plan, RequestView, Step};
    use crate::native::HINT;

    /// Plans a budget of 7 and fails in the hook that it is given.
    struct Fake(&'static str);

    impl Fake {
        fn check(&self, hook: &'static str) -> Result<(), Failure> {
            if self.0 != hook {
                return Ok(());
            }
            Err(Failure { policy: "fake".into(), hook, cause: Cause::Message("on purpose".into()) })
        }
    }

    impl Policy for Fake {
        fn call(&mut self, call: &Call<'_>) -> Result<Answer, Failure> {
            self.check(call.hook().name())?;
            Ok(match call {
                Call::Request(_) => {
                    Answer::Request(Plan { reasoning_budget: Some(7), ..Plan::default() })
                }
                Call::Step(_) => Answer::Step(vec![Action::Stop("fake".into())]),
                call => call.default_answer(),
            })
        }
    }

    fn guard(
        fails: &'static str,
        on_failure: OnFailure,
        breaker: &Arc<Breaker>,
    ) -> Result<Box<dyn Policy>, Failure> {
        let start = || {
            Fake(fails).check("start")?;
            Ok(Box::new(Fake(fails)) as Box<dyn Policy>)
        };
        Ok(Box::new(Guard::start("fake", on_failure, breaker.clone(), start)?))
    }

    fn looping() -> Step {
        let loop_found = Some(LoopReport { period: 11, repeats: 9, exact: true });
        Step { phase: Phase::Reasoning, loop_found, ..Step::default() }
    }

    #[test]
    fn an_open_failure_is_replaced_by_the_native_policy_under_the_plan_made_so_far() {
        let breaker = Arc::new(Breaker::default());
        let close = [Action::CloseReasoning(HINT.into())];
        for (fails, budget) in [("on-step", 7), ("on-request", 32_768), ("start", 32_768)] {
            let mut policy = guard(fails, OnFailure::Open, &breaker).unwrap();
            let plan = policy.ask(&RequestView::default()).unwrap();
            assert_eq!(plan.reasoning_budget, Some(budget), "{fails}");
            assert_eq!(plan.loops.is_some(), budget > 7, "{fails}");
            assert_eq!(policy.ask(&looping()).unwrap(), close, "{fails}");
            assert_eq!(policy.ask(&looping()).unwrap(), close, "{fails}");
            let notes = policy.take_report().notes;
            let expected =
                format!("policy `fake`: {fails}: failed: on purpose; the native policy took over");
            assert_eq!(notes, [expected]);
        }
        assert_eq!(breaker.health().failures, 3);
    }

    #[test]
    fn a_paused_policy_is_not_called_until_the_pause_is_over() {
        let now = Arc::new(Mutex::new(Instant::now()));
        let clock = now.clone();
        let breaker = Arc::new(Breaker::with_clock(Box::new(move || *clock.lock())));
        let is_called = |fails: &'static str| {
            let mut policy = guard(fails, OnFailure::Open, &breaker).unwrap();
            policy.ask(&looping()).unwrap() == [Action::Stop("fake".into())]
        };
        for _ in 0..FAILURES {
            assert!(!is_called("on-step"));
        }
        assert!(!is_called("none"));
        *now.lock() += FIRST_PAUSE;
        assert!(is_called("none"));
        assert_eq!(breaker.health().failures, 0);
    }
}
