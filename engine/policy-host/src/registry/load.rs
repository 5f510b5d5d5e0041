//! Loads the policies and the parameters of all profiles when the server starts, and finds all problems of both.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use parking_lot::Mutex;

use super::Policies;
use super::active::{Active, PolicyEntry, ProfileParams, Version};
use super::history::History;
use super::params::{self, Checked};
use super::report::Problem;
use super::source::{ProfileChain, Source, read_param, resolve_profiles};
use crate::breaker::Breakers;
use crate::config::{PolicyConfig, ProfilePolicies};
use crate::contract::Params;
use crate::database::Storage;
use crate::error::{Error, lines_of_params};
use crate::sandbox::{Component, Host, Urgency};
use crate::schema::nearest;
use crate::shipped::SHIPPED;
use crate::tally::Tallies;
use crate::trace::Traces;

impl Policies {
    /// Loads the policies of every profile; the calling thread waits until they are compiled. If a file is
    /// broken, the newest valid version of the history is loaded instead; if there is none and the file does
    /// not compile, the policy has no version. Both are logged as errors.
    ///
    /// # Errors
    /// All problems of the configuration, of the policies and of their parameters: one that hides none of the others is
    /// followed by them ([`Error::Several`]). [`Error::Refused`] names the profile, its policy, the problem and what to
    /// do; [`Error::Config`] and [`Error::Params`] name the key.
    pub fn load(
        config: &PolicyConfig,
        profiles: &BTreeMap<String, ProfilePolicies>,
        storage: &Storage,
    ) -> Result<Self, Error> {
        let folder = &config.folder;
        let has_folder = folder.as_os_str().is_empty() || folder.is_dir();
        let mut problems = Vec::new();
        if !has_folder {
            let problem = format!("{} is not a folder; create it", folder.display());
            problems.push(Error::Config { field: "policy.folder", problem });
        }
        let (chains, sources, invalid) = resolve_profiles(config, profiles);
        problems.extend(invalid);
        let mut policies = Self {
            host: Host::new(config, storage)?,
            limits: config.clone(),
            trust: config.trust()?,
            chains,
            sources,
            traces: Traces::new(config)?,
            tallies: Tallies::default(),
            active: Mutex::default(),
            change: Mutex::default(),
            watch: OnceLock::new(),
            attempts: Mutex::default(),
        };
        let (mut active, mut broken) = (Active::default(), BTreeSet::new());
        for (policy, source) in &policies.sources {
            let history = || History::read(&storage.database, policy, &source.identity(policy));
            let entry = policies.load_first(policy, source, history()).unwrap_or_else(|error| {
                broken.insert(policy.as_str());
                // Whoever creates the folder may have the file for it.
                if has_folder || !policies.may_be_in_folder(policy, source) {
                    problems.push(error);
                }
                PolicyEntry::new(policies.unchecked(policy, source), history())
            });
            active.policies.insert(policy.clone(), entry);
        }
        for (name, chain) in &policies.chains {
            let (params, found) = params_of(name, chain, &active, &broken);
            problems.extend(found);
            active.params.insert(name.clone(), params);
        }
        if !problems.is_empty() {
            let unusable = active.params.iter().filter(|(_, params)| !params.unusable.is_empty());
            problems.extend(unusable.map(|(profile, params)| {
                let each = params.unusable.iter().flat_map(|(param, problem)| {
                    problem.message.lines().map(|line| (param.clone(), line.to_owned()))
                });
                let problems = each.collect();
                Error::Params { profile: profile.clone(), problems }
            }));
            let inactive = active.policies.values().filter_map(|entry| entry.problem.as_ref());
            problems.extend(inactive.map(|problem| Error::Inactive(problem.message.clone())));
        }
        Error::all(problems)?;
        for (profile, params) in &active.params {
            for (param, Problem { message, .. }) in &params.unusable {
                for problem in message.lines() {
                    tracing::warn!(profile, param, problem, "parameter unusable");
                }
            }
        }
        active.resolve(&policies.chains, &policies.limits);
        *policies.active.get_mut() = active;
        Ok(policies)
    }

    /// Returns true if a policy is probably a file in `policy.folder`: it does not ship, nor is its name a slip for one that
    /// does.
    fn may_be_in_folder(&self, policy: &str, source: &Source) -> bool {
        let is_in = |file: &PathBuf| file.starts_with(&self.limits.folder);
        let shipped = SHIPPED.iter().map(|shipped| shipped.name);
        source.file().is_some_and(is_in) && nearest(policy, shipped).is_none()
    }

    /// The version of a policy that is refused, if it compiles, so that mistakes in its parameters are found as well.
    fn unchecked(&self, policy: &str, source: &Source) -> Option<Version> {
        let (bundle, origin) = self.read(policy, source).ok().flatten()?;
        let urgency = Urgency::Awaited;
        let component =
            Component::load_with(&self.host, policy, &bundle.component, urgency).ok()?;
        Some(Version::new(component.into(), &bundle, origin, Breakers::default()))
    }
}

/// The parameters of the profile `name`, and the problems because of which the server does not start. `broken` policies
/// were refused.
fn params_of(
    name: &str,
    chain: &ProfileChain,
    active: &Active,
    broken: &BTreeSet<&str>,
) -> (ProfileParams, Option<Error>) {
    let (mut texts, mut wrong) = (BTreeMap::new(), Vec::new());
    for (param, value) in &chain.settings.params {
        match read_param(value) {
            Ok(text) => drop(texts.insert(param.clone(), text)),
            Err(problem) => wrong.push((param.clone(), problem)),
        }
    }
    let params: Params = texts.clone().into_iter().collect();
    let Checked { wrong: found, unusable } = params::check(name, chain, active, broken, &params);
    wrong.extend(found);
    wrong.sort();
    let mut by_param: BTreeMap<String, String> = BTreeMap::new();
    for (param, problem) in unusable {
        let problems = by_param.entry(param).or_default();
        let and = if problems.is_empty() { "" } else { "\n" };
        problems.push_str(and);
        problems.push_str(&problem);
    }
    let unusable = by_param.into_iter().map(|(param, text)| (param, Problem::now(text))).collect();
    let error =
        (!wrong.is_empty()).then(|| Error::Params { profile: name.into(), problems: wrong });
    (ProfileParams { texts, unusable, ..ProfileParams::default() }, error)
}

impl Error {
    /// The problems of a configuration of `profiles`, a line each, which begins with the key if one is to be changed.
    pub fn lines(&self, profiles: &BTreeMap<String, ProfilePolicies>) -> Vec<String> {
        match self {
            Self::Several { problems } => {
                problems.iter().flat_map(|problem| problem.lines(profiles)).collect()
            }
            Self::Params { profile, problems } => lines_of_params(profile, problems),
            Self::Refused { policy, profile: Some(profile), problem } => {
                let is_named = |chain: &[String]| chain.iter().any(|entry| is_of(entry, policy));
                let is_shadow = profiles.get(profile).is_some_and(|settings| {
                    !is_named(&settings.policies) && is_named(&settings.shadow)
                });
                let key = if is_shadow { "shadow" } else { "policies" };
                vec![format!("profiles.{profile}.{key}: policy `{policy}`: {problem}")]
            }
            other => vec![other.to_string()],
        }
    }
}

/// Whether the `entry` of a chain is the policy `policy`, by its name or by the name of its file.
fn is_of(entry: &str, policy: &str) -> bool {
    entry == policy || Path::new(entry).file_stem().is_some_and(|stem| stem == policy)
}
