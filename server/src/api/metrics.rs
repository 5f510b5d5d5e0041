//! `GET /metrics`: counters and sizes for Prometheus, as OpenMetrics text.
//!
//! The server counts requests and their tokens in [`Metrics`]. What the engine counts (its queue,
//! the cache) is read at each scrape, into a registry that lives as long as the scrape: nothing is
//! counted twice, and no thread has to keep two numbers equal.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use steersman_engine::Engine;
use steersman_engine::prefix;
use steersman_engine::request::Usage;
use steersman_engine::store;

use super::App;

/// OpenMetrics 1.0, which Prometheus reads as it reads its own older text.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// How a chat request ended: `2xx`, `4xx`, `5xx`, or `cancelled`.
type Ended = [(&'static str, &'static str); 1];

/// Whose value: `model`.
type Model = [(&'static str, String); 1];

const CANCELLED: &str = "cancelled";

/// What the server counts, since it started.
pub struct Metrics {
    requests: Family<Ended, Counter>,
    unauthorized: Counter,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    completion_tokens: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        let requests = Family::default();
        // A rate needs the zero before the first of a class.
        for class in ["2xx", "4xx", "5xx", CANCELLED] {
            drop(requests.get_or_create(&[("status", class)]));
        }
        Self {
            requests,
            unauthorized: Counter::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            completion_tokens: Counter::default(),
        }
    }
}

impl Metrics {
    /// A chat request ended well.
    pub fn finished(&self, usage: &Usage) {
        self.ended("2xx");
        self.prompt_tokens.inc_by(usage.prompt_tokens.into());
        self.cached_tokens.inc_by(usage.cached_tokens.into());
        self.completion_tokens.inc_by((usage.reasoning_tokens + usage.answer_tokens).into());
    }

    /// A chat request was refused or failed.
    pub fn failed(&self, status: StatusCode) {
        self.ended(if status.is_client_error() { "4xx" } else { "5xx" });
    }

    /// The client of a chat request hung up.
    pub fn cancelled(&self) {
        self.ended(CANCELLED);
    }

    /// A request, of any kind, came without a valid key.
    pub fn unauthorized(&self) {
        self.unauthorized.inc();
    }

    fn ended(&self, how: &'static str) {
        self.requests.get_or_create(&[("status", how)]).inc();
    }

    fn register(&self, registry: &mut Registry) {
        let help = "Chat requests by how they ended, `cancelled` where the client hung up";
        registry.register("requests", help, self.requests.clone());
        for (name, help, counter) in [
            ("unauthorized_requests", "Requests without a valid key", &self.unauthorized),
            ("prompt_tokens", "Prompt tokens of requests that ended well", &self.prompt_tokens),
            (
                "cached_tokens",
                "Prompt tokens restored instead of computed, of requests that ended well",
                &self.cached_tokens,
            ),
            (
                "completion_tokens",
                "Tokens of thoughts and answers of requests that ended well",
                &self.completion_tokens,
            ),
        ] {
            registry.register(name, help, counter.clone());
        }
    }
}

/// All of them, as they are now.
pub async fn get(State(app): State<Arc<App>>) -> impl IntoResponse {
    let mut registry = Registry::with_prefix("steersman");
    app.metrics.register(&mut registry);
    let engines = app.models.engines().iter();
    let reports: Vec<_> = engines.map(Told::by).collect();
    let waiting = |told: &Told| Some(told.waiting);
    gauge(&mut registry, "queue_length", "Requests that wait for their turn", &reports, waiting);
    register_cache(&mut registry, &reports);
    register_policies(&mut registry, app.models.policies().counters());
    let mut body = String::new();
    text::encode(&mut body, &registry).expect("a string takes any text");
    ([(header::CONTENT_TYPE, OPEN_METRICS)], body)
}

/// Names, what they mean, and where a `T` has the values.
type Values<T> = [(&'static str, &'static str, fn(&T) -> u64)];

/// What one engine tells of a model.
struct Told {
    model: Model,
    waiting: u64,
    report: prefix::PrefixReport,
}

impl Told {
    fn by(engine: &Engine) -> Self {
        let info = engine.info();
        let model = [("model", info.model.clone())];
        Self { model, waiting: engine.waiting() as u64, report: info.prefixes.report() }
    }

    fn disk(&self) -> Option<&store::StoreReport> {
        self.report.disk.as_ref()
    }
}

fn register_cache(registry: &mut Registry, told: &[Told]) {
    let registry = registry.sub_registry_with_prefix("cache");
    let counts: &Values<prefix::PrefixCounts> = &[
        ("hits", "Requests that resumed from saved state", |c| c.hits),
        ("misses", "Requests that began from nothing", |c| c.misses),
        ("prompt_tokens", "Prompt tokens of all requests, hits and misses", |c| c.prompt_tokens),
        ("cached_tokens", "Prompt tokens restored instead of computed, of all requests", |c| {
            c.cached_tokens
        }),
        ("read_tokens", "Tokens of prefixes that were read from disk", |c| c.read_tokens),
        ("saves", "Prefixes that were kept in memory", |c| c.saves),
        ("evictions", "Pieces that left memory for the budget's sake", |c| c.evictions),
        ("ahead_tokens", "Tokens computed ahead while idle", |c| c.ahead_tokens),
    ];
    for &(name, help, count) in counts {
        counter(registry, name, help, told, |told| Some(count(&told.report.counts)));
    }
    let sizes: &Values<prefix::PrefixReport> = &[
        ("memory_prefixes", "Prefixes in memory", |r| r.memory.nodes as u64),
        ("memory_states", "Positions in memory with a state", |r| r.memory.states as u64),
        ("memory_bytes", "Bytes of state in memory", |r| r.memory.bytes),
        ("memory_budget_bytes", "Most bytes of state in memory", |r| r.memory_budget),
    ];
    for &(name, help, size) in sizes {
        gauge(registry, name, help, told, |told| Some(size(&told.report)));
    }
    let help = "1 while state is saved on disk, otherwise 0";
    let saving = |told: &Told| Some(told.disk().is_some_and(|disk| disk.off.is_none()).into());
    gauge(registry, "disk_saving", help, told, saving);
    register_disk(registry.sub_registry_with_prefix("disk"), told);
}

/// Of the models that have a disk tier.
fn register_disk(registry: &mut Registry, told: &[Told]) {
    let counts: &Values<store::StoreCounts> = &[
        ("saves", "Saves that are on disk", |c| c.saves),
        ("saved_bytes", "Bytes of tensors saved on disk", |c| c.saved_bytes),
        (
            "dropped_saves",
            "Saves that kept nothing: queue or disk full, or beyond the budget",
            |c| c.dropped_saves,
        ),
        ("evicted_parts", "Parts that left the disk for the budget's sake", |c| c.evicted_parts),
        ("damaged_parts", "Parts found damaged, and dropped", |c| c.damaged_parts),
        ("loads", "Reads that found what they asked for", |c| c.loads),
        ("loaded_bytes", "Bytes of tensors read from disk", |c| c.loaded_bytes),
    ];
    for &(name, help, count) in counts {
        counter(registry, name, help, told, |told| told.disk().map(|disk| count(&disk.counts)));
    }
    let sizes: &Values<store::StoreReport> = &[
        ("bytes", "Bytes of the budget that are used, by all models", |d| {
            d.rows.bytes + d.states.bytes + d.others.bytes
        }),
        ("budget_bytes", "Most bytes of state on disk", |d| d.budget_bytes),
        ("pinned_bytes", "Bytes kept from eviction for now", |d| d.retained.bytes),
        ("file_bytes", "Bytes that the file takes", |d| d.file_bytes),
        ("queued_bytes", "Bytes that wait to be written", |d| d.queued_bytes),
    ];
    for &(name, help, size) in sizes {
        gauge(registry, name, help, told, |told| told.disk().map(size));
    }
}

/// A counter for each model that has one.
fn counter(
    registry: &mut Registry,
    name: &str,
    help: &str,
    told: &[Told],
    value: impl Fn(&Told) -> Option<u64>,
) {
    let family = Family::<Model, Counter>::default();
    for told in told {
        if let Some(value) = value(told) {
            family.get_or_create(&told.model).inc_by(value);
        }
    }
    registry.register(name, help, family);
}

/// What policies count for themselves (grant `counters`).
fn register_policies(registry: &mut Registry, counters: Vec<(String, String, u64)>) {
    let counted = Family::<[(&str, String); 2], Counter>::default();
    for (policy, name, value) in counters {
        counted.get_or_create(&[("policy", policy), ("name", name)]).inc_by(value);
    }
    registry.register("policy_counts", "What policies counted, by their own names", counted);
}

/// A gauge for each model that has one.
fn gauge(
    registry: &mut Registry,
    name: &str,
    help: &str,
    told: &[Told],
    value: impl Fn(&Told) -> Option<u64>,
) {
    let family = Family::<Model, Gauge<u64, AtomicU64>>::default();
    for told in told {
        if let Some(value) = value(told) {
            family.get_or_create(&told.model).set(value);
        }
    }
    registry.register(name, help, family);
}
