//! `steersman cache`: what the state saved on disk is, and what can be done with it while no server
//! has it open.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, anyhow, bail};
use clap::Subcommand;
use steersman_engine::Error;
use steersman_engine::config::StoreConfig;
use steersman_engine::store::{Fingerprint, Size, StoreFile};

/// What to do.
#[derive(Subcommand)]
pub enum Task {
    /// What is saved, by model and kind: `rows` are keys and values of attention, in blocks of
    /// tokens that prompts share; `state` is what recurrent and sliding layers remember at some
    /// position
    Stats,
    /// The prefixes that are saved, the last used first
    List,
    /// Read everything, and drop what is damaged
    Verify,
    /// Drop everything, or what is saved of one model
    Clear {
        /// The model: its fingerprint as `stats` shows it, or the beginning of it
        #[arg(long, value_name = "F")]
        fingerprint: Option<String>,
    },
    /// Make the file as small as its content allows
    Compact,
    /// Write everything to one file that can be carried to another machine
    Export {
        /// The file to make; it holds what users said to the models
        file: PathBuf,
    },
    /// Add what `export` wrote, as far as it fits the budget
    Import {
        /// The file to read
        file: PathBuf,
    },
}

/// Does it, and prints what was done.
///
/// # Errors
/// When a server has the state open, it cannot be read or written, or there is none.
pub fn run(task: Task, config: &StoreConfig, data_dir: &Path) -> Result<()> {
    let path = config.file(data_dir);
    let opened = match &task {
        Task::Import { .. } => StoreFile::open_or_begin(&path),
        _ => StoreFile::open(&path),
    };
    let mut store = opened.map_err(|error| match error {
        Error::StoreInUse { path } => anyhow!(
            "{} is in use by another process, most likely a server: ask it with GET /v1/cache, or \
             stop it first",
            path.display()
        ),
        error => error.into(),
    })?;
    let mut out = std::io::stdout().lock();
    match task {
        Task::Stats => stats(&store, config, &path, &mut out)?,
        Task::List => list(&store, &mut out)?,
        Task::Verify => {
            let found = store.verify()?;
            writeln!(out, "whole: {}", sized(found.whole))?;
            for (kind, end) in &found.damaged {
                writeln!(out, "dropped, as damaged: {} at token {end}", kind.name())?;
            }
            if found.stray_rows > 0 {
                writeln!(out, "dropped: {} pieces that belong to nothing", found.stray_rows)?;
            }
            if !found.damaged.is_empty() {
                bail!("damaged parts: {}; the rest is in order", found.damaged.len());
            }
        }
        Task::Clear { fingerprint } => {
            let named = fingerprint.map(|named| resolve(&store, &named)).transpose()?;
            let cleared = store.clear(named.as_ref())?;
            writeln!(out, "dropped: {}", sized(cleared))?;
            compact(&mut store, &mut out)?;
        }
        Task::Compact => compact(&mut store, &mut out)?,
        Task::Export { file } => {
            let written = store.export(&file)?;
            writeln!(out, "written to {}: {}", file.display(), sized(written))?;
        }
        Task::Import { file } => {
            let imported = store.import(&file, config.budget_bytes)?;
            writeln!(out, "added: {}", sized(imported.added))?;
            writeln!(out, "here before: {}", sized(imported.present))?;
            if imported.beyond_budget.parts > 0 {
                writeln!(
                    out,
                    "left out, as store.budget_bytes is {}: {}",
                    bytes(config.budget_bytes),
                    sized(imported.beyond_budget)
                )?;
            }
        }
    }
    out.flush().context("writing the output")
}

fn stats(store: &StoreFile, config: &StoreConfig, path: &Path, out: &mut impl Write) -> Result<()> {
    let sizes = store.sizes();
    writeln!(out, "{:<12}  {:<5}  {:>7}  {:>10}  last use", "model", "kind", "parts", "bytes")?;
    for of_kind in &sizes {
        writeln!(
            out,
            "{:<12}  {:<5}  {:>7}  {:>10}  {}",
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
        bytes(used),
        bytes(config.budget_bytes),
        path.display(),
        bytes(store.bytes_on_disk())
    )?;
    Ok(())
}

fn list(store: &StoreFile, out: &mut impl Write) -> Result<()> {
    writeln!(
        out,
        "{:<12}  {:>8}  {:>7}  {:>10}  {:<16}  states at",
        "model", "tokens", "parts", "bytes", "last use"
    )?;
    for prefix in store.prefixes() {
        let states: Vec<String> = prefix.states.iter().map(ToString::to_string).collect();
        let pinned = prefix.pinned.map(|until| format!("  (kept for {})", within(until)));
        writeln!(
            out,
            "{:<12}  {:>8}  {:>7}  {:>10}  {:<16}  {}{}",
            short(&prefix.fingerprint),
            prefix.end,
            prefix.size.parts,
            bytes(prefix.size.bytes),
            ago(prefix.used),
            if states.is_empty() { "-".into() } else { states.join(" ") },
            pinned.unwrap_or_default()
        )?;
    }
    writeln!(out, "\nWhat two prefixes share counts for the one that was used later.")?;
    Ok(())
}

fn compact(store: &mut StoreFile, out: &mut impl Write) -> Result<()> {
    let before = store.bytes_on_disk();
    store.compact()?;
    writeln!(out, "the file took {}, now {}", bytes(before), bytes(store.bytes_on_disk()))?;
    Ok(())
}

/// The fingerprint that begins so.
fn resolve(store: &StoreFile, named: &str) -> Result<Fingerprint> {
    let named = named.to_ascii_lowercase();
    let mut found: Vec<_> = store.sizes().into_iter().map(|sizes| sizes.fingerprint).collect();
    found.retain(|fingerprint| !named.is_empty() && hex(fingerprint).starts_with(&named));
    found.dedup();
    match found[..] {
        [fingerprint] => Ok(fingerprint),
        [] => bail!("nothing is saved under the fingerprint {named}; see `steersman cache stats`"),
        _ => bail!("{} fingerprints begin with {named}; write more of it", found.len()),
    }
}

fn hex(fingerprint: &Fingerprint) -> String {
    fingerprint.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// As much of it as tells models apart.
fn short(fingerprint: &Fingerprint) -> String {
    hex(fingerprint)[..12].into()
}

fn sized(size: Size) -> String {
    let parts = if size.parts == 1 { "part" } else { "parts" };
    format!("{} {parts}, {}", size.parts, bytes(size.bytes))
}

fn bytes(count: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = (count.max(1).ilog2() / 10).min(4);
    match unit {
        0 => format!("{count} B"),
        _ => {
            format!("{:.1} {}", count as f64 / (1_u64 << (10 * unit)) as f64, units[unit as usize])
        }
    }
}

fn ago(time: SystemTime) -> String {
    match time.elapsed() {
        Ok(elapsed) => format!("{} ago", rough(elapsed)),
        // The clock was set back since.
        Err(_) => "in the future".into(),
    }
}

fn within(until: SystemTime) -> String {
    rough(until.duration_since(SystemTime::now()).unwrap_or_default())
}

/// A time in one number.
fn rough(time: Duration) -> String {
    let seconds = time.as_secs();
    let (count, unit) = match seconds {
        0..120 => (seconds, "s"),
        120..7200 => (seconds / 60, "min"),
        7200..172_800 => (seconds / 3600, "h"),
        _ => (seconds / 86_400, "days"),
    };
    format!("{count} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_times_are_said_in_one_number() {
        for (count, said) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (4 << 30, "4.0 GiB"),
            (1 << 50, "1024.0 TiB"),
        ] {
            assert_eq!(bytes(count), said);
        }
        for (seconds, said) in [(0, "0 s"), (119, "119 s"), (120, "2 min"), (90_000, "25 h")] {
            assert_eq!(rough(Duration::from_secs(seconds)), said);
        }
    }
}
