//! What is in force at a moment, and what requests get of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};

use super::super::breaker::Breaker;
use super::super::wasm::Component;
use super::hex;
use super::place::{Rules, Source};
use super::report::Problem;
use super::versions::Origin;
use crate::config::{PolicyConfig, Profile};

/// Compiled versions that are held behind the one in force, for when it is condemned.
const EARLIER: usize = 2;

/// What is in force now.
#[derive(Default)]
pub struct State {
    pub slots: BTreeMap<String, Slot>,
    pub params: BTreeMap<String, Params>,
    /// What a request of each profile gets; made anew by [`State::resolve`] whenever the rest
    /// changes.
    pub entries: BTreeMap<String, Arc<Entry>>,
}

/// A policy.
pub struct Slot {
    pub current: Arc<Version>,
    /// What ran before, oldest first, at most [`EARLIER`].
    pub earlier: Vec<Arc<Version>>,
    /// Digest of its file as it was last looked at: the same is not tried again.
    pub seen: Option<[u8; 32]>,
    pub problem: Option<Problem>,
}

/// A component with what is known of it.
pub struct Version {
    pub component: Arc<Component>,
    pub bytes: usize,
    pub origin: Origin,
    pub since: u64,
    pub breaker: Arc<Breaker>,
}

/// The parameters of a profile.
#[derive(Default)]
pub struct Params {
    pub texts: Arc<BTreeMap<String, String>>,
    /// By parameter.
    pub problems: BTreeMap<String, Problem>,
}

/// What a request of a profile gets.
pub struct Entry {
    /// Its policies, and whether they are shadows.
    pub links: Vec<(Arc<Version>, bool)>,
    pub params: Arc<BTreeMap<String, String>>,
    pub digest: [u8; 32],
}

impl State {
    /// A policy that is known to be there.
    pub fn slot(&mut self, policy: &str) -> &mut Slot {
        self.slots.get_mut(policy).expect("every place has a slot")
    }

    /// Takes back what was condemned, and says what and why.
    pub fn condemned(&mut self) -> Vec<(String, Arc<Version>, String)> {
        let mut all = Vec::new();
        for (policy, slot) in &mut self.slots {
            let Some(why) = slot.current.breaker.condemned() else { continue };
            let Some(before) = slot.earlier.pop() else { continue };
            let version = std::mem::replace(&mut slot.current, before);
            let sha256 = hex(&version.component.sha256());
            slot.problem = Some(Problem::now(format!(
                "policy `{policy}`: {sha256} {why}; the version before it is back"
            )));
            all.push((policy.clone(), version, why));
        }
        all
    }

    /// Makes what requests get.
    pub fn resolve(&mut self, profiles: &BTreeMap<String, Rules>, limits: &PolicyConfig) {
        let entry = |(name, rules): (&String, &Rules)| {
            let link =
                |(policy, shadow): &(String, bool)| (self.slots[policy].current.clone(), *shadow);
            let links: Vec<_> = rules.chain.iter().map(link).collect();
            let params = self.params[name].texts.clone();
            let digest = digest(limits, &rules.profile, &links, &params);
            (name.clone(), Arc::new(Entry { links, params, digest }))
        };
        self.entries = profiles.iter().map(entry).collect();
    }
}

impl Slot {
    /// A policy that begins with `version`.
    pub fn new(version: Version) -> Self {
        Self { current: Arc::new(version), earlier: Vec::new(), seen: None, problem: None }
    }

    /// Puts `version` in force; returns what ran before.
    pub fn put(&mut self, version: Version) -> Arc<Version> {
        let before = std::mem::replace(&mut self.current, Arc::new(version));
        self.earlier.push(before.clone());
        let surplus = self.earlier.len().saturating_sub(EARLIER);
        self.earlier.drain(..surplus);
        self.problem = None;
        before
    }
}

impl Version {
    pub fn new(component: Arc<Component>, bytes: &[u8], origin: Origin, breaker: Breaker) -> Self {
        let breaker = Arc::new(breaker);
        Self { component, bytes: bytes.len(), origin, since: seconds(), breaker }
    }
}

impl Problem {
    pub(super) fn now(what: String) -> Self {
        Self { at: seconds(), what }
    }
}

/// [`super::Steering::digest`].
fn digest(
    config: &PolicyConfig,
    profile: &Profile,
    links: &[(Arc<Version>, bool)],
    params: &BTreeMap<String, String>,
) -> [u8; 32] {
    let decide = links.iter().filter(|(_, shadow)| !shadow);
    let decide = decide.map(|(version, _)| (version.component.name(), version.component.sha256()));
    let decide: Vec<_> = decide.collect();
    let grants: BTreeSet<_> = profile.grants.iter().collect();
    let PolicyConfig { fuel, deadline_ms, memory_bytes, output_bytes, kv_bytes, .. } = config;
    let limits = (fuel, deadline_ms, memory_bytes, output_bytes, kv_bytes);
    // JSON separates the fields unambiguously; maps and sets are sorted.
    let text = serde_json::to_vec(&(decide, params, profile.on_failure, grants, limits));
    Sha256::digest(text.expect("plain data becomes JSON")).into()
}

/// Tells whether a file, and the golden traces beside it, are what they were.
pub fn digest_of_source(source: &Source) -> [u8; 32] {
    digest_of(&source.component, &source.golden)
}

/// The same, of its parts.
pub fn digest_of(component: &[u8], golden: &str) -> [u8; 32] {
    Sha256::new().chain_update(Sha256::digest(component)).chain_update(golden).finalize().into()
}

/// Since 1970.
fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
