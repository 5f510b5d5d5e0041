//! The file of the store: whether it is one of ours, who can read it, whether it is still the same one.
//!
//! Never changes mode, name or content of a file that exists.

use std::fs;
use std::io::Read;
use std::path::Path;

use steersman_database::Owner;
use tracing::warn;

use super::super::format;
use super::fault::StoreFault;

pub(super) const EXPORT_MAGIC: &[u8; 8] = b"STEERSEX";

/// Bytes that every file of ours has, and most of them many times: the names of the tables as redb's
/// table of tables holds them, and the beginning of each part.
const MARKS: [&[u8]; 2] = [b"chunksentriesmeta", &format::MAGIC];
/// Most bytes of a file whose creation was cut short: redb begins with 1 MiB and a page or two.
const YOUNG_BYTES: u64 = 4 << 20;

/// Checks that the file at `path` may be opened for writing, without changing it. Returns whether only
/// its tables can tell if it is the store's.
///
/// # Errors
/// [`StoreFault::Foreign`] if it is not the store's, [`StoreFault::Damaged`] if it is, but no database.
pub(super) fn is_unknown(path: &Path) -> Result<bool, StoreFault> {
    let bytes = fs::metadata(path).map_or(0, |metadata| metadata.len());
    if path.exists() && !path.is_file() {
        return Err(StoreFault::Foreign("is not a file"));
    }
    let owner = steersman_database::owner(path, &MARKS);
    match owner.map_err(|error| StoreFault::Io(error.into()))? {
        Owner::Nobody | Owner::Ours => Ok(false),
        Owner::Unknown => Ok(true),
        // Its parts are those of a store.
        Owner::Damaged | Owner::Unwritten | Owner::Foreign if is_export(path) => {
            Err(StoreFault::Foreign("is an export; add it with `steersman cache import`"))
        }
        Owner::Foreign => Err(StoreFault::Foreign("is not a state store")),
        Owner::Unwritten if bytes > YOUNG_BYTES => Err(StoreFault::Foreign("is not a state store")),
        Owner::Damaged | Owner::Unwritten => {
            Err(StoreFault::Damaged("its header is damaged or was never written".into()))
        }
    }
}

fn is_export(path: &Path) -> bool {
    let mut head = [0; EXPORT_MAGIC.len()];
    let read = steersman_files::open(path).and_then(|mut file| file.read_exact(&mut head));
    read.is_ok() && head == *EXPORT_MAGIC
}

/// Warns if the mode of the file lets other users read it.
#[cfg(unix)]
pub(super) fn warn_of_other_readers(path: &Path) {
    use std::os::unix::fs::MetadataExt;
    let mode = fs::metadata(path).map_or(0, |metadata| metadata.mode() & 0o777);
    if mode & 0o077 != 0 {
        let mode = format!("{mode:o}");
        warn!(
            path = %path.display(),
            mode, "other users can read the state store, which holds conversations; `chmod 600` it"
        );
    }
}

#[cfg(not(unix))]
pub(super) fn warn_of_other_readers(_: &Path) {}

/// Identifies the file at `path`, to notice that it was deleted or replaced. `None` if there is none.
pub(super) fn file_id(path: &Path) -> Option<(u64, u64)> {
    let metadata = fs::metadata(path).ok()?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        Some((metadata.dev(), metadata.ino()))
    }
    #[cfg(not(unix))]
    metadata.is_file().then_some((0, 0))
}
