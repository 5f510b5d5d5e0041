//! `steersman check`: finds problems of a configuration without starting a server.
//!
//! Checks values, and the files that they name: models, policies, parameters and the beginnings of
//! requests in `warm`. Loads no model, downloads nothing, and writes nothing but compiled policies.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::net::{IpAddr, TcpListener, ToSocketAddrs};
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use serde::Deserialize;
use serde_json::Value;
use steersman_engine::config::{Config, context_note};
use steersman_engine::policy::{Error, Policies, PolicyConfig, ProfilePolicies, Storage};
use steersman_engine::request::Message;
use steersman_upstream::is_upstream_of;

use crate::config::{FILE_BYTES, FileConfig, Problem, ServerConfig, Source, is_listened_on};
use crate::hub;
use crate::keys::{self, Keys};
use crate::models::problems_of_continuation;

/// A file named by `warm`: the beginning of a chat request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Beginning {
    #[serde(rename = "messages")]
    _messages: Vec<Message>,
    #[serde(default, rename = "tools")]
    _tools: Vec<Value>,
}

/// Reads and checks the configuration in `path`, and prints each problem with its line. Policies are compiled by the
/// program `compiler` with the cache in `storage`; `data_dir` has the keys of `steersman keys`.
///
/// # Errors
/// If there are problems.
pub fn run(
    path: &Path,
    data_dir: Option<&Path>,
    storage: &Storage,
    compiler: Option<PathBuf>,
    out: &mut impl Write,
) -> Result<()> {
    let problems = match FileConfig::recover(path) {
        Ok((mut file, problems_of_text)) => {
            file.policy.compiler = compiler;
            let notes = notes(&file.server, data_dir);
            let problems = problems(file, problems_of_text, data_dir, storage, out)?;
            for note in notes {
                writeln!(out, "{note}")?;
            }
            problems
        }
        Err(error) => vec![Problem { line: None, text: format!("{error:#}") }],
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

/// What a server with this configuration warns of.
fn notes(server: &ServerConfig, data_dir: Option<&Path>) -> Vec<String> {
    let is_local = match server.host.parse::<IpAddr>() {
        Ok(address) => address.is_loopback(),
        Err(_) => server.host == "localhost",
    };
    let has_key = || {
        let keys = data_dir.and_then(|folder| Keys::read(&folder.join(keys::FILE)).ok());
        keys.is_some_and(|keys| keys.has_client_key())
    };
    if is_local || !server.api_keys.is_empty() || has_key() {
        return Vec::new();
    }
    vec![format!(
        "warning: server.host: a server at {} accepts network connections without a key: create one with \
         `steersman keys create`, or set server.api_keys",
        server.host
    )]
}

/// All problems, after those of the text. Prints what is no problem yet: models that the server would download.
fn problems(
    file: FileConfig,
    mut located: Vec<Problem>,
    data_dir: Option<&Path>,
    storage: &Storage,
    out: &mut impl Write,
) -> Result<Vec<Problem>> {
    let source = file.source.clone();
    // Without a problem of the text, those of its values are still to be found.
    let mut problems = if located.is_empty() { file.problems() } else { Vec::new() };
    let (server, mut config) = file.split();
    let room = hub::room(&config);
    for (key, model) in models(&server, &config) {
        match hub::is_here(model, room) {
            // A server says so, and starts.
            Ok(true) if key != "speculation.draft_model" => {
                let context = hub::context_of(model, room);
                let note = context.and_then(|model| context_note(config.engine.context, model));
                if let Some(note) = note {
                    writeln!(out, "warning: {key}: {note}")?;
                }
            }
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
    problems.extend(problems_of_places(&server, &config, data_dir));
    // Loading the policies would create the file.
    config.policy.trace_file = PathBuf::new();
    problems.extend(problems_of_policies(&config, storage));
    // Policies that cannot be loaded have a problem already.
    if !server.upstreams.is_empty()
        && let Ok(policies) = Policies::load(&config.policy, &config.profile_policies(), storage)
    {
        let report = policies.report();
        problems.extend(problems_of_continuation(&report, &server, |_| None));
    }
    problems.extend(problems_of_warm_files(&config));
    located.extend(problems.into_iter().map(|problem| source.locate(problem)));
    // Those without a line come last.
    located.sort_by_key(|problem| problem.line.unwrap_or(usize::MAX));
    Ok(located)
}

/// Where a server could not listen or write: what is only known when it tries, without trying.
fn problems_of_places(
    server: &ServerConfig,
    config: &Config,
    data_dir: Option<&Path>,
) -> Vec<String> {
    let mut problems = Vec::new();
    let host = server.host.as_str();
    let remedy = "use 127.0.0.1 for this machine only, or 0.0.0.0 for all its addresses";
    // What is no name has a problem already.
    if is_listened_on(host) {
        match (host, 0).to_socket_addrs() {
            Err(error) => problems.push(format!(
                "server.host: `{host}` is a name without an address here ({error}); {remedy}"
            )),
            Ok(addresses) => {
                let bound = TcpListener::bind(&addresses.collect::<Vec<_>>()[..]);
                if bound.is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable) {
                    problems.push(format!(
                        "server.host: {host} is no address of this machine; {remedy}"
                    ));
                }
            }
        }
    }
    let file = &config.policy.trace_file;
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    if file.is_dir() {
        let file = file.display();
        problems.push(format!("policy.trace_file: {file} is a folder; add the name of a file"));
    } else if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        let folder = folder.display();
        problems.push(format!(
            "policy.trace_file: there is no folder {folder}; create it, or choose another file"
        ));
    }
    problems.extend(data_dir.and_then(problem_of_data_dir));
    problems
}

/// The reason why a server could not write to `data_dir`, or could not create it. A file without a name is written, where
/// the system has those, which is gone at once: permissions do not tell of a file system that is mounted read-only.
fn problem_of_data_dir(data_dir: &Path) -> Option<String> {
    let remedy = "choose a folder with --data-dir or STEERSMAN_DATA_DIR";
    // A relative folder is in the working directory.
    let parts =
        data_dir.ancestors().map(|part| if part == Path::new("") { Path::new(".") } else { part });
    let existing = parts.into_iter().find(|part| part.exists())?;
    let shown = existing.display();
    if !existing.is_dir() {
        return Some(format!("the data folder: {shown} is a file; {remedy}"));
    }
    let error = tempfile::tempfile_in(existing).err()?;
    Some(match existing == data_dir {
        true => format!("the data folder: {shown} cannot be written ({error}); {remedy}"),
        false => {
            let data_dir = data_dir.display();
            format!("the data folder: {data_dir} cannot be created in {shown} ({error}); {remedy}")
        }
    })
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
    let is_here = |model: &String| {
        let is_of_upstream = is_upstream_of(model, |name| server.upstreams.contains_key(name));
        !server.models.contains_key(model) && is_of_upstream.is_none()
    };
    let profiles = server.profile_models.iter().filter(|(_, model)| is_here(model));
    models.extend(profiles.map(|(name, model)| (format!("profiles.{name}.model"), model.as_str())));
    models
}

/// The error of a server whose policies cannot be loaded because of `error`: all their problems, as
/// `steersman check` finds them.
pub fn error_of_policies(
    config: &Config,
    source: &Source,
    storage: &Storage,
    error: steersman_engine::Error,
) -> anyhow::Error {
    let problems = problems_of_policies(config, storage);
    let has = |text: &str| problems.iter().any(|problem| problem.contains(text));
    let is_among_them = match &error {
        steersman_engine::Error::Policy(Error::Refused { problem, .. }) => has(problem),
        steersman_engine::Error::Policy(Error::Params { .. }) => true,
        // Also that of two profiles which are right alone.
        _ => false,
    };
    if !is_among_them {
        return error.into();
    }
    let problems: Vec<_> = problems.into_iter().map(|problem| source.locate(problem)).collect();
    anyhow!(source.message(&problems))
}

/// What keeps a server from starting with a configuration though its values are right: models, policies and files of profiles
/// that are not there or cannot be loaded. Policies are compiled with the cache in `storage`.
pub fn problems_of_files(server: &ServerConfig, config: &Config, storage: &Storage) -> Vec<String> {
    let room = hub::room(config);
    let of_model = |(key, model): (String, &str)| {
        hub::is_here(model, room).err().map(|error| format!("{key}: {error:#}"))
    };
    let mut problems: Vec<_> = models(server, config).into_iter().filter_map(of_model).collect();
    // Loading the policies would create the file.
    let trace_file = PathBuf::new();
    let policy = PolicyConfig { trace_file, ..config.policy.clone() };
    let config = Config { policy, ..config.clone() };
    problems.extend(problems_of_policies(&config, storage));
    problems.extend(problems_of_warm_files(&config));
    problems
}

/// Policies that cannot be loaded, and their parameters that cannot be used.
fn problems_of_policies(config: &Config, storage: &Storage) -> Vec<String> {
    let (mut problems, profiles) = (Vec::new(), config.profile_policies());
    // Without a profile, problems of `[policy]` would not be found.
    if profiles.is_empty()
        && let Err(error) = Policies::load(&config.policy, &profiles, storage)
    {
        problems.push(error.to_string());
    }
    for (name, profile) in profiles {
        // A problem of `[policy]` concerns all profiles.
        for problem in problems_of_profile(&config.policy, &name, profile, storage) {
            if !problems.contains(&problem) {
                problems.push(problem);
            }
        }
    }
    problems
}

/// The problems of the policies of profile `name`. A policy that cannot be loaded is left out, so that those of the others
/// are found as well; but then nobody knows who has which parameters.
fn problems_of_profile(
    config: &PolicyConfig,
    name: &str,
    mut profile: ProfilePolicies,
    storage: &Storage,
) -> Vec<String> {
    let mut problems = Vec::new();
    loop {
        let profiles = BTreeMap::from([(name.to_owned(), profile.clone())]);
        match Policies::load(config, &profiles, storage) {
            Err(Error::Refused { policy, problem, .. }) => {
                let chains = [("policies", &mut profile.policies), ("shadow", &mut profile.shadow)];
                let mut found = None;
                for (key, chain) in chains {
                    let length = chain.len();
                    chain.retain(|entry| !is_of(entry, &policy));
                    if chain.len() < length {
                        found.get_or_insert(key);
                    }
                }
                let key = found.unwrap_or("policies");
                problems.push(format!("profiles.{name}.{key}: policy `{policy}`: {problem}"));
                profile.params.clear();
                if found.is_none() || profile.policies.is_empty() && profile.shadow.is_empty() {
                    return problems;
                }
            }
            Err(Error::Params { problems: params, .. }) => {
                let line = |(param, problem)| format!("profiles.{name}.params.{param}: {problem}");
                problems.extend(params.into_iter().map(line));
                return problems;
            }
            Err(error) => {
                problems.push(error.to_string());
                return problems;
            }
            // A server starts without them, or with an earlier version.
            Ok(policies) => {
                let reports = policies.report().policies.into_iter();
                problems.extend(reports.filter_map(|policy| Some(policy.problem?.message)));
                problems.extend(policies.unusable_params().iter().cloned());
                return problems;
            }
        }
    }
}

/// Whether the `entry` of a chain is the policy `policy`, by its name or by the name of its file.
fn is_of(entry: &str, policy: &str) -> bool {
    entry == policy || Path::new(entry).file_stem().is_some_and(|stem| stem == policy)
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
        let passed = run(path, None, &Storage::in_memory(), None, &mut out).is_ok();
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
             [profiles.a]\nmodel = 'neither a folder nor a repo'\npolicies = ['{}', 'defualt']\n\
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
            "line 2: server.body_timeout_s: is 0",
            "line 4: model.path: ",
            "line 6: speculation.depth: is 9",
            "line 8: profiles.a.model: ",
            "line 9: profiles.a.policies: policy `defualt`: is not a shipped policy, and policy.folder is not \
             set; did you mean `default`?",
            "line 9: profiles.a.policies: policy `first`: ",
            "line 10: profiles.a.sampling: min_p is NaN",
            "line 12: profiles.b.policies: policy `second`: ",
            "line 13: profiles.b.warm: ",
            "wrong.json: unknown field `tool`",
        ];
        assert_eq!(printed.lines().count(), expected.len(), "{printed}");
        for (line, words) in printed.lines().zip(expected) {
            assert!(line.contains(words), "`{words}` is not in {line}");
        }
    }

    /// `passthrough` was refused because it has the hook on-step, and an empty list of policies with the advice to name
    /// `passthrough`.
    #[test]
    fn policies_that_change_what_was_written_need_an_upstream_that_continues_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("steersman.toml");
        for (policies, upstream, fits) in [
            ("'default'", "protocol = 'anthropic'", false),
            ("'passthrough', 'default'", "capabilities.kind = 'mlx-lm'", false),
            ("'passthrough'", "protocol = 'anthropic'", true),
            ("'default'", "capabilities.kind = 'vllm'", true),
            ("'default'", "protocol = 'anthropic'\nwithout_continuation = 'end'", true),
        ] {
            let text = format!(
                "[upstreams.up]\nurl = 'http://127.0.0.1:1'\n{upstream}\n\
                 [profiles.default]\nupstreams = ['up']\npolicies = [{policies}]\n"
            );
            std::fs::write(&path, &text).unwrap();
            let (passed, printed) = checked(&path);
            assert_eq!(passed, fits, "{text}: {printed}");
            let words = "profiles.default.upstreams: the policy `default` may close the reasoning";
            assert_eq!(printed.contains(words), !fits, "{text}: {printed}");
        }
    }

    /// A file with three problems had "1 problem".
    #[test]
    fn problems_of_the_text_do_not_hide_those_of_policies() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("steersman.toml");
        let text = "[server]\nprot = 1\nbody_timeout_s = 0\n[engine]\nqueue = 'x'\n\
                    [profiles.fast.params]\nreasoning_budgt = 100\n";
        std::fs::write(&path, text).unwrap();
        let (passed, printed) = checked(&path);
        assert!(!passed);
        let expected = [
            "line 2: server.prot: unknown key `prot`; did you mean `port`?",
            "line 3: server.body_timeout_s: is 0, must be from 1 to 3600",
            "line 5: engine.queue: is \"x\", expected a whole number, not below 0",
            "line 7: profiles.fast.params.reasoning_budgt: the policy `default` has no such parameter; did you \
             mean `reasoning_budget`?",
        ];
        assert_eq!(printed.lines().collect::<Vec<_>>(), expected);
    }

    /// A server refused what had "no problems".
    #[test]
    fn where_a_server_could_not_listen_or_write_is_a_problem() {
        let folder = tempfile::tempdir().unwrap();
        let (path, file) = (folder.path().join("steersman.toml"), folder.path().join("file"));
        std::fs::write(&file, "").unwrap();
        let check = |text: &str, data_dir: &Path| {
            std::fs::write(&path, text).unwrap();
            let mut out = Vec::new();
            let passed = run(&path, Some(data_dir), &Storage::in_memory(), None, &mut out).is_ok();
            (passed, String::from_utf8(out).unwrap())
        };
        let traces = |name: &str| {
            format!("[policy]\ntrace_file = '{}'\n", folder.path().join(name).display())
        };
        let new = folder.path().join("new").join("data");
        // A relative one is in the working directory.
        for good in
            [String::new(), traces("trace.jsonl"), "[policy]\ntrace_file = 'trace.jsonl'\n".into()]
        {
            let (passed, printed) = check(&good, &new);
            assert!(passed, "{good}: {printed}");
        }
        assert!(!folder.path().join("trace.jsonl").exists(), "nothing is written");
        for (text, data_dir, words) in [
            (
                "[server]\nhost = 'http://127.0.0.1'\n".into(),
                &new,
                "line 2: server.host: `http://127.0.0.1` is neither",
            ),
            // Of a network for documents, which no machine has.
            (
                "[server]\nhost = '192.0.2.1'\n".into(),
                &new,
                "line 2: server.host: 192.0.2.1 is no address of this machine",
            ),
            (
                "[policy]\nfolder = 'none'\n".into(),
                &new,
                "line 2: policy.folder: none is not a folder",
            ),
            (traces("none/trace.jsonl"), &new, "line 2: policy.trace_file: there is no folder"),
            (traces(""), &new, "line 2: policy.trace_file: "),
            (String::new(), &file, "the data folder: "),
            (String::new(), &file.join("data"), "the data folder: "),
        ] {
            let (passed, printed) = check(&text, data_dir);
            assert!(!passed && printed.contains(words), "{text}: {printed}");
        }
        assert!(!new.exists(), "check creates no data folder");
        // No user may write there, whatever the permissions say.
        #[cfg(target_os = "linux")]
        for (data_dir, words) in [
            ("/proc/sys", "the data folder: /proc/sys cannot be written ("),
            (
                "/proc/sys/none/data",
                "the data folder: /proc/sys/none/data cannot be created in /proc/sys (",
            ),
        ] {
            let (passed, printed) = check("", Path::new(data_dir));
            assert!(!passed && printed.contains(words), "{printed}");
        }
    }

    /// It had "no problems", and a server took the model's context without a word.
    #[test]
    fn a_context_that_the_model_does_not_have_is_warned_of() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("steersman.toml");
        let printed = |context: usize| {
            std::fs::write(&path, format!("[engine]\ncontext = {context}\n")).unwrap();
            let (passed, printed) = checked(&path);
            assert!(passed, "{printed}");
            printed
        };
        let most = hub::context_of("", 0).expect("the bundled model tells");
        let note = context_note(most + 1, most).unwrap();
        assert!(printed(most + 1).starts_with(&format!("warning: model.path: {note}\n")));
        for fits in [0, most] {
            assert!(!printed(fits).contains("engine.context"), "{fits}");
        }
    }

    #[test]
    fn an_open_server_without_keys_is_warned_of() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("steersman.toml");
        let warns = |text: &str| {
            std::fs::write(&path, format!("[server]\n{text}\n")).unwrap();
            let mut out = Vec::new();
            run(&path, Some(folder.path()), &Storage::in_memory(), None, &mut out).unwrap();
            String::from_utf8(out).unwrap().contains("warning: server.host: a server at ")
        };
        for open in ["host = '0.0.0.0'", "host = '::'"] {
            assert!(warns(open), "{open}");
        }
        // A name, which need not be known where the test runs.
        let named = ServerConfig { host: "model.lan".into(), ..ServerConfig::default() };
        assert_eq!(notes(&named, None).len(), 1);
        for closed in
            ["", "host = '::1'", "host = 'localhost'", "host = '0.0.0.0'\napi_keys = ['a']"]
        {
            assert!(!warns(closed), "{closed}");
        }
        let (task, none) = (keys::tests::create("laptop"), keys::Configured::default());
        keys::run(&task, &none, folder.path(), &mut Vec::new()).unwrap();
        assert!(!warns("host = '0.0.0.0'"));
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
        let expected =
            "line 4: profiles.p.params.rules: policy `rules`: parameter `rules`: rule 1, line 2: ";
        assert!(!passed && printed.starts_with(expected), "{printed}");
        assert_eq!(printed.lines().count(), 1, "{printed}");

        // The key of a parameter for one policy has its name.
        let profile = "[profiles.a]\npolicies = ['agent']\n[profiles.a.params]\nreasoning_budget = 'many'\n\
                       [profiles.b]\npolicies = ['agent']\n[profiles.b.params]\nagent.reasoning_budget = 'many'\n";
        std::fs::write(&path, profile).unwrap();
        let (_, printed) = checked(&path);
        let problem = "policy `agent`: parameter `reasoning_budget` cannot be `many`";
        for expected in [
            format!("line 4: profiles.a.params.reasoning_budget: {problem}"),
            format!("line 8: profiles.b.params.agent.reasoning_budget: {problem}"),
        ] {
            assert!(printed.lines().any(|line| line.starts_with(&expected)), "{printed}");
        }
    }

    /// They had neither the line of the configuration nor the file with the rules, and an unknown parameter hid them.
    #[test]
    fn mistakes_in_all_parameters_are_problems_with_their_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("steersman.toml");
        let rules = folder.path().join("rules.toml").display().to_string();
        std::fs::write(&rules, "[[rule]]\ndo = { reason = true }").unwrap();
        let profile = "[profiles.p]\npolicies = ['default', 'rules', 'redact']\n[profiles.p.params]\n\
                       redact.patterns = 'phone'\n";
        let rules_at = format!("rules.rules = {{ file = '{rules}' }}\n");
        std::fs::write(&path, format!("{profile}{rules_at}")).unwrap();
        let (passed, printed) = checked(&path);
        let expected = [
            "line 4: profiles.p.params.redact.patterns: policy `redact`: parameter `patterns` cannot be `phone`"
                .to_owned(),
            format!("line 5: profiles.p.params.rules.rules: policy `rules`: {rules}: rule 1, line 2: "),
        ];
        let check = |printed: &str, expected: &[String]| {
            assert_eq!(printed.lines().count(), expected.len(), "{printed}");
            for (line, words) in printed.lines().zip(expected) {
                assert!(line.starts_with(words), "`{words}` is not at the beginning of {line}");
            }
        };
        assert!(!passed);
        check(&printed, &expected);
        std::fs::write(&path, format!("{profile}{rules_at}default.budgt = 1\n")).unwrap();
        let (_, printed) = checked(&path);
        let unknown =
            "line 6: profiles.p.params.default.budgt: the policy `default` has no such parameter";
        check(&printed, &[&expected[..], &[unknown.to_owned()]].concat());
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
