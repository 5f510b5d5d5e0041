//! What policies do: versions, calls, failures, breakers, loops closed, and counters of their own.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use steersman_engine::policy::{Health, ParamReport, Policies, PolicyCounts, PolicyReport, Report};

use super::register;

/// States of a breaker.
const STATES: [&str; 3] = ["closed", "open", "probation"];

/// Name of a breaker's state, also in `GET /v1/policies`.
pub fn breaker_state(health: &Health) -> &'static str {
    match (health.paused, health.probation) {
        (Some(_), _) => "open",
        (None, Some(_)) => "probation",
        (None, None) => "closed",
    }
}

/// Registers the series of all policies.
pub fn register_policies(registry: &mut Registry, policies: &Policies) {
    let Report { policies: reports, params } = policies.report();
    register_versions(registry, &reports);
    register_params(registry, &params);
    register_breakers(registry, &reports);
    register_counts(registry, &policies.counts());
    let counted = Family::<[(&str, String); 2], Counter>::default();
    for (policy, name, value) in policies.counters() {
        counted.get_or_create(&[("policy", policy), ("name", name)]).inc_by(value);
    }
    register(registry, "policy_counts", "Counters of policies, by policy and name", counted);
}

/// Which policies have a version, and which.
fn register_versions(registry: &mut Registry, policies: &[PolicyReport]) {
    let active = Family::<[(&str, String); 1], Gauge<u64, AtomicU64>>::default();
    let rejected = Family::<[(&str, String); 1], Gauge<u64, AtomicU64>>::default();
    let versions = Family::<[(&str, String); 4], Gauge<u64, AtomicU64>>::default();
    for policy in policies {
        let name = [("policy", policy.name.clone())];
        active.get_or_create(&name).set(policy.is_active().into());
        rejected.get_or_create(&name).set(policy.problem.is_some().into());
        if policy.is_active() {
            let labels = [
                ("policy", policy.name.clone()),
                ("sha256", policy.sha256.clone()),
                ("contract", policy.contract.to_owned()),
                ("origin", policy.origin.name().to_owned()),
            ];
            versions.get_or_create(&labels).set(1);
        }
    }
    let help = "1 if a version of the policy is active, else 0: it fails in every request";
    register(registry, "policy_active", help, active);
    let help = "1 if the last update of the policy was rejected or rolled back, else 0";
    register(registry, "policy_update_rejected", help, rejected);
    register(registry, "policy_version_info", "The active version of each policy", versions);
}

/// Which parameters have a problem.
fn register_params(registry: &mut Registry, params: &[ParamReport]) {
    let problems = Family::<[(&str, String); 2], Gauge<u64, AtomicU64>>::default();
    for ParamReport { profile, param, problem, .. } in params {
        let labels = [("profile", profile.clone()), ("param", param.clone())];
        problems.get_or_create(&labels).set(problem.is_some().into());
    }
    let help = "1 if the contents of the file of a parameter are not used, or a policy cannot use a parameter, else 0";
    register(registry, "policy_parameter_problem", help, problems);
}

/// The breaker of each policy in each profile.
fn register_breakers(registry: &mut Registry, policies: &[PolicyReport]) {
    let states = Family::<[(&str, String); 4], Gauge<u64, AtomicU64>>::default();
    for policy in policies {
        for used in &policy.profiles {
            let now = breaker_state(&used.health);
            for state in STATES {
                let labels = [
                    ("policy", policy.name.clone()),
                    ("profile", used.profile.clone()),
                    ("role", role(used.shadow).to_owned()),
                    ("state", state.to_owned()),
                ];
                states.get_or_create(&labels).set((state == now).into());
            }
        }
    }
    let help = "1 for the state of the policy's breaker in the profile, 0 for the other states";
    register(registry, "policy_breaker", help, states);
}

/// What each policy did in each profile.
fn register_counts(registry: &mut Registry, counts: &[PolicyCounts]) {
    let calls = Family::<[(&str, String); 4], Counter>::default();
    let times = Family::<[(&str, String); 4], Counter<f64, AtomicU64>>::default();
    let failures = Family::<[(&str, String); 3], Counter>::default();
    let paused = Family::<[(&str, String); 3], Counter>::default();
    let loops = Family::<[(&str, String); 3], Counter>::default();
    for counts in counts {
        let labels = [
            ("policy", counts.policy.clone()),
            ("profile", counts.profile.clone()),
            ("role", role(counts.shadow).to_owned()),
        ];
        for of_hook in &counts.calls {
            let [policy, profile, role] = labels.clone();
            let labels = [policy, profile, role, ("hook", of_hook.hook.name().to_owned())];
            calls.get_or_create(&labels).inc_by(of_hook.calls);
            times.get_or_create(&labels).inc_by(of_hook.nanoseconds as f64 / 1e9);
        }
        failures.get_or_create(&labels).inc_by(counts.failures);
        paused.get_or_create(&labels).inc_by(counts.paused);
        loops.get_or_create(&labels).inc_by(counts.loops_closed);
    }
    register(registry, "policy_calls", "Calls of policies by hook", calls);
    register(registry, "policy_call_seconds", "Time of these calls", times);
    let help = "Requests in which a policy failed";
    register(registry, "policy_failures", help, failures);
    let help = "Requests that began while a policy was paused because it had failed too often";
    register(registry, "policy_paused_requests", help, paused);
    let help = "Loops after which a policy, or the native one in its place, closed the reasoning or ended the reply";
    register(registry, "policy_loops_closed", help, loops);
}

/// What a policy is in a profile.
fn role(is_shadow: bool) -> &'static str {
    if is_shadow { "shadow" } else { "applied" }
}
