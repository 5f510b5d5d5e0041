//! The file of the store: whether it is one of ours, how it is created, what it takes on disk.
//!
//! Never changes mode, name or content of a file that exists.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use tracing::warn;

use super::super::format;
use super::database::StoreFault;
use super::portable;

/// First bytes of every redb file.
const MAGIC: &[u8] = b"redb\x1a\x0a\xa9\x0d\x0a";
/// Bytes that every file of ours has, and most of them many times: the names of the tables as redb's
/// table of tables holds them, and the beginning of each part.
const MARKS: [&[u8]; 2] = [b"chunksentriesmeta", &format::MAGIC];
/// redb's page with the header.
const HEADER_BYTES: usize = 4096;
/// Most bytes of a file whose creation was cut short: redb begins with 1 MiB and a page or two.
const YOUNG_BYTES: u64 = 4 << 20;
/// Bytes of a file that are searched for marks.
const SEARCHED_BYTES: u64 = 64 << 20;

/// Whose file lies at a path.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// The store's, or nobody's: there is none, or an empty one.
    Store,
    /// A database, of the store or of another program: its tables tell.
    Unknown,
}

/// Whose file lies at `path`, without changing it.
///
/// # Errors
/// [`StoreFault::Foreign`] if it is not the store's, [`StoreFault::Damaged`] if it is, but no database.
pub(super) fn owner(path: &Path) -> Result<Owner, StoreFault> {
    let failed = |error: io::Error| StoreFault::Io(error.into());
    let metadata = match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Owner::Store),
        Err(error) => return Err(failed(error)),
        Ok(metadata) => metadata,
    };
    if !metadata.is_file() {
        return Err(StoreFault::Foreign("is not a file"));
    }
    if metadata.len() == 0 {
        return Ok(Owner::Store);
    }
    let mut file = steersman_files::open(path).map_err(failed)?;
    let mut head = Vec::new();
    (&mut file).take(HEADER_BYTES as u64).read_to_end(&mut head).map_err(failed)?;
    if head.starts_with(portable::MAGIC) {
        return Err(StoreFault::Foreign("is an export; add it with `steersman cache import`"));
    }
    let is_database = head.starts_with(&MAGIC[..MAGIC.len().min(head.len())]);
    // redb writes its magic number last.
    let is_young = metadata.len() <= YOUNG_BYTES && head.iter().take(MAGIC.len()).all(|b| *b == 0);
    let contents = Contents::of(file).map_err(failed)?;
    if is_database {
        return Ok(if contents.has_mark { Owner::Store } else { Owner::Unknown });
    }
    if contents.has_mark || is_young && contents.is_zero {
        return Err(StoreFault::Damaged("its header is damaged or was never written".into()));
    }
    Err(StoreFault::Foreign("is not a state store"))
}

/// What lies behind the header.
struct Contents {
    has_mark: bool,
    is_zero: bool,
}

impl Contents {
    /// Reads `rest` as far as it is searched.
    fn of(rest: File) -> io::Result<Self> {
        let mut rest = rest.take(SEARCHED_BYTES);
        let mut contents = Self { has_mark: false, is_zero: true };
        let overlap = MARKS.iter().map(|mark| mark.len()).max().unwrap_or(0);
        let mut window = Vec::new();
        while !contents.has_mark && (&mut rest).take(1 << 20).read_to_end(&mut window)? > 0 {
            contents.is_zero &= window.iter().all(|byte| *byte == 0);
            contents.has_mark =
                MARKS.iter().any(|mark| window.windows(mark.len()).any(|bytes| bytes == *mark));
            window.drain(..window.len().saturating_sub(overlap));
        }
        Ok(contents)
    }
}

/// Warns if the mode of the file lets other users read it.
#[cfg(unix)]
pub(super) fn warn_of_other_readers(path: &Path) {
    use std::os::unix::fs::MetadataExt;
    let mode = fs::metadata(path).map_or(0, |metadata| metadata.mode() & 0o777);
    if mode & 0o077 != 0 {
        let mode = format!("{mode:o}");
        warn!(
            ?path,
            mode, "other users can read the state store, which holds conversations; `chmod 600` it"
        );
    }
}

#[cfg(not(unix))]
pub(super) fn warn_of_other_readers(_: &Path) {}

/// Opens the file, or creates it and its folders for this user only: it holds conversations.
pub(in super::super) fn open_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let mut folders = fs::DirBuilder::new();
    folders.recursive(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
        folders.mode(0o700);
        options.mode(0o600);
    }
    if let Some(folder) = path.parent() {
        folders.create(folder)?;
    }
    options.open(path)
}

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

/// Bytes that the file takes. redb extends it ahead of need and leaves holes, so its length may be
/// twice as much.
pub(super) fn size_on_disk(path: &Path) -> u64 {
    let Ok(metadata) = fs::metadata(path) else { return 0 };
    #[cfg(unix)]
    return std::os::unix::fs::MetadataExt::blocks(&metadata) * 512;
    #[cfg(not(unix))]
    return metadata.len();
}
