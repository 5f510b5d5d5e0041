//! `steersman init`: a configuration for this machine, with comments.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use steersman_engine::config::Config;
use steersman_engine::tools::machine::{self, Machine};

use super::choice::{Choice, choices};
use crate::config::{FileConfig, ServerConfig};

/// Every key with its default and a comment.
const DEFAULTS: &str = include_str!("../../../configs/steersman.toml");

/// Where the keys begin in [`DEFAULTS`]; what stands before is about that file.
const FIRST_SECTION: &str = "[server]\n";

/// Columns of a comment.
const COLUMNS: usize = 100;

/// Writes a configuration with every key to the new file `path`: the defaults, and beside those that depend on the
/// machine what they are here.
///
/// # Errors
/// If the file exists or cannot be written.
pub fn init(path: &Path, out: &mut impl Write) -> Result<()> {
    let exists = path.symlink_metadata().is_ok();
    ensure!(!exists, "{} exists, and is left as it is; name another file", path.display());
    let (server, config) = FileConfig::default().check()?;
    let text = describe(&server, &config)?;
    let create = || -> std::io::Result<()> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        // It will hold keys.
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        options.open(path)?.write_all(text.as_bytes())
    };
    create().with_context(|| format!("writing {}", path.display()))?;
    writeln!(
        out,
        "{} has every setting with its default; serve with `steersman serve --config {}`",
        path.display(),
        path.display()
    )?;
    Ok(())
}

fn describe(server: &ServerConfig, config: &Config) -> Result<String> {
    let machine = Machine::inspect(config).context("inspecting the device")?;
    let cores = machine.cores;
    let title = format!(
        "Configuration of Steersman, written by `steersman init` for {} with {cores} cores. Every key has its default, \
         so each line may be deleted. \"Here\" says what a default is on this machine. Keys that end in _bytes, _s or _ms are \
         sizes and times: a plain number is in bytes, seconds or milliseconds, a text has its unit, as \"1GiB\" or \"10m\".",
        machine::processor()
    );
    let (_, keys) = DEFAULTS.split_once(FIRST_SECTION).context("the defaults have no [server]")?;
    let text = format!("{}\n{FIRST_SECTION}{keys}", comment(&title));
    Ok(annotate(&text, &choices(server, config, &machine)))
}

/// Adds to each key of `text` that has a choice what it is here, as a comment before it.
fn annotate(text: &str, choices: &[Choice]) -> String {
    let mut section = "";
    let mut annotated = String::with_capacity(text.len() * 2);
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = name;
        }
        let key = line.split_once(" = ").map(|(key, _)| format!("{section}.{key}"));
        if let Some(choice) = choices.iter().find(|choice| Some(choice.key) == key.as_deref()) {
            annotated += &comment(&format!("Here: {}. {}.", choice.value, capital(&choice.reason)));
        }
        annotated += line;
        annotated += "\n";
    }
    annotated
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

/// A comment of lines with at most [`COLUMNS`] columns.
fn comment(text: &str) -> String {
    let mut lines = String::from("#");
    let mut column = 1;
    for word in text.split_whitespace() {
        if column + 1 + word.len() > COLUMNS {
            lines += "\n#";
            column = 1;
        }
        lines += " ";
        lines += word;
        column += 1 + word.len();
    }
    lines + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_written_configuration_is_the_default_and_explains_each_choice() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mine.toml");
        init(&path, &mut Vec::new()).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let (server, config) = FileConfig::read(&path).unwrap().check().unwrap();
        let (default_server, default_config) = FileConfig::default().check().unwrap();
        assert_eq!(config, default_config);
        assert_eq!(format!("{server:?}"), format!("{default_server:?}"));
        let machine = Machine::inspect(&config).unwrap();
        let choices = choices(&server, &config, &machine);
        assert_eq!(text.matches("# Here: ").count(), choices.len());
        assert!(choices.iter().all(|choice| !choice.configured), "{choices:?}");
        let running = format!("# Here: {}. ", machine.max_running);
        let (_, after) = text.split_once(&running).expect(&text);
        assert!(after.lines().take(4).any(|line| line.starts_with("max_running = ")), "{after}");
    }

    #[test]
    fn an_existing_file_is_left_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mine.toml");
        std::fs::write(&path, "mine").unwrap();
        let error = init(&path, &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("mine.toml exists"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
    }
}
