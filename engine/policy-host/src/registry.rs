//! Which version of which policy steers which profile, and how a new version becomes active.
//!
//! Three nouns: a *policy* is a name, shared by all profiles that use it. A [`Version`] is one
//! component of it; one version is active. A [`Session`] is the policies of one request.
//!
//! A new version is compiled while the thread that brings it waits (never the decode thread), its imports
//! are compared with the grants of every profile that names it, it is instantiated in a dry run, and its
//! golden file is checked. No lock is held meanwhile, so a version that takes long delays no other. Then it
//! replaces the active version for all profiles at once. Running requests keep their versions, and a
//! request gets all its policies at one moment. A rejected version changes nothing and is reported.
//!
//! A policy of which no version compiles at the start has none: it fails in every request of its profiles,
//! as they say (`on_failure`), until a version is uploaded or its file is replaced. If something other than
//! the component ended the compiler, it is tried again (`attempts.rs`).
//!
//! Versions come from files, which `watch.rs` watches, from uploads, and from the history. A new
//! version is on probation ([`crate::breaker`]): if it fails, the version before it becomes active
//! again.

mod active;
mod attempts;
mod history;
mod load;
mod params;
mod reload;
mod report;
mod source;
mod watch;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};
use sha2::{Digest, Sha256};

use self::active::{Active, PolicyEntry, ResolvedLink, Version, digest_of};
use self::source::{ProfileChain, Source};
use self::watch::Watch;
use crate::breaker::Breakers;
use crate::bundle::Bundle;
use crate::chain::{Chain, Link, own_params};
use crate::config::{OnFailure, Param, PolicyConfig};
use crate::contract::{CONTRACT, Hook, HookInput, Params, Policy, Vocabulary};
use crate::error::{Cause, Error, Failure};
use crate::file;
use crate::golden::{Golden, check_golden};
use crate::guard::Guard;
use crate::sandbox::{Component, Context, Host, Urgency};
use crate::schema::conform;
use crate::tally::{Counted, PolicyCounts, Tallies};
use crate::trace::Traces;
use crate::trust::{Signer, Trust};

/// Fewest bytes of a component that takes long to compile.
const LARGE_BYTES: usize = 4 << 20;

pub use self::history::{HistoryEntry, Origin, Withdrawn};
pub use self::params::refused_params;
pub use self::report::{Activation, ParamReport, PolicyReport, Problem, Report, Use};
pub use self::source::schema_beside;

/// The policies of all profiles.
pub struct Policies {
    host: Host,
    limits: PolicyConfig,
    trust: Trust,
    chains: BTreeMap<String, ProfileChain>,
    sources: BTreeMap<String, Source>,
    traces: Arc<Traces>,
    tallies: Tallies,
    active: Mutex<Active>,
    /// Held while a valid version is activated and written to its file, so that of two uploads the same
    /// one wins in memory and on disk.
    change: Mutex<()>,
    watch: OnceLock<Watch>,
    /// The sender to the thread of further attempts, while it runs. The thread ends when the sender is dropped.
    attempts: Mutex<Option<SyncSender<()>>>,
}

/// The policies of one request.
pub struct Session {
    /// The chain.
    pub policy: Box<dyn Policy>,
    /// Parameters of the profile.
    pub params: Arc<Params>,
    /// SHA-256 over everything that determines their decisions: names and SHA-256 of the policies in
    /// order, parameters, failure mode, grants and limits. Shadows are not included.
    pub digest: [u8; 32],
    /// Whether one of them gives verdicts on tool calls; shadows do not.
    pub judges_calls: bool,
    /// Whether one of them shapes the text of the answer; shadows do not.
    pub shapes_text: bool,
    /// Whether one of them, or a shadow, is called with it.
    pub sees_text: bool,
    /// Number of policies, without shadows. The text that one of several injects is shown to all.
    pub policies: u32,
}

impl Session {
    /// Calls the hook of `input`.
    ///
    /// # Errors
    /// [`Failure`] if a policy failed and the profile fails closed.
    pub fn ask<T: HookInput>(&mut self, input: &T) -> Result<T::Answer, Failure> {
        self.policy.ask(input)
    }

    /// Notes since the last call of this function.
    pub fn take_notes(&mut self) -> Vec<String> {
        self.policy.take_report().notes
    }
}

impl Policies {
    /// Starts the policies of `profile` for a request, on the calling thread.
    ///
    /// # Errors
    /// [`Error::UnknownProfile`]; [`Error::Failed`] if a policy cannot start and the profile fails
    /// closed.
    pub fn start(
        &self,
        profile: &str,
        request: &str,
        vocabulary: &Arc<dyn Vocabulary>,
    ) -> Result<Session, Error> {
        let Some(chain) = self.chains.get(profile) else {
            let known: Vec<_> = self.chains.keys().map(String::as_str).collect();
            return Err(Error::UnknownProfile { profile: profile.into(), known: known.join(", ") });
        };
        let resolved = self.active().profiles[profile].clone();
        let context = Context {
            request: request.into(),
            profile: profile.into(),
            vocabulary: vocabulary.clone(),
            recorded: None,
        };
        let link = |ResolvedLink { policy, version, shadow }: &ResolvedLink| {
            // A shadow must not end the request.
            let on_failure = if *shadow { OnFailure::Open } else { chain.settings.on_failure };
            let start = || match version {
                Some(version) => {
                    Ok(Box::new(version.component.instantiate(&context)?) as Box<dyn Policy>)
                }
                None => {
                    let cause = Cause::Limit("has no version that compiles".into());
                    Err(Failure { policy: policy.clone(), hook: "start", cause })
                }
            };
            let breaker = version.as_ref().map(|version| version.breakers.of(profile, *shadow));
            let tally = self.tallies.of(policy, profile, *shadow);
            let guard = Guard::start(policy, on_failure, breaker.unwrap_or_default(), start)
                .inspect_err(|failure| tally.failed(failure))?;
            Ok(Link {
                name: policy.clone(),
                sha256: version.as_ref().map_or([0; 32], |version| version.component.sha256()),
                shadow: *shadow,
                policy: Box::new(Counted::new(policy.clone(), *shadow, Box::new(guard), tally)),
            })
        };
        let needs = |link: &ResolvedLink, hook: Hook| {
            let Some(version) = &link.version else { return false };
            let own = own_params(&link.policy, &resolved.params);
            version.component.needs(hook, profile, own.as_ref().unwrap_or(&resolved.params))
        };
        let applied = || resolved.links.iter().filter(|link| !link.shadow);
        let judges_calls = applied().any(|link| needs(link, Hook::OnToolCall));
        let shapes_text = applied().any(|link| needs(link, Hook::OnText));
        let sees_text = resolved.links.iter().any(|link| needs(link, Hook::OnText));
        let links = resolved.links.iter().map(link).collect::<Result<_, Failure>>()?;
        let recorder = self.traces.recorder(request, profile, chain.settings.trace_text);
        Ok(Session {
            policy: Box::new(Chain::new(links, recorder)),
            params: resolved.params.clone(),
            digest: resolved.digest,
            judges_calls,
            shapes_text,
            sees_text,
            policies: resolved.links.iter().filter(|link| !link.shadow).count() as u32,
        })
    }

    /// Validates an uploaded component or bundle, writes it to the policy's file, so that it survives a restart,
    /// and activates it. The calling thread waits until it is compiled: tens of milliseconds for a small
    /// component, half a minute for one with an interpreter.
    ///
    /// # Errors
    /// [`Error::NotCompiled`] and [`Error::Refused`] if the component is invalid,
    /// [`Error::UnknownPolicy`], [`Error::NoFile`] or [`Error::NotWritten`]. The active version is then
    /// unchanged.
    pub fn upload(&self, policy: &str, file: &[u8]) -> Result<Activation, Error> {
        let source = self.source(policy)?;
        let bundle = Bundle::open(policy, file.to_vec(), &self.trust);
        let bundle = bundle.and_then(|bundle| source.complete(bundle));
        let bundle = bundle.map_err(|problem| Error::refused(policy, problem));
        let activated = bundle.and_then(|bundle| {
            self.replace(policy, source, &bundle, Origin::Upload, Urgency::Awaited)
        });
        if let Err(error @ (Error::Refused { .. } | Error::NotCompiled { .. })) = &activated {
            self.reject(policy, error.to_string());
        }
        activated
    }

    /// Activates the version before the active one and writes it to the policy's file; the shipped one removes that file
    /// instead, so that a later server has the version that ships with it. Later rollbacks skip the version that was active.
    ///
    /// # Errors
    /// [`Error::CannotRollBack`] if there is no earlier version, it is damaged, or another version became
    /// active meanwhile; otherwise as [`Self::upload`].
    pub fn roll_back(&self, policy: &str) -> Result<Activation, Error> {
        let source = self.source(policy)?;
        let failed = |problem: String| Error::CannotRollBack { policy: policy.into(), problem };
        let (current, history) = {
            let mut active = self.active();
            let entry = active.policy(policy);
            (entry.sha256(), entry.history.clone())
        };
        // Read without a lock, so that starting requests do not wait for the disk.
        let before = history.usable().find(|entry| entry.sha256 != current);
        let before = before.ok_or_else(|| failed("there is no earlier version".into()))?;
        let file = history.file(&before.sha256);
        let file = file
            .ok_or_else(|| failed(format!("the earlier version {} is damaged", before.sha256)))?;
        // Neither golden file nor schema beside a component: they may describe the later version.
        let bundle = Bundle::open(policy, file, &self.trust).map_err(failed)?;
        let valid = self.validate(policy, &bundle, Urgency::Awaited)?;
        let on_disk = source.complete(bundle.clone()).unwrap_or_else(|_| bundle.clone());
        let _change = self.change.lock();
        if self.active().policy(policy).sha256() != current {
            return Err(failed("another version became active meanwhile; try again".into()));
        }
        let ships = source.shipped().is_some_and(|shipped| {
            hex::encode(Sha256::digest(&shipped.component)) == before.sha256
        });
        let (mut notes, origin) = match ships {
            true => (self.remove(policy, source)?, Origin::Shipped),
            false => (self.write(policy, source, &on_disk)?, Origin::History),
        };
        self.active().policy(policy).history.withdraw(&current, Withdrawn::RolledBack);
        let is_beside = !bundle.is_archive && !on_disk.golden.is_empty();
        if is_beside && let Err(problem) = check_golden(&valid, &on_disk.golden) {
            notes.push(format!(
                "restore the golden file of this version, too: the one beside it does not fit ({problem})"
            ));
        }
        let version = Version::new(valid, &bundle, origin, Breakers::default());
        Ok(Activation { notes, ..self.activate(policy, version, &bundle.file) })
    }

    /// The active versions, and rejected updates.
    pub fn report(&self) -> Report {
        let active = self.active();
        let policies = active.policies.iter().map(|(name, entry)| {
            let uses = self.chains.iter().flat_map(|(profile, chain)| {
                let links = chain.links.iter().enumerate().filter(|(_, (link, _))| link == name);
                links.map(|(position, &(_, shadow))| {
                    let version = entry.version_of(profile, shadow);
                    let sha256 = version.as_ref().map(|version| version.sha256());
                    let health =
                        version.map(|version| version.breakers.of(profile, shadow).health());
                    let (sha256, health) = (sha256.unwrap_or_default(), health.unwrap_or_default());
                    Use { profile: profile.clone(), position, shadow, sha256, health }
                })
            });
            let version = entry.current.as_deref();
            PolicyReport {
                name: name.clone(),
                sha256: entry.sha256(),
                contract: CONTRACT,
                origin: version.map_or(Origin::File, |version| version.origin),
                file: match version.is_some_and(|version| version.is_archive) {
                    true => self.sources[name].bundle.clone(),
                    false => self.sources[name].component.clone(),
                },
                signed_by: version.and_then(|version| match &version.signer {
                    Signer::Key(key) => Some(key.clone()),
                    Signer::Unknown | Signer::Nobody => None,
                }),
                since: version.map_or(0, |version| version.since),
                bytes: version.map_or(0, |version| version.bytes),
                hooks: version
                    .map(|version| version.component.hooks().to_vec())
                    .unwrap_or_default(),
                imports: version
                    .map(|version| version.component.import_names())
                    .unwrap_or_default(),
                profiles: uses.collect(),
                problem: entry.problem.clone(),
                is_pending: entry.is_pending,
                earlier: entry.earlier(),
            }
        });
        let params = self.chains.iter().flat_map(|(profile, chain)| {
            let params = &active.params[profile];
            let of_none = params.unusable.keys().filter(|param| param.is_empty());
            let names = chain.settings.params.keys().chain(of_none);
            names.filter_map(|param| {
                let file = match chain.settings.params.get(param) {
                    Some(Param::File { file }) => Some(file.clone()),
                    Some(Param::Text(_)) | None => None,
                };
                let problem = params.problems.get(param).or(params.unusable.get(param)).cloned();
                let (profile, param) = (profile.clone(), param.clone());
                let is_listed = file.is_some() || problem.is_some();
                is_listed.then_some(ParamReport { profile, param, file, problem })
            })
        });
        Report { policies: policies.collect(), params: params.collect() }
    }

    /// What each policy did in each profile since the start.
    pub fn counts(&self) -> Vec<PolicyCounts> {
        self.tallies.report()
    }

    /// Counters of policies: policy, counter, value; sorted.
    pub fn counters(&self) -> Vec<(String, String, u64)> {
        self.host.counters()
    }

    /// Traces of requests.
    pub fn traces(&self) -> &Arc<Traces> {
        &self.traces
    }

    /// Whether a profile names this policy.
    pub fn has(&self, policy: &str) -> bool {
        self.sources.contains_key(policy)
    }

    /// Compiles a component and checks that it works in every profile that names it.
    fn validate(
        &self,
        policy: &str,
        bundle: &Bundle,
        urgency: Urgency,
    ) -> Result<Arc<Component>, Error> {
        let bytes = bundle.component.len();
        if bytes >= LARGE_BYTES && !self.host.is_compiled(&bundle.component) {
            let megabytes = (bytes as f64 / 1e5).round() / 10.0;
            tracing::info!(
                policy,
                megabytes,
                "compiling a large policy: up to a minute of processor time, once"
            );
        }
        let component = Component::load_with(&self.host, policy, &bundle.component, urgency)?;
        let component = Arc::new(component);
        self.check(policy, &component, bundle)?;
        Ok(component)
    }

    /// Checks that a component works in every profile that names its policy, and as its golden file says.
    fn check(
        &self,
        policy: &str,
        component: &Arc<Component>,
        bundle: &Bundle,
    ) -> Result<(), Error> {
        let refused = self.users(policy).filter_map(|(profile, chain)| {
            let granted = component.check_grants(&chain.settings.grants);
            granted.err().map(|error| error.in_profile(profile))
        });
        Error::all(refused.collect())?;
        let refuse = |failure: Failure| {
            Error::refused(policy, format!("{}: {}", failure.hook, failure.cause))
        };
        component.instantiate(&Context::dry_run()).map_err(refuse)?;
        if !bundle.golden.is_empty() {
            check_golden(component, &bundle.golden)?;
        }
        let golden = Golden::parse(&bundle.golden).ok();
        for (profile, _) in self.users(policy) {
            // None at the start: then `params::check` prepares them.
            let (texts, mut schemas) = {
                let active = self.active();
                let Some(params) = active.params.get(profile) else { continue };
                (params.texts.clone(), active.schemas(&self.chains[profile], profile))
            };
            let own = schemas.iter_mut().filter(|(link, _)| link == policy);
            own.for_each(|(_, schema)| schema.clone_from(&bundle.schema));
            let params: Params = texts.into_iter().collect();
            conform(&schemas, &params)
                .map_err(|problem| Error::refused(policy, problem).in_profile(profile))?;
            let params = own_params(policy, &params).unwrap_or(params);
            let prepared = component.prepare(profile, &params);
            prepared.map_err(|failure| refuse(failure).in_profile(profile))?;
            // The golden file passes with its own parameters; the requests of the profile have these.
            let failure =
                golden.as_ref().and_then(|golden| golden.failure_with(component, &params));
            if let Some(failure) = failure {
                let problem = format!("tried with the parameters of its profile: {failure}");
                return Err(Error::refused(policy, problem).in_profile(profile));
            }
        }
        Ok(())
    }

    /// Validates and activates a component, unless it is active already.
    fn replace(
        &self,
        policy: &str,
        source: &Source,
        bundle: &Bundle,
        origin: Origin,
        urgency: Urgency,
    ) -> Result<Activation, Error> {
        let upload = origin == Origin::Upload;
        let sha256 = hex::encode(Sha256::digest(&bundle.component));
        let is_active = || self.active().policy(policy).sha256() == sha256;
        let same = self.current(policy).filter(|current| current.sha256() == sha256);
        let component = match &same {
            Some(current) => {
                self.check(policy, &current.component, bundle)?;
                None
            }
            None => Some(self.validate(policy, bundle, urgency)?),
        };
        let _change = self.change.lock();
        // An upload may have replaced the file meanwhile. The watch reports that change, too.
        let is_outdated = || {
            let file = source.read(policy, &self.trust).ok().flatten();
            file.is_none_or(|file| digest_of(&file) != digest_of(bundle))
        };
        let unchanged = |notes| Activation {
            policy: policy.into(),
            sha256: sha256.clone(),
            replaced: None,
            notes,
        };
        if origin == Origin::File && is_outdated() {
            return Ok(unchanged(Vec::new()));
        }
        let write = || if upload { self.write(policy, source, bundle) } else { Ok(Vec::new()) };
        if is_active() {
            let notes = write()?;
            let mut active = self.active();
            active.policy(policy).update(bundle);
            active.resolve(&self.chains, &self.limits);
            return Ok(unchanged(notes));
        }
        let Some(component) = component else {
            let problem = "another version became active meanwhile; try again";
            return Err(Error::refused(policy, problem));
        };
        let notes = write()?;
        let current = self.current(policy);
        if let Some(current) = current.filter(|current| current.origin == Origin::Shipped)
            && let Some(shipped) = source.shipped()
        {
            // So that a rollback can return to it.
            self.active().policy(policy).history.add(current.entry(), &shipped.component);
        }
        let version = Version::new(component, bundle, origin, Breakers::on_probation());
        Ok(Activation { notes, ..self.activate(policy, version, &bundle.file) })
    }

    /// Writes a component, or a bundle, to the file of its policy. A component removes a bundle, which would take
    /// precedence over it; returns a note if it did.
    fn write(&self, policy: &str, source: &Source, bundle: &Bundle) -> Result<Vec<String>, Error> {
        let path = source.target(policy, bundle.is_archive)?;
        let replaced = source.bundle.as_deref().filter(|_| !bundle.is_archive);
        let written = file::replace(path, &bundle.file)
            .and_then(|()| replaced.map_or(Ok(false), file::remove));
        let removed = written.map_err(|source| Error::NotWritten {
            policy: policy.into(),
            path: path.into(),
            source,
        })?;
        self.active().policy(policy).seen = Some(digest_of(bundle));
        let note = |removed: &Path| {
            format!("removed {}, which takes precedence over a component", removed.display())
        };
        Ok(replaced.filter(|_| removed).map(note).into_iter().collect())
    }

    /// Removes the files of a policy that the binary contains. Returns a note for each file that existed.
    fn remove(&self, policy: &str, source: &Source) -> Result<Vec<String>, Error> {
        let mut notes = Vec::new();
        for path in source.bundle.iter().chain(&source.component) {
            let removed = file::remove(path);
            let is_removed = removed.map_err(|source| Error::NotWritten {
                policy: policy.into(),
                path: path.clone(),
                source,
            })?;
            if is_removed {
                let path = path.display();
                notes.push(format!(
                    "removed {path}: the version that ships with the server is active"
                ));
            }
        }
        self.active().policy(policy).seen = None;
        Ok(notes)
    }

    fn activate(&self, policy: &str, version: Version, file: &[u8]) -> Activation {
        let (sha256, origin) = (version.sha256(), version.origin.name());
        let mut active = self.active();
        let replaced = active.policy(policy).activate(version, file);
        active.resolve(&self.chains, &self.limits);
        tracing::info!(policy, sha256, replaced, origin, "policy activated");
        Activation { policy: policy.into(), sha256, replaced: Some(replaced), notes: Vec::new() }
    }

    /// Logs and reports a rejected update.
    fn reject(&self, policy: &str, message: String) {
        let mut active = self.active();
        let entry = active.policy(policy);
        if entry.problem.as_ref().is_none_or(|problem| problem.message != message) {
            tracing::warn!(policy, problem = message, "policy update rejected");
            entry.problem = Some(Problem::now(message));
        }
    }

    /// The active versions. Versions that failed their probation are rolled back first.
    fn active(&self) -> MutexGuard<'_, Active> {
        let mut active = self.active.lock();
        if active.roll_back_condemned(&self.chains) {
            active.resolve(&self.chains, &self.limits);
        }
        active
    }

    fn current(&self, policy: &str) -> Option<Arc<Version>> {
        self.active().policy(policy).current.clone()
    }

    fn source(&self, policy: &str) -> Result<&Source, Error> {
        self.sources.get(policy).ok_or_else(|| {
            let known: Vec<_> = self.sources.keys().map(String::as_str).collect();
            Error::UnknownPolicy { policy: policy.into(), known: known.join(", ") }
        })
    }

    /// The profiles that name a policy.
    fn users(&self, policy: &str) -> impl Iterator<Item = (&str, &ProfileChain)> {
        let names = move |chain: &ProfileChain| chain.links.iter().any(|(link, _)| link == policy);
        let users = self.chains.iter().filter(move |(_, chain)| names(chain));
        users.map(|(name, chain)| (name.as_str(), chain))
    }
}
