//! Transactions on the redb file: what is written together, what is read, and what a failure
//! means. Knows no thread, no queue and no budget.

use std::any::Any;
use std::collections::HashSet;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::redb::{
    Builder, Database, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition,
};
use tracing::{info, warn};
use xxhash_rust::xxh3::xxh3_64;

use super::super::record::{Record, rows};
use super::super::{Key, Part, format};
use crate::error::Error;

const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
/// Key of a part: its [`Record`].
const ENTRIES: TableDefinition<&Key, &[u8]> = TableDefinition::new("entries");
/// Key of a part and number of the row: a piece of its formatted bytes.
pub(super) const CHUNKS: TableDefinition<(&Key, u32), &[u8]> = TableDefinition::new("chunks");

/// Version of the three tables, [stamped](stamp) under `format` in `meta`.
const FORMAT: u64 = 2;
/// What format 1 has there: whole snapshots, and no stamp.
const SNAPSHOTS: u64 = 1;
/// redb's cache. The operating system caches the file as well, so this one need only hold inner
/// pages and what one transaction writes before it reaches the file.
const CACHE_BYTES: usize = 32 << 20;
/// Most bytes a file may have beyond twice what lives in it before it is compacted.
const COMPACT_BYTES: u64 = 64 << 20;
/// Most files moved aside; the last one is overwritten then.
const DAMAGED_FILES: u32 = 3;

/// What one transaction changes, in this order.
#[derive(Default)]
pub(super) struct Batch {
    /// Parts to remove.
    pub evicted: HashSet<Key>,
    /// Parts to add; their records are among the following ones.
    pub parts: Vec<Arc<Part>>,
    /// Records to write.
    pub records: Vec<(Key, Record)>,
}

/// A file, and what is in it.
pub(super) struct Opened {
    pub database: Database,
    /// Of all parts.
    pub records: Vec<(Key, Record)>,
    /// Records that could not be read, and were dropped.
    pub damaged: u64,
}

/// Why an operation on the database failed, sorted by what follows.
#[derive(Debug, Clone)]
pub(super) enum Trouble {
    /// One part is damaged: drop it.
    Part(String),
    /// Another process has the file: go on without.
    Busy,
    /// The file is damaged, or of another format: begin a new one.
    Damaged(String),
    /// The disk is full, not writable, failing: save nothing more.
    Io(String),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Part(problem) | Self::Damaged(problem) | Self::Io(problem) => {
                f.write_str(problem)
            }
            Self::Busy => f.write_str("another process uses the file"),
        }
    }
}

impl From<::redb::Error> for Trouble {
    fn from(error: ::redb::Error) -> Self {
        use ::redb::Error as E;
        match &error {
            E::DatabaseAlreadyOpen => Self::Busy,
            E::Io(io) => match io.kind() {
                ErrorKind::UnexpectedEof | ErrorKind::InvalidData => {
                    Self::Damaged(error.to_string())
                }
                _ => Self::Io(error.to_string()),
            },
            E::PreviousIo | E::DatabaseClosed => Self::Io(error.to_string()),
            _ => Self::Damaged(error.to_string()),
        }
    }
}

/// Opens the file, or begins a new one where there is none or it is damaged (it is moved aside).
pub(super) fn open_or_begin_anew(path: &Path) -> Result<Opened, Error> {
    let open = || {
        let database = open(path)?;
        let (records, damaged) = records(&database)?;
        Ok(Opened { database, records, damaged })
    };
    let opened = open().or_else(|trouble| {
        if matches!(trouble, Trouble::Damaged(_)) {
            move_aside(path, &trouble);
            return open();
        }
        Err(trouble)
    });
    opened.map_err(|trouble| error(path, &trouble))
}

/// What a caller is told who can do without the file.
pub(super) fn error(path: &Path, trouble: &Trouble) -> Error {
    match trouble {
        Trouble::Busy => Error::StoreInUse { path: path.to_owned() },
        _ => Error::Store(format!("{}: {trouble}", path.display())),
    }
}

/// Opens the file, and makes it with its tables where there is none. What an older version of this
/// program has left there is cleared.
pub(super) fn open(path: &Path) -> Result<Database, Trouble> {
    let file = open_file(path).map_err(|error| Trouble::Io(error.to_string()))?;
    guarded(|| {
        let database = Builder::new().set_cache_size(CACHE_BYTES).create_file(file)?;
        let read = database.begin_read()?;
        let is_new = read.list_tables()?.next().is_none();
        let found = if is_new { None } else { read.open_table(META)?.get("format")? };
        let found = found.map(|version| version.value());
        drop(read);
        match found {
            None if is_new => begin(&database)?,
            Some(SNAPSHOTS) => {
                info!(?path, "the store has the format of an older version: it begins anew");
                begin(&database)?;
            }
            Some(found) if found == stamp(FORMAT) => {}
            Some(found) if found != stamp(found >> 32) => {
                // Each record says by its checksum whether it is ours, so this one is not needed.
                warn!(?path, "the store's format is unreadable: taken for ours");
                put_format(&database)?;
            }
            found => {
                let found = found.map(|found| found >> 32);
                return Err(::redb::Error::Corrupted(format!(
                    "the file has format {found:?}, this program writes {FORMAT}"
                )));
            }
        }
        Ok(database)
    })
}

/// A format's version and, in the lower half, its checksum: so that a flipped bit is not taken for
/// another version.
pub(super) fn stamp(version: u64) -> u64 {
    version << 32 | xxh3_64(&version.to_le_bytes()) & 0xffff_ffff
}

/// Makes the tables, empty.
fn begin(database: &Database) -> Result<(), ::redb::Error> {
    let mut write = database.begin_write()?;
    write.set_quick_repair(true);
    write.delete_table(ENTRIES)?;
    write.delete_table(CHUNKS)?;
    write.open_table(META)?.insert("format", stamp(FORMAT))?;
    write.open_table(ENTRIES)?;
    write.open_table(CHUNKS)?;
    Ok(write.commit()?)
}

fn put_format(database: &Database) -> Result<(), ::redb::Error> {
    let mut write = database.begin_write()?;
    write.set_quick_repair(true);
    write.open_table(META)?.insert("format", stamp(FORMAT))?;
    Ok(write.commit()?)
}

/// Makes missing folders and the file, for this user alone: it holds conversations.
fn open_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let mut folders = fs::DirBuilder::new();
    folders.recursive(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
        folders.mode(0o700);
        options.mode(0o600);
        if path.exists() {
            fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        }
    }
    if let Some(folder) = path.parent() {
        folders.create(folder)?;
    }
    options.open(path)
}

/// Renames a damaged file, so that a new one can begin and this one be looked at.
///
/// Two processes that meet the same damaged file at the same moment may move aside each other's
/// new one: the cache starts empty once more, and nothing else happens.
pub(super) fn move_aside(path: &Path, trouble: &Trouble) {
    let name = |n| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".damaged-{n}"));
        PathBuf::from(name)
    };
    let free = (1..DAMAGED_FILES).map(name).find(|aside| !aside.exists());
    let aside = free.unwrap_or_else(|| name(DAMAGED_FILES));
    warn!(?path, ?aside, %trouble, "store is damaged: moved aside, a new one begins");
    if let Err(error) = fs::rename(path, &aside) {
        warn!(?path, %error, "cannot be moved");
    }
}

/// Closes a database, which may itself fail on a damaged file.
pub(super) fn close(database: Option<Database>) {
    let _ = guarded(|| {
        drop(database);
        Ok(())
    });
}

/// Compacts the file if it is much larger than its budget, or than the `live` bytes in it. Takes
/// about as long as writing what lives.
pub(super) fn compact(
    database: &mut Database,
    path: &Path,
    live: u64,
    budget_bytes: u64,
) -> Result<(), Trouble> {
    let before = size_on_disk(path);
    if before <= budget_bytes.saturating_add(budget_bytes / 4) && before <= 2 * live + COMPACT_BYTES
    {
        return Ok(());
    }
    compact_now(database)?;
    info!(before, after = size_on_disk(path), live, "store compacted");
    Ok(())
}

/// Compacts the file.
pub(super) fn compact_now(database: &mut Database) -> Result<(), Trouble> {
    guarded(|| database.compact().map(drop).map_err(::redb::Error::from))
}

/// Bytes that the file takes. redb extends it ahead of need and leaves holes, so its length says
/// up to twice as much.
pub(super) fn size_on_disk(path: &Path) -> u64 {
    let Ok(metadata) = fs::metadata(path) else { return 0 };
    #[cfg(unix)]
    return std::os::unix::fs::MetadataExt::blocks(&metadata) * 512;
    #[cfg(not(unix))]
    return metadata.len();
}

/// All readable records, and how many were not. Those are removed with a warning, and with them all
/// rows that belong to no record.
pub(super) fn records(database: &Database) -> Result<(Vec<(Key, Record)>, u64), Trouble> {
    let mut records = Vec::new();
    let mut damaged = Vec::new();
    guarded(|| {
        for entry in database.begin_read()?.open_table(ENTRIES)?.iter()? {
            let (key, value) = entry?;
            match Record::from_bytes(key.value(), value.value()) {
                Some(record) => records.push((*key.value(), record)),
                None => damaged.push(*key.value()),
            }
        }
        Ok(())
    })?;
    if damaged.is_empty() {
        return Ok((records, 0));
    }
    warn!(records = damaged.len(), "damaged records dropped");
    let count = damaged.len() as u64;
    write(database, &Batch { evicted: damaged.into_iter().collect(), ..Batch::default() })?;
    // If its key was damaged, it could not say which rows were its own.
    sweep(database, &records)?;
    Ok((records, count))
}

/// Removes rows that belong to no record, where there are more rows than there should be; it has to
/// read the whole file then. Returns how many.
pub(super) fn sweep(database: &Database, records: &[(Key, Record)]) -> Result<u64, Trouble> {
    let expected: u64 = records.iter().map(|(_, record)| record.rows()).sum();
    let known: HashSet<Key> = records.iter().map(|(key, _)| *key).collect();
    guarded(|| {
        let found = database.begin_read()?.open_table(CHUNKS)?.len()?;
        if found <= expected {
            return Ok(0);
        }
        let mut write = database.begin_write()?;
        write.set_quick_repair(true);
        write.open_table(CHUNKS)?.retain(|(key, _), _| known.contains(key))?;
        write.commit()?;
        Ok(found - database.begin_read()?.open_table(CHUNKS)?.len()?)
    })
}

/// Empties the file.
pub(super) fn clear(database: &Database) -> Result<(), Trouble> {
    guarded(|| begin(database))
}

/// One transaction.
pub(super) fn write(database: &Database, batch: &Batch) -> Result<(), Trouble> {
    if batch.evicted.is_empty() && batch.records.is_empty() && batch.parts.is_empty() {
        return Ok(());
    }
    guarded(|| {
        let mut write = database.begin_write()?;
        write.set_quick_repair(true);
        {
            let mut entries = write.open_table(ENTRIES)?;
            let mut chunks = write.open_table(CHUNKS)?;
            for key in &batch.evicted {
                entries.remove(key)?;
                chunks.retain_in((key, 0)..=(key, u32::MAX), |_, _| false)?;
            }
            for Part { key, tensors, .. } in batch.parts.iter().map(|part| &**part) {
                let mut encoded = format::encode(key, tensors);
                for (row, length) in (0..).zip(rows(format::encoded_len(tensors))) {
                    let mut place = chunks.insert_reserve((key, row), length as usize)?;
                    encoded.read_exact(place.as_mut())?;
                }
            }
            for (key, record) in &batch.records {
                entries.insert(key, record.to_bytes(key).as_slice())?;
            }
        }
        Ok(write.commit()?)
    })
}

/// Runs `f`, and takes a panic for a damaged file: redb trusts its pages between repairs.
pub(super) fn guarded<T>(f: impl FnOnce() -> Result<T, ::redb::Error>) -> Result<T, Trouble> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => result.map_err(Trouble::from),
        Err(panic) => Err(Trouble::Damaged(format!("redb panicked: {}", message(&*panic)))),
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
