//! What the server did in the last two hours, for charts.
//!
//! A sample has numbers only, and there are [`SAMPLES`] at most; for more, a monitoring system scrapes `/metrics`.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::Serialize;
use steersman_engine::Engine;
use steersman_engine::report::MemoryUse;
use steersman_upstream::Upstream;

use super::metrics::Metrics;
use crate::models::Models;

/// Most samples: those of two hours, one every ten seconds.
const SAMPLES: usize = 720;

/// The newest samples.
pub struct Samples(Mutex<State>);

struct State {
    samples: VecDeque<Sample>,
    counts: Counts,
    /// Time of the last sample, or of the start.
    last: Instant,
}

/// What the server did since the sample before.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Sample {
    /// Seconds since 1970.
    at: u64,
    /// Time since the sample before, or since the start.
    seconds: f64,
    /// Requests for replies that ended, in whatever way.
    requests: u64,
    /// Tokens of replies in a second. Those of running requests are among them, those of upstreams when they are counted.
    tokens_per_second: f64,
    /// Mean time to the first piece of the replies that began; null if none did.
    first_token_ms: Option<f64>,
    /// Requests that run now.
    running: usize,
    /// Requests that wait now.
    waiting: usize,
    /// Bytes of arrays now.
    memory_bytes: u64,
}

impl Default for Samples {
    fn default() -> Self {
        let (samples, counts) = (VecDeque::new(), Counts::default());
        Self(Mutex::new(State { samples, counts, last: Instant::now() }))
    }
}

impl Samples {
    /// Takes a sample of the time since the last one.
    pub fn take(&self, metrics: &Metrics, models: &Models) {
        let mut guard = self.0.lock();
        let state = &mut *guard;
        let seconds = state.last.elapsed().as_secs_f64();
        state.last = Instant::now();
        let sample = state.counts.sample(metrics, models, seconds);
        state.add(sample);
    }

    /// The samples later than `seconds` since 1970, oldest first.
    pub fn after(&self, seconds: u64) -> Vec<Sample> {
        self.0.lock().samples.iter().filter(|sample| sample.at > seconds).cloned().collect()
    }
}

impl State {
    fn add(&mut self, sample: Sample) {
        self.samples.push_back(sample);
        if self.samples.len() > SAMPLES {
            self.samples.pop_front();
        }
    }
}

/// What was counted at the last sample.
#[derive(Default)]
struct Counts {
    requests: u64,
    first_tokens: u64,
    first_token_us: u64,
    /// Tokens by who counts them: an engine counts from 0 when it is loaded again.
    tokens: BTreeMap<Counter, u64>,
}

/// Who counts tokens, by the name.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Counter {
    Engine(String),
    Upstream(String),
}

impl Counts {
    fn sample(&mut self, metrics: &Metrics, models: &Models, seconds: f64) -> Sample {
        let engines = models.engines();
        let upstreams: Vec<_> = models.upstreams().iter().map(Upstream::report).collect();
        let of_engines = engines.iter().map(|engine| {
            let info = engine.info();
            (Counter::Engine(info.model.clone()), info.activity.report().tokens)
        });
        let of_upstreams = upstreams.iter().map(|upstream| {
            let used = upstream.used.iter();
            let tokens: u64 = used.map(|(_, used)| used.reply_tokens + used.estimated_tokens).sum();
            (Counter::Upstream(upstream.name.clone()), tokens)
        });
        let tokens: BTreeMap<Counter, u64> = of_engines.chain(of_upstreams).collect();
        let added: u64 = tokens
            .iter()
            .map(|(counter, now)| {
                let before = self.tokens.get(counter).copied().unwrap_or_default();
                now.checked_sub(before).unwrap_or(*now)
            })
            .sum();
        let (requests, (first_tokens, first_token_us)) = (metrics.ended(), metrics.first_tokens());
        let began = first_tokens.saturating_sub(self.first_tokens);
        let waited_us = first_token_us.saturating_sub(self.first_token_us);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let sample = Sample {
            at: now.as_secs(),
            seconds: rounded(seconds),
            requests: requests.saturating_sub(self.requests),
            tokens_per_second: rounded(added as f64 / seconds.max(1e-3)),
            first_token_ms: (began > 0).then(|| rounded(waited_us as f64 / 1e3 / began as f64)),
            running: engines
                .iter()
                .map(|engine| engine.info().activity.report().running)
                .chain(upstreams.iter().map(|upstream| upstream.running))
                .sum(),
            waiting: engines
                .iter()
                .map(Engine::waiting)
                .chain(upstreams.iter().map(|upstream| upstream.waiting))
                .sum(),
            memory_bytes: memory_bytes(&engines),
        };
        *self = Self { requests, first_tokens, first_token_us, tokens };
        sample
    }
}

/// Bytes of all arrays of the process. They are counted after the first pass, accounts from the start.
fn memory_bytes(engines: &[Engine]) -> u64 {
    let uses: Vec<MemoryUse> =
        engines.iter().map(|engine| engine.info().activity.report().bytes).collect();
    let accounted = |uses: &MemoryUse| uses.weights + uses.running + uses.prefix_cache + uses.step;
    let arrays = uses.iter().map(|uses| uses.arrays).max().unwrap_or_default();
    arrays.max(uses.iter().map(accounted).sum())
}

/// With one decimal.
fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_samples_are_forgotten() {
        let samples = Samples::default();
        for at in 1..=2 * SAMPLES as u64 {
            samples.0.lock().add(Sample {
                at,
                seconds: 10.0,
                requests: 0,
                tokens_per_second: 0.0,
                first_token_ms: None,
                running: 0,
                waiting: 0,
                memory_bytes: 0,
            });
        }
        let all = samples.after(0);
        assert_eq!((all.len(), all[0].at), (SAMPLES, SAMPLES as u64 + 1));
        assert_eq!(samples.after(2 * SAMPLES as u64 - 1).len(), 1);
    }
}
