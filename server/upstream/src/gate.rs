//! The limits of one upstream: requests at a time, requests that wait, tokens a day, and the pause that it asks for.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use steersman_request::UpstreamFault;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until};

use crate::config::UpstreamConfig;
use crate::fault::Fault;

/// Longest pause for which requests wait; for a longer one they end at once.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Longest pause after which a request tries again, whatever the upstream says: its clock may be wrong.
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

const DAY_S: u64 = 24 * 3600;

/// Lets requests to an upstream through.
pub struct Gate {
    running: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    concurrency: usize,
    queue: usize,
    tokens_per_day: u64,
    inner: Mutex<Inner>,
    /// Requests that have a place, by profile.
    of_profiles: Mutex<HashMap<String, usize>>,
    /// Told when a place is free again.
    freed: Notify,
}

/// A place among the running requests of a profile, until it is dropped.
pub struct Place<'a> {
    gate: &'a Gate,
    profile: String,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let running = &mut *self.gate.of_profiles.lock();
        if let Some(own) = running.get_mut(&self.profile) {
            *own -= 1;
            if *own == 0 {
                running.remove(&self.profile);
            }
        }
        self.gate.freed.notify_waiters();
    }
}

#[derive(Default)]
struct Inner {
    /// The end of the pause in which the upstream wants no requests.
    pause: Option<Instant>,
    /// Days since 1970, and the tokens of that day.
    today: (u64, u64),
}

/// Requests at a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crowd {
    /// Requests that run.
    pub running: usize,
    /// Requests that wait for others to end.
    pub waiting: usize,
    /// Tokens of this day.
    pub tokens_today: u64,
}

impl Gate {
    /// The gate of an upstream.
    pub fn new(config: &UpstreamConfig) -> Self {
        Self {
            running: Arc::new(Semaphore::new(config.concurrency)),
            waiting: Arc::new(Semaphore::new(config.queue)),
            concurrency: config.concurrency,
            queue: config.queue,
            tokens_per_day: config.tokens_per_day,
            inner: Mutex::default(),
            of_profiles: Mutex::default(),
            freed: Notify::new(),
        }
    }

    /// Waits until fewer than `limit` requests of `profile` have a place; 0 is no limit. A body may have many requests,
    /// and each choice is one.
    pub async fn place(&self, profile: &str, limit: usize) -> Place<'_> {
        loop {
            // Before the look, so that no place is missed.
            let freed = self.freed.notified();
            {
                let running = &mut *self.of_profiles.lock();
                let own = running.entry(profile.into()).or_default();
                if limit == 0 || *own < limit {
                    *own += 1;
                    return Place { gate: self, profile: profile.into() };
                }
            }
            freed.await;
        }
    }

    /// Waits until a request may run, and for the end of a short pause.
    ///
    /// # Errors
    /// If too many wait, the tokens of the day are used, or the pause is long.
    pub async fn enter(&self) -> Result<OwnedSemaphorePermit, Fault> {
        self.check_day()?;
        let permit = match self.running.clone().try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                let Ok(_place) = self.waiting.clone().try_acquire_owned() else {
                    let problem = format!(
                        "has {} requests here, and {} wait (concurrency, queue); try again later",
                        self.concurrency, self.queue
                    );
                    return Err(Fault::new(UpstreamFault::Busy, problem));
                };
                let permit = self.running.clone().acquire_owned().await;
                permit.map_err(|_| Fault::protocol("is not served any more"))?
            }
        };
        self.wait().await?;
        // Those before it may have used the tokens of the day.
        self.check_day()?;
        Ok(permit)
    }

    /// Waits for the end of a pause.
    ///
    /// # Errors
    /// If it is long.
    pub async fn wait(&self) -> Result<(), Fault> {
        while let Some(until) = self.pause() {
            let left = until.saturating_duration_since(Instant::now());
            if left > LONGEST_WAIT {
                let seconds = left.as_secs();
                let problem = format!("takes no more requests for {seconds} s");
                let fault = Fault::new(UpstreamFault::Busy, problem);
                return Err(Fault { retry_after: Some(left), ..fault });
            }
            sleep_until(until).await;
        }
        Ok(())
    }

    fn pause(&self) -> Option<Instant> {
        let inner = &mut *self.inner.lock();
        inner.pause = inner.pause.filter(|until| *until > Instant::now());
        inner.pause
    }

    /// The upstream wants no requests for this time.
    pub fn pause_for(&self, time: Duration) {
        let until = Instant::now() + time.min(LONGEST_PAUSE);
        let inner = &mut *self.inner.lock();
        inner.pause = Some(inner.pause.map_or(until, |before| before.max(until)));
    }

    /// Counts tokens that were used.
    pub fn count(&self, tokens: u64) {
        let (today, inner) = (today(), &mut *self.inner.lock());
        if inner.today.0 != today {
            inner.today = (today, 0);
        }
        inner.today.1 = inner.today.1.saturating_add(tokens);
    }

    fn check_day(&self) -> Result<(), Fault> {
        let limit = self.tokens_per_day;
        if limit == 0 || self.crowd().tokens_today < limit {
            return Ok(());
        }
        let left = DAY_S - now_s() % DAY_S;
        let problem = format!("has used its {limit} tokens of this day (tokens_per_day)");
        let fault = Fault::new(UpstreamFault::Busy, problem);
        Err(Fault { retry_after: Some(Duration::from_secs(left)), ..fault })
    }

    /// The requests here.
    pub fn crowd(&self) -> Crowd {
        let (day, tokens) = self.inner.lock().today;
        Crowd {
            running: self.concurrency - self.running.available_permits(),
            waiting: self.queue - self.waiting.available_permits(),
            tokens_today: if day == today() { tokens } else { 0 },
        }
    }
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

fn today() -> u64 {
    now_s() / DAY_S
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinHandle;

    use super::*;

    fn gate(change: impl FnOnce(&mut UpstreamConfig)) -> Gate {
        let mut config = UpstreamConfig::default();
        change(&mut config);
        Gate::new(&config)
    }

    /// A request that waits at the gate.
    async fn waiting(gate: &Arc<Gate>) -> JoinHandle<Result<(), Fault>> {
        let waits = tokio::spawn({
            let gate = gate.clone();
            async move { gate.enter().await.map(drop) }
        });
        while gate.crowd().waiting == 0 {
            tokio::task::yield_now().await;
        }
        waits
    }

    #[tokio::test]
    async fn requests_wait_for_others_and_no_more_than_the_queue_holds() {
        let gate = Arc::new(gate(|config| (config.concurrency, config.queue) = (1, 1)));
        let first = gate.enter().await.unwrap();
        let waits = waiting(&gate).await;
        assert!(gate.enter().await.unwrap_err().problem.contains("concurrency"));
        drop(first);
        waits.await.unwrap().unwrap();
        assert_eq!(gate.crowd().running, 0);
    }

    #[tokio::test]
    async fn a_profile_has_no_more_places_than_its_limit() {
        let gate = Arc::new(gate(|_| ()));
        let first = gate.place("a", 1).await;
        let waits = tokio::spawn({
            let gate = gate.clone();
            async move { drop(gate.place("a", 1).await) }
        });
        drop(gate.place("b", 1).await);
        drop(gate.place("a", 0).await);
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert!(!waits.is_finished());
        drop(first);
        waits.await.unwrap();
        assert!(gate.of_profiles.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_is_waited_for_unless_it_is_long() {
        let gate = gate(|_| ());
        gate.pause_for(Duration::from_secs(20));
        let before = Instant::now();
        drop(gate.enter().await.unwrap());
        assert_eq!(before.elapsed().as_secs(), 20);
        gate.pause_for(Duration::from_secs(90));
        let fault = gate.enter().await.unwrap_err();
        assert_eq!(fault.retry_after, Some(Duration::from_secs(90)));
        gate.pause_for(Duration::from_secs(1 << 40));
        assert_eq!(gate.enter().await.unwrap_err().retry_after, Some(LONGEST_PAUSE));
    }

    #[tokio::test]
    async fn the_tokens_of_a_day_are_limited() {
        let gate = gate(|config| config.tokens_per_day = 100);
        gate.count(60);
        assert!(gate.enter().await.is_ok());
        gate.count(40);
        let fault = gate.enter().await.unwrap_err();
        assert!(fault.problem.contains("tokens_per_day") && fault.retry_after.is_some());
    }

    /// All requests of a full queue passed, which were there before the tokens were used.
    #[tokio::test]
    async fn a_request_that_has_waited_finds_the_tokens_of_the_day_used() {
        let gate = Arc::new(gate(|config| (config.concurrency, config.tokens_per_day) = (1, 100)));
        let first = gate.enter().await.unwrap();
        let waits = waiting(&gate).await;
        gate.count(100);
        drop(first);
        assert!(waits.await.unwrap().unwrap_err().problem.contains("tokens_per_day"));
        assert_eq!(gate.crowd().running, 0);
    }
}
