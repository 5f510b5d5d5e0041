//! The program `steersman-policy`, which `steersman policy` runs.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use serde::Deserialize;
use steersman_policy_cli::{Task, run, url};
use steersman_policy_host::{PolicyConfig, Storage, compile_if_asked, this_program};

/// Creates, builds, tests and measures policies, and manages those of a running server. Needs no
/// model.
#[derive(Parser)]
#[command(
    name = "steersman-policy",
    version,
    after_help = "Example:\n  steersman policy test default"
)]
struct Cli {
    /// Configuration file of a server, in TOML; only its table [policy] and its address are read
    #[arg(long, value_name = "FILE", env = "STEERSMAN_CONFIG", global = true)]
    config: Option<PathBuf>,
    /// Folder that caches compiled policies
    /// [default: steersman in the user's data folder, as ~/.local/share/steersman]
    #[arg(long, value_name = "DIR", env = "STEERSMAN_DATA_DIR", global = true)]
    data_dir: Option<PathBuf>,
    #[command(subcommand)]
    task: Task,
}

/// The part of a configuration file that concerns policies.
#[derive(Default, Deserialize)]
#[serde(default)]
struct FileConfig {
    policy: PolicyConfig,
    server: ServerConfig,
}

/// Where that server is.
#[derive(Deserialize)]
#[serde(default)]
struct ServerConfig {
    host: String,
    port: u16,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self { host: "127.0.0.1".into(), port: 11436 }
    }
}

fn main() -> ExitCode {
    if let Some(status) = compile_if_asked() {
        return status;
    }
    let cli = Cli::parse();
    steersman_log::to_stderr();
    let Cli { config, data_dir, task } = cli;
    let storage = match data_dir.or_else(|| Some(dirs::data_dir()?.join("steersman"))) {
        Some(folder) => Storage::compile_cache(&folder),
        None => Storage::in_memory(),
    };
    let done = read_config(config.as_deref()).and_then(|FileConfig { policy, server }| {
        let policy = PolicyConfig { compiler: this_program(), ..policy };
        let url = url(&server.host, server.port);
        run(task, &policy, &storage, &url, &mut std::io::stdout().lock())
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the output has seen enough, as in `steersman policy list | head`.
        Err(error) if steersman_log::is_broken_pipe(error.as_ref()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", steersman_log::without_numbers_of_errors(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

fn read_config(path: Option<&Path>) -> Result<FileConfig> {
    let Some(path) = path else { return Ok(FileConfig::default()) };
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let file: FileConfig = toml::from_str(&text).with_context(|| path.display().to_string())?;
    file.policy.check()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_help_of_every_command_has_an_example_that_works() {
        let cli = Cli::command();
        for command in cli.get_subcommands().chain([&cli]) {
            let name = command.get_name();
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let example = help.strip_prefix("Example:\n");
            let example = example.unwrap_or_else(|| panic!("{name} has no example"));
            // What follows is the shell's.
            let call = example.split(" > ").next().unwrap_or_default();
            let words: Vec<_> = call.split_whitespace().collect();
            assert_eq!(words[..2], ["steersman", "policy"], "{name}");
            assert!(name == cli.get_name() || words[2] == name, "{example}");
            let parsed = Cli::try_parse_from(&words[1..]);
            assert!(parsed.is_ok(), "{example}: {:?}", parsed.err());
        }
    }
}
