//! What the command line does with a file that no server has open.
//!
//! Nothing here is moved aside or begun anew: what is wrong is said. (But what an older version of
//! this program left is cleared, as everywhere.)

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ::redb::Database;
use tracing::warn;

use super::super::record::Record;
use super::super::{Fingerprint, Key, Kind, Size};
use super::database::{self, Batch, Trouble};
use super::reader::Reader;
use super::seconds;
use crate::error::{Error, Result};

/// A file of the store, open for maintenance.
pub struct StoreFile {
    pub(super) path: PathBuf,
    /// `None` only while it is dropped.
    database: Option<Database>,
    /// What it holds, by key.
    pub(super) records: Vec<(Key, Record)>,
}

/// Parts of one fingerprint and kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes {
    /// Whose they are.
    pub fingerprint: Fingerprint,
    /// Their kind.
    pub kind: Kind,
    /// How many, and what they take of the budget.
    pub size: Size,
    /// When one of them was last used.
    pub used: SystemTime,
}

/// A prefix, as far as it was last used at one time: where two prefixes share blocks, these count
/// for the one that was used later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefix {
    /// Whose it is.
    pub fingerprint: Fingerprint,
    /// Tokens: where its last part ends.
    pub end: usize,
    /// Where its states stand.
    pub states: Vec<usize>,
    /// Its parts.
    pub size: Size,
    /// When it was last used.
    pub used: SystemTime,
    /// Until when all of it or a part of it is kept from eviction.
    pub pinned: Option<SystemTime>,
}

/// What [`StoreFile::verify`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// Parts that are whole.
    pub whole: Size,
    /// Parts that were not, and were dropped: kind, and position of their end.
    pub damaged: Vec<(Kind, usize)>,
    /// Rows that belonged to no part, and were dropped.
    pub stray_rows: u64,
}

impl StoreFile {
    /// Opens a file that is there.
    ///
    /// # Errors
    /// [`Error::StoreInUse`] when another process has it open; [`Error::Store`] when there is none,
    /// or it is damaged or of a later version.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.exists() {
            return Err(Error::Store(format!(
                "{} does not exist: nothing is saved",
                path.display()
            )));
        }
        Self::open_or_begin(path)
    }

    /// Opens a file, and begins one where there is none.
    ///
    /// # Errors
    /// As [`StoreFile::open`].
    pub fn open_or_begin(path: &Path) -> Result<Self> {
        let database = database::open(path).map_err(|trouble| error(path, &trouble))?;
        let mut file = Self { path: path.to_owned(), database: Some(database), records: vec![] };
        (file.records, _) = file.tried(database::records(file.database()))?;
        Ok(file)
    }

    /// Bytes that the file takes on disk.
    pub fn bytes_on_disk(&self) -> u64 {
        database::size_on_disk(&self.path)
    }

    /// What it holds, by fingerprint and kind; the last used fingerprint first.
    pub fn sizes(&self) -> Vec<Sizes> {
        let mut sizes = BTreeMap::new();
        for (_, record) in &self.records {
            let (size, used): &mut (Size, u64) =
                sizes.entry((record.fingerprint, record.kind)).or_default();
            size.add(record.cost());
            *used = record.used.max(*used);
        }
        let latest = |fingerprint: &Fingerprint| {
            let of_kind = |kind| sizes.get(&(*fingerprint, kind)).map(|(_, used)| *used);
            of_kind(Kind::Rows).max(of_kind(Kind::State))
        };
        let mut fingerprints: Vec<_> = sizes.iter().collect();
        // Stable, so the kinds of a fingerprint stay together.
        fingerprints.sort_by_key(|((fingerprint, _), _)| std::cmp::Reverse(latest(fingerprint)));
        let sizes = fingerprints.into_iter().map(|(&(fingerprint, kind), &(size, used))| Sizes {
            fingerprint,
            kind,
            size,
            used: time(used),
        });
        sizes.collect()
    }

    /// The prefixes in it, the last used first.
    ///
    /// Which blocks follow each other is not written down, but one use of a prefix gives its parts
    /// consecutive readings of the clock, from the last part to the first.
    pub fn prefixes(&self) -> Vec<Prefix> {
        let mut by_use: Vec<&Record> = self.records.iter().map(|(_, record)| record).collect();
        by_use.sort_by_key(|record| std::cmp::Reverse(record.used));
        let of_one_use = |a: &&Record, b: &&Record| {
            a.fingerprint == b.fingerprint && a.used == b.used + 1 && a.end <= b.end
        };
        let prefix = |parts: &[&Record]| {
            let is_state = |record: &&&Record| record.kind == Kind::State;
            let (first, last) = (parts[0], parts[parts.len() - 1]);
            let pinned = parts.iter().map(|record| record.pinned).max().unwrap_or(0);
            Prefix {
                fingerprint: first.fingerprint,
                end: last.end,
                states: parts.iter().filter(is_state).map(|record| record.end).collect(),
                size: Size {
                    parts: parts.len() as u64,
                    bytes: parts.iter().map(|record| record.cost()).sum(),
                },
                used: time(first.used),
                pinned: (pinned > seconds()).then(|| UNIX_EPOCH + Duration::from_secs(pinned)),
            }
        };
        by_use.chunk_by(of_one_use).map(prefix).collect()
    }

    /// Reads every part, and drops those whose checksum is wrong.
    ///
    /// # Errors
    /// [`Error::Store`] when the file itself is damaged.
    pub fn verify(&mut self) -> Result<Verified> {
        let mut found = Verified { whole: Size::default(), damaged: vec![], stray_rows: 0 };
        let mut batch = Batch::default();
        let reader = self.reader()?;
        for (key, record) in &self.records {
            match reader.tensors(key, record.bytes) {
                Ok(_) => found.whole.add(record.cost()),
                Err(Trouble::Part(problem)) => {
                    warn!(kind = record.kind.name(), end = record.end, problem, "damaged part");
                    found.damaged.push((record.kind, record.end));
                    batch.evicted.insert(*key);
                }
                Err(trouble) => return Err(error(&self.path, &trouble)),
            }
        }
        drop(reader);
        self.remove(batch)?;
        found.stray_rows = self.tried(database::sweep(self.database(), &self.records))?;
        Ok(found)
    }

    /// Drops the parts of one fingerprint, or all. Gives no space back before
    /// [`StoreFile::compact`] does.
    ///
    /// # Errors
    /// [`Error::Store`] when the file cannot be written.
    pub fn clear(&mut self, fingerprint: Option<&Fingerprint>) -> Result<Size> {
        let mut cleared = Size::default();
        let mut batch = Batch::default();
        for (key, record) in &self.records {
            if fingerprint.is_none_or(|only| record.fingerprint == *only) {
                cleared.add(record.cost());
                batch.evicted.insert(*key);
            }
        }
        if fingerprint.is_none() {
            self.tried(database::clear(self.database()))?;
            self.records.clear();
        } else {
            self.remove(batch)?;
        }
        Ok(cleared)
    }

    /// Makes the file as small as its content allows.
    ///
    /// # Errors
    /// [`Error::Store`] when the file cannot be written.
    pub fn compact(&mut self) -> Result<()> {
        let database = self.database.as_mut().expect("there until it is dropped");
        database::compact_now(database).map_err(|trouble| error(&self.path, &trouble))
    }

    pub(super) fn reader(&self) -> Result<Reader> {
        self.tried(Reader::new(self.database()))
    }

    /// Writes parts with their records.
    pub(super) fn add(&mut self, batch: Batch) -> Result<()> {
        self.tried(database::write(self.database(), &batch))?;
        self.records.extend(batch.records);
        Ok(())
    }

    fn remove(&mut self, batch: Batch) -> Result<()> {
        self.tried(database::write(self.database(), &batch))?;
        self.records.retain(|(key, _)| !batch.evicted.contains(key));
        Ok(())
    }

    fn database(&self) -> &Database {
        self.database.as_ref().expect("there until it is dropped")
    }

    fn tried<T>(&self, result: Result<T, Trouble>) -> Result<T> {
        result.map_err(|trouble| error(&self.path, &trouble))
    }
}

impl Drop for StoreFile {
    fn drop(&mut self) {
        database::close(self.database.take());
    }
}

fn error(path: &Path, trouble: &Trouble) -> Error {
    match trouble {
        Trouble::Damaged(problem) => Error::Store(format!(
            "{} is damaged ({problem}); a server that starts on it moves it aside",
            path.display()
        )),
        _ => database::error(path, trouble),
    }
}

/// A time that a record has.
fn time(micros: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_micros(micros)
}
