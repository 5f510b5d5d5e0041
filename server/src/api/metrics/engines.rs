//! What the engines do: models, queue, passes, memory, prefix cache. Read at each scrape.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use steersman_engine::Engine;
use steersman_engine::report::{
    Activity, MemoryUse, PrefixCounts, PrefixReport, StepTimes, StoreCounts, StoreReport,
};
use steersman_models::pool::Report;

use super::{Model, register};
use crate::models::{Models, State as ModelState};

/// Registers the series of all models and engines.
pub fn register_engines(registry: &mut Registry, models: &Models) {
    let engines: Vec<_> = models.engines().iter().map(EngineSnapshot::new).collect();
    register_models(registry, &models.reports());
    register_activity(registry, &engines);
    register_cache(registry, &engines);
}

/// Name, help text and value of metrics of a `T`.
type Values<T> = [(&'static str, &'static str, fn(&T) -> u64)];

/// Values of one engine at the time of the scrape.
struct EngineSnapshot {
    model: Model,
    waiting: u64,
    store_enabled: bool,
    activity: Activity,
    report: PrefixReport,
}

impl EngineSnapshot {
    fn new(engine: &Engine) -> Self {
        let info = engine.info();
        let model = [("model", info.model.clone())];
        let (activity, report) = (info.activity.report(), info.prefixes.report());
        let (waiting, store_enabled) = (engine.waiting() as u64, info.store_enabled);
        Self { model, waiting, store_enabled, activity, report }
    }

    fn disk(&self) -> Option<&StoreReport> {
        self.report.disk.as_ref()
    }
}

/// Loads and unloads of models, and what is loaded.
fn register_models(registry: &mut Registry, models: &[(String, Report)]) {
    let loads = Family::<Model, Counter>::default();
    let unloads = Family::<Model, Counter>::default();
    let loaded = Family::<Model, Gauge<u64, AtomicU64>>::default();
    for (name, report) in models {
        let label = [("model", name.clone())];
        loads.get_or_create(&label).inc_by(report.loads);
        unloads.get_or_create(&label).inc_by(report.unloads);
        loaded.get_or_create(&label).set((report.state == ModelState::Loaded).into());
    }
    register(registry, "model_loads", "Loads of models on demand", loads);
    register(registry, "model_unloads", "Unloads of models that were loaded on demand", unloads);
    register(registry, "model_loaded", "1 if the model is loaded, else 0", loaded);
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
    register(registry, "step_seconds", "Time of the engine thread in steps by what it did", times);
    let help = "Tokens of replies in a second, over about the last ten";
    register(registry, "tokens_per_second", help, rates);
    register(registry, "memory_bytes", "Bytes of arrays by account", bytes);
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
    let help = "1 if the configuration enables the prefix store, else 0";
    gauge(registry, "disk_enabled", help, engines, |engine| Some(engine.store_enabled.into()));
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
    register(registry, name, help, family);
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
    register(registry, name, help, family);
}
