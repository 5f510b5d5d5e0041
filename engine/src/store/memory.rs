//! A store that lives as long as the process.
//!
//! The engine takes it where the store on disk is turned off or cannot be opened, so that state is
//! still reused from one request to the next. Never touches a file.

use std::cell::RefCell;

use tracing::warn;

use super::index::Index;
use super::{Fingerprint, Keys, Snapshot, Store};
use crate::error::Result;

/// Snapshots in memory, at most `budget_bytes` of them, least recently used first out.
pub struct MemoryStore {
    fingerprint: Fingerprint,
    budget_bytes: u64,
    index: RefCell<Index<Snapshot>>,
}

impl MemoryStore {
    /// An empty store for the snapshots of one fingerprint.
    pub fn new(fingerprint: Fingerprint, budget_bytes: u64) -> Self {
        Self { fingerprint, budget_bytes, index: RefCell::default() }
    }
}

impl Store for MemoryStore {
    fn longest(&self, tokens: &[u32], limit: usize) -> Option<usize> {
        self.index.borrow().longest(&self.fingerprint, tokens, limit)
    }

    fn load(&self, tokens: &[u32]) -> Option<Snapshot> {
        let mut index = self.index.borrow_mut();
        let key = Keys::of(&self.fingerprint, tokens);
        index.touch(&key);
        index.get(&key).map(|entry| entry.value.clone())
    }

    fn save(&self, snapshot: Snapshot) {
        let mut index = self.index.borrow_mut();
        let key = Keys::of(&self.fingerprint, &snapshot.tokens);
        if index.touch(&key) {
            return;
        }
        let cost = self.cost(&snapshot);
        if cost > self.budget_bytes {
            warn!(cost, budget_bytes = self.budget_bytes, "snapshot exceeds the store's budget");
            return;
        }
        index.add(key, snapshot.tokens.len(), cost, snapshot);
        index.shrink_to(self.budget_bytes);
    }

    fn cost(&self, snapshot: &Snapshot) -> u64 {
        snapshot.bytes()
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }
}
