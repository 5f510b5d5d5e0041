//! Damaged files of the store, renamed to `NAME.damaged-N` so that they can be examined.
//!
//! They share the budget with the store and take at most half of it: the oldest are deleted first.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use tracing::warn;

use super::super::StoredSize;
use super::database::StoreFault;
use super::file::size_on_disk;

/// Most files set aside; the oldest is replaced then.
const MOST: u32 = 3;

/// Renames a file that cannot be used, so that a new one can be created and this one be examined.
///
/// Two processes that meet the same file at the same moment may set aside each other's new one: the
/// store starts empty once more, and nothing else happens.
pub(super) fn set_aside(path: &Path, fault: &StoreFault) {
    let free = (1..=MOST).map(|n| name(path, n)).find(|aside| !aside.exists());
    let aside = free.or_else(|| oldest_first(path).into_iter().next());
    let aside = aside.unwrap_or_else(|| name(path, MOST));
    match fs::rename(path, &aside) {
        Ok(()) => warn!(?path, ?aside, %fault, "state store unreadable; set aside"),
        Err(error) => warn!(?path, %fault, %error, "state store unreadable; moving it failed"),
    }
}

/// Deletes the oldest files set aside until the others take at most `most_bytes`. Returns what these
/// take.
pub(super) fn shrink_to(path: &Path, most_bytes: u64) -> StoredSize {
    let mut left = size(path);
    for aside in oldest_first(path) {
        if left.bytes <= most_bytes {
            break;
        }
        let bytes = size_on_disk(&aside);
        match fs::remove_file(&aside) {
            Ok(()) => {
                warn!(
                    ?aside,
                    bytes, most_bytes, "file set aside deleted: exceeds its share of the budget"
                );
                left.subtract(bytes);
            }
            Err(error) => warn!(?aside, %error, "file set aside cannot be deleted"),
        }
    }
    left
}

/// Deletes all files set aside. Returns their number and size.
pub(super) fn clear(path: &Path) -> std::io::Result<StoredSize> {
    let mut cleared = StoredSize::default();
    for aside in oldest_first(path) {
        let bytes = size_on_disk(&aside);
        fs::remove_file(&aside)?;
        cleared.add(bytes);
    }
    Ok(cleared)
}

/// Number and size of the files set aside.
pub(super) fn size(path: &Path) -> StoredSize {
    let mut size = StoredSize::default();
    oldest_first(path).iter().for_each(|aside| size.add(size_on_disk(aside)));
    size
}

fn oldest_first(path: &Path) -> Vec<PathBuf> {
    let changed = |aside: PathBuf| -> Option<(SystemTime, PathBuf)> {
        let metadata = fs::symlink_metadata(&aside).ok()?;
        metadata.is_file().then_some((metadata.modified().ok()?, aside))
    };
    let mut found: Vec<_> = (1..=MOST).filter_map(|n| changed(name(path, n))).collect();
    found.sort();
    found.into_iter().map(|(_, aside)| aside).collect()
}

fn name(path: &Path, n: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".damaged-{n}"));
    PathBuf::from(name)
}
