//! Everything of the store but the file: the index, the queue, and what the writer has to do.

use std::collections::{HashSet, VecDeque};
use std::mem;
use std::path::Path;
use std::sync::Arc;

use tracing::warn;

use super::super::index::PartIndex;
use super::super::record::PartRecord;
use super::super::{Fingerprint, Key, QueuedPart, StoreCounts, StoreError, StoredSize, WallClock};
use super::aside;
use super::database::Transaction;
use super::fault::StoreFault;
use super::file::file_id;

/// Seconds for which saving stays off after a failure (the disk is full); the next save after them
/// tries again.
const RETRY_SECONDS: u64 = 60;

/// Everything but the file.
pub(super) struct StoreState {
    pub clock: WallClock,
    pub index: PartIndex,
    /// Bytes that parts may take: the budget without the files set aside.
    pub budget_bytes: u64,
    /// Files set aside.
    pub aside: StoredSize,
    /// Identifies the open file; `None` if the storage is no file.
    pub file: Option<(u64, u64)>,
    /// Waiting to be written, oldest first.
    pub queue: VecDeque<QueuedSave>,
    /// Bytes of the queue and of the save being written.
    pub queued_bytes: u64,
    /// Evicted from the index, perhaps still in the file.
    pub evicted: HashSet<Key>,
    /// Used or retained since their records were written.
    pub touched: HashSet<Key>,
    /// Why the writer has to open the file again.
    pub reopen: Option<Reopen>,
    /// Whether the writer is in a transaction or opens the file again.
    pub writing: bool,
    pub flushing: usize,
    pub closing: bool,
    pub counts: StoreCounts,
    /// Why nothing is saved, if so.
    pub off: Option<Off>,
}

/// Why the file has to be opened again.
#[derive(Debug, Clone)]
pub(super) enum Reopen {
    /// An operation failed: redb refuses to use the open database.
    Fault(StoreFault),
    /// The file or its folder was deleted or replaced while it was open.
    Gone,
    /// Saving has been off for a while.
    Retry,
}

/// Saving is off.
pub(super) struct Off {
    pub error: StoreError,
    /// Time of the next try, in seconds since 1970.
    pub retry: u64,
}

/// Parts for one transaction, which writes those that are still in the index by then.
pub(super) struct QueuedSave {
    pub parts: Vec<Arc<QueuedPart>>,
    pub bytes: u64,
}

impl StoreState {
    pub fn new(fingerprint: Fingerprint, clock: WallClock) -> Self {
        Self {
            clock,
            index: PartIndex::new(fingerprint),
            budget_bytes: 0,
            aside: StoredSize::default(),
            file: None,
            queue: VecDeque::new(),
            queued_bytes: 0,
            evicted: HashSet::new(),
            touched: HashSet::new(),
            reopen: None,
            writing: false,
            flushing: 0,
            closing: false,
            counts: StoreCounts::default(),
            off: None,
        }
    }

    /// Whether the writer has something to do. Uses alone wait for the next save.
    pub fn has_work(&self) -> bool {
        let uses = !self.touched.is_empty() && (self.flushing > 0 || self.closing);
        !self.queue.is_empty() || !self.evicted.is_empty() || self.reopen.is_some() || uses
    }

    pub fn ticks(&mut self, count: usize) -> impl Iterator<Item = u64> + use<> {
        self.index.ticks(count, self.clock.micros())
    }

    pub fn touch(&mut self, keys: &[Key]) {
        for (key, used) in keys.iter().zip(self.ticks(keys.len())) {
            self.touch_at(key, used);
        }
    }

    /// Records a use; false if there is no such part.
    pub fn touch_at(&mut self, key: &Key, used: u64) -> bool {
        let present = self.index.touch(key, used);
        if present && self.off.is_none() {
            self.touched.insert(*key);
        }
        present
    }

    /// Replaces the index by `records`, which the file at `path` holds, and what is queued, and
    /// evicts what exceeds `budget_bytes`, which the files set aside share.
    pub fn adopt(&mut self, path: &Path, records: Vec<(Key, PartRecord)>, budget_bytes: u64) {
        self.file = file_id(path);
        self.aside = aside::shrink_to(path, budget_bytes / 2);
        self.budget_bytes = budget_bytes.saturating_sub(self.aside.bytes);
        self.index.keep_only(|entry| entry.queued.is_some());
        self.evicted.clear();
        self.touched.clear();
        let now = self.clock.seconds();
        for (key, record) in records {
            if self.index.get(&key).is_some() {
                continue;
            }
            let until = record.recency.retained_until;
            self.index.add(key, record, None);
            if until > now {
                self.index.retain(&[key], until, now, self.budget_bytes / 2);
            }
        }
        self.shrink();
    }

    /// Whether the open file is no longer the one at `path`.
    pub fn is_gone(&self, path: &Path) -> bool {
        self.file.is_some() && self.file != file_id(path)
    }

    /// Turns saving off and drops the queue.
    pub fn turn_off(&mut self, error: StoreError) {
        let retry = self.clock.seconds() + RETRY_SECONDS;
        warn!(%error, retry_seconds = RETRY_SECONDS, "saving state is off");
        self.off = Some(Off { error, retry });
        self.counts.dropped_saves += self.queue.len() as u64;
        self.queue.clear();
        self.queued_bytes = 0;
        self.index.keep_only(|entry| entry.queued.is_none());
    }

    /// Evicts parts until the rest is within the budget.
    pub fn shrink(&mut self) {
        let evicted = self.index.shrink_to(self.budget_bytes, self.clock.seconds());
        self.counts.evicted_parts += evicted.len() as u64;
        evicted.iter().for_each(|key| self.remove_from_file(key));
    }

    /// Schedules the removal of a part that left the index. If it was still queued, there is nothing
    /// to remove, and it will not be written either.
    pub fn remove_from_file(&mut self, key: &Key) {
        if self.off.is_none() {
            self.evicted.insert(*key);
        }
        self.touched.remove(key);
    }

    /// Takes the next transaction, and the save that it completes.
    pub fn next_transaction(&mut self) -> (Transaction, Option<QueuedSave>) {
        let save = self.queue.pop_front();
        let mut transaction =
            Transaction { evicted: mem::take(&mut self.evicted), ..Transaction::default() };
        let touched = mem::take(&mut self.touched);
        for part in save.iter().flat_map(|save| &save.parts) {
            // The part may have been evicted since, and perhaps saved again: that one is further
            // back in the queue.
            if let Some(entry) = self.index.get(&part.key)
                && entry.queued.as_ref().is_some_and(|queued| Arc::ptr_eq(queued, part))
            {
                transaction.parts.push(part.clone());
                transaction.records.push((part.key, entry.record.clone()));
            }
        }
        for key in touched {
            // The records of queued parts are written with them.
            if let Some(entry) = self.index.get(&key)
                && entry.queued.is_none()
            {
                transaction.records.push((key, entry.record.clone()));
            }
        }
        (transaction, save)
    }

    /// The parts of all queued saves.
    pub fn queued_parts(&self) -> Vec<Arc<QueuedPart>> {
        self.queue.iter().flat_map(|save| &save.parts).cloned().collect()
    }

    /// Completes a save: `parts` of it are in the file, unless the write failed.
    pub fn complete(&mut self, save: &QueuedSave, parts: &[Arc<QueuedPart>], written: bool) {
        self.queued_bytes -= save.bytes;
        for part in parts {
            let Some(entry) = self.index.get_mut(&part.key) else { continue };
            // Another one is queued if this one was evicted and saved again meanwhile.
            if !entry.queued.as_ref().is_some_and(|queued| Arc::ptr_eq(queued, part)) {
                continue;
            }
            entry.queued = None;
            if !written {
                self.index.remove(&part.key);
            }
        }
        if written {
            self.counts.saves += 1;
            self.counts.saved_parts += parts.len() as u64;
            self.counts.saved_bytes += parts.iter().map(|part| part.bytes).sum::<u64>();
        } else {
            self.counts.dropped_saves += 1;
        }
    }
}
