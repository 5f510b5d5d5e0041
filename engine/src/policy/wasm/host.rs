//! wasmtime, set up for all guests of a server.

use std::path::Path;
use std::sync::Arc;

use wasmtime::component::Linker;
use wasmtime::{
    Cache, CacheConfig, Config, Engine, InstanceAllocationStrategy, PoolingAllocationConfig,
};

use super::contract::VERSIONS;
use super::imports::{Counters, Services};
use super::kv::Kv;
use super::ticker::Ticker;
use super::{CORES, INSTANCES, PARTS, State, TABLE_ELEMENTS};
use crate::config::PolicyConfig;
use crate::error::{Error, Result};
use crate::policy::disk::Disk;

/// Most stack of a guest; the thread that calls it must have more.
const STACK_BYTES: usize = 256 << 10;

/// Size of a Wasm page: memory limits are rounded up to it.
const PAGE_BYTES: usize = 64 << 10;

/// About the most that is kept of what was compiled; a component with a JavaScript engine makes 30 MB.
const COMPILED_BYTES: u64 = 512 << 20;

/// wasmtime, set up with the limits of all guests, the thread that advances its epoch, and what
/// guests share: a map and counters.
pub struct Host {
    pub(super) engine: Engine,
    pub(super) linker: Linker<State>,
    pub(super) ticker: Arc<Ticker>,
    pub(super) services: Arc<Services>,
    pub(super) limits: PolicyConfig,
}

impl Host {
    /// Sets wasmtime up. What policies keep is on `disk`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when this machine cannot reserve the address space.
    pub fn new(limits: &PolicyConfig, disk: &Disk) -> Result<Self> {
        let memory_bytes = limits.memory_bytes.next_multiple_of(PAGE_BYTES);
        let mut pool = PoolingAllocationConfig::new();
        pool.total_component_instances(INSTANCES)
            .total_core_instances(INSTANCES * CORES)
            .total_memories(INSTANCES)
            .total_tables(INSTANCES * 2)
            .max_core_instances_per_component(CORES)
            .max_memories_per_component(PARTS)
            .max_tables_per_component(PARTS)
            .table_elements(TABLE_ELEMENTS)
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
            .cache(disk.compiled.as_deref().and_then(cache));
        let engine = Engine::new(&config).map_err(|e| Error::Invalid {
            field: "policy.memory_bytes",
            problem: format!("wasmtime cannot be set up with {memory_bytes} bytes: {e:#}"),
        })?;
        let no_thread = |error: std::io::Error| Error::Invalid {
            field: "policy",
            problem: format!("no thread can be started: {error}"),
        };
        let ticker = Ticker::start(engine.clone(), limits.deadline_ms).map_err(no_thread)?;
        let kv = Kv::open(&disk.database, limits.kv_bytes).map_err(no_thread)?;
        let mut linker = Linker::new(&engine);
        for version in VERSIONS {
            (version.link)(&mut linker).expect("each version has names of its own");
        }
        Ok(Self {
            engine,
            linker,
            ticker: Arc::new(ticker),
            services: Arc::new(Services { kv, counters: Counters::default() }),
            limits: limits.clone(),
        })
    }

    /// What policies counted: policy, counter, value; sorted.
    pub fn counters(&self) -> Vec<(String, String, u64)> {
        self.services.counters.list()
    }
}

/// Where compiled components are kept; `None`, and a word in the log, where the folder is no use.
fn cache(folder: &Path) -> Option<Cache> {
    let unusable = |error: &dyn std::fmt::Display| {
        let folder = folder.display();
        tracing::warn!(%folder, %error, "policies are compiled anew at each start");
    };
    let made = std::path::absolute(folder).and_then(|folder| {
        let mut builder = std::fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.recursive(true).create(&folder)?;
        Ok(folder)
    });
    let folder = made.inspect_err(|error| unusable(error)).ok()?;
    let mut config = CacheConfig::new();
    config.with_directory(folder).with_files_total_size_soft_limit(COMPILED_BYTES);
    Cache::new(config).inspect_err(|error| unusable(error)).ok()
}
