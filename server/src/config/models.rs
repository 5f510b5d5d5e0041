//! `[models.NAME]` and `[aliases]`: models that are loaded on demand, and further names.

use std::collections::BTreeSet;

use serde::Deserialize;

use super::{FileConfig, out_of};
use crate::hub;
use crate::words::suggestion;

/// A week in seconds.
const WEEK_S: u64 = 7 * 24 * 3600;

/// `[models.NAME]`: a model that is loaded when the first request asks for it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OnDemandConfig {
    /// A local folder or a Hugging Face repo id. A repo is not downloaded when the server starts.
    pub path: String,
    /// Seconds without a request after which it is unloaded; 0 keeps it until its room is needed.
    pub keep_alive_s: u64,
    /// Whether it stays loaded once it is.
    pub pinned: bool,
}

impl OnDemandConfig {
    /// The lines of a configuration by which the model `id` of a hub is served under this name.
    pub fn lines(id: &str) -> String {
        // An id has no characters that TOML would read in another way.
        format!("[models.\"{id}\"]\npath = \"{id}\"\n")
    }
}

impl FileConfig {
    /// Names for clients of `[model]`, of the models of profiles and of those that are loaded on demand.
    pub fn model_names(&self) -> Vec<String> {
        let first = Some(self.first_name());
        let of_profiles = self.profiles.values().map(|profile| &profile.model);
        let of_profiles = of_profiles
            .filter(|model| !model.is_empty() && !self.models.contains_key(*model))
            .filter(|model| !self.is_of_upstream(model))
            .map(|model| hub::name_of(model));
        let mut names: Vec<_> = first.into_iter().chain(of_profiles).collect();
        names.extend(self.models.keys().cloned());
        names
    }

    fn first_name(&self) -> String {
        match self.model.name.as_str() {
            "" => hub::name_of(&self.model.path),
            name => name.into(),
        }
    }

    /// Problems of `[models]` and `[aliases]`.
    pub(super) fn problems_of_models(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let names = self.model_names();
        for (name, model) in &self.models {
            let key = format!("models.{}", name.escape_debug());
            if !is_name(name) {
                problems.push(format!("{key}: {NAME_RULE}"));
            }
            if names.iter().filter(|other| *other == name).count() > 1 {
                problems.push(format!("{key}: another model has this name; choose another one"));
            }
            if self.is_of_upstream(name) {
                problems.push(format!("{key}: {UPSTREAM_RULE}"));
            }
            if model.path.is_empty() {
                problems
                    .push(format!("{key}.path: is missing; name a folder or a repo (owner/name)"));
            }
            problems.extend(out_of(&format!("{key}.keep_alive_s"), model.keep_alive_s, 0, WEEK_S));
        }
        for (alias, target) in &self.aliases {
            let key = format!("aliases.{}", alias.escape_debug());
            problems.extend(
                self.problem_of_alias(alias, target, &names)
                    .map(|problem| format!("{key}: {problem}")),
            );
        }
        for (name, profile) in &self.profiles {
            for route in &profile.routes {
                problems.extend(
                    self.problem_of_route(name, route, &names)
                        .map(|problem| format!("profiles.{name}.routes: {problem}")),
                );
            }
        }
        problems
    }

    /// What is wrong with a destination for requests of `profile`: a model that it uses, `MODEL@PROFILE`, an
    /// alias of these, or a profile.
    fn problem_of_route(&self, profile: &str, route: &str, names: &[String]) -> Option<String> {
        let target = self.aliases.get(route).map_or(route, String::as_str);
        let is_named =
            |model: &str| names.iter().any(|name| name == model) || self.is_of_upstream(model);
        if is_named(target) {
            let serves = self.serves(target, profile);
            return (!serves).then(|| {
                format!(
                    "the profile does not use the model `{route}`; name a profile that does, as \
                     `{route}@PROFILE`"
                )
            });
        }
        let is_profile = |name: &str| name == "default" || self.profiles.contains_key(name);
        let serves = |(model, of): (&str, &str)| is_named(model) && self.serves(model, of);
        if is_profile(target) || target.rsplit_once('@').is_some_and(serves) {
            return None;
        }
        let profiles = self.profiles.keys().map(|name| format!("`{name}`"));
        let models = names.iter().map(|name| format!("`{name}`"));
        let known: BTreeSet<_> = models.chain(profiles).collect();
        let known = known.into_iter().collect::<Vec<_>>().join(", ");
        let both = names.iter().chain(self.profiles.keys()).map(String::as_str);
        let near = suggestion(route, both);
        Some(format!(
            "`{route}` is neither a model nor a profile; use MODEL, MODEL@PROFILE or PROFILE of {known}{near}"
        ))
    }

    fn problem_of_alias(&self, alias: &str, target: &str, names: &[String]) -> Option<String> {
        if !is_name(alias) {
            return Some(NAME_RULE.into());
        }
        if names.iter().any(|name| name == alias) {
            return Some("is the name of a model already".into());
        }
        if self.is_of_upstream(alias) {
            return Some(UPSTREAM_RULE.into());
        }
        if self.aliases.contains_key(target) {
            return Some(format!("`{target}` is an alias itself; name its model"));
        }
        if names.iter().any(|name| name == target) || self.is_of_upstream(target) {
            return None;
        }
        let known: BTreeSet<_> = names.iter().map(|name| format!("`{name}`")).collect();
        let known = known.into_iter().collect::<Vec<_>>().join(", ");
        let Some((model, profile)) = target.rsplit_once('@') else {
            let near = suggestion(target, names.iter().map(String::as_str));
            return Some(format!(
                "there is no model `{target}`; use {known}, or one of them with @PROFILE{near}"
            ));
        };
        if !names.iter().any(|name| name == model) && !self.is_of_upstream(model) {
            let near = suggestion(model, names.iter().map(String::as_str));
            return Some(format!("there is no model `{model}`; use {known}{near}"));
        }
        let near = suggestion(profile, self.profiles.keys().map(String::as_str));
        let serves = self.serves(model, profile);
        (!serves).then(|| format!("there is no profile `{profile}` that uses `{model}`{near}"))
    }

    /// Whether requests of `profile` may use `model`.
    fn serves(&self, model: &str, profile: &str) -> bool {
        if self.is_of_upstream(model) {
            return self.is_granted(profile, model);
        }
        let own = self.profiles.get(profile).map(|profile| profile.model.as_str());
        match own {
            None if profile != "default" => false,
            None | Some("") => model == self.first_name() || self.models.contains_key(model),
            Some(own) if self.models.contains_key(own) => own == model,
            Some(own) => hub::name_of(own) == model,
        }
    }
}

/// What names must be.
const NAME_RULE: &str = "a name is letters, digits and any of -_.:/ (`@` begins a profile)";

/// What is wrong with names of other models that begin as those of an upstream: a request would go to either.
const UPSTREAM_RULE: &str =
    "the models of an upstream have names that begin like this one; choose another name";

fn is_name(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "-_.:/".contains(c);
    !name.is_empty() && name.chars().all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> Vec<String> {
        FileConfig::parse(text).unwrap().problems()
    }

    const MODELS: &str = "[models.small]\npath = 'owner/small'\n[models.quick]\npath = 'owner/q'\n\
                          [profiles.fast]\nmodel = 'quick'\n[profiles.plain]\n";

    #[test]
    fn the_lines_for_a_model_of_a_hub_are_read_as_such() {
        for id in ["owner/name", "Owner-1/name_2.5-4bit", "owner/name:Q4_K_M"] {
            let file = FileConfig::parse(&OnDemandConfig::lines(id)).unwrap();
            let model = OnDemandConfig { path: id.into(), ..OnDemandConfig::default() };
            assert_eq!((file.models.len(), file.models.get(id)), (1, Some(&model)), "{id}");
            assert!(file.check().is_ok(), "{id}");
        }
    }

    #[test]
    fn aliases_name_models_and_their_profiles() {
        let targets = [
            "small",
            "quick",
            "tiny-hybrid-4bit",
            "small@default",
            "small@plain",
            "quick@fast",
            "tiny-hybrid-4bit@plain",
        ];
        for target in targets {
            let text = format!("{MODELS}[aliases]\n\"gpt-4o:latest\" = '{target}'");
            assert_eq!(problems(&text), [""; 0], "{target}");
        }
    }

    #[test]
    fn routes_name_models_and_profiles() {
        let check = |route: &str| {
            problems(&format!(
                "{MODELS}[profiles.a]\nroutes = ['{route}']\n[profiles.b]\nmodel = 'small'"
            ))
        };
        for route in ["small", "a", "b", "default", "small@b", "small@a"] {
            assert_eq!(check(route), [""; 0], "{route}");
        }
        let misspelt = check("smal");
        assert!(misspelt[0].starts_with("profiles.a.routes: `smal` is neither"), "{misspelt:?}");
        assert!(misspelt[0].contains("`small`") && misspelt[0].contains("`b`"), "{misspelt:?}");
        assert_eq!(check("small@c").len(), 1);
        let of_b = problems(&format!(
            "{MODELS}[models.other]\npath = 'o'\n[profiles.b]\nmodel = 'small'\nroutes = ['other']"
        ));
        assert!(of_b[0].contains("does not use the model `other`"), "{of_b:?}");
    }

    #[test]
    fn wrong_aliases_are_refused_with_their_line() {
        for (alias, words) in [
            ("a = 'smal'", "there is no model `smal`; use `quick`, `small`, `tiny-hybrid-4bit`"),
            ("a = 'smal@plain'", "there is no model `smal`"),
            ("a = 'small@none'", "there is no profile `none` that uses `small`"),
            ("a = 'small@fast'", "there is no profile `fast` that uses `small`"),
            ("a = 'quick@'", "there is no profile `` that uses `quick`"),
            ("small = 'quick'", "is the name of a model already"),
            ("\"a@b\" = 'quick'", "a name is letters"),
            ("a = ''", "there is no model ``"),
        ] {
            let text = format!("{MODELS}[aliases]\n\n{alias}\n");
            let problems = problems(&text);
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].contains(words), "{problems:?}");
            let file = FileConfig::parse(&text).unwrap();
            let error = file.check().unwrap_err().to_string();
            assert!(error.starts_with("line 10: aliases."), "{error}");
        }
        let chain = problems(&format!("{MODELS}[aliases]\na = 'small'\nb = 'a'"));
        assert!(chain[0].contains("aliases.b: `a` is an alias itself"), "{chain:?}");
    }

    #[test]
    fn wrong_models_are_refused_by_key() {
        for (text, words) in [
            ("[models.a]", "models.a.path: is missing"),
            ("[models.\"a@b\"]\npath = 'x/y'", "models.a@b: a name is letters"),
            ("[models.tiny-hybrid-4bit]\npath = 'x/y'", "another model has this name"),
            ("[model]\nname = 'a'\n[models.a]\npath = 'x/y'", "another model has this name"),
            ("[models.a]\npath = 'x/y'\nkeep_alive_s = 99999999", "models.a.keep_alive_s"),
        ] {
            let problems = problems(text);
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].contains(words), "{problems:?}");
        }
    }
}
