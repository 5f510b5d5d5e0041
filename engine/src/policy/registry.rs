//! Which policy steers which profile: loads them all at start, and starts one for each request.
//!
//! Every component is read once, compiled, and instantiated on trial, so that a policy that cannot
//! work is an error at start and not in the first request. Profiles that name the same component
//! share its code and nothing else: each has its own breaker.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use redb::Database;
use sha2::{Digest, Sha256};

use super::chain::{Chain, Link};
use super::guarded::{Breaker, Guarded};
use super::trace::Traces;
use super::wasm::{COMPONENT_BYTES, Component, Host};
use super::{Policy, Vocabulary};
use crate::config::{OnFailure, Param, PolicyConfig, Profile};
use crate::error::{Error, Result};

/// The policies that ship inside the binary, by name.
const EMBEDDED: &[(&str, &[u8])] = &[
    ("default", include_bytes!("../../../policies/default/default.wasm")),
    ("passthrough", include_bytes!("../../../policies/passthrough/passthrough.wasm")),
];

/// The policies of all profiles, loaded.
pub struct Policies {
    profiles: BTreeMap<String, Entry>,
    traces: Arc<Traces>,
}

/// What steers one request.
pub struct Steering {
    /// Its policies.
    pub policy: Box<dyn Policy>,
    /// `[profiles.NAME.params]`, for [`super::RequestView::params`].
    pub params: Arc<BTreeMap<String, String>>,
    /// SHA-256 over all that decides what its policies do: their SHA-256, in order, parameters,
    /// failure mode and limits.
    pub digest: [u8; 32],
}

struct Entry {
    component: Arc<Component>,
    on_failure: OnFailure,
    params: Arc<BTreeMap<String, String>>,
    trace_text: bool,
    breaker: Arc<Breaker>,
    digest: [u8; 32],
}

impl Policies {
    /// Loads the policies of every profile, compiling on the calling thread. What they keep is in
    /// `database`.
    ///
    /// # Errors
    /// [`Error::Policy`] names the profile, its policy, what is wrong and what to do.
    pub fn load(
        config: &PolicyConfig,
        profiles: &BTreeMap<String, Profile>,
        database: &Arc<Database>,
    ) -> Result<Self> {
        let host = Host::new(config, database)?;
        let mut components: BTreeMap<&str, Arc<Component>> = BTreeMap::new();
        let mut loaded = BTreeMap::new();
        for (name, profile) in profiles {
            let source = profile.policies[0].as_str();
            let component = match components.get(source) {
                Some(component) => component.clone(),
                None => load(&host, source).map_err(|error| in_profile(name, error))?,
            };
            components.insert(source, component.clone());
            let text = |(name, param): (&String, &Param)| match param {
                Param::Text(text) => (name.clone(), text.clone()),
                Param::File { .. } => todo!("helper C"),
            };
            let mut entry = Entry {
                component,
                on_failure: profile.on_failure,
                params: Arc::new(profile.params.iter().map(text).collect()),
                trace_text: profile.trace_text,
                breaker: Arc::default(),
                digest: [0; 32],
            };
            entry.digest = digest(config, &entry);
            loaded.insert(name.clone(), entry);
        }
        Ok(Self { profiles: loaded, traces: Traces::new(config)? })
    }

    /// The policies of `profile` for the request `request`, on the calling thread.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such profile; [`Error::Policy`] when a policy cannot
    /// start and the profile fails closed.
    pub fn start(
        &self,
        profile: &str,
        request: &str,
        _vocabulary: &Arc<dyn Vocabulary>,
    ) -> Result<Steering> {
        let entry = self.entry(profile)?;
        let start = || Ok(Box::new(entry.component.instantiate()?) as Box<dyn Policy>);
        let name = entry.component.name();
        let guarded = Guarded::start(name, entry.on_failure, entry.breaker.clone(), start)?;
        let link = Link {
            name: name.into(),
            sha256: entry.component.sha256(),
            shadow: false,
            policy: Box::new(guarded),
        };
        let recorder = self.traces.recorder(request, profile, entry.trace_text);
        Ok(Steering {
            policy: Box::new(Chain::new(vec![link], recorder)),
            params: entry.params.clone(),
            digest: entry.digest,
        })
    }

    fn entry(&self, profile: &str) -> Result<&Entry> {
        self.profiles.get(profile).ok_or_else(|| {
            let known: Vec<_> = self.profiles.keys().map(String::as_str).collect();
            let problem = format!("there is no profile `{profile}`, only {}", known.join(", "));
            Error::Invalid { field: "profile", problem }
        })
    }
}

/// Reads, compiles and tries a policy: an embedded one, or the component at a path.
fn load(host: &Host, source: &str) -> Result<Arc<Component>> {
    let embedded = EMBEDDED.iter().find(|(name, _)| *name == source);
    let component = match embedded {
        Some((name, bytes)) => Component::load(host, name, bytes)?,
        None => Component::load(host, source, &read(Path::new(source))?)?,
    };
    let component = Arc::new(component);
    component.instantiate()?;
    let sha256: String = component.sha256().iter().map(|byte| format!("{byte:02x}")).collect();
    let contract = component.version();
    tracing::info!(policy = component.name(), sha256, contract, "policy loaded");
    Ok(component)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let refuse = |problem: String| Error::Policy { policy: path.display().to_string(), problem };
    let unreadable = |error: std::io::Error| {
        let names: Vec<_> = EMBEDDED.iter().map(|(name, _)| format!("`{name}`")).collect();
        let names = names.join(", ");
        refuse(format!(
            "cannot be read ({error}); name {names} or the path of a component, \
             which policies/README.md says how to build"
        ))
    };
    let bytes = std::fs::metadata(path).map_err(unreadable)?.len();
    if bytes > COMPONENT_BYTES as u64 {
        return Err(refuse(format!("has {bytes} bytes, at most {COMPONENT_BYTES} are loaded")));
    }
    std::fs::read(path).map_err(unreadable)
}

fn in_profile(profile: &str, error: Error) -> Error {
    match error {
        Error::Policy { policy, problem } => {
            Error::Policy { policy, problem: format!("{problem} (profile `{profile}`)") }
        }
        other => other,
    }
}

fn digest(config: &PolicyConfig, entry: &Entry) -> [u8; 32] {
    // JSON separates the fields unambiguously; the maps are sorted.
    let limits = (config.fuel, config.deadline_ms, config.memory_bytes, config.output_bytes);
    let profile = (entry.component.sha256(), &*entry.params, entry.on_failure);
    let text = serde_json::to_vec(&(profile, limits)).expect("plain data becomes JSON");
    Sha256::digest(text).into()
}

#[cfg(test)]
mod tests {
    use super::super::{RequestView, disk, no_vocabulary};
    use super::*;

    fn profiles(list: &[(&str, &str)]) -> BTreeMap<String, Profile> {
        let profile =
            |policy: &str| Profile { policies: vec![policy.into()], ..Profile::default() };
        list.iter().map(|(name, policy)| ((*name).into(), profile(policy))).collect()
    }

    fn load(list: &[(&str, &str)]) -> Result<Policies> {
        load_with(&PolicyConfig::default(), &profiles(list))
    }

    fn load_with(config: &PolicyConfig, profiles: &BTreeMap<String, Profile>) -> Result<Policies> {
        Policies::load(config, profiles, &Arc::new(disk::in_memory()))
    }

    fn start(policies: &Policies, profile: &str) -> Result<Steering> {
        policies.start(profile, "request", &no_vocabulary())
    }

    #[test]
    fn the_embedded_policies_load_and_plan() {
        let policies = load(&[("default", "default"), ("off", "passthrough")]).unwrap();
        let view = RequestView { can_think: true, context_left: 4096, ..RequestView::default() };
        let plan = start(&policies, "default").unwrap().policy.on_request(&view).unwrap();
        assert_eq!(plan.thinking, Some(true));
        assert!(plan.loops.is_some());
        let plan = start(&policies, "off").unwrap().policy.on_request(&view).unwrap();
        assert_eq!(plan, super::super::Plan::default());
    }

    #[test]
    fn an_unknown_profile_is_refused_by_its_field() {
        let policies = load(&[("default", "default")]).unwrap();
        let error = start(&policies, "agent").err().unwrap().to_string();
        assert_eq!(error, "profile: there is no profile `agent`, only default");
    }

    #[test]
    fn a_policy_that_cannot_be_read_names_its_path_and_profile() {
        let error = load(&[("agent", "/nowhere/agent.wasm")]).err().unwrap().to_string();
        assert!(error.starts_with("policy `/nowhere/agent.wasm`: cannot be read"), "{error}");
        assert!(error.ends_with("(profile `agent`)"), "{error}");
    }

    #[test]
    fn the_digest_changes_with_the_policy_its_params_and_the_limits() {
        let digest = |policies: Policies| start(&policies, "default").unwrap().digest;
        let base = digest(load(&[("default", "default")]).unwrap());
        assert_eq!(digest(load(&[("default", "default")]).unwrap()), base);
        assert_ne!(digest(load(&[("default", "passthrough")]).unwrap()), base);
        let mut other = profiles(&[("default", "default")]);
        other.get_mut("default").unwrap().params.insert("thinking".into(), "off".into());
        let config = PolicyConfig::default();
        assert_ne!(digest(load_with(&config, &other).unwrap()), base);
        let config = PolicyConfig { fuel: 1_000_000, ..config };
        let other = profiles(&[("default", "default")]);
        assert_ne!(digest(load_with(&config, &other).unwrap()), base);
    }
}
