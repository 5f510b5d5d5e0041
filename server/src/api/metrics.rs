//! Metrics for Prometheus, as OpenMetrics text.
//!
//! The server counts requests, their tokens and times in [`Metrics`]. What others count (engines, policies, the
//! process) is read at each scrape into a temporary registry, so no number exists twice.

mod engines;
mod policies;
mod process;
mod replies;
mod upstreams;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::http::StatusCode;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry, Unit};
use steersman_engine::request::Usage;

pub use self::engines::accounts;
use self::engines::register_engines;
pub use self::policies::breaker_state;
use self::policies::register_policies;
use self::process::{register_build, register_process};
use self::replies::Replies;
pub use self::replies::ReplyMetrics;
use self::upstreams::register_upstreams;
use super::response_store::ResponseStore;
use crate::connections::{Connections, Counts};
use crate::models::Models;
use crate::reload::ReloadCounts;

/// OpenMetrics 1.0, which Prometheus also reads.
pub const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The text format before it, which `promtool check metrics` and some collectors read.
pub const PLAIN: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Outcome of a request for a reply: `2xx`, `4xx`, `5xx` or `cancelled`.
type Outcome = [(&'static str, &'static str); 1];

/// The label `reason`.
type Reason = [(&'static str, &'static str); 1];

/// The label `result`.
type ReloadResult = [(&'static str, &'static str); 1];

/// The label `model`.
type Model = [(&'static str, String); 1];

const CANCELLED: &str = "cancelled";

/// All outcomes.
const CLASSES: [&str; 4] = ["2xx", "4xx", "5xx", CANCELLED];

/// Counters since the start of the server.
pub struct Metrics {
    requests: Family<Outcome, Counter>,
    unauthorized: Counter,
    refused: Family<Reason, Counter>,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    completion_tokens: Counter,
    replies: Replies,
    /// Replies that began, and the microseconds until then. The histograms cannot be read.
    first_tokens: AtomicU64,
    first_token_us: AtomicU64,
}

impl Default for Metrics {
    fn default() -> Self {
        let requests = Family::default();
        // A rate needs a zero before the first request of a class.
        for class in CLASSES {
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
            replies: Replies::default(),
            first_tokens: AtomicU64::default(),
            first_token_us: AtomicU64::default(),
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

    /// Counts a chat request that was rejected or failed; returns the class of its status.
    pub fn failed(&self, status: StatusCode) -> &'static str {
        let class = if status.is_client_error() { "4xx" } else { "5xx" };
        self.count(class);
        class
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

    /// The series of replies of one model, profile and route.
    pub fn of_replies(&self, model: &str, profile: &str, route: &str) -> ReplyMetrics {
        self.replies.of(model, profile, route)
    }

    /// Observes a request for a reply that ended before its model and profile were known.
    pub fn ended_early(&self, route: &str, status: &'static str, total: Duration) {
        self.replies.ended_early(route, status, total);
    }

    /// Counts a reply that began after `elapsed`.
    pub fn first_token(&self, elapsed: Duration) {
        let microseconds = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        self.first_token_us.fetch_add(microseconds, Ordering::Relaxed);
        self.first_tokens.fetch_add(1, Ordering::Relaxed);
    }

    /// The replies that began, and the microseconds until then, all together.
    pub fn first_tokens(&self) -> (u64, u64) {
        let count = self.first_tokens.load(Ordering::Relaxed);
        (count, self.first_token_us.load(Ordering::Relaxed))
    }

    /// The requests for replies that ended, in whatever way.
    pub fn ended(&self) -> u64 {
        let count = |class| self.requests.get_or_create(&[("status", class)]).get();
        CLASSES.into_iter().map(count).sum()
    }

    fn count(&self, outcome: &'static str) {
        self.requests.get_or_create(&[("status", outcome)]).inc();
    }

    fn register(&self, registry: &mut Registry) {
        let help = "Requests for replies by status class, `cancelled` if the client disconnected";
        register(registry, "requests", help, self.requests.clone());
        let help = "HTTP requests refused for their Host or Origin";
        register(registry, "refused_requests", help, self.refused.clone());
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
            register(registry, name, help, counter.clone());
        }
        self.replies.register(registry);
    }
}

/// The current values as text: those of `metrics` and of the other parts of the server.
pub fn text(
    metrics: &Metrics,
    models: &Models,
    responses: Option<&ResponseStore>,
    connections: Option<&Connections>,
    reloads: &ReloadCounts,
) -> String {
    let mut all = Registry::default();
    register_process(all.sub_registry_with_prefix("process"));
    let registry = all.sub_registry_with_prefix("steersman");
    register_build(registry, models);
    metrics.register(registry);
    register_reloads(registry, reloads);
    if let Some(connections) = connections {
        register_connections(registry, connections);
    }
    if let Some(store) = responses {
        let help = "Responses that could not be stored";
        let failures: Counter = Counter::default();
        failures.inc_by(store.failures());
        register(registry, "responses_not_stored", help, failures);
    }
    register_engines(registry, models);
    register_policies(registry, models.policies());
    register_upstreams(registry, models.upstreams());
    let mut text = String::new();
    encode(&mut text, &all).expect("a string takes any text");
    text
}

/// Registers how reloads have ended. Prometheus has such a gauge of itself: `prometheus_config_last_reload_successful`.
fn register_reloads(registry: &mut Registry, counts: &ReloadCounts) {
    let reloads = Family::<ReloadResult, Counter>::default();
    for (result, count) in [("success", counts.succeeded()), ("failure", counts.failed())] {
        reloads.get_or_create(&[("result", result)]).inc_by(count);
    }
    register(registry, "config_reloads", "Reloads of the configuration by their result", reloads);
    let gauge = Gauge::<u64, AtomicU64>::default();
    gauge.set(counts.last_succeeded().into());
    let help = "1 unless the last reload of the configuration failed, then 0";
    register(registry, "config_last_reload_successful", help, gauge);
}

fn register_connections(registry: &mut Registry, connections: &Connections) {
    let gauge = Gauge::<u64, AtomicU64>::default();
    gauge.set(connections.count() as u64);
    register(registry, "connections", "Open connections", gauge);
    let closed = Family::<Reason, Counter>::default();
    let Counts { refused, displaced, timed_out } = &connections.counts;
    for (reason, count) in
        [("refused", refused), ("displaced", displaced), ("timed_out", timed_out)]
    {
        closed.get_or_create(&[("reason", reason)]).inc_by(count.get());
    }
    let help = "Connections that were refused, displaced by new ones, or timed out";
    register(registry, "closed_connections", help, closed);
}

/// OpenMetrics as the text format before it: `# HELP` and `# TYPE` name counters as their samples do, and there are
/// neither units nor an end.
pub fn plain(open_metrics: &str) -> String {
    let typed = open_metrics.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let counters: BTreeSet<_> = typed.filter_map(|line| line.strip_suffix(" counter")).collect();
    let mut text = String::with_capacity(open_metrics.len());
    for line in open_metrics.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("UNIT" | "EOF"), ..) => continue,
            (Some("#"), Some(kind), Some(name), Some(rest)) if counters.contains(name) => {
                text.push_str(&format!("# {kind} {name}_total {rest}"));
            }
            _ => text.push_str(line),
        }
        text.push('\n');
    }
    text
}

/// Registers a metric, whose unit is that at the end of its name.
fn register(registry: &mut Registry, name: &str, help: &str, metric: impl Metric) {
    let unit = match name.rsplit_once('_') {
        Some((base, "seconds")) => Some((base, Unit::Seconds)),
        Some((base, "bytes")) => Some((base, Unit::Bytes)),
        _ => None,
    };
    match unit {
        // The registry appends the unit.
        Some((base, unit)) => registry.register_with_unit(base, help, unit, metric),
        None => registry.register(name, help, metric),
    }
}
