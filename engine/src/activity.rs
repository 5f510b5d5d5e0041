//! What the engine thread does now, for other threads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Time over which the rate of tokens is taken.
const RATE_OVER: Duration = Duration::from_secs(10);

/// Weight of the newest pass in the mean of rows.
const NEWEST: f64 = 1.0 / 16.0;

/// Sequences, passes and bytes of one engine. Numbers count from its start.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Activity {
    /// Sequences that run.
    pub running: usize,
    /// Running sequences whose policy is called on a thread.
    pub awaiting_policy: usize,
    /// Requests that wait for a prefix which a sequence computes.
    pub awaiting_prefix: usize,
    /// Sequences that were preempted, and choices that wait for a turn of their profile.
    pub preempted: usize,
    /// Passes of the model over prompts and replies.
    pub passes: u64,
    /// Rows of these passes.
    pub rows: u64,
    /// Rows of a pass, the mean of about the last 16.
    pub rows_mean: f64,
    /// Tokens of replies.
    pub tokens: u64,
    /// Tokens of replies in a second, over about the last ten.
    pub tokens_per_second: f64,
    /// How often a sequence was preempted.
    pub preemptions: u64,
    /// Steps that took longer than `engine.stall_ms` while a reply was decoded.
    pub stalls: u64,
    /// Time of steps by what they did.
    pub step_times: StepTimes,
    /// Bytes of arrays.
    pub bytes: MemoryUse,
}

/// Time of the engine thread in steps, by what it did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Drafting, with the wait for the tokens that drafts follow and their commit. On a CPU, tokens of all steps are committed
    /// here.
    pub draft: Duration,
    /// Building the graph of the pass and giving it to the device. A CPU computes most of the pass meanwhile. Chunks of prompts
    /// are waited for here.
    pub pass: Duration,
    /// Waiting for sampled tokens.
    pub wait: Duration,
    /// Committing them: text, policies, limits, rewinds.
    pub commit: Duration,
}

/// Bytes of arrays by account.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Most bytes of all arrays of this process.
    pub limit: u64,
    /// All arrays of this process.
    pub arrays: u64,
    /// Weights, and whatever else loading left.
    pub weights: u64,
    /// Caches of running sequences; what they share is counted once.
    pub running: u64,
    /// The prefix cache.
    pub prefix_cache: u64,
    /// What the last step was expected to take besides: its pass, and growth of caches.
    pub step: u64,
}

/// Reports from any thread.
#[derive(Debug, Clone, Default)]
pub struct ActivityReporter(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    activity: Activity,
    rate: Rate,
    /// When the engine thread began what it does; `None` while it waits for requests.
    began: Option<Instant>,
}

/// Tokens in a second: each token counts less and less as time passes.
#[derive(Debug, Default)]
struct Rate {
    tokens: f64,
    updated: Option<Instant>,
}

impl Rate {
    /// Adds tokens; returns how many there are in a second.
    fn add(&mut self, tokens: u64, now: Instant) -> f64 {
        let passed = self.updated.map_or(0.0, |updated| (now - updated).as_secs_f64());
        self.updated = Some(now);
        self.tokens = self.tokens * (-passed / RATE_OVER.as_secs_f64()).exp() + tokens as f64;
        self.tokens / RATE_OVER.as_secs_f64()
    }
}

impl ActivityReporter {
    /// Sets the counts and times of passes to zero, after those that no request caused.
    pub(crate) fn forget_passes(&self) {
        let activity = &mut self.0.lock().activity;
        (activity.passes, activity.rows, activity.rows_mean) = (0, 0, 0.0);
        activity.step_times = StepTimes::default();
    }

    /// Counts a pass.
    pub(crate) fn add_pass(&self, rows: usize) {
        let activity = &mut self.0.lock().activity;
        activity.passes += 1;
        activity.rows += rows as u64;
        let weight = if activity.passes == 1 { 1.0 } else { NEWEST };
        activity.rows_mean += weight * (rows as f64 - activity.rows_mean);
    }

    /// Adds the times of a step.
    pub(crate) fn add_step(&self, step: StepTimes) {
        let times = &mut self.0.lock().activity.step_times;
        times.draft += step.draft;
        times.pass += step.pass;
        times.wait += step.wait;
        times.commit += step.commit;
    }

    /// Counts tokens of replies.
    pub(crate) fn add_tokens(&self, tokens: usize) {
        let state = &mut *self.0.lock();
        state.activity.tokens += tokens as u64;
        state.rate.add(tokens as u64, Instant::now());
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut Activity)) {
        change(&mut self.0.lock().activity);
    }

    /// The engine thread begins a turn of its loop, or waits for requests.
    pub(crate) fn set_busy(&self, is_busy: bool) {
        self.0.lock().began = is_busy.then(Instant::now);
    }

    /// How long the engine thread has been in the same turn of its loop; `None` while it waits for requests.
    pub fn busy_for(&self) -> Option<Duration> {
        self.0.lock().began.map(|began| began.elapsed())
    }

    /// The current values.
    pub fn report(&self) -> Activity {
        let state = &mut *self.0.lock();
        let tokens_per_second = state.rate.add(0, Instant::now());
        Activity { tokens_per_second, ..state.activity.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_follows_the_tokens_and_falls_when_there_are_none() {
        let (mut rate, start) = (Rate::default(), Instant::now());
        let after = |ms| start + Duration::from_millis(ms);
        // 50 a second for a minute.
        let steady = (0..600).map(|i| rate.add(5, after(i * 100))).last().unwrap();
        assert!((steady - 50.0).abs() < 1.0, "{steady}");
        let idle = rate.add(0, after(60_000 + 30_000));
        assert!(idle < 0.06 * steady, "{idle}");
    }

    #[test]
    fn the_mean_of_rows_follows_the_last_passes() {
        let activity = ActivityReporter::default();
        activity.add_pass(512);
        assert_eq!(activity.report().rows_mean, 512.0);
        (0..100).for_each(|_| activity.add_pass(8));
        let report = activity.report();
        assert!((report.rows_mean - 8.0).abs() < 1.0, "{report:?}");
        assert_eq!((report.passes, report.rows), (101, 512 + 800));
    }
}
