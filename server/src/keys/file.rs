//! The file of keys of a running server.

use std::fs::Metadata;
use std::path::{Path, PathBuf};

use anyhow::Result;
use jiff::Timestamp;
use parking_lot::Mutex;

use super::{FILE, Key, Keys};

/// The file of a running server, which is read again when it has changed.
#[derive(Debug)]
pub struct KeyFile {
    folder: PathBuf,
    path: PathBuf,
    /// What was last read.
    last: Mutex<(Option<Stamp>, Keys)>,
}

/// What changes when a file is replaced, or becomes readable.
#[derive(Debug, PartialEq)]
struct Stamp {
    modified: Option<std::time::SystemTime>,
    bytes: u64,
    inode: u64,
    /// Seconds and nanoseconds of the last change of owner, permissions or content.
    changed: (i64, i64),
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        #[cfg(unix)]
        let (inode, changed) = {
            use std::os::unix::fs::MetadataExt;
            (metadata.ino(), (metadata.ctime(), metadata.ctime_nsec()))
        };
        #[cfg(not(unix))]
        let (inode, changed) = (0, (0, 0));
        Self { modified: metadata.modified().ok(), bytes: metadata.len(), inode, changed }
    }
}

impl KeyFile {
    /// The file in `data_dir`, which may be missing.
    ///
    /// # Errors
    /// As [`Keys::read`].
    pub fn open(data_dir: &Path) -> Result<Self> {
        let path = data_dir.join(FILE);
        let stamp = stamp(&path);
        let keys = Keys::read(&path)?;
        Ok(Self { folder: data_dir.into(), path, last: Mutex::new((stamp, keys)) })
    }

    /// The data folder that it is in.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The keys that were last read.
    pub fn keys(&self) -> Keys {
        self.last.lock().1.clone()
    }

    /// The keys, if the file has changed since they were last read. Without the file, or with one that is damaged or
    /// cannot be read, all keys are revoked.
    pub fn changed(&self) -> Option<Keys> {
        let stamp = stamp(&self.path);
        let mut last = self.last.lock();
        if last.0 == stamp {
            return None;
        }
        let path = self.path.display();
        let keys = match Keys::read(&self.path) {
            Ok(keys) if stamp.is_some() => {
                tracing::info!(%path, keys = keys.keys.len(), "keys read again");
                keys
            }
            Ok(_) => {
                tracing::error!(%path, "file of keys is gone; refusing its keys");
                last.1.revoked()
            }
            Err(error) => {
                let text = format!("{error:#}");
                // A file that can be read and is wrong has no error of the system.
                if error.downcast_ref::<std::io::Error>().is_some() {
                    tracing::error!(error = text, "file of keys cannot be read; refusing its keys");
                } else {
                    tracing::error!(error = text, "file of keys is damaged; refusing its keys");
                }
                last.1.revoked()
            }
        };
        *last = (stamp, keys.clone());
        Some(keys)
    }
}

/// The stamp of the file at `path`, if there is one.
fn stamp(path: &Path) -> Option<Stamp> {
    std::fs::metadata(path).ok().map(|metadata| Stamp::of(&metadata))
}

impl Keys {
    /// The same keys, all revoked.
    fn revoked(&self) -> Self {
        let now = Timestamp::now();
        let revoke = |key: &Key| Key { revoked: key.revoked.or(Some(now)), ..key.clone() };
        Self { keys: self.keys.iter().map(revoke).collect() }
    }
}
