//! wasmtime, configured for all guests of a server.

use std::sync::Arc;

use wasmtime::component::{HasSelf, Linker};
use wasmtime::{Config, Engine};

use super::State;
use super::compile::Compiler;
use super::compiled::Compiled;
use super::imports::{Counters, Services};
use super::ticker::Ticker;
use crate::config::PolicyConfig;
use crate::contract::bindings::steersman::policy::{counters, failure, kv, log, tokenizer};
use crate::database::Storage;
use crate::error::Error;
use crate::kv::Kv;

/// Stack of a guest; the calling thread must have more.
const STACK_BYTES: usize = 256 << 10;

/// A Wasm page; memory limits are rounded up to it.
const PAGE_BYTES: usize = 64 << 10;

/// wasmtime with the limits of all guests, the thread that advances its epoch, and the services that
/// guests share.
pub struct Host {
    pub(super) engine: Engine,
    pub(super) linker: Linker<State>,
    pub(super) ticker: Arc<Ticker>,
    pub(super) services: Arc<Services>,
    pub(super) limits: PolicyConfig,
    pub(super) compiler: Compiler,
    /// `None` compiles at each start.
    pub(super) compiled: Option<Compiled>,
}

impl Host {
    /// Configures wasmtime. `kv` values and compiled components are in `storage`.
    ///
    /// # Errors
    /// [`Error::Config`] when this machine cannot start a thread or run WebAssembly.
    pub fn new(limits: &PolicyConfig, storage: &Storage) -> Result<Self, Error> {
        let engine = Engine::new(&settings(limits.memory_bytes)).map_err(|error| {
            Error::Config { field: "policy", problem: format!("cannot run WebAssembly: {error:#}") }
        })?;
        let no_thread = |error: std::io::Error| Error::Config {
            field: "policy",
            problem: format!("cannot start a thread: {error}"),
        };
        let ticker = Ticker::start(engine.clone(), limits.deadline_ms).map_err(no_thread)?;
        let kv = Kv::new(storage.database.clone(), limits.kv_bytes);
        let unusable = |error: &std::io::Error| {
            tracing::warn!(%error, "compiled components not kept; each start compiles them");
        };
        let compiled = storage.compiled.as_deref().map(Compiled::open);
        Ok(Self {
            linker: linker(&engine).expect("the interfaces have different names"),
            engine,
            ticker: Arc::new(ticker),
            services: Arc::new(Services { kv, counters: Counters::default() }),
            limits: limits.clone(),
            compiler: Compiler::new(limits.compiler.clone(), limits.memory_bytes),
            compiled: compiled.and_then(|opened| opened.inspect_err(unusable).ok()),
        })
    }

    /// Counters of policies: policy, counter, value; sorted.
    pub fn counters(&self) -> Vec<(String, String, u64)> {
        self.services.counters.list()
    }
}

/// The settings of wasmtime. Compiled components are of use with equal ones only.
pub fn settings(memory_bytes: usize) -> Config {
    let mut config = Config::new();
    config
        .memory_reservation(memory_bytes.next_multiple_of(PAGE_BYTES) as u64)
        .memory_guard_size(PAGE_BYTES as u64)
        .max_wasm_stack(STACK_BYTES)
        .consume_fuel(true)
        .epoch_interruption(true)
        .concurrency_support(false)
        .wasm_memory64(false)
        .relaxed_simd_deterministic(true)
        .cranelift_nan_canonicalization(true);
    config
}

/// The imports of the contract and nothing else.
fn linker(engine: &Engine) -> wasmtime::Result<Linker<State>> {
    let mut linker = Linker::new(engine);
    failure::add_to_linker::<_, HasSelf<State>>(&mut linker, |state| state)?;
    log::add_to_linker::<_, HasSelf<State>>(&mut linker, |state| state)?;
    kv::add_to_linker::<_, HasSelf<State>>(&mut linker, |state| state)?;
    tokenizer::add_to_linker::<_, HasSelf<State>>(&mut linker, |state| state)?;
    counters::add_to_linker::<_, HasSelf<State>>(&mut linker, |state| state)?;
    Ok(linker)
}
