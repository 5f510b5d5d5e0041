//! Notices that files have changed.
//!
//! Folders are watched and not files: editors and package managers put a new file in the place of
//! the old one, which a watch on the old one does not see. What changed is found by reading again,
//! when nothing has happened for [`QUIET`]: who copies a file writes it piece by piece.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use notify::event::{AccessKind, AccessMode};
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};

/// How long nothing must have happened before files are read again.
pub const QUIET: Duration = Duration::from_millis(200);

/// How long is waited for that, where something happens all the time.
pub const LONGEST: Duration = Duration::from_secs(1);

/// The link that Kubernetes turns when it updates a mounted folder, whose files are links through it.
const MOUNTED: &str = "..data";

/// A thread that waits for changes; it ends when this is dropped.
pub struct Watch {
    watcher: Option<RecommendedWatcher>,
    signals: Option<SyncSender<Signal>>,
    thread: Option<JoinHandle<()>>,
}

enum Signal {
    Changed,
    Stop,
}

impl Watch {
    /// Calls `changed` once now, and whenever one of `files` may have changed, come or gone, until
    /// it answers false. A folder that cannot be watched is only a warning.
    ///
    /// # Errors
    /// When the operating system can watch nothing at all, or has no thread.
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
        // One signal says all: whoever takes it reads everything again.
        let (signals, waiting) = sync_channel(1);
        let _ = signals.try_send(Signal::Changed);
        let events = signals.clone();
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
            if event.map_or(true, |event| matters(&event, &names)) {
                let _ = events.try_send(Signal::Changed);
            }
        })?;
        for folder in &folders {
            if let Err(error) = watcher.watch(folder, RecursiveMode::NonRecursive) {
                let folder = folder.display();
                tracing::warn!(%folder, %error, "changes in it are not noticed");
            }
        }
        let thread = std::thread::Builder::new()
            .name("policy watch".into())
            .spawn(move || wait(&waiting, changed))
            .map_err(notify::Error::io)?;
        Ok(Self { watcher: Some(watcher), signals: Some(signals), thread: Some(thread) })
    }
}

/// Reading a file is an event, too: what follows from it must not be reading it again.
fn matters(event: &Event, names: &BTreeSet<OsString>) -> bool {
    let change = match event.kind {
        EventKind::Access(kind) => kind == AccessKind::Close(AccessMode::Write),
        _ => true,
    };
    let ours = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name == MOUNTED || names.contains(name))
    };
    event.need_rescan() || change && event.paths.iter().any(ours)
}

fn wait(signals: &Receiver<Signal>, mut changed: impl FnMut() -> bool) {
    while let Ok(Signal::Changed) = signals.recv() {
        let first = Instant::now();
        loop {
            match signals.recv_timeout(QUIET) {
                Ok(Signal::Changed) if first.elapsed() < LONGEST => {}
                Ok(Signal::Changed) | Err(RecvTimeoutError::Timeout) => break,
                Ok(Signal::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        if !changed() {
            return;
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.watcher.take());
        if let Some(signals) = self.signals.take() {
            // Where there is no room the thread has something to do, and `changed` ends it.
            let _ = signals.try_send(Signal::Stop);
        }
        let thread = self.thread.take();
        // The last owner may be the thread itself.
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
    fn a_file_is_noticed_however_it_changes_and_its_neighbours_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.wasm");
        let (calls, called) = channel();
        let watch = Watch::start(std::slice::from_ref(&file), move || calls.send(()).is_ok());
        let watch = watch.unwrap();
        called.recv_timeout(PATIENCE).expect("once at first");

        let beside = folder.path().join("beside");
        fs::write(&beside, "1").unwrap();
        fs::read(&beside).unwrap();
        called.recv_timeout(3 * QUIET).expect_err("a neighbour is none of ours");
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
        called.recv_timeout(3 * QUIET).expect_err("reading is no change");
        drop(watch);
        called.recv_timeout(PATIENCE).expect_err("the thread has ended");
    }

    /// Else a file that is written all the time would never be read.
    #[test]
    fn a_folder_that_never_rests_is_looked_at_all_the_same() {
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
