//! Parts in one file that can be copied to another machine.
//!
//! | bytes | |
//! |---|---|
//! | 8 | magic `STEERSEX` |
//! | 8 | version 1, as u64, little-endian |
//! | for each part | its key (32), its record (80), the encoded part (its length is in the record) |
//! | 112 | the end: a key of zeros and a record whose `end` is the number of parts |
//!
//! Records and encoded parts have checksums of their own, which cover the key, so every flipped bit
//! is detected; the end detects truncation.

use std::collections::HashSet;
use std::io::{self, BufReader, BufWriter, ErrorKind, Read, Seek, Write};
use std::path::Path;
use std::sync::Arc;

use steersman_files::Replacement;
use tracing::warn;

use super::super::record::PartRecord;
use super::super::{Key, Part, PartKind, Recency, StoreError, StoredSize, Tensor, format};
use super::database::Transaction;
use super::fault::StoreFault;
use super::file::EXPORT_MAGIC;
use super::maintain::StoreFile;

type Result<T, E = StoreError> = std::result::Result<T, E>;

const VERSION: u64 = 1;
/// Replaces a key after the last part.
const END: Key = [0; 32];
/// Bytes of tensors that an import writes in one transaction, unless one part has more.
const TRANSACTION_BYTES: u64 = 64 << 20;
/// Bytes that are read or written at once.
const BUFFER_BYTES: usize = 1 << 20;

/// Parts of an imported file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ImportReport {
    /// Parts that were added.
    pub added: StoredSize,
    /// Parts that the store had before.
    pub present: StoredSize,
    /// The least recently used parts, which do not fit the budget.
    pub beyond_budget: StoredSize,
}

impl StoreFile {
    /// Writes the parts of all fingerprints to `path`, which is created or replaced when it is
    /// complete. Damaged parts are skipped with a warning. Returns what was written.
    pub fn export(&self, path: &Path) -> Result<StoredSize> {
        let failed = |error: io::Error| StoreError::io(path, error);
        let reader = self.reader()?;
        let file = Replacement::private(path).map_err(failed)?;
        let mut output = BufWriter::with_capacity(BUFFER_BYTES, file);
        let mut put = |bytes: &[u8]| output.write_all(bytes).map_err(failed);

        put(EXPORT_MAGIC)?;
        put(&VERSION.to_le_bytes())?;
        let mut written = StoredSize::default();
        let mut body = Vec::new();
        for (key, record) in &self.records {
            let tensors = match reader.tensors(key, record.bytes) {
                Ok(tensors) => tensors,
                Err(StoreFault::Part(problem)) => {
                    warn!(
                        kind = record.kind.name(),
                        end = record.end,
                        problem,
                        "damaged part skipped"
                    );
                    continue;
                }
                Err(fault) => return Err(fault.at(&self.path)),
            };
            body.clear();
            format::encode(key, &tensors).read_to_end(&mut body).map_err(failed)?;
            put(key)?;
            put(&record.to_bytes(key))?;
            put(&body)?;
            written.add(record.cost());
        }
        put(&END)?;
        put(&end(written.parts).to_bytes(&END))?;
        let file = output.into_inner().map_err(|error| failed(error.into_error()))?;
        file.commit().map_err(failed)?;
        Ok(written)
    }

    /// Adds the parts that [`StoreFile::export`] wrote to `path`, with the times of their last use
    /// and without their retention. New parts that do not fit `budget_bytes` are skipped, the least
    /// recently used first.
    ///
    /// # Errors
    /// [`StoreError::Import`] if that file is not an export or is damaged: nothing is imported then.
    pub fn import(&mut self, path: &Path, budget_bytes: u64) -> Result<ImportReport> {
        let mut imported = ImportReport::default();
        let budget_bytes = budget_bytes.saturating_sub(self.set_aside().bytes);
        let known: HashSet<Key> = self.records.iter().map(|(key, _)| *key).collect();
        let here =
            self.records.iter().map(|(_, record)| (record.recency.used, record.cost(), None));
        let mut all: Vec<(u64, u64, Option<Key>)> = here.collect();
        // Check the whole file before adding anything.
        walk(path, |key, record, _| {
            if known.contains(&key) {
                imported.present.add(record.cost());
            } else {
                all.push((record.recency.used, record.cost(), Some(key)));
            }
            Ok(())
        })?;
        all.sort_unstable_by(|a, b| b.cmp(a));
        let (mut wanted, mut total) = (HashSet::new(), 0);
        for (_, cost, new) in all {
            total += cost;
            match new {
                Some(key) if total <= budget_bytes => drop(wanted.insert(key)),
                Some(_) => imported.beyond_budget.add(cost),
                None => {}
            }
        }

        let (mut transaction, mut bytes) = (Transaction::default(), 0);
        walk(path, |key, record, tensors| {
            // Removed from `wanted`, so that a repeated key is added once.
            if !wanted.remove(&key) {
                return Ok(());
            }
            imported.added.add(record.cost());
            let part = Part { key, kind: record.kind, end: record.end, tensors };
            bytes += part.bytes();
            transaction.parts.push(Arc::new(part.into()));
            let recency = Recency { retained_until: 0, ..record.recency };
            transaction.records.push((key, PartRecord { recency, ..record }));
            if bytes >= TRANSACTION_BYTES {
                bytes = 0;
                self.add(std::mem::take(&mut transaction))?;
            }
            Ok(())
        })?;
        self.add(transaction)?;
        Ok(imported)
    }
}

/// Calls `each` with every part in the file at `path`.
fn walk(
    path: &Path,
    mut each: impl FnMut(Key, PartRecord, Vec<Tensor>) -> Result<()>,
) -> Result<()> {
    let failed = |error: io::Error| StoreError::io(path, error);
    let invalid = |problem: String| StoreError::Import(path.to_owned(), problem);
    let file = steersman_files::open(path).map_err(failed)?;
    let mut input = BufReader::with_capacity(BUFFER_BYTES, file);
    let mut head = [0; 16];
    let read = input.read_exact(&mut head);
    if read.is_err() || head[..8] != *EXPORT_MAGIC {
        return Err(invalid("not an export of steersman".into()));
    }
    let version = u64::from_le_bytes(head[8..].try_into().expect("8 bytes"));
    if version != VERSION {
        return Err(invalid(format!("has version {version}, this program reads {VERSION}")));
    }
    for count in 0.. {
        let offset = input.stream_position().map_err(failed)?;
        let damaged = |problem: &str| invalid(format!("damaged at byte {offset}: {problem}"));
        let seen = |error: io::Error| match error.kind() {
            ErrorKind::UnexpectedEof => damaged("unexpected end"),
            ErrorKind::InvalidData => damaged(&error.to_string()),
            _ => failed(error),
        };
        let (mut key, mut record) = ([0; 32], [0; PartRecord::BYTES]);
        input.read_exact(&mut key).map_err(seen)?;
        input.read_exact(&mut record).map_err(seen)?;
        let record = PartRecord::from_bytes(&key, &record)
            .ok_or_else(|| damaged("checksum of a record differs"))?;
        if key == END {
            let rest = input.read(&mut [0]).map_err(failed)?;
            let is_whole = record == end(count) && rest == 0;
            return if is_whole { Ok(()) } else { Err(damaged("wrong number of parts")) };
        }
        let tensors = format::decode(&key, &mut input, record.bytes).map_err(seen)?;
        each(key, record, tensors)?;
    }
    Ok(())
}

/// The record after the last part.
fn end(parts: u64) -> PartRecord {
    PartRecord {
        fingerprint: END,
        kind: PartKind::Kv,
        end: usize::try_from(parts).unwrap_or(usize::MAX),
        bytes: 0,
        recency: Recency::default(),
    }
}
