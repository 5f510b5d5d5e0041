//! Reloads components, golden files and parameters when their files change.

use std::path::PathBuf;
use std::sync::Arc;

use super::active::digest_of;
use super::params::{located, own_problems};
use super::source::{Source, read_param};
use super::watch::Watch;
use super::{Origin, Policies, Problem};
use crate::chain::own_params;
use crate::config::Param;
use crate::contract::Params;
use crate::error::Error;
use crate::golden::Golden;
use crate::sandbox::Urgency;
use crate::schema::conform;

impl Policies {
    /// Watches all files, if `policy.watch` is set, and tries policies again whose compiler was ended by something
    /// other than the component. Both happen on threads that end with the last handle.
    pub fn watch(self: &Arc<Self>) {
        self.try_again_later();
        let mut files: Vec<PathBuf> = self.sources.values().flat_map(Source::files).collect();
        let params = self.chains.values().flat_map(|chain| chain.settings.params.values());
        files.extend(params.filter_map(|param| match param {
            Param::File { file } => Some(file.clone()),
            Param::Text(_) => None,
        }));
        if !self.limits.watch || files.is_empty() {
            return;
        }
        let policies = Arc::downgrade(self);
        let changed = move || {
            let Some(policies) = policies.upgrade() else { return false };
            policies.reload();
            policies.try_again_later();
            true
        };
        match Watch::start(&files, changed) {
            Ok(watch) => drop(self.watch.set(watch)),
            Err(error) => tracing::warn!(%error, "policy files cannot be watched"),
        }
    }

    /// Reads all files again and activates what has changed. Problems are logged and reported.
    pub(super) fn reload(&self) {
        for (policy, source) in &self.sources {
            if let Err(error) = self.reload_policy(policy, source) {
                self.note_pending(policy, &error);
                self.reject(policy, error.to_string());
            }
        }
        for (profile, chain) in &self.chains {
            for (param, value) in &chain.settings.params {
                self.reload_param(profile, param, value);
            }
        }
    }

    fn reload_policy(&self, policy: &str, source: &Source) -> Result<(), Error> {
        let read = source.read(policy, &self.trust);
        let Some(bundle) = read.map_err(|problem| Error::refused(policy, problem))? else {
            let mut active = self.active();
            let entry = active.policy(policy);
            entry.seen = None;
            let origin = entry.current.as_ref().map(|version| version.origin);
            return match (source.file(), origin) {
                (None, _) | (_, Some(Origin::Shipped)) => Ok(()),
                // The one in the binary has not compiled yet.
                (_, None) if source.shipped.is_some() => Ok(()),
                (Some(file), origin) => {
                    let so = match origin {
                        Some(_) => "; the active version ends with the server",
                        None => ", and no version is active",
                    };
                    let problem = format!("{} no longer exists{so}", file.display());
                    Err(Error::refused(policy, problem))
                }
            };
        };
        let seen = Some(digest_of(&bundle));
        if std::mem::replace(&mut self.active().policy(policy).seen, seen) == seen {
            return Ok(());
        }
        self.replace(policy, source, &bundle, Origin::File, Urgency::Awaited).map(drop)
    }

    fn reload_param(&self, profile: &str, param: &str, value: &Param) {
        let read = read_param(value).and_then(|text| {
            let mut texts = self.active().params[profile].texts.clone();
            if texts.get(param) != Some(&text) {
                texts.insert(param.into(), text.clone());
                self.try_params(profile, &texts.into_iter().collect())?;
            }
            Ok(text)
        });
        let mut active = self.active();
        let params = active.params.get_mut(profile).expect("every profile has parameters");
        match read {
            Ok(text) => {
                params.problems.remove(param);
                if params.texts.get(param) != Some(&text) {
                    params.texts.insert(param.into(), text);
                    params.unusable.clear();
                    active.resolve(&self.chains, &self.limits);
                    tracing::info!(profile, param, "parameter updated");
                }
            }
            Err(problem) if params.problems.get(param).is_some_and(|p| p.message == problem) => {}
            Err(problem) => {
                tracing::warn!(profile, param, problem, "parameter update rejected");
                params.problems.insert(param.into(), Problem::now(problem));
            }
        }
    }

    /// Tries parameters with the active versions of the profile's policies: with their schemas, with `on-params`,
    /// and with the calls of their golden files. No lock is held meanwhile.
    ///
    /// # Errors
    /// The mistakes that policies report, each with the file of its parameter, or the first policy that fails.
    fn try_params(&self, profile: &str, params: &Params) -> Result<(), String> {
        let schemas = self.active().schemas(&self.chains[profile], profile);
        conform(&schemas, params)?;
        let given = &self.chains[profile].settings.params;
        let mut problems: Vec<String> = Vec::new();
        for (policy, shadow) in &self.chains[profile].links {
            let version = self.active().policies[policy].version_of(profile, *shadow);
            let Some(version) = version else { continue };
            let own = own_params(policy, params).unwrap_or_else(|| params.clone());
            let prepared = version.component.prepare(profile, &own);
            let prepared = prepared.map_err(|failure| failure.to_string())?;
            let reported = own_problems(&prepared.problems);
            problems.extend(reported.map(|one| located(given, policy, one).1));
            if !problems.is_empty() {
                continue;
            }
            // A version without a golden file has none that could be parsed.
            let golden = Golden::parse(&version.golden).ok();
            if let Some(problem) = golden.and_then(|g| g.failure_with(&version.component, &own)) {
                return Err(format!("tried with the golden file: {problem}"));
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(problems.join("; ")) }
    }
}
