//! Counters of policies.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use super::failure::escaped;

/// Counters of one policy.
const MAX_COUNTERS: usize = 32;

/// Bytes of the name of a counter.
const COUNTER_BYTES: usize = 64;

/// Counters by policy and name.
#[derive(Default)]
pub struct Counters(Mutex<BTreeMap<String, PolicyCounters>>);

#[derive(Default)]
struct PolicyCounters {
    values: BTreeMap<String, u64>,
    /// Whether a call was dropped, which is reported once.
    dropped: bool,
}

impl Counters {
    /// Adds to a counter of `policy`.
    pub fn add(&self, policy: &str, name: &str, by: u64) {
        let mut all = self.0.lock();
        let counters = all.entry(policy.into()).or_default();
        if let Some(value) = counters.values.get_mut(name) {
            *value = value.saturating_add(by);
            return;
        }
        let is_valid = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let valid = (1..=COUNTER_BYTES).contains(&name.len()) && name.chars().all(is_valid);
        if valid && counters.values.len() < MAX_COUNTERS {
            counters.values.insert(name.into(), by);
        } else if !std::mem::replace(&mut counters.dropped, true) {
            let head = escaped(&name[..name.floor_char_boundary(COUNTER_BYTES)]);
            tracing::warn!(
                target: "policy",
                policy,
                counter = head,
                "counter dropped: a name has 1 to {COUNTER_BYTES} letters, digits or `_`, a policy \
                 at most {MAX_COUNTERS} counters"
            );
        }
    }

    /// Policy, counter and value; sorted.
    pub fn list(&self) -> Vec<(String, String, u64)> {
        let all = self.0.lock();
        let each =
            all.iter().flat_map(|(policy, of)| of.values.iter().map(move |one| (policy, one)));
        each.map(|(policy, (name, value))| (policy.clone(), name.clone(), *value)).collect()
    }
}
