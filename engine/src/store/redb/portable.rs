//! Parts in one file that can be carried to another machine.
//!
//! | bytes | |
//! |---|---|
//! | 8 | magic `STEERSEX` |
//! | 8 | version 1, as u64, little-endian |
//! | for each part | its key (32), its record (80), its formatted bytes (as many as the record says) |
//! | 112 | the end: a key of zeros and a record whose `end` is how many parts there were |
//!
//! Records and formatted bytes have checksums of their own, both over the key as well, so no bit of
//! the file can flip unnoticed, and the end tells a file that was cut.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tracing::warn;

use super::super::record::Record;
use super::super::{Key, Kind, Part, Size, Tensor, format};
use super::database::{Batch, Trouble};
use super::maintain::StoreFile;
use crate::error::{Error, Result};

const MAGIC: &[u8; 8] = b"STEERSEX";
const VERSION: u64 = 1;
/// In place of a key where no further part follows.
const END: Key = [0; 32];
/// Bytes of tensors that an import writes in one transaction, unless one part has more.
const BATCH_BYTES: u64 = 64 << 20;
/// Bytes that are read or written at once.
const BUFFER_BYTES: usize = 1 << 20;

/// What became of the parts in an imported file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Imported {
    /// They are in the store now.
    pub added: Size,
    /// They were there before.
    pub present: Size,
    /// They, the least recently used of all, do not fit the budget.
    pub beyond_budget: Size,
}

impl StoreFile {
    /// Writes all parts, of all fingerprints, to `path`, which is made or replaced once it is
    /// complete. Damaged ones are left out with a warning. Returns what was written.
    ///
    /// # Errors
    /// [`Error::Store`] when this file cannot be read or that one not be written.
    pub fn export(&self, path: &Path) -> Result<Size> {
        let failed = |error: io::Error| Error::Store(format!("{}: {error}", path.display()));
        let reader = self.reader()?;
        let mut name = path.as_os_str().to_owned();
        name.push(".part");
        let unfinished = Unfinished(PathBuf::from(name));
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.open(&unfinished.0).map_err(failed)?;
        let mut output = BufWriter::with_capacity(BUFFER_BYTES, file);
        let mut put = |bytes: &[u8]| output.write_all(bytes).map_err(failed);

        put(MAGIC)?;
        put(&VERSION.to_le_bytes())?;
        let mut written = Size::default();
        let mut body = Vec::new();
        for (key, record) in &self.records {
            let tensors = match reader.tensors(key, record.bytes) {
                Ok(tensors) => tensors,
                Err(Trouble::Part(problem)) => {
                    warn!(kind = record.kind.name(), end = record.end, problem, "left out");
                    continue;
                }
                Err(trouble) => return Err(Error::Store(trouble.to_string())),
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
        file.sync_all().map_err(failed)?;
        drop(file);
        fs::rename(&unfinished.0, path).map_err(failed)?;
        Ok(written)
    }

    /// Adds the parts that [`StoreFile::export`] wrote to `path`, with the times of their last use,
    /// without their pins. Of those that are new, the least recently used are left out where
    /// `budget_bytes` would not hold them.
    ///
    /// # Errors
    /// [`Error::Store`] when that file is no export or damaged, with the offset where that is seen:
    /// nothing is imported then; or when this file cannot be written.
    pub fn import(&mut self, path: &Path, budget_bytes: u64) -> Result<Imported> {
        let mut imported = Imported::default();
        let known: HashSet<Key> = self.records.iter().map(|(key, _)| *key).collect();
        let here = self.records.iter().map(|(_, record)| (record.used, record.cost(), None));
        let mut all: Vec<(u64, u64, Option<Key>)> = here.collect();
        // The whole file is checked before anything of it is believed.
        walk(path, |key, record, _| {
            if known.contains(&key) {
                imported.present.add(record.cost());
            } else {
                all.push((record.used, record.cost(), Some(key)));
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

        let (mut batch, mut bytes) = (Batch::default(), 0);
        walk(path, |key, record, tensors| {
            // Removed, so that a key that comes twice is added once.
            if !wanted.remove(&key) {
                return Ok(());
            }
            imported.added.add(record.cost());
            let part = Part { key, kind: record.kind, end: record.end, tensors };
            bytes += part.bytes();
            batch.parts.push(Arc::new(part));
            batch.records.push((key, Record { pinned: 0, ..record }));
            if bytes >= BATCH_BYTES {
                bytes = 0;
                self.add(std::mem::take(&mut batch))?;
            }
            Ok(())
        })?;
        self.add(batch)?;
        Ok(imported)
    }
}

/// Gives every part in the file at `path` to `each`.
fn walk(path: &Path, mut each: impl FnMut(Key, Record, Vec<Tensor>) -> Result<()>) -> Result<()> {
    let failed = |error: io::Error| Error::Store(format!("{}: {error}", path.display()));
    let file = File::open(path).map_err(failed)?;
    let mut input = BufReader::with_capacity(BUFFER_BYTES, file);
    let mut head = [0; 16];
    let read = input.read_exact(&mut head);
    if read.is_err() || head[..8] != *MAGIC {
        return Err(Error::Store(format!("{} is no export of this program", path.display())));
    }
    let version = u64::from_le_bytes(head[8..].try_into().expect("8 bytes"));
    if version != VERSION {
        let problem = format!("has version {version}, this program reads {VERSION}");
        return Err(Error::Store(format!("the export {} {problem}", path.display())));
    }
    for count in 0.. {
        let offset = input.stream_position().map_err(failed)?;
        let damaged = |problem: &str| {
            let path = path.display();
            Error::Store(format!("{path} is damaged at byte {offset}: {problem}"))
        };
        let seen = |error: io::Error| match error.kind() {
            ErrorKind::UnexpectedEof => damaged("it ends early"),
            ErrorKind::InvalidData => damaged(&error.to_string()),
            _ => failed(error),
        };
        let (mut key, mut record) = ([0; 32], [0; Record::BYTES]);
        input.read_exact(&mut key).map_err(seen)?;
        input.read_exact(&mut record).map_err(seen)?;
        let record = Record::from_bytes(&key, &record)
            .ok_or_else(|| damaged("the checksum of a record differs"))?;
        if key == END {
            let rest = input.read(&mut [0]).map_err(failed)?;
            let is_whole = record == end(count) && rest == 0;
            return if is_whole { Ok(()) } else { Err(damaged("parts are missing, or follow")) };
        }
        let tensors = format::decode(&key, &mut input, record.bytes).map_err(seen)?;
        each(key, record, tensors)?;
    }
    Ok(())
}

/// The record behind so many parts.
fn end(parts: u64) -> Record {
    let end = usize::try_from(parts).unwrap_or(usize::MAX);
    Record { fingerprint: END, kind: Kind::Rows, end, bytes: 0, used: 0, pinned: 0 }
}

/// A file that is removed unless it was renamed.
struct Unfinished(PathBuf);

impl Drop for Unfinished {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
