//! The only door to wasmtime: compiles components and calls their hooks within limits.
//!
//! A [`Component`] is compiled once, on any thread; an [`Instance`] of it (one wasmtime `Store`)
//! lives as long as one request, on the engine thread, so guest globals are the request's state
//! and a trap harms one request. The linker is empty: no WASI, clock, random or network, and a
//! component that imports a function is refused at load.
//!
//! Every call, and instantiation too, has four bounds out of [`PolicyConfig`]: fuel, which is
//! deterministic and so can be replayed; an epoch deadline, for what fuel does not count; the
//! memory limit, with tables and instances bounded by constants here; and the bytes of its answer,
//! checked while it is lifted, before the host allocates for it.
//!
//! # Why
//! `component-model-async` stays off (it adds 0.4 us a call), as do GC, threads and 64-bit
//! memories, which no policy needs. NaNs are canonical and relaxed SIMD is deterministic, so that
//! a trace replays bit for bit on another machine. The pooling allocator reserves address space
//! for [`INSTANCES`] instances of `memory_bytes` each and no more than that: the default of 4 GiB
//! a memory saves bounds checks, which cost nothing here, but fails under `ulimit -v`.
//!
//! Measured with the default policy on two x86-64 cores: a step call 0.8 us at the median and
//! 1.6 us at the 99th percentile, starting and dropping an instance 6 us and 11 us
//! (`cost_of_the_default_policy` in tests/tests/hostile.rs repeats it).

mod contract;
mod ticker;

use std::fmt::Write as _;
use std::sync::Arc;

use contract::exports::steersman::policy as hooks;
use redb::Database;
use sha2::{Digest, Sha256};
use ticker::{TICKS, Ticker};
use wasmtime::component::types::ComponentItem;
use wasmtime::component::{self as wasm, InstancePre, Linker};
use wasmtime::{
    Config, Engine, InstanceAllocationStrategy, PoolingAllocationConfig, ResourceLimiter, Store,
    Trap,
};

use super::{ACTIONS, Action, KEEPS, Plan, Policy, RequestView, Step, Summary};
use crate::config::PolicyConfig;
use crate::error::{Error, Result};

/// Version of the contract in `wit/` that this server speaks.
pub const CONTRACT: &str = "0.1.0";

/// Largest component that is loaded; those with a JavaScript or Python engine inside have up to
/// 20 MB.
pub const COMPONENT_BYTES: usize = 64 << 20;

/// Most instances at a time, that is, most requests that a policy steers at a time.
pub const INSTANCES: u32 = 256;

/// Most core instances, memories and tables of one component, each.
const PARTS: u32 = 8;

/// Most elements of one table.
const TABLE_ELEMENTS: usize = 20_000;

/// Most stack of a guest; the thread that calls it must have more.
const STACK_BYTES: usize = 256 << 10;

/// Size of a Wasm page: memory limits are rounded up to it.
const PAGE_BYTES: usize = 64 << 10;

/// Prefix of the names of all interfaces of the contract.
const PACKAGE: &str = "steersman:policy/";

/// wasmtime, set up with the limits of all guests, and the thread that advances its epoch.
pub struct Host {
    engine: Engine,
    ticker: Arc<Ticker>,
    limits: PolicyConfig,
}

impl Host {
    /// Sets wasmtime up. What policies keep is in `database`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when this machine cannot reserve the address space.
    pub fn new(limits: &PolicyConfig, _database: &Arc<Database>) -> Result<Self> {
        let memory_bytes = limits.memory_bytes.next_multiple_of(PAGE_BYTES);
        let mut pool = PoolingAllocationConfig::new();
        pool.total_component_instances(INSTANCES)
            .total_core_instances(INSTANCES * PARTS)
            .total_memories(INSTANCES)
            .total_tables(INSTANCES * 2)
            .max_core_instances_per_component(PARTS)
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
            .cranelift_nan_canonicalization(true);
        let engine = Engine::new(&config).map_err(|e| Error::Invalid {
            field: "policy.memory_bytes",
            problem: format!("wasmtime cannot be set up with {memory_bytes} bytes: {e:#}"),
        })?;
        let ticker = Ticker::start(engine.clone(), limits.deadline_ms).map_err(|e| {
            Error::Invalid { field: "policy", problem: format!("no thread can be started: {e}") }
        })?;
        Ok(Self { engine, ticker: Arc::new(ticker), limits: limits.clone() })
    }
}

/// A compiled policy, ready to be instantiated.
pub struct Component {
    name: String,
    sha256: [u8; 32],
    version: String,
    pre: InstancePre<State>,
    on_request: Option<hooks::on_request::GuestIndices>,
    on_step: Option<hooks::on_step::GuestIndices>,
    on_finish: Option<hooks::on_finish::GuestIndices>,
    ticker: Arc<Ticker>,
    limits: PolicyConfig,
}

impl Component {
    /// Validates and compiles `bytes`, which takes tens of milliseconds for a small policy and
    /// seconds for one with a JavaScript engine inside. Runs nothing of it.
    ///
    /// # Errors
    /// [`Error::Policy`] when `bytes` is no component, imports anything, exports no hook, or one that
    /// the contract lacks or that is of another version.
    pub fn load(host: &Host, name: &str, bytes: &[u8]) -> Result<Self> {
        let refuse = |problem: String| Error::Policy { policy: name.into(), problem };
        if bytes.len() > COMPONENT_BYTES {
            return Err(refuse(format!(
                "has {} bytes, at most {COMPONENT_BYTES} are loaded",
                bytes.len()
            )));
        }
        let component = wasm::Component::from_binary(&host.engine, bytes)
            .map_err(|e| refuse(format!("is not a valid component: {}", one_line(&e))))?;
        let ty = component.component_type();
        for (import, item) in ty.imports(&host.engine) {
            if !is_types_only(import, &item.ty, &host.engine) {
                let why = "a policy may import nothing but the contract's types";
                return Err(refuse(format!("imports `{import}`; {why}")));
            }
        }
        let mut version = None;
        for (export, _) in ty.exports(&host.engine) {
            let Some(hook) = export.strip_prefix(PACKAGE) else { continue };
            let (hook, speaks) = hook.split_once('@').unwrap_or((hook, "no version"));
            if speaks != CONTRACT {
                let ours = "this server speaks";
                return Err(refuse(format!("speaks contract {speaks}, {ours} {CONTRACT}")));
            }
            if !["on-request", "on-step", "on-finish"].contains(&hook) {
                return Err(refuse(format!("exports `{hook}`, which contract {CONTRACT} lacks")));
            }
            version = Some(speaks.to_owned());
        }
        let version = version.ok_or_else(|| {
            refuse(format!(
                "exports none of the hooks `{PACKAGE}on-{{request,step,finish}}@{CONTRACT}`"
            ))
        })?;
        let pre = Linker::new(&host.engine)
            .instantiate_pre(&component)
            .map_err(|e| refuse(format!("cannot be linked: {}", one_line(&e))))?;
        let has = |hook: &str| {
            component.get_export_index(None, format!("{PACKAGE}{hook}@{CONTRACT}")).is_some()
        };
        let shape = |error| other_shape(name, &error);
        Ok(Self {
            name: name.into(),
            sha256: Sha256::digest(bytes).into(),
            version,
            on_request: has("on-request")
                .then(|| hooks::on_request::GuestIndices::new(&pre))
                .transpose()
                .map_err(shape)?,
            on_step: has("on-step")
                .then(|| hooks::on_step::GuestIndices::new(&pre))
                .transpose()
                .map_err(shape)?,
            on_finish: has("on-finish")
                .then(|| hooks::on_finish::GuestIndices::new(&pre))
                .transpose()
                .map_err(shape)?,
            pre,
            ticker: host.ticker.clone(),
            limits: host.limits.clone(),
        })
    }

    /// Name of the policy in logs and errors.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// SHA-256 of the component's bytes.
    pub fn sha256(&self) -> [u8; 32] {
        self.sha256
    }

    /// Version of the contract that the component speaks.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// An instance for one request, on the calling thread. Runs the component's start function,
    /// under the limits of a hook call.
    ///
    /// # Errors
    /// [`Error::Policy`] when the start function fails, a hook has another shape, or [`INSTANCES`]
    /// are alive already.
    pub fn instantiate(self: &Arc<Self>) -> Result<Instance> {
        let state = State { memory_bytes: self.limits.memory_bytes, refused: None };
        let mut store = Store::new(self.pre.engine(), state);
        store.limiter(|state| state);
        // Text, and the longest list that a hook may answer with: of actions, as a keep is smaller.
        store.set_hostcall_fuel(
            self.limits.output_bytes.saturating_add(ACTIONS * size_of::<contract::Action>()),
        );
        let alive = self.ticker.watch();
        allow(&mut store, &self.limits);
        let instance = self.pre.instantiate(&mut store);
        let instance = instance.map_err(|e| self.failure(&mut store, "start", &e))?;
        let hooks = (|| {
            Ok((
                self.on_request.as_ref().map(|i| i.load(&mut store, &instance)).transpose()?,
                self.on_step.as_ref().map(|i| i.load(&mut store, &instance)).transpose()?,
                self.on_finish.as_ref().map(|i| i.load(&mut store, &instance)).transpose()?,
            ))
        })();
        let (on_request, on_step, on_finish) = hooks.map_err(|e| other_shape(&self.name, &e))?;
        Ok(Instance {
            component: self.clone(),
            store,
            on_request,
            on_step,
            on_finish,
            failure: None,
            _alive: alive,
        })
    }

    /// What went wrong in `hook`, in one line that names the limit, if it was one.
    fn failure(&self, store: &mut Store<State>, hook: &str, error: &wasmtime::Error) -> Error {
        let limits = &self.limits;
        let cause = match (store.data_mut().refused.take(), error.downcast_ref::<Trap>()) {
            (Some(refused), _) => refused,
            (_, Some(Trap::OutOfFuel)) => format!("used up its fuel of {}", limits.fuel),
            (_, Some(Trap::Interrupt)) => {
                format!("exceeded its deadline of {} ms", limits.deadline_ms)
            }
            (_, Some(trap)) => format!("trapped: {trap}"),
            _ if format!("{error:?}").contains("hostcalls has been exhausted") => {
                format!("answered with more than {} bytes", limits.output_bytes)
            }
            _ => one_line(error),
        };
        Error::Policy { policy: self.name.clone(), problem: format!("{hook}: {cause}") }
    }
}

/// A policy at work on one request.
pub struct Instance {
    component: Arc<Component>,
    store: Store<State>,
    on_request: Option<hooks::on_request::Guest>,
    on_step: Option<hooks::on_step::Guest>,
    on_finish: Option<hooks::on_finish::Guest>,
    /// That `on-finish` failed; [`super::guarded`] takes it for a failure.
    failure: Option<String>,
    _alive: ticker::Alive,
}

/// How many there are of what an answer lists.
struct Items {
    count: usize,
    most: usize,
    name: &'static str,
}

impl Instance {
    fn check_output(&self, hook: &str, bytes: usize, items: Items) -> Result<()> {
        let limit = self.component.limits.output_bytes;
        let Items { count, most, name } = items;
        let problem = if bytes > limit {
            format!("{hook}: answered with more than {limit} bytes")
        } else if count > most {
            format!("{hook}: answered with more than {most} {name}")
        } else {
            return Ok(());
        };
        Err(Error::Policy { policy: self.component.name.clone(), problem })
    }
}

impl Policy for Instance {
    fn on_request(&mut self, request: &RequestView) -> Result<Plan> {
        let Some(guest) = &self.on_request else { return Ok(Plan::default()) };
        allow(&mut self.store, &self.component.limits);
        let answer = contract::with_request(request, |request| {
            guest.call_on_request(&mut self.store, request)
        });
        let plan = answer.map_err(|e| self.component.failure(&mut self.store, "on-request", &e))?;
        let count = plan.keep.as_ref().map_or(0, Vec::len);
        let keeps = Items { count, most: KEEPS, name: "anchors to keep" };
        self.check_output("on-request", plan.note.as_ref().map_or(0, String::len), keeps)?;
        Ok(plan.into())
    }

    fn on_step(&mut self, step: &Step) -> Result<Vec<Action>> {
        let Some(guest) = &self.on_step else { return Ok(Vec::new()) };
        allow(&mut self.store, &self.component.limits);
        let answer = guest.call_on_step(&mut self.store, step.into());
        let actions = answer.map_err(|e| self.component.failure(&mut self.store, "on-step", &e))?;
        let bytes = actions.iter().map(contract::action_bytes).sum();
        let items = Items { count: actions.len(), most: ACTIONS, name: "actions" };
        self.check_output("on-step", bytes, items)?;
        Ok(actions.into_iter().map(Action::from).collect())
    }

    fn on_finish(&mut self, summary: &Summary) {
        let Some(guest) = &self.on_finish else { return };
        allow(&mut self.store, &self.component.limits);
        if let Err(error) = guest.call_on_finish(&mut self.store, summary.into()) {
            let error = self.component.failure(&mut self.store, "on-finish", &error);
            self.failure = Some(error.to_string());
        }
    }

    fn take_notes(&mut self) -> Vec<String> {
        self.failure.take().into_iter().collect()
    }
}

fn other_shape(policy: &str, error: &wasmtime::Error) -> Error {
    let problem = format!("has a hook of another shape: {}", one_line(error));
    Error::Policy { policy: policy.into(), problem }
}

/// Gives the next call its fuel and its deadline.
fn allow(store: &mut Store<State>, limits: &PolicyConfig) {
    store.set_fuel(limits.fuel).expect("Host::new turns fuel on");
    // The current tick has begun already: without one more the deadline could come early.
    store.set_epoch_deadline(TICKS + 1);
}

/// Whether an import brings types alone, which need nothing of the host. `wit-bindgen` makes one
/// for the interface `types`.
fn is_types_only(name: &str, item: &ComponentItem, engine: &Engine) -> bool {
    let ComponentItem::ComponentInstance(instance) = item else { return false };
    let ours = name.strip_prefix(PACKAGE).is_some_and(|rest| rest.starts_with("types@"));
    ours && instance.exports(engine).all(|(_, item)| matches!(item.ty, ComponentItem::Type(_)))
}

/// An error and its causes in one line.
fn one_line(error: &wasmtime::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        let separator = if line.is_empty() { "" } else { ": " };
        let _ =
            write!(line, "{separator}{}", text.split_whitespace().collect::<Vec<_>>().join(" "));
    }
    line
}

/// What a store carries: its bounds, and which of them it hit.
struct State {
    memory_bytes: usize,
    refused: Option<String>,
}

impl ResourceLimiter for State {
    fn memory_growing(
        &mut self,
        _current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        if desired <= self.memory_bytes {
            return Ok(true);
        }
        // An error ends the guest here. `Ok(false)` would let it go on and die of something else.
        let problem = format!("wanted {desired} bytes of memory, may have {}", self.memory_bytes);
        self.refused = Some(problem.clone());
        Err(wasmtime::Error::msg(problem))
    }

    fn table_growing(
        &mut self,
        _current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        if desired <= TABLE_ELEMENTS {
            return Ok(true);
        }
        let problem = format!("wanted {desired} table elements, may have {TABLE_ELEMENTS}");
        self.refused = Some(problem.clone());
        Err(wasmtime::Error::msg(problem))
    }

    fn instances(&self) -> usize {
        PARTS as usize
    }

    fn tables(&self) -> usize {
        PARTS as usize
    }

    fn memories(&self) -> usize {
        PARTS as usize
    }
}
