//! Which version of which policy steers which profile, and how another takes its place.
//!
//! A profile names its policies; a name stands for one component, whoever names it, and its versions
//! take turns. A version comes into force when it is whole: compiled on whatever thread brings it
//! (never the engine's), granted what it imports by every profile that names it, instantiated on
//! trial, and of the answers that its golden traces expect. Then it replaces the one before it at
//! once for all profiles; requests that run keep theirs, and a request takes all its policies in one
//! moment, so none sees two versions. What is refused changes nothing and is reported.
//!
//! Versions come from files, which [`watch`] sees change, from uploads, and from [`versions`], where
//! the last good ones are kept. A fresh one is on probation ([`super::breaker`]): if it fails, the one
//! before it comes back by itself.

mod place;
mod refresh;
mod report;
mod state;
mod versions;
mod watch;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use sha2::{Digest, Sha256};

use self::place::{Place, Rules, named, read_param};
use self::state::{Params, Slot, State, Version, digest_of, digest_of_source};
use self::versions::Versions;
use self::watch::Watch;
use super::breaker::Breaker;
use super::chain::{Chain, Link};
use super::disk::Disk;
use super::guarded::Guarded;
use super::trace::Traces;
use super::wasm::{Component, Host, Scene};
use super::{Policy, Vocabulary, golden};
use crate::config::{OnFailure, Param, PolicyConfig, Profile};
use crate::error::{Error, Result};

pub use self::report::{Installed, ParamReport, PolicyReport, Problem, Report, Use};
pub use self::versions::{Kept, Origin, VERSIONS, Withdrawn};

/// The component of a policy that ships inside the binary, and its golden traces (empty for none).
pub fn embedded(name: &str) -> Option<(&'static [u8], &'static str)> {
    let shipped = place::SHIPPED.iter().find(|shipped| shipped.name == name)?;
    Some((shipped.component, shipped.golden))
}

/// The policies of all profiles.
pub struct Policies {
    host: Host,
    limits: PolicyConfig,
    profiles: BTreeMap<String, Rules>,
    places: BTreeMap<String, Place>,
    versions: Arc<Versions>,
    traces: Arc<Traces>,
    state: Mutex<State>,
    /// Held from reading a component until it is in force and in its file, so that of two who bring
    /// one the later one wins, in memory and on disk.
    turn: Mutex<()>,
    watch: OnceLock<Watch>,
}

/// What steers one request.
pub struct Steering {
    /// Its policies.
    pub policy: Box<dyn Policy>,
    /// `[profiles.NAME.params]`, for [`super::RequestView::params`].
    pub params: Arc<BTreeMap<String, String>>,
    /// SHA-256 over all that decides what its policies do: their names and SHA-256, in order,
    /// parameters, failure mode, grants and limits. Shadows decide nothing.
    pub digest: [u8; 32],
}

impl Policies {
    /// Loads the policies of every profile, compiling on the calling thread. What they keep, and
    /// what is kept of them, is on `disk`. Where a file is broken, the last good version runs and
    /// the log says so loudly.
    ///
    /// # Errors
    /// [`Error::Policy`] names the profile, its policy, what is wrong and what to do;
    /// [`Error::Invalid`] names the key.
    pub fn load(
        config: &PolicyConfig,
        profiles: &BTreeMap<String, Profile>,
        disk: &Disk,
    ) -> Result<Self> {
        if !config.folder.as_os_str().is_empty() && !config.folder.is_dir() {
            let problem = format!("there is no folder {}; make it", config.folder.display());
            return Err(Error::Invalid { field: "policy.folder", problem });
        }
        let (rules, places) = named(config, profiles)?;
        let policies = Self {
            host: Host::new(config, disk)?,
            limits: config.clone(),
            profiles: rules,
            places,
            versions: Arc::new(Versions::new(disk.database.clone())),
            traces: Traces::new(config)?,
            state: Mutex::default(),
            turn: Mutex::default(),
            watch: OnceLock::new(),
        };
        let mut state = State::default();
        for (policy, place) in &policies.places {
            state.slots.insert(policy.clone(), policies.first(policy, place)?);
        }
        for (name, rules) in &policies.profiles {
            let mut texts = BTreeMap::new();
            for (param, value) in &rules.profile.params {
                let text = read_param(value).map_err(|problem| {
                    let problem = format!("param `{param}` of profile `{name}`: {problem}");
                    Error::Invalid { field: "profiles", problem }
                })?;
                texts.insert(param.clone(), text);
            }
            let params = Params { texts: Arc::new(texts), problems: BTreeMap::new() };
            state.params.insert(name.clone(), params);
        }
        state.resolve(&policies.profiles, &policies.limits);
        *policies.lock() = state;
        Ok(policies)
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
        vocabulary: &Arc<dyn Vocabulary>,
    ) -> Result<Steering> {
        let Some(rules) = self.profiles.get(profile) else {
            let known: Vec<_> = self.profiles.keys().map(String::as_str).collect();
            let problem = format!("there is no profile `{profile}`, only {}", known.join(", "));
            return Err(Error::Invalid { field: "profile", problem });
        };
        let entry = self.settled().entries[profile].clone();
        let scene = Scene {
            request: request.into(),
            profile: profile.into(),
            vocabulary: vocabulary.clone(),
            recorded: None,
        };
        let link = |(version, shadow): &(Arc<Version>, bool)| {
            let Version { component, breaker, .. } = &**version;
            // A shadow decides nothing, not even that the request ends.
            let on_failure = if *shadow { OnFailure::Open } else { rules.profile.on_failure };
            let start = || Ok(Box::new(component.instantiate(&scene)?) as Box<dyn Policy>);
            let guarded = Guarded::start(component.name(), on_failure, breaker.clone(), start)?;
            Ok(Link {
                name: component.name().into(),
                sha256: component.sha256(),
                shadow: *shadow,
                policy: Box::new(guarded),
            })
        };
        let links = entry.links.iter().map(link).collect::<Result<_>>()?;
        let recorder = self.traces.recorder(request, profile, rules.profile.trace_text);
        Ok(Steering {
            policy: Box::new(Chain::new(links, recorder)),
            params: entry.params.clone(),
            digest: entry.digest,
        })
    }

    /// Puts a component in force that `origin` brings, once it has been found whole, on the calling
    /// thread: tens of milliseconds for a small one, seconds for one with a JavaScript engine
    /// inside. An upload is written to the policy's file as well, so that it outlives a restart.
    /// What runs already is left as it is.
    ///
    /// # Errors
    /// [`Error::Policy`] says what is wrong with the component, or that no profile names the policy;
    /// [`Error::Invalid`] that an upload has no file to go to, or why it cannot be written. What ran
    /// before still does.
    pub fn install(&self, policy: &str, component: &[u8], origin: Origin) -> Result<Installed> {
        let _turn = self.turn();
        let place = self.place(policy)?;
        let golden = place.golden().map_err(|problem| refused(policy, problem));
        golden
            .and_then(|golden| self.replace(policy, place, component, &golden, origin))
            .inspect_err(|error| match error {
                // What keeps an upload from being written is nothing of the policy.
                Error::Invalid { .. } => {}
                problem => self.note(policy, problem.to_string()),
            })
    }

    /// Goes back to the version before the one that runs, in its file as well. The one that runs now
    /// is kept, and not gone back to.
    ///
    /// # Errors
    /// [`Error::Policy`] when there is no earlier version, or it is not valid any more;
    /// [`Error::Invalid`] when it cannot be written. What ran before still does.
    pub fn rollback(&self, policy: &str) -> Result<Installed> {
        let _turn = self.turn();
        let place = self.place(policy)?;
        let lost = |error: redb::Error| refused(policy, format!("its versions: {error}"));
        let running = self.running(policy);
        let now = hex(&running.component.sha256());
        let kept = self.versions.list(policy).map_err(lost)?;
        let good = |kept: &&Kept| kept.withdrawn.is_none() && kept.sha256 != now;
        let Some(before) = kept.iter().rev().find(good) else {
            return Err(refused(policy, "there is no earlier version to go back to".into()));
        };
        let component = self.versions.component(policy, &before.sha256).map_err(lost)?;
        let component = component.ok_or_else(|| {
            refused(policy, format!("the earlier version {} is damaged", before.sha256))
        })?;
        // Without golden traces: they may ask for what only the later version does.
        let valid = self.validate(policy, &component, "")?;
        self.write(policy, place, &component, &place.golden().unwrap_or_default())?;
        if let Err(error) = self.versions.withdraw(policy, &now, Withdrawn::RolledBack) {
            tracing::warn!(policy, %error, "a restart could go back to what was withdrawn");
        }
        let version = Version::new(valid, &component, Origin::Kept, Breaker::default());
        Ok(self.put(policy, version, &component))
    }

    /// The versions of a policy that are kept, newest first, the one that runs among them unless it
    /// ships and nothing has replaced it.
    ///
    /// # Errors
    /// [`Error::Policy`] when no profile names it, or they cannot be read.
    pub fn versions(&self, policy: &str) -> Result<Vec<Kept>> {
        self.place(policy)?;
        let kept = self.versions.list(policy);
        let mut kept = kept.map_err(|error| refused(policy, format!("its versions: {error}")))?;
        kept.reverse();
        Ok(kept)
    }

    /// What is in force, and what kept something else from being.
    pub fn report(&self) -> Report {
        let state = self.settled();
        let policies = state.slots.iter().map(|(name, slot)| {
            let Version { component, bytes, origin, since, breaker } = &*slot.current;
            let uses = self.profiles.iter().flat_map(|(profile, rules)| {
                let chain = rules.chain.iter().enumerate().filter(|(_, (link, _))| link == name);
                chain.map(|(position, &(_, shadow))| Use {
                    profile: profile.clone(),
                    position,
                    shadow,
                })
            });
            PolicyReport {
                name: name.clone(),
                sha256: hex(&component.sha256()),
                contract: component.version().into(),
                origin: *origin,
                file: self.places[name].file.clone(),
                since: *since,
                bytes: *bytes,
                hooks: component.hooks().iter().map(|hook| (*hook).to_string()).collect(),
                imports: component.imports(),
                profiles: uses.collect(),
                health: breaker.health(),
                problem: slot.problem.clone(),
                earlier: Vec::new(),
            }
        });
        let mut policies: Vec<_> = policies.collect();
        let params = self.profiles.iter().flat_map(|(profile, rules)| {
            rules.profile.params.iter().filter_map(|(param, value)| {
                let Param::File { file } = value else { return None };
                let problem = state.params[profile].problems.get(param).cloned();
                let (profile, param) = (profile.clone(), param.clone());
                Some(ParamReport { profile, param, file: file.clone(), problem })
            })
        });
        let params = params.collect();
        // What is on disk is read without the lock: requests that start do not wait for it.
        drop(state);
        for policy in &mut policies {
            policy.earlier = self.versions(&policy.name).unwrap_or_default();
            policy.earlier.retain(|kept| kept.sha256 != policy.sha256);
        }
        Report { policies, params }
    }

    /// What policies counted: policy, counter, value; sorted.
    pub fn counters(&self) -> Vec<(String, String, u64)> {
        self.host.counters()
    }

    /// What policies decided.
    pub fn traces(&self) -> &Arc<Traces> {
        &self.traces
    }

    /// Whether a profile names this policy.
    pub fn has(&self, policy: &str) -> bool {
        self.places.contains_key(policy)
    }

    /// The version of a policy that a start begins with.
    fn first(&self, policy: &str, place: &Place) -> Result<Slot> {
        let user = self.users(policy).next().map_or("", |(name, _)| name);
        let (source, origin) = match place.read() {
            Ok(Some(source)) => (Ok(source), Origin::File),
            Ok(None) => match place.shipped() {
                Some(source) => (Ok(source), Origin::Shipped),
                None => return Err(in_profile(user, refused(policy, place.nothing()))),
            },
            Err(problem) => (Err(refused(policy, problem)), Origin::File),
        };
        let seen = source.as_ref().ok().map(digest_of_source);
        let tried = source.and_then(|source| {
            let component = self.validate(policy, &source.component, &source.golden)?;
            Ok((component, source.component))
        });
        let problem = match &tried {
            Err(error) => Some(error.to_string()),
            Ok((component, _)) => self.failed_before(policy, &component.sha256()),
        };
        if let Some(problem) = problem
            && let Some(version) = self.last_good(policy)
        {
            let sha256 = hex(&version.component.sha256());
            tracing::error!(policy, problem, sha256, "the last good version runs instead");
            let problem = Some(Problem::now(problem));
            return Ok(Slot { seen, problem, ..Slot::new(version) });
        }
        let (component, bytes) = tried.map_err(|error| in_profile(user, error))?;
        let version = Version::new(component, &bytes, origin, Breaker::default());
        let (sha256, contract) = (hex(&version.component.sha256()), version.component.version());
        tracing::info!(policy, sha256, contract, origin = origin.name(), "policy loaded");
        if origin == Origin::File {
            self.record(policy, &version, &bytes);
        }
        Ok(Slot { seen, ..Slot::new(version) })
    }

    /// Why the version of this digest was taken back, if it was because it failed.
    fn failed_before(&self, policy: &str, sha256: &[u8; 32]) -> Option<String> {
        let sha256 = hex(sha256);
        let kept = self.versions.list(policy).ok()?;
        match kept.into_iter().find(|kept| kept.sha256 == sha256)?.withdrawn? {
            Withdrawn::Failed(why) => Some(format!("policy `{policy}`: {why}")),
            Withdrawn::RolledBack => None,
        }
    }

    /// The newest kept version that is still valid.
    fn last_good(&self, policy: &str) -> Option<Version> {
        let kept = self.versions.list(policy).unwrap_or_default();
        kept.iter().rev().filter(|kept| kept.withdrawn.is_none()).find_map(|kept| {
            let bytes = self.versions.component(policy, &kept.sha256).ok()??;
            let component = self.validate(policy, &bytes, "").ok()?;
            Some(Version::new(component, &bytes, Origin::Kept, Breaker::default()))
        })
    }

    /// Compiles a component and finds out whether it can work in every profile that names it.
    fn validate(&self, policy: &str, bytes: &[u8], golden: &str) -> Result<Arc<Component>> {
        let component = Arc::new(Component::load(&self.host, policy, bytes)?);
        for (profile, rules) in self.users(policy) {
            let granted = component.granted(&rules.profile.grants);
            granted.map_err(|error| in_profile(profile, error))?;
        }
        component.instantiate(&Scene::trial())?;
        if !golden.is_empty() {
            golden::check(&component, golden)?;
        }
        Ok(component)
    }

    /// Puts a component in force, if it is another than the one that runs.
    fn replace(
        &self,
        policy: &str,
        place: &Place,
        bytes: &[u8],
        golden: &str,
        origin: Origin,
    ) -> Result<Installed> {
        let running = self.running(policy);
        let upload = origin == Origin::Upload;
        let sha256: [u8; 32] = Sha256::digest(bytes).into();
        if running.component.sha256() == sha256 {
            if upload {
                self.write(policy, place, bytes, golden)?;
            }
            self.settled().slot(policy).problem = None;
            let sha256 = hex(&sha256);
            return Ok(Installed { policy: policy.into(), sha256, replaced: None });
        }
        let component = self.validate(policy, bytes, golden)?;
        if upload {
            self.write(policy, place, bytes, golden)?;
        }
        if running.origin == Origin::Shipped
            && let Some(source) = place.shipped()
        {
            // So that there is something to go back to.
            self.record(policy, &running, &source.component);
        }
        let version = Version::new(component, bytes, origin, Breaker::on_probation());
        Ok(self.put(policy, version, bytes))
    }

    /// Writes a component to its policy's file.
    fn write(&self, policy: &str, place: &Place, bytes: &[u8], golden: &str) -> Result<()> {
        let file = place.file.as_ref().ok_or_else(|| {
            let problem =
                format!("is not set, so policy `{policy}` has no file that a restart would read");
            Error::Invalid { field: "policy.folder", problem }
        })?;
        place::write(file, bytes).map_err(|error| {
            let problem = format!("{} cannot be written: {error}", file.display());
            Error::Invalid { field: "policy", problem }
        })?;
        self.settled().slot(policy).seen = Some(digest_of(bytes, golden));
        Ok(())
    }

    /// Puts a version in force: what all else was for.
    fn put(&self, policy: &str, version: Version, bytes: &[u8]) -> Installed {
        self.record(policy, &version, bytes);
        let (sha256, origin) = (hex(&version.component.sha256()), version.origin.name());
        let replaced = {
            let mut state = self.settled();
            let replaced = state.slot(policy).put(version);
            state.resolve(&self.profiles, &self.limits);
            hex(&replaced.component.sha256())
        };
        tracing::info!(policy, sha256, replaced, origin, "policy replaced");
        Installed { policy: policy.into(), sha256, replaced: Some(replaced) }
    }

    fn record(&self, policy: &str, version: &Version, bytes: &[u8]) {
        let kept = Kept {
            sha256: hex(&version.component.sha256()),
            bytes: version.bytes,
            origin: version.origin,
            since: version.since,
            withdrawn: None,
        };
        if let Err(error) = self.versions.record(policy, kept, bytes) {
            tracing::warn!(policy, %error, "this version cannot be gone back to");
        }
    }

    /// Notes what kept another version of a policy from running.
    fn note(&self, policy: &str, what: String) {
        let mut state = self.settled();
        let slot = state.slot(policy);
        if slot.problem.as_ref().is_none_or(|problem| problem.what != what) {
            tracing::warn!(policy, problem = what, "what ran before goes on");
            slot.problem = Some(Problem::now(what));
        }
    }

    /// What is in force, once versions that were condemned have been taken back.
    fn settled(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        let condemned = state.condemned();
        if !condemned.is_empty() {
            state.resolve(&self.profiles, &self.limits);
        }
        for (policy, version, why) in condemned {
            let sha256 = hex(&version.component.sha256());
            tracing::error!(policy, sha256, why, "the version before it is back");
            let versions = self.versions.clone();
            // On a thread of its own: requests start here, and do not wait for a disk.
            std::thread::spawn(move || {
                if let Err(error) = versions.withdraw(&policy, &sha256, Withdrawn::Failed(why)) {
                    tracing::warn!(policy, %error, "a restart would try it again");
                }
            });
        }
        state
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Entries are made whole before they replace others: a panic leaves the old ones.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self, policy: &str) -> Arc<Version> {
        self.settled().slot(policy).current.clone()
    }

    fn place(&self, policy: &str) -> Result<&Place> {
        self.places.get(policy).ok_or_else(|| {
            let known: Vec<_> = self.places.keys().map(String::as_str).collect();
            let problem = format!("no profile names it, only {}", known.join(", "));
            refused(policy, problem)
        })
    }

    /// The profiles that name a policy.
    fn users(&self, policy: &str) -> impl Iterator<Item = (&str, &Rules)> {
        let names = move |rules: &Rules| rules.chain.iter().any(|(link, _)| link == policy);
        let users = self.profiles.iter().filter(move |(_, rules)| names(rules));
        users.map(|(name, rules)| (name.as_str(), rules))
    }
}

fn refused(policy: &str, problem: String) -> Error {
    Error::Policy { policy: policy.into(), problem }
}

/// Says of an error in which profile it is one, if that is not said yet.
fn in_profile(profile: &str, error: Error) -> Error {
    match error {
        Error::Policy { policy, problem } if !problem.contains("(profile `") => {
            Error::Policy { policy, problem: format!("{problem} (profile `{profile}`)") }
        }
        other => other,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
