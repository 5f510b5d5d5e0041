//! wasmtime, configured for all guests of a server.

use std::sync::Arc;

use sha2::{Digest, Sha256};
use wasmtime::Engine;
use wasmtime::component::{HasSelf, Linker};

use super::compile::Compiler;
use super::compiled::Compiled;
use super::counters::Counters;
use super::imports::Services;
use super::settings::settings;
use super::state::State;
use super::ticker::Ticker;
use crate::config::PolicyConfig;
use crate::contract::bindings::steersman::policy::{counters, failure, kv, log, tokenizer};
use crate::database::Storage;
use crate::error::Error;
use crate::kv::Kv;

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

    /// Returns true if these bytes need not be compiled: the result is on disk.
    pub fn is_compiled(&self, component: &[u8]) -> bool {
        let sha256 = Sha256::digest(component).into();
        self.compiled.as_ref().is_some_and(|compiled| compiled.has(&self.engine, &sha256))
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
