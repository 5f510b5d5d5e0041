//! The engine of Steersman: messages in, events out; no HTTP.
//!
//! [`start`] loads a model on a thread of its own and returns an [`Engine`], which accepts a
//! [`Request`](request::Request) from any thread and sends back [`Event`](request::Event)s.
//! `examples/embed.rs` is a complete program.
//!
//! `ARCHITECTURE.md` beside this crate has the map, the invariants and the glossary.

mod activity;
mod cache;
pub mod config;
mod decode;
mod device;
mod draft;
mod engine;
mod engine_thread;
mod job;
mod kernel_check;
mod kernels;
mod lazy;
pub mod loading;
mod measure;
mod model;
mod nn;
mod prefix;
mod processor;
mod ranks;
mod sample;
mod schedule;
mod sequence;
mod store;

pub use decode::{policies, start};
pub use engine::{Engine, Info};
pub use engine_thread::EngineThread;
/// Version of MLX.
pub use mlx_sys::VERSION as MLX_VERSION;
/// The policy host: contract, versions, traces.
pub use steersman_policy_host as policy;
/// Input and output: the server builds a `Request`, and gets `Event`s.
pub use steersman_request as request;
pub use steersman_request::error::{ConfigError, Error, RequestError, Result, StoreError};
use steersman_request::{error, live, span};
use steersman_text::{self as text, grammar};

/// Commands over a model or a prefix store, without a running engine.
pub mod tools {
    pub use crate::decode::Decoder;
    pub use crate::kernel_check::{Outcome, Outcomes, check_all};
    pub use crate::measure::{calibrate, machine, passes, verify};
    pub use crate::model::model_types;
    /// Several ranks that compute a model together.
    pub mod ranks {
        pub use crate::decode::{
            FollowingRank, Outputs, join_ranks, load_as_first_rank, load_on_threads,
            start_as_first_rank, weights_digest,
        };
        pub use crate::ranks::entries::read as read_log;
        pub use crate::ranks::{Backend, Entry, Ranks};
    }
    pub use crate::schedule::memory::Machine;
    pub use crate::store::{
        Fingerprint, ImportReport, KindSize, StoreFile, StoredPrefix, VerifyReport,
    };
}

/// Reports on what runs, the prefix cache and the prefix store.
pub mod report {
    pub use crate::activity::{Activity, ActivityReporter, MemoryUse, StepTimes};
    pub use crate::live::{Live, Stage};
    pub use crate::prefix::{CacheSize, NamedPrefix, PrefixCounts, PrefixReport, PrefixReporter};
    pub use crate::store::{PartKind, StoreCounts, StoreReport, StoredSize};
}

#[cfg(test)]
use steersman_test_support::fuzz_inputs;

/// The rooms, for the tests and benches of this workspace. Nothing here is stable.
#[doc(hidden)]
pub mod internals {
    macro_rules! rooms {
        ($($room:ident),+) => {$(
            pub mod $room {
                pub use crate::$room::*;
            }
        )+};
    }

    rooms!(cache, decode, engine, model, nn, prefix, ranks, store);

    pub mod queue {
        pub use crate::job::Job;
        pub use crate::schedule::queue::*;
    }
}
