//! The file of keys of a running server.

use std::collections::BTreeSet;
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
        let keys = read_again(Keys::read(&self.path), &last.1, &self.path);
        *last = (stamp, keys.clone());
        Some(keys)
    }
}

/// The keys of the file at `path` as it was `read`, and those that were `known` and are not in it, revoked: they open
/// nothing, and what they opened stays closed.
fn read_again(read: Result<Keys>, known: &Keys, path: &Path) -> Keys {
    let path = path.display();
    match read {
        // A file has keys. Without any it is gone, perhaps since its stamp was taken.
        Ok(keys) if keys.keys.is_empty() => {
            tracing::error!(%path, "file of keys is gone; refusing its keys");
            known.revoked()
        }
        Ok(read) => {
            let present: BTreeSet<_> = read.keys.iter().map(|key| key.sha256).collect();
            let mut keys = known.revoked().keys;
            keys.retain(|key| !present.contains(&key.sha256));
            let (present, missing) = (present.len(), keys.len());
            tracing::info!(%path, keys = present, missing, "keys read again");
            keys.extend(read.keys);
            Keys { keys }
        }
        Err(error) => {
            let text = format!("{error:#}");
            // A file that can be read and is wrong has no error of the system.
            if error.downcast_ref::<std::io::Error>().is_some() {
                tracing::error!(error = text, "file of keys cannot be read; refusing its keys");
            } else {
                tracing::error!(error = text, "file of keys is damaged; refusing its keys");
            }
            known.revoked()
        }
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

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;
    use crate::keys::tests::key;

    /// A file that went between the look at its stamp and its reading was one without keys: a server that they had
    /// closed was open to everyone until it ended.
    #[test]
    fn a_file_that_goes_while_it_is_read_opens_nothing() {
        let (known, path) = (Keys { keys: vec![key(None, false)] }, Path::new(FILE));
        for read in [Ok(Keys::default()), Err(anyhow!("the list of keys is empty"))] {
            let keys = read_again(read, &known, path);
            assert!(keys.keys.len() == 1 && keys.keys[0].revoked.is_some(), "{keys:?}");
        }
        for before in [Keys::default(), known.clone(), known.revoked()] {
            let keys = read_again(Ok(known.clone()), &before, path);
            assert!(keys.keys.len() == 1 && keys.keys[0].revoked.is_none(), "{keys:?}");
        }
    }

    #[test]
    fn a_key_that_the_file_has_lost_is_revoked() {
        let (known, path) = (Keys { keys: vec![key(None, false)] }, Path::new(FILE));
        let other = Key { sha256: [8; 32], ..key(None, false) };
        let keys = read_again(Ok(Keys { keys: vec![other] }), &known, path);
        let states: Vec<_> =
            keys.keys.iter().map(|key| (key.sha256[0], key.revoked.is_some())).collect();
        assert_eq!(states, [(7, true), (8, false)]);
    }
}
