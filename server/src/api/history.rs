//! `GET /v1/history`: what the server did in the last two hours, for charts.
//!
//! A task takes a sample every few seconds. A sample has numbers only, and there are [`SAMPLES`] at most; for more,
//! a monitoring system scrapes `/metrics`.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::{Extension, Json};
use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::Serialize;
use steersman_engine::Engine;
use steersman_engine::report::MemoryUse;
use tokio::time::{MissedTickBehavior, interval_at};

use super::app::App;
use super::error::ApiError;
use super::metrics::Metrics;
use super::query::Query;
use crate::models::Models;

/// Most samples: those of two hours, one every ten seconds.
const SAMPLES: usize = 720;

/// The newest samples.
#[derive(Default)]
pub struct History(Mutex<VecDeque<Sample>>);

/// What the server did since the sample before.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct Sample {
    /// Seconds since 1970.
    at: u64,
    /// Time since the sample before, or since the start.
    seconds: f64,
    /// Requests for replies that ended, in whatever way.
    requests: u64,
    /// Tokens of replies, those of running requests included, in a second.
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

/// Samples, oldest first.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct HistoryBody {
    samples: Vec<Sample>,
}

/// `GET /v1/history`: the samples later than `after`, in seconds since 1970.
pub async fn get(
    State(app): State<Arc<App>>,
    Extension(query): Extension<Query>,
) -> Result<Json<HistoryBody>, ApiError> {
    let after = query.number("after")?.unwrap_or_default();
    let samples = app.history.0.lock();
    let later = samples.iter().filter(|sample| sample.at > after);
    Ok(Json(HistoryBody { samples: later.cloned().collect() }))
}

impl History {
    fn add(&self, sample: Sample) {
        let mut samples = self.0.lock();
        samples.push_back(sample);
        if samples.len() > SAMPLES {
            samples.pop_front();
        }
    }
}

/// Takes a sample every `period` as long as there is the server.
pub async fn follow(app: Weak<App>, period: Duration) {
    let mut ticks = interval_at(tokio::time::Instant::now() + period, period);
    // A machine that was suspended has one sample of that time.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut counts = Counts::default();
    let mut last = Instant::now();
    loop {
        ticks.tick().await;
        let Some(app) = app.upgrade() else { return };
        let seconds = last.elapsed().as_secs_f64();
        last = Instant::now();
        app.history.add(counts.sample(&app.metrics, &app.models, seconds));
    }
}

/// What was counted at the last sample.
#[derive(Default)]
struct Counts {
    requests: u64,
    first_tokens: u64,
    first_token_us: u64,
    /// Tokens by model: an engine counts from 0 when it is loaded again.
    tokens: BTreeMap<String, u64>,
}

impl Counts {
    fn sample(&mut self, metrics: &Metrics, models: &Models, seconds: f64) -> Sample {
        let engines = models.engines();
        let tokens: BTreeMap<_, _> = engines
            .iter()
            .map(|engine| {
                let info = engine.info();
                (info.model.clone(), info.activity.report().tokens)
            })
            .collect();
        let added: u64 = tokens
            .iter()
            .map(|(model, now)| {
                let before = self.tokens.get(model).copied().unwrap_or_default();
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
            running: engines.iter().map(|engine| engine.info().activity.report().running).sum(),
            waiting: engines.iter().map(Engine::waiting).sum(),
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
        let history = History::default();
        for at in 0..2 * SAMPLES as u64 {
            history.add(Sample {
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
        let samples = history.0.lock();
        assert_eq!((samples.len(), samples[0].at), (SAMPLES, SAMPLES as u64));
    }
}
