//! Stands between a request and its guest: at the guest's first failure it says so, and answers
//! for it from then on, or ends the request, as the profile says.
//!
//! The native policy that takes over works under the plan already made: a guest that planned and
//! then failed leaves its budgets and thresholds in force, so failing loosens nothing.
//!
//! A [`Breaker`] remembers failures across requests. A policy that failed in
//! [`FAILURES`] requests in a row rests: it is not called for [`FIRST_REST`], then, if it fails
//! again at once, for twice as long, up to [`LONGEST_REST`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::native::Native;
use super::{
    Action, Cost, Plan, Policy, PromptView, Replacement, RequestView, Step, Summary, ToolCallView,
    Verdict,
};
use crate::config::OnFailure;
use crate::error::{Error, Result};

/// Failed requests in a row after which a policy rests.
pub const FAILURES: u32 = 8;

/// How long it rests at first.
pub const FIRST_REST: Duration = Duration::from_secs(30);

/// How long it rests at most.
pub const LONGEST_REST: Duration = Duration::from_secs(600);

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
        self.guest = None;
        self.breaker.failed();
        self.give_up(error)
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

    fn on_finish(&mut self, summary: &Summary) {
        let Some(guest) = &mut self.guest else { return };
        self.called = true;
        guest.on_finish(summary);
        let failures = guest.take_notes();
        if !failures.is_empty() {
            self.guest = None;
            self.breaker.failed();
            tracing::warn!(policy = self.name, error = failures.join("; "), "on-finish failed");
            self.notes.extend(failures);
        }
    }

    fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
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

/// Where a breaker reads the time.
pub type Clock = Box<dyn Fn() -> Instant + Send + Sync>;

/// Counts failed requests in a row and says when a policy rests.
pub struct Breaker {
    clock: Clock,
    record: Mutex<Record>,
}

#[derive(Default)]
struct Record {
    failures: u32,
    rests_until: Option<Instant>,
}

impl Default for Breaker {
    fn default() -> Self {
        Self::with_clock(Box::new(Instant::now))
    }
}

impl Breaker {
    /// A breaker that reads the time from `clock`.
    pub fn with_clock(clock: Clock) -> Self {
        Self { clock, record: Mutex::default() }
    }

    /// How much longer the policy rests; `None` when it may be called.
    pub fn rest(&self) -> Option<Duration> {
        let left = self.lock().rests_until?.saturating_duration_since((self.clock)());
        (!left.is_zero()).then_some(left)
    }

    fn failed(&self) {
        let now = (self.clock)();
        let mut record = self.lock();
        if record.rests_until.is_some_and(|until| until > now) {
            // A request that began before the rest: it tells nothing new.
            return;
        }
        record.failures = record.failures.saturating_add(1);
        if let Some(doublings) = record.failures.checked_sub(FAILURES) {
            let rest = FIRST_REST.saturating_mul(2u32.saturating_pow(doublings));
            record.rests_until = Some(now + rest.min(LONGEST_REST));
        }
    }

    fn succeeded(&self) {
        *self.lock() = Record::default();
    }

    fn lock(&self) -> MutexGuard<'_, Record> {
        // Nothing can panic between two changes of the record, so it is whole even when poisoned.
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
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

        fn on_finish(&mut self, _: &Summary) {}

        fn take_notes(&mut self) -> Vec<String> {
            if self.0 == "on-finish" { vec!["on-finish".into()] } else { Vec::new() }
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
        assert_eq!(breaker.lock().failures, 3);
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
        policy.on_finish(&Summary::default());
        assert_eq!(policy.take_notes(), ["on-finish"]);
        drop(policy);
        assert_eq!(breaker.lock().failures, 1);
    }

    #[test]
    fn a_policy_that_keeps_failing_rests_twice_as_long_each_time_until_it_succeeds() {
        let now = Arc::new(Mutex::new(Instant::now()));
        let clock = now.clone();
        let breaker = Arc::new(Breaker::with_clock(Box::new(move || *clock.lock().unwrap())));
        let request = |fails: &'static str| {
            let mut policy = guarded(fails, OnFailure::Open, &breaker);
            policy.on_step(&looping()).unwrap() == [Action::Stop("fake".into())]
        };
        for _ in 0..FAILURES {
            assert_eq!(breaker.rest(), None);
            assert!(!request("on-step"));
        }
        for seconds in [30, 60, 120, 240, 480, 600, 600] {
            assert_eq!(breaker.rest(), Some(Duration::from_secs(seconds)));
            assert!(!request("none"), "a resting policy is not called");
            *now.lock().unwrap() += Duration::from_secs(seconds);
            assert_eq!(breaker.rest(), None);
            assert!(!request("on-step"));
        }
        *now.lock().unwrap() += LONGEST_REST;
        assert!(request("none"));
        assert_eq!(breaker.lock().failures, 0);
    }
}
