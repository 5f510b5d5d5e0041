//! Runs Steersman's policies: WebAssembly components that steer requests.
//!
//! ```text
//! contract.rs   the types of wit/policy.wit, calls and answers, the trait Policy
//! sandbox.rs    compiles components, in a child process, and calls their hooks within limits; the only
//!               user of wasmtime's engine
//! check.rs      checks answers against the contract
//! guard.rs      replaces a policy that failed (native.rs), counts failures (breaker.rs)
//! tally.rs      counts calls, failures and closed loops of each policy, for operators
//! chain.rs      calls the policies of one request in order and merges their answers
//! registry.rs   Policy, Version, Session: which version of which policy steers which profile
//! shipped.rs    the policies inside the binary
//! trace.rs      records calls and answers
//! bundle.rs     the bytes of a policy: a component, or a signed bundle with its golden file and schema.rs, the
//!               schema of its parameters; trust.rs says who may sign it
//! golden.rs     calls a policy with recorded or written calls and compares the answers
//! loops.rs      finds the loops that steps report, in tokens
//! kv.rs         what policies store, in the database of database.rs
//! ```
//!
//! The crate knows no model, no tokenizer and no HTTP: the engine passes plain records and gets plain
//! records back. A policy cannot call the engine. It can trap, loop or return wrong answers; the
//! request still ends within its limits.
//!
//! Every wrapper (guard, chain, recorder, golden, replay, bench) implements or calls one method,
//! [`Policy::call`].

mod breaker;
mod bundle;
mod chain;
mod check;
mod config;
mod contract;
mod database;
mod error;
pub mod events;
mod file;
mod golden;
mod guard;
mod kv;
pub mod loops;
mod native;
mod registry;
mod sandbox;
mod schema;
mod shipped;
mod tally;
mod trace;
mod trust;

pub use breaker::{Breaker, Clock, FAILURES, FIRST_PAUSE, Health};
pub use bundle::{BUNDLE_BYTES, Bundle, pack};
pub use chain::{Chain, Link, Texts};
pub use check::apply_edits;
pub use config::{
    CHAIN_LENGTH, Grant, OnFailure, Param, PolicyConfig, ProfilePolicies, deserialize_params,
};
pub use contract::*;
pub use database::Storage;
pub use error::{Cause, Error, Failure};
pub use file::create_private_folder;
pub use golden::{Decision, Golden, check_golden};
pub use guard::{Guard, TOOK_OVER};
pub use native::{ANSWER_LOOP_TOKENS, HINT};
pub use registry::{
    Activation, HistoryEntry, Origin, ParamReport, Policies, PolicyReport, Problem, Report,
    Session, Use, Withdrawn, refused_params, schema_beside,
};
pub use sandbox::{
    COMPONENT_BYTES, CompilerLimits, Component, Context, Host, Instance, LimitedBy, ProcessUsage,
    compile_if_asked, compiler_limits, this_program,
};
pub use schema::{Kind, ParamSchema, Schema, conform, nearest};
pub use shipped::{shipped, shipped_names};
pub use tally::{HookCounts, PolicyCounts};
pub use trace::{Difference, Record, RecordedLink, Recorder, ShadowReport, Traces};
pub use trust::{Signer, Trust};
