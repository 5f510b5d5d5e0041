//! Scheduling: who runs next, how much of it, and within how much memory.
//!
//! [`queue`] has the requests that have not started. [`turns`] decides which of them, of the preempted sequences and of
//! those that wait for a prefix starts next; [`memory`] and [`preempt`] whether there is room; [`plan`] which rows of
//! prompt run in a step.

pub mod await_prefix;
pub mod choices;
pub mod memory;
pub mod plan;
pub mod preempt;
pub mod queue;
pub mod turns;
