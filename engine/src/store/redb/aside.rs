//! Damaged files of the store that were set aside.
//!
//! They share the budget with the store and take at most half of it: the oldest are deleted first.

use std::fs;
use std::path::Path;

use steersman_database::{files_set_aside, size_on_disk};
use tracing::warn;

use super::super::StoredSize;
use super::fault::StoreFault;

/// Sets aside a file that cannot be used, and logs it.
pub(super) fn set_aside(path: &Path, fault: &StoreFault) {
    match steersman_database::set_aside(path) {
        Ok(aside) => {
            let (path, aside) = (path.display(), aside.display());
            warn!(%path, %aside, %fault, "state store unreadable; set aside");
        }
        Err(error) => {
            warn!(path = %path.display(), %fault, %error, "state store unreadable; moving it failed");
        }
    }
}

/// Deletes the oldest files set aside until the others take at most `most_bytes`. Returns what these
/// take.
pub(super) fn shrink_to(path: &Path, most_bytes: u64) -> StoredSize {
    let mut left = size(path);
    for aside in files_set_aside(path) {
        if left.bytes <= most_bytes {
            break;
        }
        let bytes = size_on_disk(&aside);
        match fs::remove_file(&aside) {
            Ok(()) => {
                warn!(
                    aside = %aside.display(),
                    bytes, most_bytes, "file set aside deleted: exceeds its share of the budget"
                );
                left.subtract(bytes);
            }
            Err(error) => {
                warn!(aside = %aside.display(), %error, "file set aside cannot be deleted");
            }
        }
    }
    left
}

/// Deletes all files set aside. Returns their number and size.
pub(super) fn clear(path: &Path) -> std::io::Result<StoredSize> {
    let mut cleared = StoredSize::default();
    for aside in files_set_aside(path) {
        let bytes = size_on_disk(&aside);
        fs::remove_file(&aside)?;
        cleared.add(bytes);
    }
    Ok(cleared)
}

/// Number and size of the files set aside.
pub(super) fn size(path: &Path) -> StoredSize {
    let mut size = StoredSize::default();
    files_set_aside(path).iter().for_each(|aside| size.add(size_on_disk(aside)));
    size
}
