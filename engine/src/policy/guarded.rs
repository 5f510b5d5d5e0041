//! Stands between a request and its guest: at the guest's first failure it says so, and answers
//! for it from then on, or ends the request, as the profile says.
//!
//! The native policy that takes over works under the plan already made: a guest that planned and
//! then failed leaves its budgets and thresholds in force, so failing loosens nothing.
//!
//! A [`Breaker`] remembers failures across requests, and says when a policy is not to be called.

use std::sync::Arc;

use super::breaker::Breaker;
use super::native::Native;
use super::{
    Action, Cost, ImportCall, Plan, Policy, PromptView, Replacement, RequestView, Step, Summary,
    ToolCallView, Verdict,
};
use crate::config::OnFailure;
use crate::error::{Error, Result};

/// A policy whose failures are handled.
pub struct Guarded {
    name: String,
    on_failure: OnFailure,
    breaker: Arc<Breaker>,
    /// `None` once it has failed.
    guest: Option<Box<dyn Policy>>,
    called: bool,
    notes: Vec<String>,
}

impl Guarded {
    /// Guards the policy that `start` instantiates, which is not called while the breaker says
    /// that it rests.
    ///
    /// # Errors
    /// [`Error::Policy`] when the policy cannot start, or rests, and `on_failure` is closed.
    pub fn start(
        name: &str,
        on_failure: OnFailure,
        breaker: Arc<Breaker>,
        start: impl FnOnce() -> Result<Box<dyn Policy>>,
    ) -> Result<Self> {
        let name = name.to_owned();
        let mut guarded =
            Self { name, on_failure, breaker, guest: None, called: false, notes: Vec::new() };
        if let Some(rest) = guarded.breaker.rest() {
            let problem = format!("failed too often and rests for {} s", rest.as_secs() + 1);
            guarded.give_up(Error::Policy { policy: guarded.name.clone(), problem })?;
            return Ok(guarded);
        }
        match start() {
            Ok(guest) => guarded.guest = Some(guest),
            Err(error) => guarded.fail(error)?,
        }
        Ok(guarded)
    }

    /// Records a failure; what follows is answered by [`Native`], or is `error`.
    fn fail(&mut self, error: Error) -> Result<()> {
        self.failed(&error);
        self.give_up(error)
    }

    fn failed(&mut self, error: &Error) {
        self.guest = None;
        match error {
            Error::PolicyLate { .. } => self.breaker.late(),
            // Without the policy's name, where that is said anyway.
            Error::Policy { problem, .. } => self.breaker.failed(problem),
            other => self.breaker.failed(&other.to_string()),
        }
    }

    fn give_up(&mut self, error: Error) -> Result<()> {
        match self.on_failure {
            OnFailure::Closed => Err(error),
            OnFailure::Open => {
                tracing::warn!(policy = self.name, %error, "the native policy takes over");
                self.notes.push(format!("{error}; the native policy took over"));
                Ok(())
            }
        }
    }

    /// Asks the guest, and in its place [`Native`] once it has failed.
    fn ask<T>(&mut self, mut hook: impl FnMut(&mut dyn Policy) -> Result<T>) -> Result<T> {
        if let Some(guest) = &mut self.guest {
            self.called = true;
            match hook(guest.as_mut()) {
                Ok(answer) => return Ok(answer),
                Err(error) => self.fail(error)?,
            }
        }
        hook(&mut Native)
    }
}

impl Policy for Guarded {
    fn on_prompt(&mut self, prompt: &PromptView) -> Result<Vec<Replacement>> {
        self.ask(|policy| policy.on_prompt(prompt))
    }

    fn on_request(&mut self, request: &RequestView) -> Result<Plan> {
        self.ask(|policy| policy.on_request(request))
    }

    fn on_step(&mut self, step: &Step) -> Result<Vec<Action>> {
        self.ask(|policy| policy.on_step(step))
    }

    fn on_tool_call(&mut self, call: &ToolCallView) -> Result<Verdict> {
        self.ask(|policy| policy.on_tool_call(call))
    }

    /// Never fails: whatever the profile says, the reply has been made.
    fn on_finish(&mut self, summary: &Summary) -> Result<()> {
        let Some(guest) = &mut self.guest else { return Ok(()) };
        self.called = true;
        if let Err(error) = guest.on_finish(summary) {
            self.failed(&error);
            tracing::warn!(policy = self.name, %error, "on-finish failed");
            self.notes.push(error.to_string());
        }
        Ok(())
    }

    fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    fn take_imports(&mut self) -> Vec<ImportCall> {
        self.guest.as_mut().map(|guest| guest.take_imports()).unwrap_or_default()
    }

    fn cost(&self) -> Cost {
        self.guest.as_ref().map_or_else(Cost::default, |guest| guest.cost())
    }
}

impl Drop for Guarded {
    /// A request that ends with its guest still trusted clears the record.
    fn drop(&mut self) {
        if self.guest.is_some() && self.called {
            self.breaker.succeeded();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Instant;

    use super::super::breaker::{FAILURES, FIRST_REST};
    use super::super::native::{HINT, LOOPS};
    use super::super::{LoopReport, Phase};
    use super::*;

    /// Plans a budget of 7 and fails in the hook that it is named for.
    struct Fake(&'static str);

    impl Fake {
        fn answer<T>(&self, hook: &str, answer: T) -> Result<T> {
            if self.0 == hook {
                return Err(Error::Policy { policy: "fake".into(), problem: hook.into() });
            }
            Ok(answer)
        }
    }

    impl Policy for Fake {
        fn on_request(&mut self, _: &RequestView) -> Result<Plan> {
            self.answer("on-request", Plan { think_budget: Some(7), ..Plan::default() })
        }

        fn on_step(&mut self, _: &Step) -> Result<Vec<Action>> {
            self.answer("on-step", vec![Action::Stop("fake".into())])
        }

        fn on_finish(&mut self, _: &Summary) -> Result<()> {
            self.answer("on-finish", ())
        }
    }

    fn guarded(fails: &'static str, on_failure: OnFailure, breaker: &Arc<Breaker>) -> Guarded {
        let start = || {
            Fake(fails).answer("start", ())?;
            Ok(Box::new(Fake(fails)) as Box<dyn Policy>)
        };
        Guarded::start("fake", on_failure, breaker.clone(), start).unwrap()
    }

    fn looping() -> Step {
        let loop_found = Some(LoopReport { period: 11, repeats: 9, exact: true });
        Step { phase: Phase::Think, loop_found, ..Step::default() }
    }

    #[test]
    fn a_policy_that_fails_open_is_replaced_by_the_native_one_under_the_plan_made_so_far() {
        let breaker = Arc::new(Breaker::default());
        let close = vec![Action::CloseThinking(HINT.into())];
        for (fails, budget) in [("on-step", 7), ("on-request", 32_768), ("start", 32_768)] {
            let mut policy = guarded(fails, OnFailure::Open, &breaker);
            let plan = policy.on_request(&RequestView::default()).unwrap();
            assert_eq!(plan.think_budget, Some(budget), "{fails}");
            assert_eq!(plan.loops, (budget > 7).then_some(LOOPS), "{fails}");
            assert_eq!(policy.on_step(&looping()).unwrap(), close, "{fails}");
            assert_eq!(policy.on_step(&looping()).unwrap(), close, "{fails}");
            let notes = policy.take_notes();
            assert_eq!(notes, [format!("policy `fake`: {fails}; the native policy took over")]);
        }
        assert_eq!(breaker.health().failures, 3);
    }

    #[test]
    fn a_policy_that_fails_closed_ends_the_request() {
        let breaker = Arc::new(Breaker::default());
        let mut policy = guarded("on-step", OnFailure::Closed, &breaker);
        policy.on_request(&RequestView::default()).unwrap();
        let error = policy.on_step(&looping()).unwrap_err();
        assert_eq!(error.to_string(), "policy `fake`: on-step");
        let start = || Err(Error::Policy { policy: "fake".into(), problem: "start".into() });
        assert!(Guarded::start("fake", OnFailure::Closed, breaker, start).is_err());
    }

    #[test]
    fn a_failure_at_the_end_changes_nothing_but_is_noted_and_counted() {
        let breaker = Arc::new(Breaker::default());
        let mut policy = guarded("on-finish", OnFailure::Closed, &breaker);
        policy.on_finish(&Summary::default()).unwrap();
        assert_eq!(policy.take_notes(), ["policy `fake`: on-finish"]);
        drop(policy);
        assert_eq!(breaker.health().failures, 1);
    }

    #[test]
    fn a_policy_that_rests_is_not_called_until_the_rest_is_over() {
        let now = Arc::new(Mutex::new(Instant::now()));
        let clock = now.clone();
        let breaker = Arc::new(Breaker::with_clock(Box::new(move || *clock.lock().unwrap())));
        let request = |fails: &'static str| {
            let mut policy = guarded(fails, OnFailure::Open, &breaker);
            policy.on_step(&looping()).unwrap() == [Action::Stop("fake".into())]
        };
        for _ in 0..FAILURES {
            assert!(!request("on-step"));
        }
        assert!(!request("none"), "a resting policy is not called");
        *now.lock().unwrap() += FIRST_REST;
        assert!(request("none"));
        assert_eq!(breaker.health().failures, 0);
    }
}
