//! The active versions, and what the requests of each profile get.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};

use super::history::{History, HistoryEntry, Origin, Withdrawn};
use super::report::Problem;
use super::source::{Bundle, ProfileChain};
use crate::breaker::Breaker;
use crate::config::PolicyConfig;
use crate::contract::Params;
use crate::sandbox::Component;

/// Compiled versions held for an automatic rollback.
const EARLIER: usize = 2;

/// The active versions and parameters.
#[derive(Default)]
pub struct Active {
    pub policies: BTreeMap<String, PolicyEntry>,
    pub params: BTreeMap<String, ProfileParams>,
    /// By profile; [`Active::resolve`] rebuilds them after each change.
    pub profiles: BTreeMap<String, Arc<ResolvedProfile>>,
}

/// A policy and its active version.
pub struct PolicyEntry {
    pub current: Arc<Version>,
    /// Versions before it, oldest first, at most [`EARLIER`].
    pub earlier: Vec<Arc<Version>>,
    /// Digest of its file when it was last read: the same bytes are not tried again.
    pub seen: Option<[u8; 32]>,
    pub problem: Option<Problem>,
    pub history: History,
}

/// One component of a policy.
pub struct Version {
    pub component: Arc<Component>,
    pub bytes: usize,
    pub origin: Origin,
    /// Time of activation, in seconds since 1970.
    pub since: u64,
    pub breaker: Arc<Breaker>,
}

/// Parameters of a profile.
#[derive(Default)]
pub struct ProfileParams {
    pub texts: BTreeMap<String, String>,
    /// By parameter.
    pub problems: BTreeMap<String, Problem>,
}

/// What a request of a profile gets.
pub struct ResolvedProfile {
    /// Versions, and whether they are shadows.
    pub links: Vec<(Arc<Version>, bool)>,
    pub params: Arc<Params>,
    pub digest: [u8; 32],
}

impl Active {
    /// The entry of a policy that some profile names.
    pub fn policy(&mut self, name: &str) -> &mut PolicyEntry {
        self.policies.get_mut(name).expect("every named policy has an entry")
    }

    /// Rolls back versions that failed their probation; returns whether there were any.
    pub fn roll_back_condemned(&mut self) -> bool {
        let mut any = false;
        for (policy, entry) in &mut self.policies {
            let Some(reason) = entry.current.breaker.condemned() else { continue };
            let Some(before) = entry.earlier.pop() else { continue };
            let sha256 = std::mem::replace(&mut entry.current, before).sha256();
            tracing::error!(policy, sha256, reason, "policy rolled back");
            entry.problem = Some(Problem::now(format!(
                "policy `{policy}`: {sha256} {reason}; rolled back to the version before it"
            )));
            entry.history.withdraw(&sha256, Withdrawn::Failed(reason));
            any = true;
        }
        any
    }

    /// Rebuilds [`Self::profiles`].
    pub fn resolve(&mut self, chains: &BTreeMap<String, ProfileChain>, limits: &PolicyConfig) {
        let resolve = |(name, chain): (&String, &ProfileChain)| {
            let link = |(policy, shadow): &(String, bool)| {
                (self.policies[policy].current.clone(), *shadow)
            };
            let links: Vec<_> = chain.links.iter().map(link).collect();
            let texts = &self.params[name].texts;
            let digest = digest(limits, chain, &links, texts);
            let params = Arc::new(texts.clone().into_iter().collect());
            (name.clone(), Arc::new(ResolvedProfile { links, params, digest }))
        };
        self.profiles = chains.iter().map(resolve).collect();
    }
}

impl PolicyEntry {
    /// A policy that starts with `version`.
    pub fn new(version: Version, history: History) -> Self {
        Self { current: Arc::new(version), earlier: Vec::new(), seen: None, problem: None, history }
    }

    /// The versions of the history but the active one, newest first.
    pub fn earlier(&self) -> Vec<HistoryEntry> {
        let current = self.current.sha256();
        let list = self.history.list().iter().rev();
        list.filter(|entry| entry.sha256 != current).cloned().collect()
    }

    /// Activates `version` and adds it to the history; returns the one before it.
    pub fn activate(&mut self, version: Version, bytes: &[u8]) -> Arc<Version> {
        self.history.add(version.entry(), bytes);
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
        Self { component, bytes: bytes.len(), origin, since: now_seconds(), breaker }
    }

    /// The version in the history.
    pub fn entry(&self) -> HistoryEntry {
        let Self { bytes, origin, since, .. } = *self;
        HistoryEntry { sha256: self.sha256(), bytes, origin, since, withdrawn: None }
    }

    /// SHA-256 of the component, in hex.
    pub fn sha256(&self) -> String {
        hex::encode(self.component.sha256())
    }
}

impl Problem {
    pub(super) fn now(message: String) -> Self {
        Self { at: now_seconds(), message }
    }
}

/// [`super::Session::digest`].
fn digest(
    config: &PolicyConfig,
    chain: &ProfileChain,
    links: &[(Arc<Version>, bool)],
    params: &BTreeMap<String, String>,
) -> [u8; 32] {
    let applied = links.iter().filter(|(_, shadow)| !shadow);
    let applied: Vec<_> = applied
        .map(|(version, _)| (version.component.name(), version.component.sha256()))
        .collect();
    let grants: BTreeSet<_> = chain.settings.grants.iter().collect();
    let PolicyConfig { fuel, deadline_ms, memory_bytes, output_bytes, kv_bytes, .. } = config;
    let limits = (fuel, deadline_ms, memory_bytes, output_bytes, kv_bytes);
    // JSON separates the fields unambiguously; maps and sets are sorted.
    let text = serde_json::to_vec(&(applied, params, chain.settings.on_failure, grants, limits));
    Sha256::digest(text.expect("plain data serializes")).into()
}

/// Digest of a file and its golden file, to detect changes.
pub fn digest_of(Bundle { component, golden }: &Bundle) -> [u8; 32] {
    Sha256::new().chain_update(Sha256::digest(component)).chain_update(golden).finalize().into()
}

fn now_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
