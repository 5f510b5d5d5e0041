//! Files that change while requests run: components, their golden traces, and parameters.

use std::path::PathBuf;
use std::sync::Arc;

use super::place::{Place, read_param};
use super::state::digest_of_source;
use super::watch::Watch;
use super::{Origin, Policies, Problem, refused};
use crate::config::Param;

impl Policies {
    /// Loads files again when they change, where `policy.watch` says so, on a thread that ends with
    /// the last handle to this.
    pub fn watch(self: &Arc<Self>) {
        let components = self.places.values().filter_map(|place| place.file.clone());
        let mut files: Vec<PathBuf> =
            components.flat_map(|file| [file.with_extension("jsonl"), file]).collect();
        let params = self.profiles.values().flat_map(|rules| rules.profile.params.values());
        files.extend(params.filter_map(|param| match param {
            Param::File { file } => Some(file.clone()),
            Param::Text(_) => None,
        }));
        if !self.limits.watch || files.is_empty() {
            return;
        }
        let policies = Arc::downgrade(self);
        let changed = move || policies.upgrade().map(|policies| policies.refresh()).is_some();
        match Watch::start(&files, changed) {
            Ok(watch) => drop(self.watch.set(watch)),
            Err(error) => tracing::warn!(%error, "changes of policies are not noticed"),
        }
    }

    /// Reads all files again and puts in force what has changed; what is refused is noted.
    pub(super) fn refresh(&self) {
        for (policy, place) in &self.places {
            if let Err(problem) = self.refresh_policy(policy, place) {
                self.note(policy, problem);
            }
        }
        for (profile, rules) in &self.profiles {
            for (param, value) in &rules.profile.params {
                self.refresh_param(profile, param, value);
            }
        }
    }

    fn refresh_policy(&self, policy: &str, place: &Place) -> Result<(), String> {
        let _turn = self.turn();
        let read = place.read().map_err(|problem| refused(policy, problem).to_string())?;
        let Some(source) = read else {
            let mut state = self.settled();
            let slot = state.slot(policy);
            slot.seen = None;
            return match (&place.file, slot.current.origin) {
                (None, _) | (_, Origin::Shipped) => Ok(()),
                (Some(file), _) => Err(format!(
                    "policy `{policy}`: there is no file {} any more; what runs ends with the server",
                    file.display()
                )),
            };
        };
        let seen = Some(digest_of_source(&source));
        if std::mem::replace(&mut self.settled().slot(policy).seen, seen) == seen {
            return Ok(());
        }
        let replaced = self.replace(policy, place, &source.component, &source.golden, Origin::File);
        replaced.map(drop).map_err(|error| error.to_string())
    }

    fn refresh_param(&self, profile: &str, param: &str, value: &Param) {
        let read = read_param(value);
        let mut state = self.settled();
        let params = state.params.get_mut(profile).expect("every profile has an entry");
        match read {
            Ok(text) => {
                params.problems.remove(param);
                if params.texts.get(param) != Some(&text) {
                    Arc::make_mut(&mut params.texts).insert(param.into(), text);
                    state.resolve(&self.profiles, &self.limits);
                    tracing::info!(profile, param, "param replaced");
                }
            }
            Err(problem) if params.problems.get(param).is_some_and(|p| p.what == problem) => {}
            Err(problem) => {
                tracing::warn!(profile, param, problem, "what was read before stays in force");
                params.problems.insert(param.into(), Problem::now(problem));
            }
        }
    }
}
