//! The time that the grammars of one step take.
//!
//! Masks are computed on the engine thread, one after another. After those of a step have taken as long as a step may,
//! the others wait for the next step: 32 choices in a form with slow masks delay other requests by one of them.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The time that masks of the current step have taken, and the limit after which others wait.
#[derive(Debug)]
pub struct MaskTime {
    limit: Duration,
    spent: Cell<Duration>,
}

impl MaskTime {
    /// No time spent, with the limit of a step (`engine.stall_ms`).
    pub fn new(limit: Duration) -> Self {
        Self { limit, spent: Cell::default() }
    }

    /// Begins a step.
    pub fn begin_step(&self) {
        self.spent.set(Duration::ZERO);
    }

    /// Returns true if the masks of this step have taken longer than the limit.
    pub fn is_spent(&self) -> bool {
        self.spent.get() > self.limit
    }

    /// Adds the time since `start`.
    pub fn add_since(&self, start: Instant) {
        self.spent.set(self.spent.get() + start.elapsed());
    }

    /// Replaces the limit.
    #[cfg(test)]
    pub fn set_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }
}
