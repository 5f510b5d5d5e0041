//! `[upstreams]`: which names they have, and who may use them.

use std::collections::BTreeSet;

use steersman_upstream::is_upstream_of;

use super::FileConfig;
use crate::words::suggestion;

impl FileConfig {
    /// Problems of `[upstreams]`, and of what names them.
    pub(super) fn problems_of_upstreams(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for (name, upstream) in &self.upstreams {
            problems.extend(upstream.problems(name));
            for (index, model) in upstream.fallback.iter().enumerate() {
                let key = format!("upstreams.{name}.fallback");
                let problem = match self.is_model(model) {
                    _ if upstream.fallback[..index].contains(model) => {
                        Some(format!("`{model}` is named twice; drop one"))
                    }
                    true => None,
                    false => Some(format!("there is no model `{model}`{}", self.near_model(model))),
                };
                problems.extend(problem.map(|problem| format!("{key}: {problem}")));
            }
        }
        for (name, profile) in &self.profiles {
            let key = format!("profiles.{}.upstreams", name.escape_debug());
            for granted in &profile.upstreams {
                if !self.upstreams.contains_key(granted) && !self.is_of_upstream(granted) {
                    let known: Vec<_> = self.upstreams.keys().map(String::as_str).collect();
                    let near = suggestion(granted, known.iter().copied());
                    let known = if known.is_empty() { "none".into() } else { known.join(", ") };
                    problems.push(format!(
                        "{key}: `{granted}` is neither an upstream nor UPSTREAM/MODEL; [upstreams] has {known}{near}"
                    ));
                }
            }
            let is_of_upstream = self.is_of_upstream(&profile.model);
            if is_of_upstream && !profile.warm.is_empty() {
                problems.push(format!(
                    "profiles.{}.warm: an upstream computes no prefixes ahead; drop it",
                    name.escape_debug()
                ));
            }
        }
        problems
    }

    /// Whether `model` is one of an upstream, by its name.
    pub(super) fn is_of_upstream(&self, model: &str) -> bool {
        is_upstream_of(model, |name| self.upstreams.contains_key(name)).is_some()
    }

    /// Whether profile `name` may use `model`, one of an upstream.
    pub(super) fn is_granted(&self, name: &str, model: &str) -> bool {
        let Some((upstream, _)) = is_upstream_of(model, |name| self.upstreams.contains_key(name))
        else {
            return false;
        };
        let profile = self.profiles.get(name);
        profile.is_some_and(|profile| {
            let grants = |granted: &String| granted == model || granted == upstream;
            profile.model == model || profile.upstreams.iter().any(grants)
        })
    }

    /// Whether a model is served: one of this server, `MODEL@PROFILE` of it, an alias, or one of an upstream.
    fn is_model(&self, name: &str) -> bool {
        let names: BTreeSet<_> = self.model_names().into_iter().collect();
        let is_served = |model: &str| names.contains(model) || self.is_of_upstream(model);
        let is_with_profile = || {
            let Some((model, profile)) = name.rsplit_once('@') else { return false };
            is_served(model) && (profile == "default" || self.profiles.contains_key(profile))
        };
        is_served(name) || self.aliases.contains_key(name) || is_with_profile()
    }

    fn near_model(&self, name: &str) -> String {
        let names = self.model_names();
        suggestion(
            name,
            names.iter().map(String::as_str).chain(self.aliases.keys().map(String::as_str)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> Vec<String> {
        FileConfig::parse(text).unwrap().problems()
    }

    const UPSTREAMS: &str = "[upstreams.work]\nurl = 'http://127.0.0.1:1'\n[upstreams.claude]\n\
                             url = 'https://api.example'\nprotocol = 'anthropic'\n";

    #[test]
    fn upstreams_are_named_by_profiles_routes_aliases_and_fallbacks() {
        let text = format!(
            "{UPSTREAMS}fallback = ['work/owner/m', 'tiny-hybrid-4bit']\n[aliases]\nbest = 'claude/opus@agents'\n\
             [profiles.agents]\nmodel = 'claude/opus'\nroutes = ['work/m', 'tiny-hybrid-4bit@default']\n\
             upstreams = ['work/m']\n[profiles.all]\nupstreams = ['work', 'claude']\nroutes = ['claude/any']\n"
        );
        assert_eq!(problems(&text), [""; 0]);
    }

    #[test]
    fn what_is_not_there_or_not_granted_is_refused_by_key() {
        for (more, words) in [
            ("fallback = ['worker/m']", "upstreams.claude.fallback: there is no model `worker/m`"),
            (
                "fallback = ['work/m', 'work/m']",
                "upstreams.claude.fallback: `work/m` is named twice",
            ),
            ("[profiles.a]\nupstreams = ['wrok']", "profiles.a.upstreams: `wrok` is neither"),
            ("[profiles.a]\nroutes = ['work/m']", "profiles.a.routes: the profile does not use"),
            ("[profiles.a]\nmodel = 'work/m'\nwarm = ['x']", "profiles.a.warm"),
            (
                "[models.'work/x']\npath = 'tiny-hybrid-4bit'",
                "models.work/x: the models of an upstream",
            ),
            ("[aliases]\n'work/x' = 'claude/opus'", "aliases.work/x: the models of an upstream"),
            ("[upstreams.'a/b']\nurl = 'http://h'", "upstreams.a/b: the name"),
        ] {
            let found = problems(&format!("{UPSTREAMS}{more}\n"));
            assert_eq!(found.len(), 1, "{more}: {found:?}");
            assert!(found[0].starts_with(words), "{more}: {found:?}");
        }
    }

    #[test]
    fn no_key_stands_in_the_file() {
        let error = FileConfig::parse(&format!("{UPSTREAMS}key = 'sk-secret'\n")).unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains("key") && !error.contains("sk-secret"), "{error}");
    }
}
