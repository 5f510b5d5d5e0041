//! Counters and sizes of both tiers, for other threads.

use std::sync::Arc;

use parking_lot::Mutex;

use super::tree::{CacheSize, NamedPrefix};
use crate::store::{StoreReport, StoreReporter};

/// Counters since the engine started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefixCounts {
    /// Requests that resumed from saved state.
    pub hits: u64,
    /// Requests that started from nothing.
    pub misses: u64,
    /// Tokens of their prompts.
    pub prompt_tokens: u64,
    /// Prompt tokens that were restored instead of computed.
    pub cached_tokens: u64,
    /// Tokens of prefixes that were read from disk.
    pub read_tokens: u64,
    /// Prefixes saved in memory.
    pub saves: u64,
    /// States and runs of KV evicted from memory.
    pub evictions: u64,
    /// Tokens computed by the prefix prefetch.
    pub ahead_tokens: u64,
}

/// Counters and sizes of both tiers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrefixReport {
    /// Counters since the engine started.
    pub counts: PrefixCounts,
    /// Content of the prefix cache.
    pub memory: CacheSize,
    /// The conversations that used it last, newest first.
    pub names: Vec<NamedPrefix>,
    /// Most bytes of the prefix cache.
    pub memory_budget: u64,
    /// The prefix store, if there is one.
    pub disk: Option<StoreReport>,
}

/// Reports from any thread.
#[derive(Clone, Default)]
pub struct PrefixReporter {
    memory: Arc<Mutex<PrefixReport>>,
    disk: Option<StoreReporter>,
}

impl From<PrefixReport> for PrefixReporter {
    /// For what takes the place of an engine: always this report.
    fn from(report: PrefixReport) -> Self {
        Self { memory: Arc::new(Mutex::new(report)), disk: None }
    }
}

impl std::fmt::Debug for PrefixReporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.report().fmt(f)
    }
}

impl PrefixReporter {
    pub(super) fn new(memory_budget: u64, disk: Option<StoreReporter>) -> Self {
        let report = PrefixReport { memory_budget, ..PrefixReport::default() };
        Self { memory: Arc::new(Mutex::new(report)), disk }
    }

    pub(crate) fn count(&self, change: impl FnOnce(&mut PrefixCounts)) {
        change(&mut self.memory.lock().counts);
    }

    pub(super) fn set_content(&self, memory: CacheSize, names: Vec<NamedPrefix>) {
        let report = &mut *self.memory.lock();
        (report.memory, report.names) = (memory, names);
    }

    /// What the prefix cache has now, without the store, whose report takes longer.
    pub fn in_memory(&self) -> (CacheSize, Vec<NamedPrefix>) {
        let report = self.memory.lock();
        (report.memory, report.names.clone())
    }

    /// Current sizes and counters.
    pub fn report(&self) -> PrefixReport {
        let memory = self.memory.lock().clone();
        PrefixReport { disk: self.disk.as_ref().map(StoreReporter::report), ..memory }
    }
}
