//! What upstreams do: requests, failures and tokens by model, profile and key, and their limits now.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use steersman_upstream::{BreakerState, Upstream, Used};

use super::register;

/// Counts by upstream, model, profile and key, and by what is counted where there are several.
type Counts = Family<Vec<(&'static str, String)>, Counter>;

/// Registers the series of all upstreams.
pub fn register_upstreams(registry: &mut Registry, upstreams: &[Upstream]) {
    if upstreams.is_empty() {
        return;
    }
    let (requests, failures, tokens) = (Counts::default(), Counts::default(), Counts::default());
    let crowds = Family::<[(&str, String); 2], Gauge<u64, AtomicU64>>::default();
    let breakers = Family::<[(&str, String); 2], Gauge<u64, AtomicU64>>::default();
    let today = Family::<[(&str, String); 1], Gauge<u64, AtomicU64>>::default();
    for report in upstreams.iter().map(Upstream::report) {
        let upstream = ("upstream", report.name);
        for (who, used) in report.used {
            let labels = vec![
                upstream.clone(),
                ("model", who.model),
                ("profile", who.profile),
                ("key", who.key),
            ];
            let Used { prompt_tokens, cached_tokens, reply_tokens, estimated_tokens, .. } = used;
            requests.get_or_create(&labels).inc_by(used.requests);
            failures.get_or_create(&labels).inc_by(used.failures);
            let kinds = [
                ("prompt", prompt_tokens),
                ("cached", cached_tokens),
                ("reply", reply_tokens),
                ("reply_estimated", estimated_tokens),
            ];
            for (kind, count) in kinds {
                let mut labels = labels.clone();
                labels.push(("kind", kind.to_owned()));
                tokens.get_or_create(&labels).inc_by(count);
            }
        }
        for (state, count) in [("running", report.running), ("waiting", report.waiting)] {
            let labels = [upstream.clone(), ("state", state.to_owned())];
            crowds.get_or_create(&labels).set(count as u64);
        }
        for state in [BreakerState::Closed, BreakerState::Open, BreakerState::Trial] {
            let labels = [upstream.clone(), ("state", state.name().to_owned())];
            breakers.get_or_create(&labels).set((state == report.breaker).into());
        }
        today.get_or_create(&[upstream]).set(report.tokens_today);
    }
    let help = "Requests to upstreams, repetitions and continuations included";
    register(registry, "upstream_requests", help, requests);
    register(registry, "upstream_failures", "Requests to upstreams that failed", failures);
    let help =
        "Tokens that upstreams counted, by kind, and estimates for replies that were cut before";
    register(registry, "upstream_tokens", help, tokens);
    let help = "Requests to upstreams that run, or wait for others to end";
    register(registry, "upstream_requests_now", help, crowds);
    let help = "1 for the state of the upstream's breaker, 0 for the other states";
    register(registry, "upstream_breaker", help, breakers);
    let help =
        "Tokens of the upstream of this day (UTC), which upstreams.NAME.tokens_per_day limits";
    register(registry, "upstream_tokens_today", help, today);
}
