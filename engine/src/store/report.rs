//! Counters and sizes of the store.

use std::path::PathBuf;

/// Number and cost of some parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoredSize {
    /// How many.
    pub parts: u64,
    /// Bytes of the budget that they take.
    pub bytes: u64,
}

impl StoredSize {
    pub(super) fn add(&mut self, bytes: u64) {
        self.parts += 1;
        self.bytes += bytes;
    }

    pub(super) fn subtract(&mut self, bytes: u64) {
        self.parts -= 1;
        self.bytes -= bytes;
    }
}

/// Content and activity of a store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoreReport {
    /// The file.
    pub path: PathBuf,
    /// Bytes that the file takes on disk.
    pub file_bytes: u64,
    /// Most bytes that all parts and the files set aside may take.
    pub budget_bytes: u64,
    /// KV parts of the served model.
    pub rows: StoredSize,
    /// State parts of the served model.
    pub states: StoredSize,
    /// Parts of other models, which share the budget.
    pub others: StoredSize,
    /// Parts of any model that are retained now.
    pub retained: StoredSize,
    /// Damaged files set aside, which share the budget.
    pub set_aside: StoredSize,
    /// Bytes of tensors that wait to be written.
    pub queued_bytes: u64,
    /// What was done.
    pub counts: StoreCounts,
    /// Why saving is off, if it is.
    pub off: Option<String>,
}

/// Counters since the store was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreCounts {
    /// Calls of `save` whose new parts are on disk.
    pub saves: u64,
    /// Parts that they wrote.
    pub saved_parts: u64,
    /// Bytes of their tensors.
    pub saved_bytes: u64,
    /// Calls of `save` that saved nothing: the queue was full, the parts exceeded the budget, the
    /// write failed, or saving is off.
    pub dropped_saves: u64,
    /// Parts evicted to stay within the budget.
    pub evicted_parts: u64,
    /// Damaged parts that were dropped.
    pub damaged_parts: u64,
    /// Calls of `load` that returned tensors.
    pub loads: u64,
    /// Parts that they read.
    pub loaded_parts: u64,
    /// Bytes of their tensors.
    pub loaded_bytes: u64,
}
