//! Transactions on the redb file: what is written together, what is read, and what a failure
//! means. Knows no thread, no queue and no budget.

use std::any::Any;
use std::collections::HashSet;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use ::redb::{
    AccessGuard, Builder, Database, Range, ReadableDatabase, ReadableTable, TableDefinition,
};
use tracing::{info, warn};
use xxhash_rust::xxh3::xxh3_64;

use super::super::{Fingerprint, Key, Snapshot, format};
use crate::error::Error;

const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
/// Key of a prefix: its [`Record`].
const ENTRIES: TableDefinition<&Key, &[u8]> = TableDefinition::new("entries");
/// Key of a prefix and number of the row: a piece of its formatted bytes.
const CHUNKS: TableDefinition<(&Key, u32), &[u8]> = TableDefinition::new("chunks");

/// Version of the three tables, under `format` in `meta`.
const FORMAT: u64 = 1;
/// Most bytes of one row: with redb's own it fills a page of 1 MiB.
pub(super) const CHUNK_BYTES: usize = (1 << 20) - ROW_OVERHEAD as usize;
/// Bound on redb's bytes in a page that holds one row: header, offsets, key.
const ROW_OVERHEAD: u64 = 512;
const PAGE_BYTES: u64 = 4096;
/// Budget charged for the record and the inner pages above its rows.
const RECORD_COST: u64 = 512;
/// redb's cache. The operating system caches the file as well, so this one need only hold inner
/// pages and what one transaction writes before it reaches the file.
const CACHE_BYTES: usize = 32 << 20;
/// Most bytes a file may have beyond twice what lives in it before it is compacted.
const COMPACT_BYTES: u64 = 64 << 20;
/// Most files moved aside; the last one is overwritten then.
const DAMAGED_FILES: u32 = 3;

/// What `entries` says of one snapshot. Its bytes: fingerprint; tokens, bytes, used as u64;
/// XXH3-64 of the key and all that. Little-endian.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Record {
    pub fingerprint: Fingerprint,
    /// Length of the prefix.
    pub tokens: usize,
    /// Length of its formatted bytes, in rows of [`CHUNK_BYTES`].
    pub bytes: u64,
    /// Reading of the use counter at its last use.
    pub used: u64,
}

/// What one transaction changes besides adding a snapshot.
#[derive(Default)]
pub(super) struct Batch {
    /// Entries to remove.
    pub evicted: HashSet<Key>,
    /// Records to write.
    pub records: Vec<(Key, Record)>,
}

/// Why an operation on the database failed, sorted by what follows.
#[derive(Debug)]
pub(super) enum Trouble {
    /// One entry is damaged: drop it.
    Entry(String),
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
            Self::Entry(problem) | Self::Damaged(problem) | Self::Io(problem) => {
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

/// Share of the budget that a snapshot of so many formatted bytes takes: the bytes of its pages
/// and a seventh more.
///
/// redb's pages are powers of two, so a last, partly filled row may take nearly twice its length.
/// The seventh is for pages that are free but cannot be used by the transaction that freed them:
/// without it a file under steady churn settled at 1.02 to 1.12 times the budget.
pub(super) fn cost(bytes: u64) -> u64 {
    let page = |row: u64| (row + ROW_OVERHEAD).next_power_of_two().max(PAGE_BYTES);
    let chunk = CHUNK_BYTES as u64;
    (RECORD_COST + bytes / chunk * page(chunk) + page(bytes % chunk)) * 8 / 7
}

/// Opens the file, or begins a new one where there is none or it is damaged (it is moved aside),
/// and reads the records of all its entries.
pub(super) fn open_or_begin_anew(path: &Path) -> Result<(Database, Vec<(Key, Record)>), Error> {
    let first = open(path).and_then(|database| Ok((records(&database)?, database)));
    let result = match first {
        Err(trouble @ Trouble::Damaged(_)) => {
            move_aside(path, &trouble);
            open(path).and_then(|database| Ok((records(&database)?, database)))
        }
        other => other,
    };
    match result {
        Ok((records, database)) => Ok((database, records)),
        Err(Trouble::Busy) => Err(Error::Store(format!(
            "{} is in use by another process; only one at a time can keep its state there",
            path.display()
        ))),
        Err(trouble) => Err(Error::Store(format!("{}: {trouble}", path.display()))),
    }
}

/// Opens the file, and makes it with its tables where there is none.
pub(super) fn open(path: &Path) -> Result<Database, Trouble> {
    let file = open_file(path).map_err(|error| Trouble::Io(error.to_string()))?;
    guarded(|| {
        let database = Builder::new().set_cache_size(CACHE_BYTES).create_file(file)?;
        let read = database.begin_read()?;
        if read.list_tables()?.next().is_none() {
            drop(read);
            let mut write = database.begin_write()?;
            write.set_quick_repair(true);
            write.open_table(META)?.insert("format", FORMAT)?;
            write.open_table(ENTRIES)?;
            write.open_table(CHUNKS)?;
            write.commit()?;
            return Ok(database);
        }
        let format = read.open_table(META)?.get("format")?.map(|version| version.value());
        if format != Some(FORMAT) {
            return Err(::redb::Error::Corrupted(format!(
                "the file has format {format:?}, this program writes {FORMAT}"
            )));
        }
        Ok(database)
    })
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
    guarded(|| database.compact().map(drop).map_err(::redb::Error::from))?;
    info!(before, after = size_on_disk(path), live, "store compacted");
    Ok(())
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

/// All readable records. Those that are not are removed with a warning, and with them all rows
/// that belong to no record.
fn records(database: &Database) -> Result<Vec<(Key, Record)>, Trouble> {
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
        return Ok(records);
    }
    warn!(records = damaged.len(), "damaged records dropped");
    let known: HashSet<Key> = records.iter().map(|(key, _)| *key).collect();
    guarded(|| {
        let mut write = database.begin_write()?;
        write.set_quick_repair(true);
        {
            let mut entries = write.open_table(ENTRIES)?;
            for key in &damaged {
                entries.remove(key)?;
            }
            // Reads the whole file, but a damaged key cannot say which rows were its own.
            write.open_table(CHUNKS)?.retain(|(key, _), _| known.contains(key))?;
        }
        Ok(write.commit()?)
    })?;
    Ok(records)
}

/// One transaction: removes what was evicted, adds `snapshot`, writes the records.
pub(super) fn write(
    database: &Database,
    batch: &Batch,
    snapshot: Option<(Key, &Snapshot)>,
) -> Result<(), Trouble> {
    if batch.evicted.is_empty() && batch.records.is_empty() && snapshot.is_none() {
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
            if let Some((key, snapshot)) = snapshot {
                let mut encoded = format::encode(snapshot);
                let mut rest = encoded.len();
                for row in 0.. {
                    let length = rest.min(CHUNK_BYTES as u64);
                    let mut place = chunks.insert_reserve((&key, row), length as usize)?;
                    encoded.read_exact(place.as_mut())?;
                    rest -= length;
                    if rest == 0 {
                        break;
                    }
                }
            }
            for (key, record) in &batch.records {
                entries.insert(key, record.to_bytes(key).as_slice())?;
            }
        }
        Ok(write.commit()?)
    })
}

/// The snapshot under `key`, or `None` where there is no record of it.
pub(super) fn read(database: &Database, key: &Key) -> Result<Option<Snapshot>, Trouble> {
    let mut damage = None;
    let snapshot = guarded(|| {
        let read = database.begin_read()?;
        let Some(value) = read.open_table(ENTRIES)?.get(key)? else { return Ok(None) };
        let Some(record) = Record::from_bytes(key, value.value()) else {
            damage = Some("its record is damaged".to_owned());
            return Ok(None);
        };
        let range = read.open_table(CHUNKS)?.range((key, 0)..=(key, u32::MAX))?;
        let mut rows = Rows { range, row: None, offset: 0, failure: None };
        match format::decode(&mut rows, record.bytes) {
            Ok(snapshot) => Ok(Some(snapshot)),
            Err(_) if rows.failure.is_some() => Err(rows.failure.expect("just seen").into()),
            Err(error) => {
                damage = Some(error.to_string());
                Ok(None)
            }
        }
    })?;
    match damage {
        Some(problem) => Err(Trouble::Entry(problem)),
        None => Ok(snapshot),
    }
}

/// Reads the rows of one entry as one stream.
struct Rows {
    range: Range<'static, (&'static Key, u32), &'static [u8]>,
    row: Option<AccessGuard<'static, &'static [u8]>>,
    offset: usize,
    /// redb's own failure, which says more than the [`io::Error`] it is reported as.
    failure: Option<::redb::StorageError>,
}

impl Read for Rows {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(row) = &self.row {
                let rest = &row.value()[self.offset..];
                let count = rest.len().min(buffer.len());
                if count > 0 || buffer.is_empty() {
                    buffer[..count].copy_from_slice(&rest[..count]);
                    self.offset += count;
                    return Ok(count);
                }
            }
            match self.range.next() {
                Some(Ok((_, row))) => (self.row, self.offset) = (Some(row), 0),
                None => return Ok(0),
                Some(Err(failure)) => {
                    self.failure = Some(failure);
                    return Err(io::Error::other("redb failed"));
                }
            }
        }
    }
}

impl Record {
    /// Length of the bytes.
    const BYTES: usize = 64;

    fn to_bytes(&self, key: &Key) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..32].copy_from_slice(&self.fingerprint);
        bytes[32..40].copy_from_slice(&(self.tokens as u64).to_le_bytes());
        bytes[40..48].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.used.to_le_bytes());
        let checksum = Self::checksum(key, &bytes);
        bytes[56..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// `None` where the checksum differs.
    fn from_bytes(key: &Key, bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let field = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        if field(56) != Self::checksum(key, bytes) {
            return None;
        }
        Some(Self {
            fingerprint: bytes[..32].try_into().expect("32 bytes"),
            tokens: usize::try_from(field(32)).ok()?,
            bytes: field(40),
            used: field(48),
        })
    }

    fn checksum(key: &Key, bytes: &[u8; Self::BYTES]) -> u64 {
        xxh3_64(&[key, &bytes[..56]].concat())
    }
}

/// Runs `f`, and takes a panic for a damaged file: redb trusts its pages between repairs.
fn guarded<T>(f: impl FnOnce() -> Result<T, ::redb::Error>) -> Result<T, Trouble> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => result.map_err(Trouble::from),
        Err(panic) => Err(Trouble::Damaged(format!("redb panicked: {}", message(&*panic)))),
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
