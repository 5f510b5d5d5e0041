//! Watches files for changes.
//!
//! Folders are watched instead of files: editors and package managers replace a file by a new one, which
//! a watch on the old one does not see. Changes are reported after [`QUIET`] without events, since a copy
//! writes a file in pieces.
//!
//! # Why
//! `notify-debouncer-mini` reports an opened file as a change, and a change makes us open the file.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use notify::event::{AccessKind, AccessMode};
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};

/// Time without events before a change is reported.
const QUIET: Duration = Duration::from_millis(200);

/// Longest delay of a report if events never stop.
const LONGEST_DELAY: Duration = Duration::from_secs(1);

/// The link that Kubernetes replaces when it updates a mounted folder; its files are links through it.
const MOUNTED: &str = "..data";

/// A thread that waits for changes. It ends when this is dropped.
pub struct Watch {
    watcher: Option<RecommendedWatcher>,
    signals: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Calls `changed` now, and whenever one of `files` may have been changed, created or removed, until
    /// it returns false. A folder that cannot be watched is logged.
    ///
    /// # Errors
    /// When the operating system provides no watch or no thread.
    pub fn start(
        files: &[PathBuf],
        changed: impl FnMut() -> bool + Send + 'static,
    ) -> notify::Result<Self> {
        let (mut names, mut folders) = (BTreeSet::new(), BTreeSet::new());
        let targets = files.iter().filter_map(|file| file.canonicalize().ok());
        for file in files.iter().cloned().chain(targets) {
            names.extend(file.file_name().map(OsString::from));
            let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
            let folder = folder.unwrap_or(Path::new("."));
            folders.insert(folder.canonicalize().unwrap_or_else(|_| folder.into()));
        }
        // One signal is enough: all files are read again.
        let (signals, waiting) = sync_channel(1);
        let _ = signals.try_send(());
        let events = signals.clone();
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
            if event.map_or(true, |event| is_change(&event, &names)) {
                let _ = events.try_send(());
            }
        })?;
        for folder in &folders {
            if let Err(error) = watcher.watch(folder, RecursiveMode::NonRecursive) {
                let folder = folder.display();
                tracing::warn!(%folder, %error, "folder cannot be watched");
            }
        }
        let thread = std::thread::Builder::new()
            .name("policy watch".into())
            .spawn(move || wait(&waiting, changed))
            .map_err(notify::Error::io)?;
        Ok(Self { watcher: Some(watcher), signals: Some(signals), thread: Some(thread) })
    }
}

/// Whether an event may be a change of our files. Reading a file is an event too.
fn is_change(event: &Event, names: &BTreeSet<OsString>) -> bool {
    let change = match event.kind {
        EventKind::Access(kind) => kind == AccessKind::Close(AccessMode::Write),
        _ => true,
    };
    let ours = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name == MOUNTED || names.contains(name))
    };
    event.need_rescan() || change && event.paths.iter().any(ours)
}

fn wait(signals: &Receiver<()>, mut changed: impl FnMut() -> bool) {
    while signals.recv().is_ok() {
        let first = Instant::now();
        loop {
            match signals.recv_timeout(QUIET) {
                Ok(()) if first.elapsed() < LONGEST_DELAY => {}
                Ok(()) | Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        if !changed() {
            return;
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Without senders the thread ends.
        drop((self.watcher.take(), self.signals.take()));
        let thread = self.thread.take();
        // The thread itself may drop the last handle.
        if let Some(thread) = thread.filter(|t| t.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::mpsc::channel;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn every_kind_of_change_is_reported_and_other_files_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.wasm");
        let (calls, called) = channel();
        let watch = Watch::start(std::slice::from_ref(&file), move || calls.send(()).is_ok());
        let watch = watch.unwrap();
        called.recv_timeout(PATIENCE).expect("the first call");

        let beside = folder.path().join("beside");
        fs::write(&beside, "1").unwrap();
        fs::read(&beside).unwrap();
        called.recv_timeout(3 * QUIET).expect_err("another file changed");
        let changes: [(&str, &dyn Fn()); 4] = [
            ("renamed into place", &|| fs::rename(&beside, &file).unwrap()),
            ("written", &|| fs::write(&file, "2").unwrap()),
            ("removed", &|| fs::remove_file(&file).unwrap()),
            ("made", &|| fs::write(&file, "3").unwrap()),
        ];
        for (how, change) in changes {
            change();
            called.recv_timeout(PATIENCE).expect(how);
        }
        fs::read(&file).unwrap();
        called.recv_timeout(3 * QUIET).expect_err("a file was read");
        drop(watch);
        called.recv_timeout(PATIENCE).expect_err("the thread has ended");
    }

    /// Otherwise a file that is written continuously would never be read.
    #[test]
    fn continuous_writes_do_not_delay_reports_forever() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.wasm");
        let (calls, called) = channel();
        let _watch =
            Watch::start(std::slice::from_ref(&file), move || calls.send(()).is_ok()).unwrap();
        called.recv_timeout(PATIENCE).unwrap();
        let start = Instant::now();
        while called.try_recv().is_err() {
            assert!(start.elapsed() < PATIENCE);
            fs::write(&file, "again").unwrap();
            std::thread::sleep(QUIET / 8);
        }
    }
}
