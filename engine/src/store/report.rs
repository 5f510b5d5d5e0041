//! What the store tells about itself: counters since it was opened, and sizes as they are.

use std::path::PathBuf;
use std::sync::Arc;

use super::redb::Shared;

/// Parts of some sort.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Size {
    /// How many.
    pub parts: u64,
    /// Bytes of the budget that they take.
    pub bytes: u64,
}

impl Size {
    pub(super) fn add(&mut self, bytes: u64) {
        self.parts += 1;
        self.bytes += bytes;
    }

    pub(super) fn subtract(&mut self, bytes: u64) {
        self.parts -= 1;
        self.bytes -= bytes;
    }
}

/// What a store holds and what it has done since it was opened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// The file.
    pub path: PathBuf,
    /// Bytes that the file takes on disk.
    pub file_bytes: u64,
    /// Bytes that all parts together may take.
    pub budget_bytes: u64,
    /// Rows of the model that is served.
    pub rows: Size,
    /// States of the model that is served.
    pub states: Size,
    /// Parts of other models, which share the budget.
    pub others: Size,
    /// Those of all these that are kept from eviction for now.
    pub pinned: Size,
    /// Bytes of tensors that wait to be written.
    pub queued_bytes: u64,
    /// What was done.
    pub counts: Counts,
    /// Why nothing is saved any more, where that is so.
    pub off: Option<String>,
}

/// Counted since the store was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls of `save` whose new parts are on disk.
    pub saves: u64,
    /// Parts that they wrote.
    pub saved_parts: u64,
    /// Bytes of their tensors.
    pub saved_bytes: u64,
    /// Calls of `save` that kept nothing: the queue was full, the parts beyond the budget, the
    /// write failed, or saving is off.
    pub dropped_saves: u64,
    /// Parts that went for the budget's sake.
    pub evicted_parts: u64,
    /// Parts that were found damaged, and dropped.
    pub damaged_parts: u64,
    /// Calls of `load` that returned tensors.
    pub loads: u64,
    /// Parts that they read.
    pub loaded_parts: u64,
    /// Bytes of their tensors.
    pub loaded_bytes: u64,
}

/// Asks a store for its report from any thread. Outlives the store, and then reports its end.
#[derive(Clone)]
pub struct Reporter(pub(super) Arc<Shared>);

impl Reporter {
    /// Sizes as they are now, and counters.
    pub fn report(&self) -> Report {
        self.0.report()
    }
}
