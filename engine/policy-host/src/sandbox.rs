//! The sandbox: compiles components and calls their hooks within limits. The only user of
//! wasmtime's engine; the types of `contract.rs` are wasmtime's bindings.
//!
//! ```text
//! component.rs   compiled policies and their instances: calls of hooks within limits
//! interfaces.rs  the hooks and imports of a component
//! params.rs      parameters that a policy prepares once
//! pace.rs        which hooks are known to be quick
//! engine.rs      wasmtime and the services that guests share; settings.rs, ticker.rs
//! state.rs       the data of an instance: its memory limits, and its imports
//! imports.rs     what an instance may use of imports, and its record; functions.rs, counters.rs
//! compile.rs     compiles components in a child process, after count.rs; compiled.rs keeps them on disk
//! failure.rs     causes of failures
//! ```
//!
//! A [`Component`] is compiled once, on any thread. An [`Instance`] (one wasmtime `Store`) serves
//! one request, so guest globals are the state of that request and a trap affects one request. The
//! linker provides the imports of the contract and nothing else: no WASI, clock, random numbers or
//! network. A component with any other import is refused at load; [`Component::check_grants`]
//! compares its imports with the grants of a profile.
//!
//! Every call, including instantiation, has these limits from [`PolicyConfig`]: fuel, which is
//! deterministic and can be replayed; an epoch deadline, for work that fuel does not count; memory,
//! with constant limits for tables, instances and handles; the bytes of the answer, checked while
//! it is lifted, before the host allocates; and the number and bytes of import calls. `check.rs`
//! then checks the answer against the contract.
//!
//! # Why
//! `component-model-async` is disabled (it adds 0.4 us a call), as are GC, threads and 64-bit
//! memories, which no policy needs. NaNs are canonical and relaxed SIMD is deterministic, so a
//! trace replays bit for bit on another machine. A memory reserves `memory_bytes` of address space:
//! the default of 4 GiB saves bounds checks, which cost nothing here, but fails under `ulimit -v`.
//! So did the pooling allocator, which reserved the memories of all instances at the start: 8.6 GB.
//!
//! A policy in JavaScript or Python contains an interpreter of 10 to 20 MB with an initial memory
//! of 9.5 or 12.9 MB, the latter in 38 core instances. `memory_bytes` and `MAX_CORE_INSTANCES`
//! allow them and cost a small policy nothing: untouched pages are address space only. Policies in
//! both languages can be built with WASI stubbed out, so the host provides none.
//!
//! Measured on two x86-64 cores under load (4 runnable threads): a step of the default policy takes
//! 0.8 us at the median and 1.0 us at the 99th percentile in a release build, including fuel and
//! time readings. Instantiating takes 14 us at the median. `steersman policy bench` repeats it.

mod compile;
mod compiled;
mod component;
mod context;
mod count;
mod counters;
mod engine;
mod failure;
mod functions;
mod imports;
mod interfaces;
mod pace;
mod params;
mod settings;
mod state;
mod ticker;

pub use compile::{
    CompilerLimits, LimitedBy, Urgency, Usage as ProcessUsage, compile_if_asked, compiler_limits,
    this_program,
};
pub use component::{COMPONENT_BYTES, Component, Instance};
pub use context::Context;
pub use engine::Host;
pub use imports::GIVEN_KV;
