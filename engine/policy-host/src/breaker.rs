//! Counts, across the requests of a profile, how often a version of a policy failed.
//!
//! Profiles do not share counts ([`Breakers`]): what a request of one profile makes a policy do pauses it in
//! no other. A shadow has counts of its own, and no probation.
//!
//! A version that fails in [`FAILURES`] requests in a row is paused: it is not called for
//! [`FIRST_PAUSE`], and for twice as long each time it fails again directly afterwards, up to
//! [`LONGEST_PAUSE`].
//!
//! A version that has just replaced another is on probation. [`PROBATION_FAILURES`] failed requests
//! before [`PROBATION_SUCCESSES`] successful ones, in any order, condemn it in this profile, and
//! [`crate::registry`] rolls it back there. Missed deadlines do not count against a probation: a busy machine misses them too.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use crate::error::{Cause, Failure};

/// Failed requests in a row after which a policy is paused.
pub const FAILURES: u32 = 8;

/// Length of the first pause.
pub const FIRST_PAUSE: Duration = Duration::from_secs(30);

/// Length of the longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// Failed requests that condemn a version on probation.
const PROBATION_FAILURES: u32 = 3;

/// Bytes of a place in a source; what is longer is none.
const PLACE_BYTES: usize = 128;

/// Successful requests that end the probation.
const PROBATION_SUCCESSES: u32 = 32;

/// Returns the time.
pub type Clock = Box<dyn Fn() -> Instant + Send + Sync>;

/// The breakers of one version of a policy, by profile.
#[derive(Default)]
pub struct Breakers {
    on_probation: bool,
    /// By profile, and whether the policy is a shadow there.
    all: Mutex<BTreeMap<(String, bool), Arc<Breaker>>>,
}

impl Breakers {
    /// The breakers of a version that has just replaced another.
    pub fn on_probation() -> Self {
        Self { on_probation: true, all: Mutex::default() }
    }

    /// The breaker of `profile`, created if missing.
    pub fn of(&self, profile: &str, shadow: bool) -> Arc<Breaker> {
        let new = || match self.on_probation && !shadow {
            true => Breaker::on_probation(),
            false => Breaker::default(),
        };
        let mut all = self.all.lock();
        all.entry((profile.into(), shadow)).or_insert_with(|| Arc::new(new())).clone()
    }

    /// The profiles in which the version failed its probation, with the reasons.
    pub fn condemned(&self) -> Vec<(String, String)> {
        let all = self.all.lock();
        let condemned = all
            .iter()
            .filter_map(|((profile, _), breaker)| Some((profile.clone(), breaker.condemned()?)));
        condemned.collect()
    }
}

/// Counts the failed requests of one version of a policy in one profile.
pub struct Breaker {
    clock: Clock,
    counts: Mutex<Counts>,
}

#[derive(Default)]
struct Counts {
    failures: u32,
    paused_until: Option<Instant>,
    probation: Option<Probation>,
}

#[derive(Default)]
struct Probation {
    failures: u32,
    successes: u32,
    last_failure: String,
}

/// Health of a version, for operators.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Health {
    /// Failed requests in a row.
    pub failures: u32,
    /// Time until the version is called again.
    pub paused: Option<Duration>,
    /// Successful requests until the probation ends.
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
        Self { clock, counts: Mutex::default() }
    }

    /// The breaker of a version on probation.
    pub fn on_probation() -> Self {
        let breaker = Self::default();
        breaker.counts.lock().probation = Some(Probation::default());
        breaker
    }

    /// Time until the policy may be called again; `None` if it may be called now.
    pub fn pause(&self) -> Option<Duration> {
        self.pause_of(&self.counts.lock())
    }

    /// Why the version must be rolled back, if it failed its probation.
    pub fn condemned(&self) -> Option<String> {
        let counts = self.counts.lock();
        let Probation { failures, successes, last_failure } = counts.probation.as_ref()?;
        (*failures >= PROBATION_FAILURES).then(|| {
            let requests = failures + successes;
            format!("failed in {failures} of its first {requests} requests: {last_failure}")
        })
    }

    /// Health of the version.
    pub fn health(&self) -> Health {
        let counts = self.counts.lock();
        let left = |p: &Probation| PROBATION_SUCCESSES.saturating_sub(p.successes);
        Health {
            failures: counts.failures,
            paused: self.pause_of(&counts),
            probation: counts.probation.as_ref().map(left),
        }
    }

    /// Counts a failed request.
    pub(crate) fn failed(&self, failure: &Failure) {
        let now = (self.clock)();
        let mut counts = self.counts.lock();
        if counts.paused_until.is_some_and(|until| until > now) {
            // The request began before the pause.
            return;
        }
        if let Some(probation) = &mut counts.probation
            && !matches!(failure.cause, Cause::Deadline(_))
        {
            probation.failures += 1;
            // The policy's own words may repeat a request, and every reader of the versions sees this. The log of the
            // failure has them.
            let cause = match &failure.cause {
                Cause::Message(message) => match panic_place(message) {
                    Some(place) => format!("panicked at {place}; the log has its message"),
                    None => "failed with a message, which the log has".into(),
                },
                Cause::Answer(_) => "answered what the contract does not allow".into(),
                cause => cause.to_string(),
            };
            probation.last_failure = format!("{}: {cause}", failure.hook);
        }
        counts.failures = counts.failures.saturating_add(1);
        if let Some(doublings) = counts.failures.checked_sub(FAILURES) {
            let pause = FIRST_PAUSE.saturating_mul(2u32.saturating_pow(doublings));
            counts.paused_until = Some(now + pause.min(LONGEST_PAUSE));
        }
    }

    /// Counts a request in which the policy did not fail.
    pub(crate) fn succeeded(&self) {
        let mut counts = self.counts.lock();
        counts.failures = 0;
        counts.paused_until = None;
        if let Some(probation) = &mut counts.probation {
            probation.successes += 1;
            if probation.successes >= PROBATION_SUCCESSES && probation.failures < PROBATION_FAILURES
            {
                counts.probation = None;
            }
        }
    }

    fn pause_of(&self, counts: &MutexGuard<'_, Counts>) -> Option<Duration> {
        let left = counts.paused_until?.saturating_duration_since((self.clock)());
        (!left.is_zero()).then_some(left)
    }
}

/// The place in the source that the message of a panic in Rust begins with, `src/lib.rs:24:24`.
fn panic_place(message: &str) -> Option<&str> {
    let place = message.strip_prefix("panicked at ")?.split_whitespace().next()?;
    let place = place.strip_suffix(':').unwrap_or(place);
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let mut parts = place.rsplitn(3, ':');
    let [column, line, file] = [parts.next()?, parts.next()?, parts.next()?];
    let is_place = is_number(column) && is_number(line) && file.ends_with(".rs");
    (is_place && place.len() <= PLACE_BYTES).then_some(place)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn failure(cause: Cause) -> Failure {
        Failure { policy: "guest".into(), hook: "on-step", cause }
    }

    fn trap() -> Failure {
        failure(Cause::Trap("unreachable".into()))
    }

    #[test]
    fn pauses_double_until_a_request_succeeds() {
        let now = Arc::new(Mutex::new(Instant::now()));
        let clock = now.clone();
        let breaker = Breaker::with_clock(Box::new(move || *clock.lock()));
        for _ in 0..FAILURES {
            assert_eq!(breaker.pause(), None);
            breaker.failed(&trap());
        }
        for seconds in [30, 60, 120, 240, 480, 600, 600] {
            let pause = Duration::from_secs(seconds);
            assert_eq!(breaker.pause(), Some(pause));
            breaker.failed(&trap());
            assert_eq!(breaker.pause(), Some(pause), "a request that began before the pause");
            *now.lock() += pause;
            assert_eq!(breaker.pause(), None);
            breaker.failed(&trap());
        }
        *now.lock() += LONGEST_PAUSE;
        breaker.succeeded();
        assert_eq!(breaker.health(), Health { failures: 0, paused: None, probation: None });
    }

    /// `requests`: `.` succeeds, `x` traps, `l` misses its deadline.
    fn on_probation(requests: &str) -> Breaker {
        let breaker = Breaker::on_probation();
        for request in requests.chars() {
            match request {
                'x' => breaker.failed(&trap()),
                'l' => breaker.failed(&failure(Cause::Deadline(50))),
                _ => breaker.succeeded(),
            }
        }
        breaker
    }

    #[test]
    fn three_failures_before_thirty_two_successes_condemn_a_version() {
        let (early, late) = (".".repeat(31), ".".repeat(32));
        for (requests, condemned) in [
            ("xxx", Some("3 of its first 3")),
            ("x.x.x", Some("3 of its first 5")),
            ("xx", None),
            ("xxll", None),
            ("xllx.x", Some("3 of its first 4")),
            ("", None),
            (&format!("xx{early}x"), Some("3 of its first 34")),
            (&format!("xx{late}x"), None),
            (&format!("{late}xxx"), None),
        ] {
            let expected =
                condemned.map(|n| format!("failed in {n} requests: on-step: trapped: unreachable"));
            assert_eq!(on_probation(requests).condemned(), expected, "{requests}");
        }
        assert_eq!(on_probation("x..").health().probation, Some(PROBATION_SUCCESSES - 2));
        assert_eq!(on_probation(&late).health().probation, None);
        assert!(on_probation(&format!("xxx{late}")).condemned().is_some(), "stays condemned");
    }

    /// The reason repeated the policy's words on the request of another client.
    #[test]
    fn the_reason_of_a_rollback_has_no_words_of_the_policy() {
        let breaker = Breaker::on_probation();
        for cause in ["4711".to_owned(), "4712".into(), "4713".into()].map(Cause::Message) {
            breaker.failed(&failure(cause));
        }
        let reason = breaker.condemned().unwrap();
        let expected = "on-step: failed with a message, which the log has";
        assert_eq!(reason, format!("failed in 3 of its first 3 requests: {expected}"));
    }

    #[test]
    fn the_reason_of_a_rollback_after_a_panic_has_its_place() {
        let breaker = Breaker::on_probation();
        let message = "panicked at src/lib.rs:24:24: no such user: anna".to_owned();
        (0..PROBATION_FAILURES)
            .for_each(|_| breaker.failed(&failure(Cause::Message(message.clone()))));
        let expected = "on-step: panicked at src/lib.rs:24:24; the log has its message";
        assert_eq!(
            breaker.condemned().unwrap(),
            format!("failed in 3 of its first 3 requests: {expected}")
        );
        for other in
            ["panicked at anna's door", "panicked at 4711:1:2: x", "no", "panicked at ", ""]
        {
            assert_eq!(panic_place(other), None, "{other}");
        }
    }

    #[test]
    fn a_first_version_has_no_probation() {
        let breaker = Breaker::default();
        (0..FAILURES).for_each(|_| breaker.failed(&trap()));
        assert_eq!(breaker.condemned(), None);
        assert_eq!(breaker.health().probation, None);
    }
}
