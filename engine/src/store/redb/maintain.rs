//! `steersman cache`: operations on a file that no server has open.
//!
//! Nothing here sets a file aside or replaces it: problems are returned as errors.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ::redb::Database;
use steersman_database::{close, size_on_disk};
use tracing::warn;

use super::super::record::PartRecord;
use super::super::{Fingerprint, Key, PartKind, StoreEnv, StoreError, StoredSize};
use super::aside;
use super::database::{self, Transaction};
use super::fault::StoreFault;
use super::reader::PartReader;

type Result<T, E = StoreError> = std::result::Result<T, E>;

/// A file of the store, open for maintenance.
pub struct StoreFile {
    pub(super) path: PathBuf,
    /// `None` only while it is dropped.
    database: Option<Database>,
    pub(super) records: Vec<(Key, PartRecord)>,
}

/// Parts of one fingerprint and kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KindSize {
    /// Fingerprint of the model.
    pub fingerprint: Fingerprint,
    /// Kind of the parts.
    pub kind: PartKind,
    /// Their number and cost.
    pub size: StoredSize,
    /// The latest use of any of them.
    pub used: SystemTime,
}

/// The parts of a prefix that were last used together: blocks that two prefixes share count for the
/// one that was used later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredPrefix {
    /// Fingerprint of the model.
    pub fingerprint: Fingerprint,
    /// Its length in tokens.
    pub end: usize,
    /// Positions of its states.
    pub states: Vec<usize>,
    /// Number and cost of its parts.
    pub size: StoredSize,
    /// Its last use.
    pub used: SystemTime,
    /// Time until which at least a part of it is retained.
    pub retained: Option<SystemTime>,
}

/// Result of [`StoreFile::verify`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyReport {
    /// Intact parts.
    pub whole: StoredSize,
    /// Damaged parts that were dropped: kind and end.
    pub damaged: Vec<(PartKind, usize)>,
    /// Chunks without a part that were dropped.
    pub stray_chunks: u64,
}

impl StoreFile {
    /// Opens an existing file.
    ///
    /// # Errors
    /// [`StoreError::Missing`] if there is none, [`StoreError::InUse`] if another process has it
    /// open, [`StoreError::UnknownFormat`] or [`StoreError::Damaged`] if it cannot be read.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.exists() {
            return Err(StoreError::Missing(path.to_owned()));
        }
        Self::open_or_create(path)
    }

    /// Opens a file, and creates it if there is none.
    pub fn open_or_create(path: &Path) -> Result<Self> {
        let database =
            database::open(path, &StoreEnv::default()).map_err(|fault| fault.at(path))?;
        let mut file = Self { path: path.to_owned(), database: Some(database), records: vec![] };
        (file.records, _) = file.at_path(database::records(file.database()))?;
        Ok(file)
    }

    /// Bytes that the file takes on disk.
    pub fn bytes_on_disk(&self) -> u64 {
        size_on_disk(&self.path)
    }

    /// Number and size of the damaged files set aside.
    pub fn set_aside(&self) -> StoredSize {
        aside::size(&self.path)
    }

    /// Deletes the damaged files set aside. Returns their number and size.
    pub fn clear_set_aside(&self) -> Result<StoredSize> {
        aside::clear(&self.path).map_err(|error| StoreError::io(&self.path, error))
    }

    /// Its parts by fingerprint and kind; the last used fingerprint first.
    pub fn sizes(&self) -> Vec<KindSize> {
        let mut sizes = BTreeMap::new();
        for (_, record) in &self.records {
            let (size, used): &mut (StoredSize, u64) =
                sizes.entry((record.fingerprint, record.kind)).or_default();
            size.add(record.cost());
            *used = record.recency.used.max(*used);
        }
        let latest = |fingerprint: &Fingerprint| {
            let of_kind = |kind| sizes.get(&(*fingerprint, kind)).map(|(_, used)| *used);
            of_kind(PartKind::Kv).max(of_kind(PartKind::State))
        };
        let mut fingerprints: Vec<_> = sizes.iter().collect();
        // The sort is stable, so the kinds of a fingerprint stay together.
        fingerprints.sort_by_key(|((fingerprint, _), _)| std::cmp::Reverse(latest(fingerprint)));
        let sizes = fingerprints.into_iter().map(|(&(fingerprint, kind), &(size, used))| {
            KindSize { fingerprint, kind, size, used: time(used) }
        });
        sizes.collect()
    }

    /// Its prefixes, the last used first.
    ///
    /// The file does not say which blocks follow each other, but one use of a prefix gives its parts
    /// consecutive readings of the clock, from the last part to the first.
    pub fn prefixes(&self) -> Vec<StoredPrefix> {
        let mut by_use: Vec<&PartRecord> = self.records.iter().map(|(_, record)| record).collect();
        by_use.sort_by_key(|record| std::cmp::Reverse(record.recency.used));
        let of_one_use = |a: &&PartRecord, b: &&PartRecord| {
            let consecutive = a.recency.used == b.recency.used + 1;
            a.fingerprint == b.fingerprint && consecutive && a.end <= b.end
        };
        let now = StoreEnv::default().clock.seconds();
        let prefix = |parts: &[&PartRecord]| {
            let is_state = |record: &&&PartRecord| record.kind == PartKind::State;
            let (first, last) = (parts[0], parts[parts.len() - 1]);
            let until = parts.iter().map(|record| record.recency.retained_until).max().unwrap_or(0);
            StoredPrefix {
                fingerprint: first.fingerprint,
                end: last.end,
                states: parts.iter().filter(is_state).map(|record| record.end).collect(),
                size: StoredSize {
                    parts: parts.len() as u64,
                    bytes: parts.iter().map(|record| record.cost()).sum(),
                },
                used: time(first.recency.used),
                retained: (until > now).then(|| UNIX_EPOCH + Duration::from_secs(until)),
            }
        };
        by_use.chunk_by(of_one_use).map(prefix).collect()
    }

    /// Reads every part, and drops damaged ones.
    pub fn verify(&mut self) -> Result<VerifyReport> {
        let mut found =
            VerifyReport { whole: StoredSize::default(), damaged: vec![], stray_chunks: 0 };
        let mut transaction = Transaction::default();
        let reader = self.reader()?;
        for (key, record) in &self.records {
            match reader.tensors(key, record.bytes) {
                Ok(_) => found.whole.add(record.cost()),
                Err(StoreFault::Part(problem)) => {
                    warn!(
                        kind = record.kind.name(),
                        end = record.end,
                        problem,
                        "damaged part dropped"
                    );
                    found.damaged.push((record.kind, record.end));
                    transaction.evicted.insert(*key);
                }
                Err(fault) => return Err(fault.at(&self.path)),
            }
        }
        drop(reader);
        self.remove(transaction)?;
        found.stray_chunks = self.at_path(database::sweep(self.database(), &self.records))?;
        Ok(found)
    }

    /// Drops the parts of one fingerprint, or all. Only [`StoreFile::compact`] gives the space back.
    pub fn clear(&mut self, fingerprint: Option<&Fingerprint>) -> Result<StoredSize> {
        let mut cleared = StoredSize::default();
        let mut transaction = Transaction::default();
        for (key, record) in &self.records {
            if fingerprint.is_none_or(|only| record.fingerprint == *only) {
                cleared.add(record.cost());
                transaction.evicted.insert(*key);
            }
        }
        if fingerprint.is_none() {
            self.at_path(database::clear(self.database()))?;
            self.records.clear();
        } else {
            self.remove(transaction)?;
        }
        Ok(cleared)
    }

    /// Makes the file as small as its content allows.
    pub fn compact(&mut self) -> Result<()> {
        let database = self.database.as_mut().expect("taken only on drop");
        database::compact(database).map_err(|fault| fault.at(&self.path))
    }

    pub(super) fn reader(&self) -> Result<PartReader> {
        self.at_path(PartReader::new(self.database()))
    }

    /// Writes parts with their records.
    pub(super) fn add(&mut self, transaction: Transaction) -> Result<()> {
        self.at_path(database::write(self.database(), &transaction))?;
        self.records.extend(transaction.records);
        Ok(())
    }

    fn remove(&mut self, transaction: Transaction) -> Result<()> {
        self.at_path(database::write(self.database(), &transaction))?;
        self.records.retain(|(key, _)| !transaction.evicted.contains(key));
        Ok(())
    }

    fn database(&self) -> &Database {
        self.database.as_ref().expect("taken only on drop")
    }

    fn at_path<T>(&self, result: Result<T, StoreFault>) -> Result<T> {
        result.map_err(|fault| fault.at(&self.path))
    }
}

impl Drop for StoreFile {
    fn drop(&mut self) {
        close(self.database.take());
    }
}

fn time(micros: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_micros(micros)
}
