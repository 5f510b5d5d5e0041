//! Requests under policies, and the replay of what these decided.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use steersman_engine::config::{Config, Profile};
use steersman_engine::policy::{Component, Golden, PolicyConfig, Record};
use steersman_engine::request::Request;

use crate::{Reply, Running, run};

/// An engine with these profiles, and `default`.
///
/// # Panics
/// If it cannot start.
pub fn engine<'a>(profiles: impl IntoIterator<Item = (&'a str, Profile)>) -> Running {
    engine_with(profiles, |_| ())
}

/// As [`engine`], with a changed configuration.
///
/// # Panics
/// If it cannot start.
pub fn engine_with<'a>(
    profiles: impl IntoIterator<Item = (&'a str, Profile)>,
    change: impl FnOnce(&mut Config),
) -> Running {
    let mut config = crate::config();
    config.policy.deadline_ms = 10_000;
    config.profiles.extend(profiles.into_iter().map(|(name, profile)| (name.into(), profile)));
    change(&mut config);
    Running::without_store(config)
}

/// The reply to a request of `profile`, and its records.
///
/// # Panics
/// If there are none.
pub fn traced(engine: &Running, profile: &str, request: Request) -> (Reply, Vec<Record>) {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let id = format!("{profile}-{}", COUNT.fetch_add(1, Ordering::Relaxed));
    let reply = run(engine, Request { id: id.clone(), profile: profile.into(), ..request });
    let records = engine.policies().traces().get(&id).expect("the newest requests have traces");
    (reply, records)
}

/// Checks that a replay of `records` by this component decides the same, with the same fuel.
///
/// # Panics
/// If it does not.
pub fn replays(component: &[u8], name: &str, records: &[Record]) {
    let config = PolicyConfig { deadline_ms: 10_000, ..PolicyConfig::default() };
    let host = crate::host(&config);
    let component = Arc::new(Component::load(&host, name, component).unwrap());
    let lines = |record: &Record| serde_json::to_string(record).unwrap() + "\n";
    let golden = Golden::parse(&records.iter().map(lines).collect::<String>()).unwrap();
    assert_eq!(golden.inexact(), None);
    assert_eq!(golden.check(&component), []);
    for (decision, record) in golden.replay(&component).iter().zip(records) {
        assert_eq!(decision.fuel, record.cost.fuel, "{decision:?}");
    }
}
