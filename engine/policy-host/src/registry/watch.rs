//! Watches files for changes.
//!
//! Folders are watched instead of files: editors and package managers replace a file by a new one, which
//! a watch on the old one does not see. Changes are reported after [`QUIET`] without events, since a copy
//! writes a file in pieces.
//!
//! A path may lead through links, which are turned to install a new set of files (`current -> v2`, or the
//! link `..data` of a folder that Kubernetes mounts). So every link on the way is watched in its own folder,
//! and after each event the ways are found again.
//!
//! # Why
//! `notify-debouncer-mini` reports an opened file as a change, and a change makes us open the file.

use std::collections::{BTreeSet, VecDeque};
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use notify::event::{AccessKind, AccessMode};
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use parking_lot::Mutex;

/// Time without events before a change is reported.
const QUIET: Duration = Duration::from_millis(200);

/// Longest delay of a report if events never stop.
const LONGEST_DELAY: Duration = Duration::from_secs(1);

/// Links on the way to one file; more are a circle.
const LINKS: usize = 40;

/// A thread that waits for changes. It ends when this is dropped.
pub struct Watch {
    ended: Arc<AtomicBool>,
    signals: SyncSender<()>,
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
        // One signal is enough: all files are read again.
        let (signals, waiting) = sync_channel(1);
        let events = signals.clone();
        let names = Arc::<Mutex<BTreeSet<OsString>>>::default();
        let ours = names.clone();
        let watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
            if event.map_or(true, |event| is_change(&event, &ours.lock())) {
                let _ = events.try_send(());
            }
        })?;
        let (files, folders, targets) = (files.to_vec(), BTreeSet::new(), Vec::new());
        let mut ways = Ways { files, names, watcher, folders, targets };
        // Before the first call of `changed`, which then misses nothing.
        ways.find();
        let _ = signals.try_send(());
        let ended = Arc::<AtomicBool>::default();
        let end = ended.clone();
        let thread = std::thread::Builder::new()
            .name("policy watch".into())
            .spawn(move || wait(&waiting, &end, ways, changed))
            .map_err(notify::Error::io)?;
        Ok(Self { ended, signals, thread: Some(thread) })
    }
}

/// Where the files are, through which links, and the watch on these folders.
struct Ways {
    files: Vec<PathBuf>,
    /// Names of files and links, for the events of the watch.
    names: Arc<Mutex<BTreeSet<OsString>>>,
    watcher: RecommendedWatcher,
    /// The folders that are watched.
    folders: BTreeSet<PathBuf>,
    /// Where each file was found; `None` if it does not exist.
    targets: Vec<Option<PathBuf>>,
}

impl Ways {
    /// Finds the files again, and watches the folders in which a change may affect them.
    fn find(&mut self) {
        let (mut names, mut folders) = (BTreeSet::new(), BTreeSet::new());
        for file in &self.files {
            for (folder, name) in places(file) {
                folders.insert(folder);
                names.insert(name);
            }
        }
        *self.names.lock() = names;
        for folder in self.folders.difference(&folders) {
            let _ = self.watcher.unwatch(folder);
        }
        for folder in &folders {
            // Again, too, if it is watched: it may be another folder of the same name.
            let watched = self.watcher.watch(folder, RecursiveMode::NonRecursive);
            let is_new = !self.folders.contains(folder);
            if let Some(error) = watched.err().filter(|_| is_new) {
                let folder = folder.display();
                tracing::warn!(%folder, %error, "folder cannot be watched");
            }
        }
        self.folders = folders;
        let targets: Vec<_> = self.files.iter().map(|file| file.canonicalize().ok()).collect();
        for ((file, before), now) in self.files.iter().zip(&self.targets).zip(&targets) {
            if let (Some(before), Some(now)) = (before, now)
                && before != now
            {
                let (file, before, now) = (file.display(), before.display(), now.display());
                tracing::info!(%file, %before, %now, "policy file moved by a link");
            }
        }
        self.targets = targets;
    }
}

/// The folder and name of each link on the way to `file`, and of the file, or of the first folder that is
/// missing. Links in the way to the working directory are not followed.
fn places(file: &Path) -> Vec<(PathBuf, OsString)> {
    let mut rest: VecDeque<OsString> = parts(file).collect();
    let mut at = if file.is_absolute() { root(file) } else { PathBuf::from(".") };
    let mut places = Vec::new();
    let mut links = 0;
    while let Some(name) = rest.pop_front() {
        let path = at.join(&name);
        let target = path.read_link().ok().filter(|_| links < LINKS);
        let is_missing = path.symlink_metadata().is_err();
        if target.is_some() || is_missing || rest.is_empty() {
            places.push((at.clone(), name));
        }
        if is_missing {
            break;
        }
        let Some(target) = target else {
            at = path;
            continue;
        };
        links += 1;
        if target.is_absolute() {
            at = root(&target);
        }
        for part in parts(&target).collect::<Vec<_>>().into_iter().rev() {
            rest.push_front(part);
        }
    }
    places
}

/// The names in a path, and `..`.
fn parts(path: &Path) -> impl Iterator<Item = OsString> {
    path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.into()),
        Component::ParentDir => Some("..".into()),
        Component::CurDir | Component::RootDir | Component::Prefix(_) => None,
    })
}

/// What an absolute path begins with: `/`.
fn root(path: &Path) -> PathBuf {
    let is_root = |part: &Component<'_>| matches!(part, Component::RootDir | Component::Prefix(_));
    path.components().take_while(is_root).collect()
}

/// Whether an event may be a change of our files. Reading a file is an event too.
fn is_change(event: &Event, names: &BTreeSet<OsString>) -> bool {
    let change = match event.kind {
        EventKind::Access(kind) => kind == AccessKind::Close(AccessMode::Write),
        _ => true,
    };
    let ours = |path: &PathBuf| path.file_name().is_some_and(|name| names.contains(name));
    event.need_rescan() || change && event.paths.iter().any(ours)
}

fn wait(
    signals: &Receiver<()>,
    ended: &AtomicBool,
    mut ways: Ways,
    mut changed: impl FnMut() -> bool,
) {
    while signals.recv().is_ok() {
        let first = Instant::now();
        loop {
            if ended.load(Ordering::Acquire) {
                return;
            }
            match signals.recv_timeout(QUIET) {
                Ok(()) if first.elapsed() < LONGEST_DELAY => {}
                Ok(()) | Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        ways.find();
        if !changed() {
            return;
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        let _ = self.signals.try_send(());
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

    /// `current -> v2` was not noticed, nor changes of the files that it then named.
    #[cfg(unix)]
    #[test]
    fn a_link_on_the_way_that_is_turned_is_a_change_and_followed() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for version in ["v1", "v2"] {
            fs::create_dir(path(version)).unwrap();
            fs::write(path(version).join("a.wasm"), version).unwrap();
        }
        symlink("v1", path("current")).unwrap();
        symlink(path("current"), path("policies")).unwrap();
        let file = path("policies").join("a.wasm");
        let (calls, called) = channel();
        let _watch =
            Watch::start(std::slice::from_ref(&file), move || calls.send(()).is_ok()).unwrap();
        called.recv_timeout(PATIENCE).expect("the first call");
        symlink("v2", path("next")).unwrap();
        called.recv_timeout(3 * QUIET).expect_err("another link was made");
        let changes: [(&str, &dyn Fn()); 5] = [
            ("turned", &|| fs::rename(path("next"), path("current")).unwrap()),
            ("written behind it", &|| fs::write(path("v2/a.wasm"), "2").unwrap()),
            ("removed", &|| fs::remove_file(path("current")).unwrap()),
            ("made", &|| symlink("v1", path("current")).unwrap()),
            ("written again", &|| fs::write(path("v1/a.wasm"), "1").unwrap()),
        ];
        for (how, change) in changes {
            change();
            called.recv_timeout(PATIENCE).expect(how);
        }
        fs::write(path("v2/a.wasm"), "3").unwrap();
        called.recv_timeout(3 * QUIET).expect_err("a folder changed that is no longer on the way");
        fs::remove_file(path("current")).unwrap();
        symlink("current", path("current")).unwrap();
        called.recv_timeout(PATIENCE).expect("a circle");
    }
}
