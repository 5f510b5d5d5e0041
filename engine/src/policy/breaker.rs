//! Remembers, across requests, how often a version of a policy failed.
//!
//! One that failed in [`FAILURES`] requests in a row rests: it is not called for [`FIRST_REST`],
//! then, if it fails again at once, for twice as long, up to [`LONGEST_REST`].
//!
//! One that has just replaced another is on probation, which is judged by all its requests and not
//! by those in a row, and not by its deadline, which a busy machine may miss: at
//! [`PROBATION_FAILURES`] before [`PROBATION_SUCCESSES`] it is condemned, and [`super::registry`]
//! brings the one before it back.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Failed requests in a row after which a policy rests.
pub const FAILURES: u32 = 8;

/// How long it rests at first.
pub const FIRST_REST: Duration = Duration::from_secs(30);

/// How long it rests at most.
pub const LONGEST_REST: Duration = Duration::from_secs(600);

/// Failed requests that condemn a version on probation.
pub const PROBATION_FAILURES: u32 = 3;

/// Requests that end the probation.
pub const PROBATION_SUCCESSES: u32 = 32;

/// Where a breaker reads the time.
pub type Clock = Box<dyn Fn() -> Instant + Send + Sync>;

/// Counts how requests of one version of a policy ended, and says what follows.
pub struct Breaker {
    clock: Clock,
    record: Mutex<Record>,
}

#[derive(Default)]
struct Record {
    failures: u32,
    rests_until: Option<Instant>,
    probation: Option<Probation>,
}

#[derive(Default)]
struct Probation {
    failures: u32,
    successes: u32,
    /// What the last failure was.
    problem: String,
}

/// How a version does, for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// Requests in a row that failed.
    pub failures: u32,
    /// How much longer it is not called.
    pub rests: Option<Duration>,
    /// Requests still to succeed before it is trusted, where it has just replaced another.
    pub probation: Option<u32>,
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

    /// That of a version that has just replaced another.
    pub fn on_probation() -> Self {
        let breaker = Self::default();
        breaker.lock().probation = Some(Probation::default());
        breaker
    }

    /// How much longer the policy rests; `None` when it may be called.
    pub fn rest(&self) -> Option<Duration> {
        self.rest_of(&self.lock())
    }

    /// Why the version may not go on, where its probation ended badly.
    pub fn condemned(&self) -> Option<String> {
        let record = self.lock();
        let probation = record.probation.as_ref()?;
        (probation.failures >= PROBATION_FAILURES).then(|| {
            let Probation { failures, successes, problem } = probation;
            format!(
                "failed in {failures} of its first {} requests: {problem}",
                failures + successes
            )
        })
    }

    /// How the version does.
    pub fn health(&self) -> Health {
        let record = self.lock();
        let probation = record.probation.as_ref();
        Health {
            failures: record.failures,
            rests: self.rest_of(&record),
            probation: probation.map(|p| PROBATION_SUCCESSES.saturating_sub(p.successes)),
        }
    }

    /// A request failed, of this `problem`.
    pub(super) fn failed(&self, problem: &str) {
        self.count(Some(problem));
    }

    /// A request failed of its deadline. That may be the machine's fault: it rests as after other
    /// failures, but is not condemned for it.
    pub(super) fn late(&self) {
        self.count(None);
    }

    /// Counts a failure, and against a probation one of this `problem`.
    fn count(&self, problem: Option<&str>) {
        let now = (self.clock)();
        let mut record = self.lock();
        if record.rests_until.is_some_and(|until| until > now) {
            // A request that began before the rest: it tells nothing new.
            return;
        }
        if let (Some(probation), Some(problem)) = (&mut record.probation, problem) {
            probation.failures += 1;
            problem.clone_into(&mut probation.problem);
        }
        record.failures = record.failures.saturating_add(1);
        if let Some(doublings) = record.failures.checked_sub(FAILURES) {
            let rest = FIRST_REST.saturating_mul(2u32.saturating_pow(doublings));
            record.rests_until = Some(now + rest.min(LONGEST_REST));
        }
    }

    /// A request ended, and the policy had not failed.
    pub(super) fn succeeded(&self) {
        let mut record = self.lock();
        record.failures = 0;
        record.rests_until = None;
        if let Some(probation) = &mut record.probation {
            probation.successes += 1;
            if probation.successes >= PROBATION_SUCCESSES && probation.failures < PROBATION_FAILURES
            {
                record.probation = None;
            }
        }
    }

    fn rest_of(&self, record: &Record) -> Option<Duration> {
        let left = record.rests_until?.saturating_duration_since((self.clock)());
        (!left.is_zero()).then_some(left)
    }

    fn lock(&self) -> MutexGuard<'_, Record> {
        // Nothing can panic between two changes of the record, so it is whole even when poisoned.
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_policy_that_keeps_failing_rests_twice_as_long_each_time_until_it_succeeds() {
        let now = Arc::new(Mutex::new(Instant::now()));
        let clock = now.clone();
        let breaker = Breaker::with_clock(Box::new(move || *clock.lock().unwrap()));
        for _ in 0..FAILURES {
            assert_eq!(breaker.rest(), None);
            breaker.failed("trapped");
        }
        for seconds in [30, 60, 120, 240, 480, 600, 600] {
            let rest = Duration::from_secs(seconds);
            assert_eq!(breaker.rest(), Some(rest));
            breaker.failed("a request that began earlier");
            assert_eq!(breaker.rest(), Some(rest));
            *now.lock().unwrap() += rest;
            assert_eq!(breaker.rest(), None);
            breaker.failed("trapped");
        }
        *now.lock().unwrap() += LONGEST_REST;
        breaker.succeeded();
        assert_eq!(breaker.health(), Health { failures: 0, rests: None, probation: None });
    }

    /// `requests`: `.` succeeds, `x` fails.
    fn tried(requests: &str) -> Breaker {
        let breaker = Breaker::on_probation();
        for request in requests.chars() {
            match request {
                'x' => breaker.failed("trapped"),
                'l' => breaker.late(),
                _ => breaker.succeeded(),
            }
        }
        breaker
    }

    #[test]
    fn three_failures_before_thirty_two_successes_condemn_a_version_on_probation() {
        let (early, late) = (".".repeat(31), ".".repeat(32));
        for (requests, why) in [
            ("xxx", Some("failed in 3 of its first 3 requests: trapped")),
            ("x.x.x", Some("failed in 3 of its first 5 requests: trapped")),
            ("xx", None),
            ("xxll", None),
            ("xllx.x", Some("failed in 3 of its first 4 requests: trapped")),
            ("", None),
            (&format!("xx{early}x"), Some("failed in 3 of its first 34 requests: trapped")),
            (&format!("xx{late}x"), None),
            (&format!("{late}xxx"), None),
        ] {
            assert_eq!(tried(requests).condemned().as_deref(), why, "{requests}");
        }
        assert_eq!(tried("x..").health().probation, Some(PROBATION_SUCCESSES - 2));
        assert_eq!(tried(&late).health().probation, None);
        assert!(tried(&format!("xxx{late}")).condemned().is_some(), "it stays condemned");
    }

    #[test]
    fn a_version_that_replaced_none_is_not_on_probation() {
        let breaker = Breaker::default();
        (0..FAILURES).for_each(|_| breaker.failed("trapped"));
        assert_eq!(breaker.condemned(), None);
        assert_eq!(breaker.health().probation, None);
    }
}
