//! The active versions, and what the requests of each profile get.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};

use super::history::{History, HistoryEntry, Origin, Withdrawn};
use super::report::Problem;
use super::source::ProfileChain;
use crate::breaker::Breakers;
use crate::bundle::Bundle;
use crate::config::PolicyConfig;
use crate::contract::Params;
use crate::sandbox::Component;
use crate::schema::{Schema, Schemas};
use crate::trust::Signer;

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
    /// `None` if no version compiled at the start.
    pub current: Option<Arc<Version>>,
    /// Versions before it, oldest first, at most [`EARLIER`].
    pub earlier: Vec<Arc<Version>>,
    /// Profiles in which the active version failed its probation: they have the version before it.
    pub set_back: BTreeSet<String>,
    /// Digest of its file when it was last read: the same bytes are not tried again.
    pub seen: Option<[u8; 32]>,
    pub problem: Option<Problem>,
    /// Whether what it is loaded from is compiled again without a change.
    pub is_pending: bool,
    pub history: History,
}

/// One component of a policy.
pub struct Version {
    pub component: Arc<Component>,
    pub bytes: usize,
    /// Empty for none.
    pub golden: String,
    pub schema: Option<Schema>,
    pub signer: Signer,
    pub is_archive: bool,
    pub origin: Origin,
    /// Time of activation, in seconds since 1970.
    pub since: u64,
    pub breakers: Arc<Breakers>,
}

/// Parameters of a profile.
#[derive(Default)]
pub struct ProfileParams {
    pub texts: BTreeMap<String, String>,
    /// Rejected updates, by parameter.
    pub problems: BTreeMap<String, Problem>,
    /// What policies said of `texts` at the start, by parameter; an update that they accept removes all of it.
    pub unusable: BTreeMap<String, Problem>,
}

/// What a request of a profile gets.
pub struct ResolvedProfile {
    pub links: Vec<ResolvedLink>,
    pub params: Arc<Params>,
    pub digest: [u8; 32],
}

/// A policy in the chain of a request.
pub struct ResolvedLink {
    pub policy: String,
    /// `None` if no version compiled.
    pub version: Option<Arc<Version>>,
    pub shadow: bool,
}

impl Active {
    /// The entry of a policy that some profile names.
    pub fn policy(&mut self, name: &str) -> &mut PolicyEntry {
        self.policies.get_mut(name).expect("every named policy has an entry")
    }

    /// Rolls back versions that failed their probation, in the profiles in which they did; returns whether
    /// there were any. A version that failed in all profiles that apply it is withdrawn.
    pub fn roll_back_condemned(&mut self, chains: &BTreeMap<String, ProfileChain>) -> bool {
        let mut any = false;
        for (policy, entry) in &mut self.policies {
            let applies = |chain: &ProfileChain| chain.links.contains(&(policy.clone(), false));
            let users = chains.iter().filter(|(_, chain)| applies(chain)).count();
            while let Some((profile, reason)) = entry.newly_condemned() {
                let sha256 = entry.sha256();
                tracing::error!(policy, profile, sha256, reason, "policy rolled back");
                // A rollback by an operator would write the version before it there.
                let is_in_file = entry.current.as_ref().is_some_and(|version| version.is_in_file());
                let file = if is_in_file { "; its file is unchanged" } else { "" };
                let message = format!(
                    "policy `{policy}`: {sha256} {reason}{file}; rolled back to the version before it"
                );
                entry.set_back.insert(profile.clone());
                if entry.set_back.len() < users {
                    let message = format!("{message} in profile `{profile}`");
                    entry.problem = Some(Problem::now(message));
                } else {
                    entry.problem = Some(Problem::now(message));
                    entry.history.withdraw(&sha256, Withdrawn::Failed(reason));
                    entry.current = entry.earlier.pop();
                    entry.set_back.clear();
                }
                any = true;
            }
        }
        any
    }

    /// The schemas of the versions that requests of a profile get.
    pub fn schemas(&self, chain: &ProfileChain, profile: &str) -> Schemas {
        let schema = |(policy, shadow): &(String, bool)| {
            let version = self.policies[policy].version_of(profile, *shadow);
            (policy.clone(), version.and_then(|version| version.schema.clone()))
        };
        chain.links.iter().map(schema).collect()
    }

    /// Rebuilds [`Self::profiles`].
    pub fn resolve(&mut self, chains: &BTreeMap<String, ProfileChain>, limits: &PolicyConfig) {
        let resolve = |(name, chain): (&String, &ProfileChain)| {
            let link = |(policy, shadow): &(String, bool)| ResolvedLink {
                policy: policy.clone(),
                version: self.policies[policy].version_of(name, *shadow),
                shadow: *shadow,
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
    /// A policy that starts with `version`, if any.
    pub fn new(version: Option<Version>, history: History) -> Self {
        let current = version.map(Arc::new);
        let (earlier, set_back) = (Vec::new(), BTreeSet::new());
        let (seen, problem, is_pending) = (None, None, false);
        Self { current, earlier, set_back, seen, problem, is_pending, history }
    }

    /// The version that requests of `profile` get.
    pub fn version_of(&self, profile: &str, shadow: bool) -> Option<Arc<Version>> {
        let before = self.earlier.last().filter(|_| !shadow && self.set_back.contains(profile));
        before.or(self.current.as_ref()).cloned()
    }

    /// A profile in which the active version failed its probation, with the reason, if there is a version
    /// to return to.
    fn newly_condemned(&self) -> Option<(String, String)> {
        let current = self.current.as_ref().filter(|_| !self.earlier.is_empty())?;
        let condemned = current.breakers.condemned().into_iter();
        condemned.into_iter().find(|(profile, _)| !self.set_back.contains(profile))
    }

    /// SHA-256 of the active version, in hex; empty if there is none.
    pub fn sha256(&self) -> String {
        self.current.as_ref().map(|version| version.sha256()).unwrap_or_default()
    }

    /// The versions of the history but the active one, newest first.
    pub fn earlier(&self) -> Vec<HistoryEntry> {
        let current = self.sha256();
        let list = self.history.list().iter().rev();
        list.filter(|entry| entry.sha256 != current).cloned().collect()
    }

    /// The active version came again, perhaps with another golden file, schema or signature.
    pub fn update(&mut self, bundle: &Bundle) {
        self.problem = None;
        self.is_pending = false;
        let Some(current) = self.current.take() else { return };
        let Version { component, origin, since, breakers, .. } = &*current;
        let version = Version::new(component.clone(), bundle, *origin, breakers.clone());
        self.current = Some(Arc::new(Version { since: *since, ..version }));
    }

    /// Activates `version` and adds it to the history; returns the SHA-256 of the one before it.
    pub fn activate(&mut self, version: Version, file: &[u8]) -> String {
        self.history.add(version.entry(), file);
        let before = self.sha256();
        self.earlier.extend(self.current.replace(Arc::new(version)));
        let surplus = self.earlier.len().saturating_sub(EARLIER);
        self.earlier.drain(..surplus);
        self.set_back.clear();
        self.problem = None;
        self.is_pending = false;
        before
    }
}

impl Version {
    pub fn new(
        component: Arc<Component>,
        bundle: &Bundle,
        origin: Origin,
        breakers: impl Into<Arc<Breakers>>,
    ) -> Self {
        Self {
            component,
            bytes: bundle.component.len(),
            golden: bundle.golden.clone(),
            schema: bundle.schema.clone(),
            signer: bundle.signer.clone(),
            is_archive: bundle.is_archive,
            origin,
            since: now_seconds(),
            breakers: breakers.into(),
        }
    }

    /// The version in the history.
    pub fn entry(&self) -> HistoryEntry {
        let Self { bytes, origin, since, .. } = *self;
        HistoryEntry { sha256: self.sha256(), bytes, origin, since, withdrawn: None }
    }

    /// Whether it came from the file of the policy, or was written there.
    fn is_in_file(&self) -> bool {
        self.origin != Origin::Shipped
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
    links: &[ResolvedLink],
    params: &BTreeMap<String, String>,
) -> [u8; 32] {
    let sha256 = |link: &ResolvedLink| link.version.as_ref().map(|v| v.component.sha256());
    let applied = links.iter().filter(|link| !link.shadow);
    let applied: Vec<_> = applied.map(|link| (&link.policy, sha256(link))).collect();
    let grants: BTreeSet<_> = chain.settings.grants.iter().collect();
    let PolicyConfig { fuel, deadline_ms, memory_bytes, output_bytes, kv_bytes, .. } = config;
    let limits = (fuel, deadline_ms, memory_bytes, output_bytes, kv_bytes);
    // JSON separates the fields unambiguously; maps and sets are sorted.
    let text = serde_json::to_vec(&(applied, params, chain.settings.on_failure, grants, limits));
    Sha256::digest(text.expect("plain data serializes")).into()
}

/// Digest of a file, its golden file and its schema, to detect changes.
pub fn digest_of(Bundle { file, golden, schema, .. }: &Bundle) -> [u8; 32] {
    let schema = schema.as_ref().map(|schema| &*schema.text);
    // The length of each part is in its digest.
    let parts = [file.as_slice(), golden.as_bytes(), schema.unwrap_or_default().as_bytes()];
    let each = parts.into_iter().map(Sha256::digest);
    each.fold(Sha256::new(), Sha256::chain_update).finalize().into()
}

fn now_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
