//! `GET /metrics`: counters and sizes for Prometheus, as OpenMetrics text.
//!
//! The server counts requests and their tokens in [`Metrics`]. What the engine counts (its queue,
//! the cache) is read at each scrape, into a registry that lives as long as the scrape: nothing is
//! counted twice, and no thread has to keep two numbers equal.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use steersman_engine::prefix;
use steersman_engine::request::Usage;
use steersman_engine::store;

use super::App;

/// OpenMetrics 1.0, which Prometheus reads as it reads its own older text.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// How a chat request ended: `2xx`, `4xx`, `5xx`, or `cancelled`.
type Ended = [(&'static str, &'static str); 1];

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
    let waiting = app.engine.waiting() as u64;
    gauge(&mut registry, "queue_length", "Requests that wait for their turn", waiting);
    register_cache(&mut registry, &app.engine.info().prefixes.report());
    register_policies(&mut registry, app.engine.policies().counters());
    let mut body = String::new();
    text::encode(&mut body, &registry).expect("a string takes any text");
    ([(header::CONTENT_TYPE, OPEN_METRICS)], body)
}

fn register_cache(registry: &mut Registry, report: &prefix::Report) {
    let prefix::Report { counts, memory, memory_budget, disk } = report;
    let registry = registry.sub_registry_with_prefix("cache");
    for (name, help, value) in [
        ("hits", "Requests that resumed from saved state", counts.hits),
        ("misses", "Requests that began from nothing", counts.misses),
        ("prompt_tokens", "Prompt tokens of all requests, hits and misses", counts.prompt_tokens),
        (
            "cached_tokens",
            "Prompt tokens restored instead of computed, of all requests",
            counts.cached_tokens,
        ),
        ("read_tokens", "Tokens of prefixes that were read from disk", counts.read_tokens),
        ("saves", "Prefixes that were kept in memory", counts.saves),
        ("evictions", "Pieces that left memory for the budget's sake", counts.evictions),
        ("ahead_tokens", "Tokens computed ahead while idle", counts.ahead_tokens),
    ] {
        counter(registry, name, help, value);
    }
    for (name, help, value) in [
        ("memory_prefixes", "Prefixes in memory", memory.nodes as u64),
        ("memory_states", "Positions in memory with a state", memory.states as u64),
        ("memory_bytes", "Bytes of state in memory", memory.bytes),
        ("memory_budget_bytes", "Most bytes of state in memory", *memory_budget),
    ] {
        gauge(registry, name, help, value);
    }
    let saving = disk.as_ref().is_some_and(|disk| disk.off.is_none());
    gauge(registry, "disk_saving", "1 while state is saved on disk, otherwise 0", saving.into());
    if let Some(disk) = disk {
        register_disk(registry.sub_registry_with_prefix("disk"), disk);
    }
}

fn register_disk(registry: &mut Registry, disk: &store::Report) {
    let counts = disk.counts;
    for (name, help, value) in [
        ("saves", "Saves that are on disk", counts.saves),
        ("saved_bytes", "Bytes of tensors saved on disk", counts.saved_bytes),
        (
            "dropped_saves",
            "Saves that kept nothing: queue or disk full, or beyond the budget",
            counts.dropped_saves,
        ),
        ("evicted_parts", "Parts that left the disk for the budget's sake", counts.evicted_parts),
        ("damaged_parts", "Parts found damaged, and dropped", counts.damaged_parts),
        ("loads", "Reads that found what they asked for", counts.loads),
        ("loaded_bytes", "Bytes of tensors read from disk", counts.loaded_bytes),
    ] {
        counter(registry, name, help, value);
    }
    let bytes = disk.rows.bytes + disk.states.bytes + disk.others.bytes;
    for (name, help, value) in [
        ("bytes", "Bytes of the budget that are used, by all models", bytes),
        ("budget_bytes", "Most bytes of state on disk", disk.budget_bytes),
        ("pinned_bytes", "Bytes kept from eviction for now", disk.pinned.bytes),
        ("file_bytes", "Bytes that the file takes", disk.file_bytes),
        ("queued_bytes", "Bytes that wait to be written", disk.queued_bytes),
    ] {
        gauge(registry, name, help, value);
    }
}

/// What policies count for themselves (grant `counters`).
fn register_policies(registry: &mut Registry, counters: Vec<(String, String, u64)>) {
    let counted = Family::<[(&str, String); 2], Counter>::default();
    for (policy, name, value) in counters {
        counted.get_or_create(&[("policy", policy), ("name", name)]).inc_by(value);
    }
    registry.register("policy_counts", "What policies counted, by their own names", counted);
}

fn counter(registry: &mut Registry, name: &str, help: &str, value: u64) {
    registry.register(name, help, ConstCounter::new(value));
}

fn gauge(registry: &mut Registry, name: &str, help: &str, value: u64) {
    registry.register(name, help, ConstGauge::new(value));
}
