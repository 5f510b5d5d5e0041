//! Counters and gauges for Prometheus, as OpenMetrics text.
//!
//! The server counts requests and their tokens in [`Metrics`]. The engine's values (queue, cache) are
//! read at each scrape into a temporary registry, so no number exists twice.

use std::sync::atomic::AtomicU64;

use axum::http::StatusCode;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use steersman_engine::Engine;
use steersman_engine::policy::PolicyReport;
use steersman_engine::report::{
    Activity, MemoryUse, PrefixCounts, PrefixReport, StepTimes, StoreCounts, StoreReport,
};
use steersman_engine::request::Usage;
use steersman_models::pool::Report;

use super::response_store::ResponseStore;
use crate::connections::{Connections, Counts};
use crate::models::{Models, State as ModelState};

/// OpenMetrics 1.0, which Prometheus also reads.
pub const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Outcome of a request for a reply: `2xx`, `4xx`, `5xx` or `cancelled`.
type Outcome = [(&'static str, &'static str); 1];

/// The label `reason`.
type Reason = [(&'static str, &'static str); 1];

/// The label `model`.
type Model = [(&'static str, String); 1];

const CANCELLED: &str = "cancelled";

/// Counters since the start of the server.
pub struct Metrics {
    requests: Family<Outcome, Counter>,
    unauthorized: Counter,
    refused: Family<Reason, Counter>,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    completion_tokens: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        let requests = Family::default();
        // A rate needs a zero before the first request of a class.
        for class in ["2xx", "4xx", "5xx", CANCELLED] {
            drop(requests.get_or_create(&[("status", class)]));
        }
        let refused = Family::default();
        for reason in ["host_not_allowed", "origin_not_allowed", "invalid_host"] {
            drop(refused.get_or_create(&[("reason", reason)]));
        }
        Self {
            requests,
            unauthorized: Counter::default(),
            refused,
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            completion_tokens: Counter::default(),
        }
    }
}

impl Metrics {
    /// Counts a chat request that succeeded.
    pub fn finished(&self, usage: &Usage) {
        self.count("2xx");
        self.prompt_tokens.inc_by(usage.prompt_tokens.into());
        self.cached_tokens.inc_by(usage.cached_tokens.into());
        self.completion_tokens.inc_by(usage.reply_tokens().into());
    }

    /// Counts a chat request that was rejected or failed.
    pub fn failed(&self, status: StatusCode) {
        self.count(if status.is_client_error() { "4xx" } else { "5xx" });
    }

    /// Counts a chat request whose client disconnected.
    pub fn cancelled(&self) {
        self.count(CANCELLED);
    }

    /// Counts an HTTP request without a valid key.
    pub fn unauthorized(&self) {
        self.unauthorized.inc();
    }

    /// Counts an HTTP request that was refused for its `Host` or `Origin`.
    pub fn refused(&self, reason: &'static str) {
        self.refused.get_or_create(&[("reason", reason)]).inc();
    }

    fn count(&self, outcome: &'static str) {
        self.requests.get_or_create(&[("status", outcome)]).inc();
    }

    fn register(&self, registry: &mut Registry) {
        let help = "Requests for replies by status class, `cancelled` if the client disconnected";
        registry.register("requests", help, self.requests.clone());
        let help = "HTTP requests refused for their Host or Origin";
        registry.register("refused_requests", help, self.refused.clone());
        for (name, help, counter) in [
            ("unauthorized_requests", "HTTP requests without a valid key", &self.unauthorized),
            ("prompt_tokens", "Prompt tokens of successful requests", &self.prompt_tokens),
            (
                "cached_tokens",
                "Prompt tokens of successful requests restored instead of computed",
                &self.cached_tokens,
            ),
            (
                "completion_tokens",
                "Reasoning and answer tokens of successful requests",
                &self.completion_tokens,
            ),
        ] {
            registry.register(name, help, counter.clone());
        }
    }
}

/// The current values as text: those of `metrics` and of the other parts of the server.
pub fn text(
    metrics: &Metrics,
    models: &Models,
    responses: Option<&ResponseStore>,
    connections: Option<&Connections>,
) -> String {
    let mut registry = Registry::with_prefix("steersman");
    metrics.register(&mut registry);
    if let Some(connections) = connections {
        register_connections(&mut registry, connections);
    }
    if let Some(store) = responses {
        let help = "Responses that could not be stored";
        let failures: Counter = Counter::default();
        failures.inc_by(store.failures());
        registry.register("responses_not_stored", help, failures);
    }
    let engines = models.engines();
    let reports: Vec<_> = engines.iter().map(EngineSnapshot::new).collect();
    register_models(&mut registry, &models.reports());
    register_activity(&mut registry, &reports);
    register_cache(&mut registry, &reports);
    let policies = models.policies();
    register_policies(&mut registry, policies.counters(), &policies.report().policies);
    let mut text = String::new();
    encode(&mut text, &registry).expect("a string takes any text");
    text
}

/// Name, help text and value of metrics of a `T`.
type Values<T> = [(&'static str, &'static str, fn(&T) -> u64)];

/// Values of one engine at the time of the scrape.
struct EngineSnapshot {
    model: Model,
    waiting: u64,
    activity: Activity,
    report: PrefixReport,
}

impl EngineSnapshot {
    fn new(engine: &Engine) -> Self {
        let info = engine.info();
        let model = [("model", info.model.clone())];
        let (activity, report) = (info.activity.report(), info.prefixes.report());
        Self { model, waiting: engine.waiting() as u64, activity, report }
    }

    fn disk(&self) -> Option<&StoreReport> {
        self.report.disk.as_ref()
    }
}

fn register_connections(registry: &mut Registry, connections: &Connections) {
    let gauge = Gauge::<u64, AtomicU64>::default();
    gauge.set(connections.count() as u64);
    registry.register("connections", "Open connections", gauge);
    let closed = Family::<Reason, Counter>::default();
    let Counts { refused, displaced, timed_out } = &connections.counts;
    for (reason, count) in
        [("refused", refused), ("displaced", displaced), ("timed_out", timed_out)]
    {
        closed.get_or_create(&[("reason", reason)]).inc_by(count.get());
    }
    let help = "Connections that were refused, displaced by new ones, or timed out";
    registry.register("closed_connections", help, closed);
}

/// Loads and unloads of models, and what is loaded.
fn register_models(registry: &mut Registry, models: &[(&str, Report)]) {
    let loads = Family::<Model, Counter>::default();
    let unloads = Family::<Model, Counter>::default();
    let loaded = Family::<Model, Gauge<u64, AtomicU64>>::default();
    for (name, report) in models {
        let label = [("model", (*name).to_string())];
        loads.get_or_create(&label).inc_by(report.loads);
        unloads.get_or_create(&label).inc_by(report.unloads);
        loaded.get_or_create(&label).set((report.state == ModelState::Loaded).into());
    }
    registry.register("model_loads", "Loads of models on demand", loads);
    registry.register("model_unloads", "Unloads of models that were loaded on demand", unloads);
    registry.register("model_loaded", "1 if the model is loaded, else 0", loaded);
}

/// What runs and waits, and the bytes of it.
fn register_activity(registry: &mut Registry, engines: &[EngineSnapshot]) {
    let values: &Values<EngineSnapshot> = &[
        ("queue_length", "Requests waiting in the queue", |e| e.waiting),
        ("running_requests", "Requests that are decoded", |e| e.activity.running as u64),
        ("awaiting_policy_requests", "Running requests whose policy is called on a thread", |e| {
            e.activity.awaiting_policy as u64
        }),
        (
            "awaiting_prefix_requests",
            "Requests that wait for a prefix that another computes",
            |e| e.activity.awaiting_prefix as u64,
        ),
        ("preempted_requests", "Requests that wait for memory", |e| e.activity.preempted as u64),
        ("memory_limit_bytes", "Most bytes of all arrays", |e| e.activity.bytes.limit),
    ];
    for &(name, help, value) in values {
        gauge(registry, name, help, engines, |engine| Some(value(engine)));
    }
    let counts: &Values<Activity> = &[
        ("passes", "Passes of the model over prompts and replies", |a| a.passes),
        ("pass_rows", "Rows of these passes", |a| a.rows),
        ("generated_tokens", "Tokens of replies, those of running requests included", |a| a.tokens),
        ("preemptions", "Requests that gave up their memory for others", |a| a.preemptions),
        ("stalls", "Steps longer than engine.stall_ms while a reply was decoded", |a| a.stalls),
    ];
    for &(name, help, count) in counts {
        counter(registry, name, help, engines, |engine| Some(count(&engine.activity)));
    }
    let rates = Family::<Model, Gauge<f64, AtomicU64>>::default();
    let bytes = Family::<[(&str, String); 2], Gauge<u64, AtomicU64>>::default();
    let times = Family::<[(&str, String); 2], Counter<f64, AtomicU64>>::default();
    for EngineSnapshot { model: [(label, name)], activity, .. } in engines {
        rates.get_or_create(&[(*label, name.clone())]).set(activity.tokens_per_second);
        for (account, count) in accounts(&activity.bytes) {
            let labels = [("model", name.clone()), ("account", account.to_string())];
            bytes.get_or_create(&labels).set(count);
        }
        let StepTimes { draft, pass, wait, commit } = activity.step_times;
        for (part, time) in [("draft", draft), ("pass", pass), ("wait", wait), ("commit", commit)] {
            let labels = [("model", name.clone()), ("part", part.to_string())];
            times.get_or_create(&labels).inc_by(time.as_secs_f64());
        }
    }
    registry.register("step_seconds", "Time of the engine thread in steps by what it did", times);
    let help = "Tokens of replies in a second, over about the last ten";
    registry.register("tokens_per_second", help, rates);
    registry.register("memory_bytes", "Bytes of arrays by account", bytes);
}

/// Bytes of arrays by account.
pub fn accounts(bytes: &MemoryUse) -> [(&'static str, u64); 5] {
    let MemoryUse { limit: _, arrays, weights, running, prefix_cache, step } = *bytes;
    let accounts = [arrays, weights, running, prefix_cache, step];
    let names = ["arrays", "weights", "running", "prefix_cache", "step"];
    std::array::from_fn(|i| (names[i], accounts[i]))
}

fn register_cache(registry: &mut Registry, engines: &[EngineSnapshot]) {
    let registry = registry.sub_registry_with_prefix("cache");
    let counts: &Values<PrefixCounts> = &[
        ("hits", "Requests that resumed from saved state", |c| c.hits),
        ("misses", "Requests that found no saved state", |c| c.misses),
        ("prompt_tokens", "Prompt tokens of hits and misses", |c| c.prompt_tokens),
        ("cached_tokens", "Prompt tokens restored instead of computed", |c| c.cached_tokens),
        ("read_tokens", "Tokens of prefixes read from disk", |c| c.read_tokens),
        ("saves", "Prefixes saved in memory", |c| c.saves),
        ("evictions", "Entries evicted from memory to meet the budget", |c| c.evictions),
        ("ahead_tokens", "Tokens computed while idle by prefix prefetch", |c| c.ahead_tokens),
    ];
    for &(name, help, count) in counts {
        counter(registry, name, help, engines, |engine| Some(count(&engine.report.counts)));
    }
    let sizes: &Values<PrefixReport> = &[
        ("memory_prefixes", "Prefixes in memory", |r| r.memory.nodes as u64),
        ("memory_states", "Positions in memory with a recurrent state", |r| r.memory.states as u64),
        ("memory_bytes", "Bytes of state in memory", |r| r.memory.bytes),
        ("memory_budget_bytes", "Budget of state in memory, in bytes", |r| r.memory_budget),
    ];
    for &(name, help, size) in sizes {
        gauge(registry, name, help, engines, |engine| Some(size(&engine.report)));
    }
    let help = "1 if state is saved on disk, else 0";
    let saving =
        |engine: &EngineSnapshot| Some(engine.disk().is_some_and(|disk| disk.off.is_none()).into());
    gauge(registry, "disk_saving", help, engines, saving);
    register_disk(registry.sub_registry_with_prefix("disk"), engines);
}

/// Metrics of engines that save state on disk.
fn register_disk(registry: &mut Registry, engines: &[EngineSnapshot]) {
    let counts: &Values<StoreCounts> = &[
        ("saves", "Saves written to disk", |c| c.saves),
        ("saved_bytes", "Bytes of tensors saved on disk", |c| c.saved_bytes),
        ("dropped_saves", "Saves dropped: queue or disk full, or over the budget", |c| {
            c.dropped_saves
        }),
        ("evicted_parts", "Parts evicted from disk to meet the budget", |c| c.evicted_parts),
        ("damaged_parts", "Damaged parts that were dropped", |c| c.damaged_parts),
        ("loads", "Successful reads", |c| c.loads),
        ("loaded_bytes", "Bytes of tensors read from disk", |c| c.loaded_bytes),
    ];
    for &(name, help, count) in counts {
        counter(registry, name, help, engines, |engine| {
            engine.disk().map(|disk| count(&disk.counts))
        });
    }
    let sizes: &Values<StoreReport> = &[
        ("bytes", "Bytes of the budget in use, by all models", |d| {
            d.rows.bytes + d.states.bytes + d.others.bytes
        }),
        ("budget_bytes", "Budget of state on disk, in bytes", |d| d.budget_bytes),
        ("pinned_bytes", "Bytes retained, and so protected from eviction", |d| d.retained.bytes),
        ("file_bytes", "Size of the file in bytes", |d| d.file_bytes),
        ("queued_bytes", "Bytes waiting to be written", |d| d.queued_bytes),
    ];
    for &(name, help, size) in sizes {
        gauge(registry, name, help, engines, |engine| engine.disk().map(size));
    }
}

/// Registers a counter with the values of all engines that have one.
fn counter(
    registry: &mut Registry,
    name: &str,
    help: &str,
    engines: &[EngineSnapshot],
    value: impl Fn(&EngineSnapshot) -> Option<u64>,
) {
    let family = Family::<Model, Counter>::default();
    for engine in engines {
        if let Some(value) = value(engine) {
            family.get_or_create(&engine.model).inc_by(value);
        }
    }
    registry.register(name, help, family);
}

/// Counters of policies (grant `counters`), and which policies have a version.
fn register_policies(
    registry: &mut Registry,
    counters: Vec<(String, String, u64)>,
    policies: &[PolicyReport],
) {
    let active = Family::<[(&str, String); 1], Gauge<u64, AtomicU64>>::default();
    for policy in policies {
        active.get_or_create(&[("policy", policy.name.clone())]).set(policy.is_active().into());
    }
    let help = "1 if a version of the policy is active, else 0: it fails in every request";
    registry.register("policy_active", help, active);
    let counted = Family::<[(&str, String); 2], Counter>::default();
    for (policy, name, value) in counters {
        counted.get_or_create(&[("policy", policy), ("name", name)]).inc_by(value);
    }
    registry.register("policy_counts", "Counters of policies, by policy and name", counted);
}

/// Registers a gauge with the values of all engines that have one.
fn gauge(
    registry: &mut Registry,
    name: &str,
    help: &str,
    engines: &[EngineSnapshot],
    value: impl Fn(&EngineSnapshot) -> Option<u64>,
) {
    let family = Family::<Model, Gauge<u64, AtomicU64>>::default();
    for engine in engines {
        if let Some(value) = value(engine) {
            family.get_or_create(&engine.model).set(value);
        }
    }
    registry.register(name, help, family);
}
