//! Stops asking an upstream that keeps failing.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Failures in a row after which it is not asked.
const FAILURES: u32 = 5;

/// Time for which it is then not asked; doubled with each trial that fails.
const FIRST_PAUSE: Duration = Duration::from_secs(5);

/// Longest such time.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// What requests may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Ask it.
    Closed,
    /// Not ask it.
    Open,
    /// One asks it.
    Trial,
}

impl State {
    /// Its name for display.
    pub fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::Trial => "trial",
        }
    }
}

/// The breaker of one upstream.
#[derive(Default)]
pub struct Breaker(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    failures: u32,
    until: Option<Instant>,
    /// A request tries whether it works again.
    has_trial: bool,
}

/// The right to ask once. Dropped without [`Pass::ended`], it says nothing about the upstream.
pub struct Pass {
    breaker: Arc<Breaker>,
    is_trial: bool,
}

impl Breaker {
    /// Lets a request ask.
    ///
    /// # Errors
    /// Returns the time until one may, if the upstream has failed too often.
    pub fn pass(self: &Arc<Self>) -> Result<Pass, Duration> {
        let inner = &mut *self.0.lock();
        let breaker = self.clone();
        let Some(until) = inner.until else { return Ok(Pass { breaker, is_trial: false }) };
        let left = until.saturating_duration_since(Instant::now());
        if !left.is_zero() || inner.has_trial {
            return Err(left.max(Duration::from_secs(1)));
        }
        inner.has_trial = true;
        Ok(Pass { breaker, is_trial: true })
    }

    /// The upstream has worked or failed.
    pub fn ended(&self, has_worked: bool) {
        self.count(has_worked, false);
    }

    fn count(&self, has_worked: bool, is_trial: bool) {
        let inner = &mut *self.0.lock();
        if has_worked {
            (inner.failures, inner.until) = (0, None);
            return;
        }
        // Requests that ran when it opened fail together: they are one reason to wait, and not many.
        if inner.until.is_some() && !is_trial {
            return;
        }
        inner.failures = inner.failures.saturating_add(1);
        if let Some(more) = inner.failures.checked_sub(FAILURES) {
            let pause = FIRST_PAUSE.saturating_mul(1 << more.min(16)).min(LONGEST_PAUSE);
            inner.until = Some(Instant::now() + pause);
        }
    }

    /// What requests may do now.
    pub fn state(&self) -> State {
        let inner = self.0.lock();
        match inner.until {
            None => State::Closed,
            Some(_) if inner.has_trial => State::Trial,
            Some(_) => State::Open,
        }
    }
}

impl Pass {
    /// [`Breaker::ended`]
    pub fn ended(self, has_worked: bool) {
        self.breaker.count(has_worked, self.is_trial);
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if self.is_trial {
            self.breaker.0.lock().has_trial = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_upstream_that_keeps_failing_is_tried_by_one_request_at_a_time() {
        let breaker = Arc::new(Breaker::default());
        for _ in 0..FAILURES {
            assert_eq!(breaker.state(), State::Closed);
            breaker.pass().unwrap().ended(false);
        }
        assert_eq!(breaker.state(), State::Open);
        assert_eq!(breaker.pass().err(), Some(FIRST_PAUSE));
        tokio::time::advance(FIRST_PAUSE).await;
        let trial = breaker.pass().unwrap();
        assert_eq!(breaker.state(), State::Trial);
        assert!(breaker.pass().is_err());
        trial.ended(false);
        assert_eq!(breaker.pass().err(), Some(FIRST_PAUSE * 2));
        tokio::time::advance(FIRST_PAUSE * 2).await;
        // A request that was cancelled says nothing.
        drop(breaker.pass().unwrap());
        breaker.pass().unwrap().ended(true);
        assert_eq!(breaker.state(), State::Closed);
        breaker.pass().unwrap().ended(false);
        assert!(breaker.pass().is_ok());
    }

    /// An upstream that was restarted was not asked for five minutes, as each of its many requests had doubled the
    /// time.
    #[tokio::test(start_paused = true)]
    async fn requests_that_fail_together_do_not_lengthen_the_pause() {
        let breaker = Arc::new(Breaker::default());
        let passes: Vec<_> = (0..64).map(|_| breaker.pass().unwrap()).collect();
        passes.into_iter().for_each(|pass| pass.ended(false));
        (0..64).for_each(|_| breaker.ended(false));
        assert_eq!(breaker.pass().err(), Some(FIRST_PAUSE));
        tokio::time::advance(FIRST_PAUSE).await;
        assert!(breaker.pass().is_ok());
    }
}
