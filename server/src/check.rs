//! `steersman check`: finds problems of a configuration without starting a server.
//!
//! Checks values, and the files that they name: models, policies, parameters and the beginnings of
//! requests in `warm`. Loads no model, downloads nothing, and writes nothing but compiled policies.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::net::{IpAddr, TcpListener, ToSocketAddrs};
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use serde::Deserialize;
use serde_json::Value;
use steersman_engine::config::{Config, context_note};
use steersman_engine::policy::{
    Error, ParamReport, Policies, PolicyConfig, ProfilePolicies, Report, Storage,
};
use steersman_engine::request::Message;
use steersman_upstream::is_upstream_of;

use crate::config::{FILE_BYTES, FileConfig, Problem, ServerConfig, is_listened_on};
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
            let mut notes = notes(&file.server, data_dir);
            let problems = problems(file, problems_of_text, data_dir, storage, &mut notes);
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

/// The error of a server that does not start with the configuration in `path` because of `error`: all problems that
/// [`run`] finds, or `error` if it finds none.
pub fn all_problems(
    path: Option<&Path>,
    data_dir: Option<&Path>,
    storage: &Storage,
    compiler: Option<PathBuf>,
    error: anyhow::Error,
) -> anyhow::Error {
    let Some(Ok((mut file, problems_of_text))) = path.map(FileConfig::recover) else {
        return error;
    };
    let source = file.source.clone();
    file.policy.compiler = compiler;
    let problems = problems(file, problems_of_text, data_dir, storage, &mut Vec::new());
    if problems.is_empty() { error } else { anyhow!(source.message(&problems)) }
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

/// All problems, after those of the text. Adds to `notes` what is no problem yet: models that the server would download.
fn problems(
    file: FileConfig,
    mut located: Vec<Problem>,
    data_dir: Option<&Path>,
    storage: &Storage,
    notes: &mut Vec<String>,
) -> Vec<Problem> {
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
                notes.extend(note.map(|note| format!("warning: {key}: {note}")));
            }
            Ok(true) => {}
            Ok(false) => {
                let then = if key.starts_with("models.") {
                    "`steersman pull` downloads it"
                } else {
                    "a server would download it"
                };
                let note = format!("{key}: {model} is not on this machine; {then}");
                notes.push(source.locate(note).to_string());
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
        && let Ok(policies) = loaded(&config.policy, &config.profile_policies(), storage)
    {
        let report = policies.report();
        problems.extend(problems_of_continuation(&report, &server, |_| None));
    }
    problems.extend(problems_of_warm_files(&config));
    located.extend(problems.into_iter().map(|problem| source.locate(problem)));
    // Those without a line come last.
    located.sort_by_key(|problem| problem.line.unwrap_or(usize::MAX));
    located
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
    problems.extend(problem_of_trace_file(file));
    problems.extend(data_dir.and_then(problem_of_data_dir));
    problems
}

/// The reason why a server could not append to the file of traces.
fn problem_of_trace_file(file: &Path) -> Option<String> {
    if file.as_os_str().is_empty() || file.is_dir() {
        return None;
    }
    let error = match file.exists() {
        true => OpenOptions::new().append(true).open(file).err()?,
        false => {
            // A name alone is in the working directory.
            let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
            let folder = Some(folder.unwrap_or(Path::new("."))).filter(|folder| folder.is_dir())?;
            tempfile::tempfile_in(folder).err()?
        }
    };
    let (file, error) = (file.display(), error.kind());
    Some(format!("policy.trace_file: {file} cannot be written ({error}); choose another file"))
}

/// The reason why a server could not write to `data_dir`, or could not create it. A file without a name is written, where
/// the system has those, which is gone at once: permissions do not tell of a file system that is mounted read-only.
pub fn problem_of_data_dir(data_dir: &Path) -> Option<String> {
    let remedy = "choose a folder with --data-dir or STEERSMAN_DATA_DIR";
    // A relative folder is in the working directory.
    let parts =
        data_dir.ancestors().map(|part| if part == Path::new("") { Path::new(".") } else { part });
    let existing = parts.into_iter().find(|part| part.exists())?;
    let shown = existing.display();
    if !existing.is_dir() {
        return Some(format!("the data folder: {shown} is a file; {remedy}"));
    }
    let error = tempfile::tempfile_in(existing).err()?.kind();
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

/// The policies of `profiles`. What a server would log is not: the problems found in them are printed.
fn loaded(
    config: &PolicyConfig,
    profiles: &BTreeMap<String, ProfilePolicies>,
    storage: &Storage,
) -> Result<Policies, Error> {
    let load = || Policies::load(config, profiles, storage);
    tracing::subscriber::with_default(tracing::subscriber::NoSubscriber::new(), load)
}

/// Policies that cannot be loaded, and their parameters that cannot be used.
fn problems_of_policies(config: &Config, storage: &Storage) -> Vec<String> {
    let profiles = config.profile_policies();
    match loaded(&config.policy, &profiles, storage) {
        Err(error) => error.lines(&profiles),
        // A server starts without them, or with an earlier version.
        Ok(policies) => {
            let Report { policies, params } = policies.report();
            let of_policies =
                policies.into_iter().filter_map(|policy| Some(policy.problem?.message));
            let of_params =
                params.into_iter().filter_map(|ParamReport { profile, param, problem, .. }| {
                    let key = if param.is_empty() { String::new() } else { format!(".{param}") };
                    Some((format!("profiles.{profile}.params{key}"), problem?.message))
                });
            // A policy may have several problems with a parameter, a line each.
            let of_params = of_params.flat_map(|(key, message)| {
                let lines: Vec<_> = message.lines().map(|line| format!("{key}: {line}")).collect();
                lines
            });
            of_policies.chain(of_params).collect()
        }
    }
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
mod tests;
