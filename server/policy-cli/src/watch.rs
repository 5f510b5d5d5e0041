//! `steersman policy watch`: builds, tests and pushes a policy whenever its source is saved.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use notify::{Event, EventKind, RecursiveMode, Watcher, event::AccessKind, event::AccessMode};
use steersman_policy_host::{PolicyConfig, Storage};

use super::{Selection, build, load, remote, test};

/// Time without events before a build: editors write a file in pieces.
const QUIET: Duration = Duration::from_millis(200);

/// Folders that tools write.
const IGNORED: &[&str] = &["target", "node_modules", "__pycache__", "types", "bindings"];

/// What is watched, and where it goes.
#[derive(Args)]
pub struct Options {
    /// Folder of the policy, as `build` takes it. NAME.jsonl in it is its golden file
    folder: PathBuf,
    /// Name of the policy on the server [default: that of the component]
    #[arg(long)]
    name: Option<String>,
    /// Build, test and push once, and end
    #[arg(long)]
    once: bool,
    /// The server
    #[command(flatten)]
    server: remote::Server,
}

/// Builds, tests and pushes now and after each change. A build or a golden file that fails pushes nothing.
///
/// # Errors
/// When the folder cannot be watched; with `once`, also when something fails.
pub fn run(
    options: &Options,
    config: &PolicyConfig,
    storage: &Storage,
    url: &str,
    out: &mut impl Write,
) -> Result<()> {
    if options.once {
        return round(options, config, storage, url, out);
    }
    let folder = &options.folder;
    let folder = folder.canonicalize().with_context(|| folder.display().to_string())?;
    let (sender, changes) = channel();
    let root = folder.clone();
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
        if event.map_or(true, |event| is_change(&event, &root)) {
            let _ = sender.send(());
        }
    })?;
    watcher.watch(&folder, RecursiveMode::Recursive)?;
    loop {
        let started = Instant::now();
        if let Err(error) = round(options, config, storage, url, out) {
            writeln!(out, "not pushed: {error:#}")?;
        }
        let seconds = started.elapsed().as_secs_f64();
        writeln!(out, "after {seconds:.1} s; waiting for changes in {}", folder.display())?;
        out.flush()?;
        wait(&changes)?;
    }
}

fn round(
    options: &Options,
    config: &PolicyConfig,
    storage: &Storage,
    url: &str,
    out: &mut impl Write,
) -> Result<()> {
    let component = build::folder(&options.folder, None, None, out)?;
    let golden = component.with_extension("jsonl");
    if !golden.is_file() {
        bail!("{}: does not exist; what is pushed is tested first", golden.display());
    }
    test(load(&component, config, storage)?, &[], &Selection::default(), out)?;
    let stem = component.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    options.server.at(url).push(options.name.as_ref().unwrap_or(&stem), &component, out)
}

/// Whether a source may have changed. What a build writes, and reads, is no source.
fn is_change(event: &Event, folder: &Path) -> bool {
    let is_written = match event.kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => true,
        EventKind::Access(_) => false,
        _ => true,
    };
    // Only below the folder: it may itself lie in one of the names that are ignored.
    let below = |path: &PathBuf| path.strip_prefix(folder).map(Path::to_path_buf);
    is_written
        && event.paths.iter().filter_map(|path| below(path).ok()).any(|path| is_source(&path))
}

/// Names that begin with a dot are folders of tools, and files on their way to another name: a server that runs the
/// component of this folder writes one when it takes a version.
fn is_source(path: &Path) -> bool {
    let is_made = |ending: &&str| path.extension().is_some_and(|extension| extension == *ending);
    let is_made = ["wasm", "steer", "lock", "pyc"].iter().any(is_made);
    let mut parts = path.components().map(|part| part.as_os_str().to_string_lossy());
    !is_made && !parts.any(|part| part.starts_with('.') || IGNORED.contains(&&*part))
}

/// Waits for a change, and until no more follow.
fn wait(changes: &Receiver<()>) -> Result<()> {
    changes.recv().context("the folder is no longer watched")?;
    while changes.recv_timeout(QUIET).is_ok() {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_told_from_what_tools_write() {
        for path in ["src/lib.rs", "brief.jsonl", "wit/world.wit"] {
            assert!(is_source(Path::new(path)), "{path}");
        }
        let made = [
            "brief.wasm",
            "brief.steer",
            "target/release/x.d",
            ".git/index",
            "Cargo.lock",
            ".tmpYl3k",
        ];
        for path in made {
            assert!(!is_source(Path::new(path)), "{path}");
        }
        let folder = Path::new("/target/brief");
        let source = |kind| Event::new(kind).add_path(folder.join("src/lib.rs"));
        assert!(is_change(&source(EventKind::Any), folder));
        let reading = EventKind::Access(AccessKind::Open(AccessMode::Read));
        assert!(!is_change(&source(reading), folder));
    }
}
