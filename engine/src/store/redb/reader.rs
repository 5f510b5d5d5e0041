//! Reading parts from the file, several at once.
//!
//! # Why
//! One thread copies and hashes what it reads at about 1.1 GB/s here, which is less than a good disk
//! gives; four on two busy cores reach 2.0 to 2.7 GB/s, and 0.5 to 1.4 GB/s from disk (444 MB in 47
//! or 189 parts). Reading the chunks of each part in parallel as well lost: a long state came from
//! disk a little faster, but all its pages were held at once, and everything else took longer.

use std::io::{self, BufRead, Read};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use ::redb::{AccessGuard, Database, Range, ReadOnlyTable, ReadableDatabase};

use super::super::{Key, Tensor, format};
use super::database::{CHUNKS, guarded};
use super::fault::StoreFault;

/// Most threads besides the caller's that read the parts of one load.
const READERS: u64 = 3;
/// Bytes for which one of them is worth starting.
const READER_BYTES: u64 = 4 << 20;

/// A consistent view of the file.
pub(super) struct PartReader {
    chunks: ReadOnlyTable<(&'static Key, u32), &'static [u8]>,
}

impl PartReader {
    pub fn new(database: &Database) -> Result<Self, StoreFault> {
        let chunks = guarded(|| Ok(database.begin_read()?.open_table(CHUNKS)?))?;
        Ok(Self { chunks })
    }

    /// The tensors of the part with this key, whose encoded length is `bytes`.
    pub fn tensors(&self, key: &Key, bytes: u64) -> Result<Vec<Tensor>, StoreFault> {
        let mut damage = String::new();
        let tensors = guarded(|| {
            let range = self.chunks.range((key, 0)..=(key, u32::MAX))?;
            let mut chunks = ChunkStream { range, chunk: None, offset: 0, failure: None };
            match format::decode(key, &mut chunks, bytes) {
                Ok(tensors) => Ok(Some(tensors)),
                Err(error) => match chunks.failure {
                    Some(failure) => Err(failure.into()),
                    None => {
                        damage = error.to_string();
                        Ok(None)
                    }
                },
            }
        })?;
        tensors.ok_or(StoreFault::Part(damage))
    }
}

/// The chunks of one part as one stream.
struct ChunkStream {
    range: Range<'static, (&'static Key, u32), &'static [u8]>,
    chunk: Option<AccessGuard<'static, &'static [u8]>>,
    offset: usize,
    /// redb's own error: an [`io::Error`] cannot carry its kind.
    failure: Option<::redb::StorageError>,
}

impl BufRead for ChunkStream {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        while self.chunk.as_ref().is_none_or(|chunk| self.offset == chunk.value().len()) {
            match self.range.next() {
                Some(Ok((_, chunk))) => (self.chunk, self.offset) = (Some(chunk), 0),
                None => return Ok(&[]),
                Some(Err(failure)) => {
                    self.failure = Some(failure);
                    return Err(io::Error::other("redb failed"));
                }
            }
        }
        Ok(self.chunk.as_ref().map_or(&[], |chunk| &chunk.value()[self.offset..]))
    }

    fn consume(&mut self, count: usize) {
        self.offset += count;
    }
}

impl Read for ChunkStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.fill_buf()?.read(buffer)?;
        self.consume(count);
        Ok(count)
    }
}

/// Maps `items` in order, on several threads if their total `bytes` are worth it. `f` must not
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
