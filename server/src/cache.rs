//! `steersman cache`: inspect and maintain the prefix store while no server has it open.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result, anyhow, bail};
use clap::Subcommand;
use indicatif::{HumanBytes, HumanDuration};
use steersman_engine::StoreError;
use steersman_engine::config::StoreConfig;
use steersman_engine::report::StoredSize;
use steersman_engine::tools::{Fingerprint, StoreFile};

/// A subcommand of `steersman cache`.
#[derive(Subcommand)]
pub enum CacheTask {
    /// Show what is saved, by model and kind: `rows` are keys and values of attention, in blocks of
    /// tokens that prompts share; `state` is the state of recurrent and sliding-window layers at one
    /// position
    #[command(after_help = "Example:\n  steersman cache stats")]
    Stats,
    /// List the saved prefixes, the last used first
    #[command(after_help = "Example:\n  steersman cache list")]
    List,
    /// Read everything and drop damaged parts
    #[command(after_help = "Example:\n  steersman cache verify")]
    Verify,
    /// Drop everything, damaged files set aside included, or all parts of one model
    #[command(after_help = "Example:\n  steersman cache clear --fingerprint 3f9a")]
    Clear {
        /// Fingerprint of the model as `stats` shows it, or the beginning of it
        #[arg(long, value_name = "F")]
        fingerprint: Option<String>,
    },
    /// Make the file as small as its content allows
    #[command(after_help = "Example:\n  steersman cache compact")]
    Compact,
    /// Write everything to one file that can be copied to another machine
    #[command(after_help = "Example:\n  steersman cache export saved-state.bin")]
    Export {
        /// The file to create; it contains what users wrote to the models
        file: PathBuf,
    },
    /// Add the content of an exported file, as far as it fits the budget
    #[command(after_help = "Example:\n  steersman cache import saved-state.bin")]
    Import {
        /// The file to read
        file: PathBuf,
    },
}

/// Runs a task and prints its result.
///
/// # Errors
/// If a server has the file open, there is no file, or it cannot be read or written.
pub fn run(task: CacheTask, config: &StoreConfig, data_dir: &Path) -> Result<()> {
    let path = config.file(data_dir);
    let opened = match &task {
        CacheTask::Import { .. } => StoreFile::open_or_create(&path),
        _ => StoreFile::open(&path),
    };
    let mut store = opened.map_err(|error| match error {
        StoreError::InUse(path) => anyhow!(
            "{} is in use by another process, most likely a server: use its GET /v1/cache, or stop \
             it first",
            path.display()
        ),
        error => error.into(),
    })?;
    let mut out = std::io::stdout().lock();
    match task {
        CacheTask::Stats => stats(&store, config, &path, &mut out)?,
        CacheTask::List => list(&store, &mut out)?,
        CacheTask::Verify => {
            let found = store.verify()?;
            writeln!(out, "whole: {}", sized(found.whole))?;
            for (kind, end) in &found.damaged {
                writeln!(out, "damaged, dropped: {} at token {end}", kind.name())?;
            }
            if found.stray_chunks > 0 {
                writeln!(out, "dropped: {} chunks without a part", found.stray_chunks)?;
            }
            if !found.damaged.is_empty() {
                bail!("damaged parts: {}; they were dropped", found.damaged.len());
            }
        }
        CacheTask::Clear { fingerprint } => {
            let fingerprint = fingerprint.map(|prefix| resolve(&store, &prefix)).transpose()?;
            let cleared = store.clear(fingerprint.as_ref())?;
            writeln!(out, "dropped: {}", sized(cleared))?;
            compact(&mut store, &mut out)?;
            if fingerprint.is_none() {
                let StoredSize { parts: files, bytes } = store.clear_set_aside()?;
                writeln!(out, "damaged files deleted: {files}, {}", HumanBytes(bytes))?;
            }
        }
        CacheTask::Compact => compact(&mut store, &mut out)?,
        CacheTask::Export { file } => {
            let written = store.export(&file)?;
            writeln!(out, "written to {}: {}", file.display(), sized(written))?;
        }
        CacheTask::Import { file } => {
            let imported = store.import(&file, config.budget_bytes)?;
            writeln!(out, "added: {}", sized(imported.added))?;
            writeln!(out, "present before: {}", sized(imported.present))?;
            if imported.beyond_budget.parts > 0 {
                writeln!(
                    out,
                    "skipped, as store.budget_bytes is {}: {}",
                    HumanBytes(config.budget_bytes),
                    sized(imported.beyond_budget)
                )?;
            }
        }
    }
    out.flush().context("writing the output")
}

fn stats(store: &StoreFile, config: &StoreConfig, path: &Path, out: &mut impl Write) -> Result<()> {
    let sizes = store.sizes();
    writeln!(out, "{:<12}  {:<5}  {:>7}  {:>11}  last use", "model", "kind", "parts", "bytes")?;
    for of_kind in &sizes {
        writeln!(
            out,
            "{:<12}  {:<5}  {:>7}  {:>11}  {}",
            short(&of_kind.fingerprint),
            of_kind.kind.name(),
            of_kind.size.parts,
            bytes(of_kind.size.bytes),
            ago(of_kind.used)
        )?;
    }
    let used = sizes.iter().map(|of_kind| of_kind.size.bytes).sum();
    writeln!(
        out,
        "\n{} of {} used; {} takes {}",
        HumanBytes(used),
        HumanBytes(config.budget_bytes),
        path.display(),
        HumanBytes(store.bytes_on_disk())
    )?;
    let StoredSize { parts: files, bytes } = store.set_aside();
    if files > 0 {
        let bytes = HumanBytes(bytes);
        writeln!(out, "damaged files set aside: {files}, {bytes}; `cache clear` deletes them")?;
    }
    Ok(())
}

fn list(store: &StoreFile, out: &mut impl Write) -> Result<()> {
    writeln!(
        out,
        "{:<12}  {:>8}  {:>7}  {:>11}  {:<16}  states at",
        "model", "tokens", "parts", "bytes", "last use"
    )?;
    for prefix in store.prefixes() {
        let states: Vec<String> = prefix.states.iter().map(ToString::to_string).collect();
        let retained = prefix.retained.map(|until| {
            let left = until.duration_since(SystemTime::now()).unwrap_or_default();
            format!("  (retained for {})", HumanDuration(left))
        });
        writeln!(
            out,
            "{:<12}  {:>8}  {:>7}  {:>11}  {:<16}  {}{}",
            short(&prefix.fingerprint),
            prefix.end,
            prefix.size.parts,
            bytes(prefix.size.bytes),
            ago(prefix.used),
            if states.is_empty() { "-".into() } else { states.join(" ") },
            retained.unwrap_or_default()
        )?;
    }
    writeln!(out, "\nParts that two prefixes share count for the one that was used later.")?;
    Ok(())
}

fn compact(store: &mut StoreFile, out: &mut impl Write) -> Result<()> {
    let before = store.bytes_on_disk();
    store.compact()?;
    let after = store.bytes_on_disk();
    writeln!(out, "size of the file: {}, before: {}", HumanBytes(after), HumanBytes(before))?;
    Ok(())
}

/// The one saved fingerprint that begins with `prefix`.
fn resolve(store: &StoreFile, prefix: &str) -> Result<Fingerprint> {
    let prefix = prefix.to_ascii_lowercase();
    let mut found: Vec<_> = store.sizes().into_iter().map(|sizes| sizes.fingerprint).collect();
    found.retain(|fingerprint| !prefix.is_empty() && hex::encode(fingerprint).starts_with(&prefix));
    found.dedup();
    match found[..] {
        [fingerprint] => Ok(fingerprint),
        [] => bail!("nothing is saved under the fingerprint {prefix}; see `steersman cache stats`"),
        _ => bail!("{} fingerprints begin with {prefix}; give more digits", found.len()),
    }
}

/// Enough digits to tell models apart.
fn short(fingerprint: &Fingerprint) -> String {
    hex::encode(&fingerprint[..6])
}

fn sized(size: StoredSize) -> String {
    let parts = if size.parts == 1 { "part" } else { "parts" };
    format!("{} {parts}, {}", size.parts, HumanBytes(size.bytes))
}

/// A string, because `HumanBytes` ignores a width.
fn bytes(count: u64) -> String {
    HumanBytes(count).to_string()
}

fn ago(time: SystemTime) -> String {
    match time.elapsed() {
        Ok(elapsed) => format!("{} ago", HumanDuration(elapsed)),
        // The clock was set back since.
        Err(_) => "in the future".into(),
    }
}
