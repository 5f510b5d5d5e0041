//! `steersman check`: finds problems of a configuration without starting a server.
//!
//! Checks values, and the files that they name: models, policies, parameters and the beginnings of
//! requests in `warm`. Loads no model, downloads nothing, and writes nothing but compiled policies.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use serde::Deserialize;
use serde_json::Value;
use steersman_engine::config::Config;
use steersman_engine::policy::{Policies, Storage};
use steersman_engine::request::Message;

use crate::config::{FILE_BYTES, FileConfig, ServerConfig};
use crate::hub;

/// A file named by `warm`: the beginning of a chat request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Beginning {
    #[serde(rename = "messages")]
    _messages: Vec<Message>,
    #[serde(default, rename = "tools")]
    _tools: Vec<Value>,
}

/// Reads and checks the configuration in `path`, and prints each problem. Policies are compiled by the
/// program `compiler` with the cache in `storage`.
///
/// # Errors
/// If there are problems.
pub fn run(
    path: &Path,
    storage: &Storage,
    compiler: Option<PathBuf>,
    out: &mut impl Write,
) -> Result<()> {
    let problems = match FileConfig::read(path) {
        Ok(mut file) => {
            file.policy.compiler = compiler;
            problems(file, storage, out)?
        }
        Err(error) => vec![format!("{error:#}")],
    };
    for problem in &problems {
        writeln!(out, "{problem}")?;
    }
    match problems.len() {
        0 => Ok(writeln!(out, "{}: no problems", path.display())?),
        1 => bail!("{}: 1 problem", path.display()),
        several => bail!("{}: {several} problems", path.display()),
    }
}

/// All problems. Prints what is no problem yet: models that the server would download.
fn problems(file: FileConfig, storage: &Storage, out: &mut impl Write) -> Result<Vec<String>> {
    let mut problems = file.problems();
    let (server, config) = file.split();
    for (key, model) in models(&server, &config) {
        match hub::is_here(model) {
            Ok(true) => {}
            Ok(false) => {
                let then = if key.starts_with("models.") {
                    "`steersman pull` downloads it"
                } else {
                    "a server would download it"
                };
                writeln!(out, "{key}: {model} is not on this machine; {then}")?;
            }
            Err(error) => problems.push(format!("{key}: {error:#}")),
        }
    }
    problems.extend(problems_of_policies(&config, storage));
    problems.extend(problems_of_warm_files(&config));
    Ok(problems)
}

/// The models that the configuration names, by key.
fn models<'a>(server: &'a ServerConfig, config: &'a Config) -> Vec<(String, &'a str)> {
    let mut models = vec![("model.path".to_string(), config.model.path.as_str())];
    if !config.speculation.draft_model.is_empty() {
        models.push(("speculation.draft_model".into(), &config.speculation.draft_model));
    }
    let on_demand = server.models.iter();
    models.extend(
        on_demand.map(|(name, model)| (format!("models.{name}.path"), model.path.as_str())),
    );
    let profiles =
        server.profile_models.iter().filter(|(_, model)| !server.models.contains_key(*model));
    models.extend(profiles.map(|(name, model)| (format!("profiles.{name}.model"), model.as_str())));
    models
}

/// Policies that cannot be loaded: one problem a profile.
fn problems_of_policies(config: &Config, storage: &Storage) -> Vec<String> {
    let mut problems = Vec::new();
    for (name, profile) in config.profile_policies() {
        let profile = BTreeMap::from([(name, profile)]);
        let found = match Policies::load(&config.policy, &profile, storage) {
            Err(error) => vec![error.to_string()],
            // A server starts without them, or with an earlier version.
            Ok(policies) => {
                let reports = policies.report().policies.into_iter();
                let problems = reports.filter_map(|policy| Some(policy.problem?.message));
                problems.chain(policies.unusable_params().iter().cloned()).collect()
            }
        };
        // A problem of `[policy]` concerns all profiles.
        for problem in found {
            if !problems.contains(&problem) {
                problems.push(problem);
            }
        }
    }
    problems
}

/// Files in `warm` that cannot be read or parsed.
fn problems_of_warm_files(config: &Config) -> Vec<String> {
    let mut problems = Vec::new();
    for (name, profile) in &config.profiles {
        for path in &profile.warm {
            let read = steersman_files::read(path, FILE_BYTES)
                .map_err(|error| error.to_string())
                .and_then(|text| {
                    serde_json::from_slice::<Beginning>(&text).map_err(|error| error.to_string())
                });
            if let Err(problem) = read {
                problems.push(format!("profiles.{name}.warm: {}: {problem}", path.display()));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(path: &Path) -> (bool, String) {
        let mut out = Vec::new();
        let passed = run(path, &Storage::in_memory(), None, &mut out).is_ok();
        (passed, String::from_utf8(out).unwrap())
    }

    #[test]
    fn every_problem_is_printed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(at("wrong.json"), "{\"messages\": [], \"tool\": []}").unwrap();
        let text = format!(
            "[server]\nbody_timeout_s = 0\n\
             [model]\npath = '{}'\n\
             [speculation]\ndepth = 9\n\
             [profiles.a]\nmodel = 'neither a folder nor a repo'\npolicies = ['{}']\n\
             sampling.min_p = nan\n\
             [profiles.b]\npolicies = ['{}']\nwarm = ['{}', '{}']\n",
            at("no-model"),
            at("first.wasm"),
            at("second.wasm"),
            at("absent.json"),
            at("wrong.json"),
        );
        std::fs::write(at("c.toml"), text).unwrap();
        let (passed, printed) = checked(&folder.path().join("c.toml"));
        assert!(!passed);
        let expected = [
            "server.body_timeout_s: is 0",
            "speculation.depth: is 9",
            "profile `a` has a sampling parameter out of range: min_p is NaN",
            "model.path: ",
            "profiles.a.model: ",
            "first.wasm",
            "second.wasm",
            "absent.json",
            "wrong.json: unknown field `tool`",
        ];
        assert_eq!(printed.lines().count(), expected.len(), "{printed}");
        for (line, words) in printed.lines().zip(expected) {
            assert!(line.contains(words), "`{words}` is not in {line}");
        }
    }

    #[test]
    fn a_mistake_in_rules_is_a_problem() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("steersman.toml");
        let rules = "[[rule]]\ndo = { reason = true }";
        let profile = format!(
            "[profiles.p]\npolicies = ['rules']\n[profiles.p.params]\nrules = \"\"\"{rules}\"\"\"\n"
        );
        std::fs::write(&path, profile).unwrap();
        let (passed, printed) = checked(&path);
        let expected = "profile `p`: policy `rules`: parameter `rules`: rule 1, line 2: ";
        assert!(!passed && printed.contains(expected), "{printed}");
    }

    #[test]
    fn configuration_without_problems_passes() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/steersman.toml");
        let (passed, printed) = checked(&path);
        assert!(passed && printed.contains("no problems"), "{printed}");
        let (passed, printed) = checked(Path::new("/no/such.toml"));
        assert!(!passed && printed.contains("/no/such.toml"), "{printed}");
    }
}
