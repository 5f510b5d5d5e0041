//! Reading parts out of the file, several at a time.
//!
//! # Why
//! One thread copies and hashes what it reads at about 1.1 GB/s here, which is less than a good disk
//! gives; four on two busy cores reach 2.0 to 2.7 GB/s, and 0.5 to 1.4 GB/s from disk (444 MB in 47
//! or 189 parts). Reading the rows of each part in parallel as well lost: a long state came from
//! disk a little faster, but all its pages are held at once, and everything else took longer.

use std::io::{self, BufRead, Read};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use ::redb::{AccessGuard, Database, Range, ReadOnlyTable, ReadableDatabase};

use super::super::{Key, Tensor, format};
use super::database::{CHUNKS, Trouble, guarded};

/// Threads that help to read the parts of one load.
const READERS: u64 = 3;
/// Bytes for each of which one of them is worth starting.
const READER_BYTES: u64 = 4 << 20;

/// The file as it is at one moment.
pub(super) struct Reader {
    chunks: ReadOnlyTable<(&'static Key, u32), &'static [u8]>,
}

impl Reader {
    pub fn new(database: &Database) -> Result<Self, Trouble> {
        let chunks = guarded(|| Ok(database.begin_read()?.open_table(CHUNKS)?))?;
        Ok(Self { chunks })
    }

    /// The tensors of the part of this key, which has so many formatted bytes.
    pub fn tensors(&self, key: &Key, bytes: u64) -> Result<Vec<Tensor>, Trouble> {
        let mut damage = String::new();
        let tensors = guarded(|| {
            let range = self.chunks.range((key, 0)..=(key, u32::MAX))?;
            let mut rows = Rows { range, row: None, offset: 0, failure: None };
            match format::decode(key, &mut rows, bytes) {
                Ok(tensors) => Ok(Some(tensors)),
                Err(error) => match rows.failure {
                    Some(failure) => Err(failure.into()),
                    None => {
                        damage = error.to_string();
                        Ok(None)
                    }
                },
            }
        })?;
        tensors.ok_or(Trouble::Part(damage))
    }
}

/// The rows of one part as one stream.
struct Rows {
    range: Range<'static, (&'static Key, u32), &'static [u8]>,
    row: Option<AccessGuard<'static, &'static [u8]>>,
    offset: usize,
    /// redb's own failure, which says more than the [`io::Error`] it is reported as.
    failure: Option<::redb::StorageError>,
}

impl BufRead for Rows {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        while self.row.as_ref().is_none_or(|row| self.offset == row.value().len()) {
            match self.range.next() {
                Some(Ok((_, row))) => (self.row, self.offset) = (Some(row), 0),
                None => return Ok(&[]),
                Some(Err(failure)) => {
                    self.failure = Some(failure);
                    return Err(io::Error::other("redb failed"));
                }
            }
        }
        Ok(self.row.as_ref().map_or(&[], |row| &row.value()[self.offset..]))
    }

    fn consume(&mut self, count: usize) {
        self.offset += count;
    }
}

impl Read for Rows {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.fill_buf()?.read(buffer)?;
        self.consume(count);
        Ok(count)
    }
}

/// `f` of all `items`, in their order, on a few threads if their `bytes` are many. `f` must not
/// panic.
pub(super) fn in_parallel<T: Sync, R: Send>(
    items: &[T],
    bytes: u64,
    f: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(i) else { return done };
            done.push((i, f(item)));
        }
    };
    thread::scope(|scope| {
        let others: Vec<_> =
            (0..(bytes / READER_BYTES).min(READERS)).map(|_| scope.spawn(work)).collect();
        let mut done = work();
        done.extend(others.into_iter().flat_map(|other| other.join().expect("f does not panic")));
        done.sort_unstable_by_key(|(i, _)| *i);
        done.into_iter().map(|(_, result)| result).collect()
    })
}
