//! Transactions on the redb file: what is written together, what is read, and what a failure
//! means. Knows no thread, no queue and no budget.

use std::collections::HashSet;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use ::redb::{
    Builder, Database, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition,
    TableHandle,
};
use steersman_database::{close, size_on_disk, tables};
use tracing::{info, warn};

use super::super::record::{PartRecord, chunk_lens};
use super::super::{Key, QueuedPart, StoreEnv, StoreError, format};
use super::aside;
use super::fault::StoreFault;
use super::file::{is_unknown, warn_of_other_readers};

const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
/// Key of a part: its [`PartRecord`].
const ENTRIES: TableDefinition<&Key, &[u8]> = TableDefinition::new("entries");
/// Key of a part and number of the chunk: a piece of the encoded part.
pub(super) const CHUNKS: TableDefinition<(&Key, u32), &[u8]> = TableDefinition::new("chunks");

/// Value of `format` in `meta`: identifies the layout of the three tables. The lower half only makes
/// it improbable that another value becomes this one by accident.
const FORMAT: u64 = 0x2_91ee_e243;
/// redb's cache. The operating system caches the file as well, so this one need only hold inner
/// pages and what one transaction writes before it reaches the file.
const CACHE_BYTES: usize = 32 << 20;
/// Most bytes a file may have beyond twice its live bytes before it is compacted.
const COMPACT_BYTES: u64 = 64 << 20;

/// The changes of one transaction, in this order.
#[derive(Default)]
pub(super) struct Transaction {
    pub evicted: HashSet<Key>,
    /// Parts to add; their records are among `records`. All of them have been read.
    pub parts: Vec<Arc<QueuedPart>>,
    pub records: Vec<(Key, PartRecord)>,
}

impl Transaction {
    /// Reads the parts. Takes those that cannot be read out of the transaction, and returns them.
    pub fn read_parts(&mut self) -> Vec<Arc<QueuedPart>> {
        let unreadable: Vec<_> =
            self.parts.extract_if(.., |part| part.tensors().is_err()).collect();
        self.records.retain(|(key, _)| !unreadable.iter().any(|part| part.key == *key));
        unreadable
    }
}

/// An open file and its content.
pub(super) struct Opened {
    pub database: Database,
    pub records: Vec<(Key, PartRecord)>,
    /// Damaged records that were dropped.
    pub damaged: u64,
}

/// Opens the file. Creates a new one if there is none, or if the one of the store is damaged or of an
/// unknown format: that file is set aside.
pub(super) fn open_or_replace(path: &Path, env: &StoreEnv) -> Result<Opened, StoreError> {
    let open = || {
        let database = open(path, env)?;
        let (records, damaged) = records(&database)?;
        Ok(Opened { database, records, damaged })
    };
    let opened = open().or_else(|fault: StoreFault| {
        if !fault.is_of_the_file() {
            return Err(fault);
        }
        aside::set_aside(path, &fault);
        open()
    });
    opened.map_err(|fault| fault.at(path))
}

/// Opens the file, and creates it with its tables if there is none.
pub(super) fn open(path: &Path, env: &StoreEnv) -> Result<Database, StoreFault> {
    // Opening a database for writing changes its header, so look into another program's first.
    if is_unknown(path)?
        && let Ok(Content::Foreign) = guarded(|| content(&Builder::new().open_read_only(path)?))
    {
        return Err(FOREIGN_DATABASE);
    }
    let (database, content) = guarded(|| {
        let database = (env.open)(Builder::new().set_cache_size(CACHE_BYTES), path)?;
        let mut content = content(&database)?;
        if let Content::Empty = content {
            create_tables(&database)?;
            content = Content::Format(Some(FORMAT));
        }
        Ok((database, content))
    })?;
    let fault = match content {
        Content::Empty | Content::Format(Some(FORMAT)) => {
            warn_of_other_readers(path);
            return Ok(database);
        }
        Content::Format(format) => StoreFault::UnknownFormat(format),
        Content::Foreign => FOREIGN_DATABASE,
    };
    close(Some(database));
    Err(fault)
}

const FOREIGN_DATABASE: StoreFault = StoreFault::Foreign("is the database of another program");

/// What a database holds, by its tables.
enum Content {
    Empty,
    /// Tables of the store, and their format.
    Format(Option<u64>),
    Foreign,
}

fn content(database: &impl ReadableDatabase) -> Result<Content, ::redb::Error> {
    let names = tables(database)?;
    if names.is_empty() {
        return Ok(Content::Empty);
    }
    // Two of three: a flipped bit in a name does not make the file another program's.
    let ours = [META.name(), ENTRIES.name(), CHUNKS.name()];
    if names.iter().filter(|name| ours.contains(&name.as_str())).count() < 2 {
        return Ok(Content::Foreign);
    }
    let format =
        database.begin_read()?.open_table(META)?.get("format")?.map(|format| format.value());
    Ok(Content::Format(format))
}

/// Creates or empties the tables.
fn create_tables(database: &Database) -> Result<(), ::redb::Error> {
    let mut write = database.begin_write()?;
    write.set_quick_repair(true);
    write.delete_table(ENTRIES)?;
    write.delete_table(CHUNKS)?;
    write.open_table(META)?.insert("format", FORMAT)?;
    write.open_table(ENTRIES)?;
    write.open_table(CHUNKS)?;
    Ok(write.commit()?)
}

/// Compacts the file if it is much larger than its budget or than its `live` bytes. Takes about as
/// long as writing the live bytes.
pub(super) fn compact_if_large(
    database: &mut Database,
    path: &Path,
    live: u64,
    budget_bytes: u64,
) -> Result<(), StoreFault> {
    let before = size_on_disk(path);
    if before <= budget_bytes.saturating_add(budget_bytes / 4) && before <= 2 * live + COMPACT_BYTES
    {
        return Ok(());
    }
    compact(database)?;
    info!(before, after = size_on_disk(path), live, "state store compacted");
    Ok(())
}

/// Compacts the file.
pub(super) fn compact(database: &mut Database) -> Result<(), StoreFault> {
    guarded(|| database.compact().map(drop).map_err(::redb::Error::from))
}

/// All readable records, and the number of damaged ones. Those are removed with a warning, and with
/// them all chunks without a record.
pub(super) fn records(database: &Database) -> Result<(Vec<(Key, PartRecord)>, u64), StoreFault> {
    let mut records = Vec::new();
    let mut damaged = Vec::new();
    guarded(|| {
        for entry in database.begin_read()?.open_table(ENTRIES)?.iter()? {
            let (key, value) = entry?;
            match PartRecord::from_bytes(key.value(), value.value()) {
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
    write(database, &Transaction { evicted: damaged.into_iter().collect(), ..Default::default() })?;
    // If its key was damaged, a record did not name its own chunks.
    sweep(database, &records)?;
    Ok((records, count))
}

/// Removes chunks without a record if there are more chunks than the records name; that reads the
/// whole file. Returns their number.
pub(super) fn sweep(database: &Database, records: &[(Key, PartRecord)]) -> Result<u64, StoreFault> {
    let expected: u64 = records.iter().map(|(_, record)| record.chunks()).sum();
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
pub(super) fn clear(database: &Database) -> Result<(), StoreFault> {
    guarded(|| create_tables(database))
}

/// Commits one transaction.
pub(super) fn write(database: &Database, transaction: &Transaction) -> Result<(), StoreFault> {
    let Transaction { evicted, parts, records } = transaction;
    if evicted.is_empty() && records.is_empty() && parts.is_empty() {
        return Ok(());
    }
    guarded(|| {
        let mut write = database.begin_write()?;
        write.set_quick_repair(true);
        {
            let mut entries = write.open_table(ENTRIES)?;
            let mut chunks = write.open_table(CHUNKS)?;
            for key in evicted {
                entries.remove(key)?;
                chunks.retain_in((key, 0)..=(key, u32::MAX), |_, _| false)?;
            }
            for part in parts {
                let Ok(tensors) = part.tensors() else { continue };
                let key = &part.key;
                let mut encoded = format::encode(key, tensors);
                for (n, len) in (0..).zip(chunk_lens(part.encoded_len)) {
                    let mut place = chunks.insert_reserve((key, n), len as usize)?;
                    encoded.read_exact(place.as_mut())?;
                }
            }
            for (key, record) in records {
                entries.insert(key, record.to_bytes(key).as_slice())?;
            }
        }
        Ok(write.commit()?)
    })
}

/// [`steersman_database::guarded`], with a fault of the store.
pub(super) fn guarded<T>(f: impl FnOnce() -> Result<T, ::redb::Error>) -> Result<T, StoreFault> {
    Ok(steersman_database::guarded(f)?)
}
