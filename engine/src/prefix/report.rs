//! What both tiers tell about themselves, to whoever asks from another thread.

use std::sync::{Arc, Mutex};

use super::tree::Size;
use crate::store;

/// What was done since the engine started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests that resumed from saved state.
    pub hits: u64,
    /// Requests that began from nothing.
    pub misses: u64,
    /// Tokens of their prompts.
    pub prompt_tokens: u64,
    /// How many of these were restored instead of computed.
    pub cached_tokens: u64,
    /// Tokens of prefixes that were read from disk.
    pub read_tokens: u64,
    /// Prefixes that were kept in memory.
    pub saves: u64,
    /// States and runs of rows that left memory for the budget's sake.
    pub evictions: u64,
    /// Tokens computed ahead of requests, while the engine was idle.
    pub ahead_tokens: u64,
}

/// Counters and sizes of both tiers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// What was done.
    pub counts: Counts,
    /// What is in memory.
    pub memory: Size,
    /// Bytes that may be.
    pub memory_budget: u64,
    /// What is on disk; none where state is kept in memory alone.
    pub disk: Option<store::Report>,
}

/// Asks for a [`Report`] from any thread.
#[derive(Clone, Default)]
pub struct Reporter {
    known: Arc<Mutex<Report>>,
    disk: Option<store::Reporter>,
}

impl std::fmt::Debug for Reporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.report().fmt(f)
    }
}

impl Reporter {
    pub(super) fn new(memory_budget: u64, disk: Option<store::Reporter>) -> Self {
        let known = Report { memory_budget, ..Report::default() };
        Self { known: Arc::new(Mutex::new(known)), disk }
    }

    pub(crate) fn count(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.known.lock().expect("nothing panics while it counts").counts);
    }

    pub(super) fn resize(&self, memory: Size) {
        self.known.lock().expect("nothing panics while it counts").memory = memory;
    }

    /// As things are now.
    pub fn report(&self) -> Report {
        let known = self.known.lock().expect("nothing panics while it counts").clone();
        Report { disk: self.disk.as_ref().map(store::Reporter::report), ..known }
    }
}
