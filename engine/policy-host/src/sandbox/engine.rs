//! wasmtime, configured for all guests of a server.

use std::path::Path;
use std::sync::Arc;

use wasmtime::component::{HasSelf, Linker};
use wasmtime::{
    Cache, CacheConfig, Config, Engine, InstanceAllocationStrategy, PoolingAllocationConfig,
};

use super::imports::{Counters, Services};
use super::ticker::Ticker;
use super::{MAX_CORE_INSTANCES, MAX_INSTANCES, MAX_MEMORIES, MAX_TABLE_ELEMENTS, State};
use crate::config::PolicyConfig;
use crate::contract::bindings::steersman::policy::{counters, failure, kv, log, tokenizer};
use crate::database::Storage;
use crate::error::Error;
use crate::kv::Kv;

/// Stack of a guest; the calling thread must have more.
const STACK_BYTES: usize = 256 << 10;

/// A Wasm page; memory limits are rounded up to it.
const PAGE_BYTES: usize = 64 << 10;

/// Soft limit of the folder with compiled components; one with a JavaScript engine takes 30 MB.
const COMPILED_BYTES: u64 = 512 << 20;

/// wasmtime with the limits of all guests, the thread that advances its epoch, and the services that
/// guests share.
pub struct Host {
    pub(super) engine: Engine,
    pub(super) linker: Linker<State>,
    pub(super) ticker: Arc<Ticker>,
    pub(super) services: Arc<Services>,
    pub(super) limits: PolicyConfig,
}

impl Host {
    /// Configures wasmtime. `kv` values and compiled components are in `storage`.
    ///
    /// # Errors
    /// [`Error::Config`] when this machine cannot reserve the address space or start a thread.
    pub fn new(limits: &PolicyConfig, storage: &Storage) -> Result<Self, Error> {
        let memory_bytes = limits.memory_bytes.next_multiple_of(PAGE_BYTES);
        let mut pool = PoolingAllocationConfig::new();
        pool.total_component_instances(MAX_INSTANCES)
            .total_core_instances(MAX_INSTANCES * MAX_CORE_INSTANCES)
            .total_memories(MAX_INSTANCES)
            .total_tables(MAX_INSTANCES * 2)
            .max_core_instances_per_component(MAX_CORE_INSTANCES)
            .max_memories_per_component(MAX_MEMORIES)
            .max_tables_per_component(MAX_MEMORIES)
            .table_elements(MAX_TABLE_ELEMENTS)
            .max_memory_size(memory_bytes);
        let mut config = Config::new();
        config
            .allocation_strategy(InstanceAllocationStrategy::Pooling(pool))
            .memory_reservation(memory_bytes as u64)
            .memory_guard_size(PAGE_BYTES as u64)
            .max_wasm_stack(STACK_BYTES)
            .consume_fuel(true)
            .epoch_interruption(true)
            .concurrency_support(false)
            .wasm_memory64(false)
            .relaxed_simd_deterministic(true)
            .cranelift_nan_canonicalization(true)
            .cache(storage.compiled.as_deref().and_then(cache));
        let engine = Engine::new(&config).map_err(|e| Error::Config {
            field: "policy.memory_bytes",
            problem: format!("wasmtime cannot reserve {memory_bytes} bytes an instance: {e:#}"),
        })?;
        let no_thread = |error: std::io::Error| Error::Config {
            field: "policy",
            problem: format!("cannot start a thread: {error}"),
        };
        let ticker = Ticker::start(engine.clone(), limits.deadline_ms).map_err(no_thread)?;
        let kv = Kv::open(&storage.database, limits.kv_bytes).map_err(no_thread)?;
        Ok(Self {
            linker: linker(&engine).expect("the interfaces have different names"),
            engine,
            ticker: Arc::new(ticker),
            services: Arc::new(Services { kv, counters: Counters::default() }),
            limits: limits.clone(),
        })
    }

    /// Counters of policies: policy, counter, value; sorted.
    pub fn counters(&self) -> Vec<(String, String, u64)> {
        self.services.counters.list()
    }
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

/// The cache of compiled components; `None`, with a warning, if the folder cannot be used.
fn cache(folder: &Path) -> Option<Cache> {
    let unusable = |error: &dyn std::fmt::Display| {
        tracing::warn!(folder = %folder.display(), %error, "compile cache unavailable");
    };
    let created = std::path::absolute(folder).and_then(|folder| {
        let mut builder = std::fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.recursive(true).create(&folder)?;
        Ok(folder)
    });
    let folder = created.inspect_err(|error| unusable(error)).ok()?;
    let mut config = CacheConfig::new();
    config.with_directory(folder).with_files_total_size_soft_limit(COMPILED_BYTES);
    Cache::new(config).inspect_err(|error| unusable(error)).ok()
}
