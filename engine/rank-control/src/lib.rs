//! Starts, watches and ends the ranks of a model: processes, on one machine or several, that compute it together.
//!
//! A process can join one group of ranks, once, and what it computes in waits for the others without a deadline. So ranks live
//! and die together: when one dies, freezes or differs, all are ended and started again, as the next *generation*. A
//! [`Supervisor`] decides that. On each machine an [`Agent`] starts and ends the process of one rank, and reports on it.
//!
//! Both are state machines: they get messages, events and the time, and return what is to be done. They have no sockets, clocks,
//! threads or processes, so that `tests/schedules.rs` can run them through 10^5 random schedules of crashes, freezes, delays and
//! lost connections. What connects them is expected to deliver messages in order and to say when it has ended.
//!
//! # Invariants
//! - No process starts while one of an older generation runs at the same agent: a process ends before its agent connects again.
//!   Where another agent takes the place of one whose connection has ended, the old process runs until it has heard nothing for
//!   [`SILENCE_MS`]; it has other addresses than the new ones.
//! - Nobody waits without a deadline: what is heard of no more is given up after [`SILENCE_MS`].

mod agent;
pub mod hello;
mod supervisor;

use serde::{Deserialize, Serialize};

pub use self::agent::{Agent, AgentAction};
pub use self::supervisor::{Supervisor, SupervisorAction};

/// Milliseconds on a clock that never goes back.
pub type Millis = u64;

/// Number of an attempt to compute together; each is larger than the one before.
pub type Generation = u64;

/// Time between two signs of life.
pub const BEAT_MS: Millis = 1000;

/// Time after which an agent or process without a sign of life counts as lost.
pub const SILENCE_MS: Millis = 3 * BEAT_MS;

/// Time that a process has to tell its clients that it ends.
pub const GRACE_MS: Millis = 500;

/// Longest time that one computation of a process may take. Passes take less on the slowest machine; a process whose peer does
/// not send waits without end.
pub const ENTRY_MS: Millis = 120_000;

/// Longest time that a process may take to load its part.
pub const LOADING_MS: Millis = 30 * 60_000;

/// Longest time between two attempts to start.
pub const LONGEST_PAUSE_MS: Millis = 30_000;

/// Where the ranks of a generation find each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Addresses {
    /// The address at which each rank exchanges arrays, in their order.
    pub ranks: Vec<String>,
    /// The address at which the first rank gives the others its log.
    pub log: String,
}

/// What a supervisor sends an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToAgent {
    /// Start the process of a rank.
    Start {
        /// The attempt.
        generation: Generation,
        /// Where the ranks find each other.
        addresses: Addresses,
    },
    /// End the process, of this or an older generation, and tell its clients why.
    Stop {
        /// The attempt.
        generation: Generation,
        /// For people.
        why: String,
    },
    /// A sign of life.
    Beat,
}

/// What an agent sends its supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromAgent {
    /// The process has loaded its part of the model.
    Ready {
        /// The attempt.
        generation: Generation,
        /// Digest of all that ranks must have in common: versions, weights, how they are cut.
        digest: String,
    },
    /// A sign of life.
    Beat {
        /// The attempt whose process runs.
        generation: Option<Generation>,
        /// How long the process has computed without an end, in milliseconds; `None` while it waits for work.
        executing: Option<Millis>,
    },
    /// The process has ended, or never ran.
    Ended {
        /// The attempt.
        generation: Generation,
        /// For people.
        why: String,
    },
}
