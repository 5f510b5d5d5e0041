//! The only door to wasmtime: compiles components and calls their hooks within limits.
//!
//! A [`Component`] is compiled once, on any thread; an [`Instance`] of it (one wasmtime `Store`)
//! lives as long as one request, on the engine thread, so guest globals are the request's state
//! and a trap harms one request. It speaks one of the versions of the contract that `contract.rs`
//! lists, side by side with components of another. The linker holds the imports of the contract and
//! nothing else: no WASI, clock, random or network. A component that imports anything else is
//! refused at load, and [`Component::granted`] says whether a profile allows what it imports.
//!
//! Every call, and instantiation too, has these bounds out of [`PolicyConfig`]: fuel, which is
//! deterministic and so can be replayed; an epoch deadline, for what fuel does not count; the
//! memory limit, with tables, instances and handles bounded by constants here; the bytes of its answer,
//! checked while it is lifted, before the host allocates for it; and the number and bytes of its
//! calls of imports. What it answers is then checked against the contract (`validate.rs`), so that
//! a lie is a failure of the guest like a trap.
//!
//! # Why
//! `component-model-async` stays off (it adds 0.4 us a call), as do GC, threads and 64-bit
//! memories, which no policy needs. NaNs are canonical and relaxed SIMD is deterministic, so that
//! a trace replays bit for bit on another machine. The pooling allocator reserves address space
//! for [`INSTANCES`] instances of `memory_bytes` each and no more than that: the default of 4 GiB
//! a memory saves bounds checks, which cost nothing here, but fails under `ulimit -v`.
//!
//! A policy in JavaScript or Python is an interpreter of 10 to 20 MB with a memory of 9.5 or 12.9 MB
//! from its first moment, the latter in 38 core instances. `memory_bytes` and [`CORES`] leave room
//! for them and cost a small policy nothing: pages that no guest touched are address space alone.
//! Neither imports WASI when it is built with it stubbed, so there is none here, not even an inert
//! one.
//!
//! Measured on two x86-64 cores that other work kept busy (load 12): a step call of the default
//! policy 0.8 us at the median and 4.9 us at the 99th percentile, with reading its fuel and its
//! time; of a guest that decides nothing 0.6 us, and 0.2 us more with a `kv.get`; starting and
//! dropping an instance 4 us and 14 us (`cost_of_the_default_policy` in tests/tests/hostile repeats
//! it).

mod contract;
mod host;
mod imports;
mod kv;
mod ticker;

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use contract::{Found, Hooks, LIST_BYTES, PACKAGE, VERSIONS, Version, full_name};
use imports::{Imports, Services};
use sha2::{Digest, Sha256};
use ticker::{Deadline, Ticker};
use wasmtime::component::types::ComponentItem;
use wasmtime::component::{self as wasm, InstancePre};
use wasmtime::{Engine, ResourceLimiter, Store, Trap};

use super::{
    Action, Cost, ImportCall, Plan, Policy, PromptView, Replacement, RequestView, Step, Summary,
    ToolCallView, Verdict, Vocabulary, no_vocabulary, validate,
};
use crate::config::{Grant, PolicyConfig};
use crate::error::{Error, Result};

pub use host::Host;
pub use imports::OWN_WORDS;

/// The newest version of the contract that this server speaks, that of `wit/`.
pub const CONTRACT: &str = VERSIONS[0].number;

/// Largest component that is loaded; those with a JavaScript or Python engine inside have up to
/// 20 MB.
pub const COMPONENT_BYTES: usize = 64 << 20;

/// Milliseconds that a hook may take, at least, where nobody waits for it. Fuel bounds what it computes, the same
/// everywhere; how long that takes on a busy machine says nothing of the policy.
const TRIAL_DEADLINE_MS: u64 = 10_000;

/// Most instances at a time, that is, most requests that a policy steers at a time.
pub const INSTANCES: u32 = 256;

/// Most core instances of one component: a Python interpreter comes in 38.
const CORES: u32 = 64;

/// Most memories and tables of one component, each.
const PARTS: u32 = 8;

/// Most handles of resources that an instance holds. The contract has none; a component may make
/// some of its own, and the host keeps account of them.
const HANDLES: usize = 1000;

/// Most elements of one table.
const TABLE_ELEMENTS: usize = 20_000;

/// What surrounds an instance.
#[derive(Clone)]
pub struct Scene {
    /// The request's name in logs.
    pub request: String,
    /// The profile that chose the policy: with the policy's name, the namespace of its `kv`.
    pub profile: String,
    /// The served model's tokenizer.
    pub vocabulary: Arc<dyn Vocabulary>,
    /// `None` where the request is real. Else what imports answered when it was, all hooks' in order:
    /// they answer so again, and where a call is not recorded, `kv` is a map in memory that begins
    /// empty and the tokenizer is `vocabulary`. Nothing is kept or counted.
    pub recorded: Option<Arc<[ImportCall]>>,
}

impl Scene {
    /// Of a trial: no request, no model, nothing is kept, and no haste.
    pub fn trial() -> Self {
        Self {
            request: String::new(),
            profile: String::new(),
            vocabulary: no_vocabulary(),
            recorded: Some(Arc::default()),
        }
    }

    /// Longest that a hook may take.
    fn deadline(&self, limits: &PolicyConfig) -> Deadline {
        let least = if self.recorded.is_some() { TRIAL_DEADLINE_MS } else { 0 };
        Deadline::new(limits.deadline_ms.max(least), limits.deadline_ms)
    }
}

/// A compiled policy, ready to be instantiated.
pub struct Component {
    name: String,
    sha256: [u8; 32],
    version: &'static Version,
    hooks: Vec<&'static str>,
    imports: Vec<Grant>,
    pre: InstancePre<State>,
    found: Found,
    ticker: Arc<Ticker>,
    services: Arc<Services>,
    limits: PolicyConfig,
}

impl Component {
    /// Validates and compiles `bytes`, which takes tens of milliseconds for a small policy and half
    /// a minute for one with a JavaScript or Python engine inside. Runs nothing of it.
    ///
    /// # Errors
    /// [`Error::Policy`] when `bytes` is no component, exports no hook of a version that is spoken,
    /// hooks of two of them, one that its version lacks or that has another shape, or imports
    /// anything that its version lacks.
    pub fn load(host: &Host, name: &str, bytes: &[u8]) -> Result<Self> {
        let refuse = |problem: String| Error::Policy { policy: name.into(), problem };
        if bytes.len() > COMPONENT_BYTES {
            return Err(refuse(format!(
                "has {} bytes, at most {COMPONENT_BYTES} are loaded",
                bytes.len()
            )));
        }
        let component = wasm::Component::from_binary(&host.engine, bytes)
            .map_err(|e| refuse(not_compiled(&e)))?;
        let ty = component.component_type();
        let exports = ty.exports(&host.engine).map(|(export, _)| export);
        let (version, hooks) = exported(exports).map_err(refuse)?;
        let mut imports = Vec::new();
        for (import, item) in ty.imports(&host.engine) {
            let is_free = |free: &&str| import == full_name(free, version.number);
            if is_types_only(import, &item.ty, &host.engine) || version.free.iter().any(is_free) {
                continue;
            }
            let mut known = version.imports.iter();
            let found = known.find(|known| import == full_name(known.name(), version.number));
            imports.push(*found.ok_or_else(|| refuse(unknown_import(import, version)))?);
        }
        let pre = host
            .linker
            .instantiate_pre(&component)
            .map_err(|e| refuse(format!("cannot be linked: {}", one_line(&e))))?;
        Ok(Self {
            name: name.into(),
            sha256: Sha256::digest(bytes).into(),
            version,
            hooks,
            imports,
            found: (version.find)(&pre).map_err(|error| other_shape(name, &error))?,
            pre,
            ticker: host.ticker.clone(),
            services: host.services.clone(),
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
        self.version.number
    }

    /// The hooks that it exports, `on-step`.
    pub fn hooks(&self) -> Vec<&'static str> {
        self.hooks.clone()
    }

    /// The interfaces that it imports functions of, by full name:
    /// `steersman:policy/kv@0.2.0`.
    pub fn imports(&self) -> Vec<String> {
        let name = |import: &Grant| full_name(import.name(), self.version.number);
        self.imports.iter().map(name).collect()
    }

    /// Checks what it imports against the `grants` of a profile.
    ///
    /// # Errors
    /// [`Error::Policy`] names the first import that is not granted.
    pub fn granted(&self, grants: &[Grant]) -> Result<()> {
        let Some(import) = self.imports.iter().find(|import| !grants.contains(import)) else {
            return Ok(());
        };
        let problem = format!(
            "imports `{}`, which the profile does not grant: add \"{}\" to its `grants`",
            full_name(import.name(), self.version.number),
            import.name()
        );
        Err(Error::Policy { policy: self.name.clone(), problem })
    }

    /// An instance for one request, on the calling thread. Runs the component's start function,
    /// under the limits of a hook call. What it imports is there, granted or not: [`Self::granted`]
    /// is asked before.
    ///
    /// # Errors
    /// [`Error::Policy`] when the start function fails or [`INSTANCES`] are alive already.
    pub fn instantiate(self: &Arc<Self>, scene: &Scene) -> Result<Instance> {
        let limits = &self.limits;
        let imports = (!self.imports.is_empty())
            .then(|| Box::new(Imports::new(&self.name, scene, &self.services, limits)));
        let state = State { memory_bytes: limits.memory_bytes, refused: None, imports };
        let mut store = Store::new(self.pre.engine(), state);
        store.limiter(|state| state);
        store.set_hostcall_fuel(self.passed_bytes());
        store.set_max_component_handles(HANDLES);
        let alive = self.ticker.watch();
        let deadline = scene.deadline(limits);
        allow(&mut store, limits, deadline);
        let instance = self.pre.instantiate(&mut store);
        let instance = instance.map_err(|e| self.failure(&mut store, "start", deadline, &e))?;
        let hooks = (self.found)(&mut store, &instance);
        Ok(Instance {
            hooks: hooks.map_err(|e| other_shape(&self.name, &e))?,
            component: self.clone(),
            store,
            vocabulary: scene.vocabulary.clone(),
            deadline,
            cost: Cost::default(),
            _alive: alive,
        })
    }

    /// Most bytes that pass from the guest at once: in an answer, or in a call of an import.
    fn passed_bytes(&self) -> usize {
        let answer = self.limits.output_bytes.saturating_add(LIST_BYTES);
        if self.imports.is_empty() { answer } else { answer.max(imports::host_bytes(&self.limits)) }
    }

    /// What went wrong in `hook`, in one line that names the limit, if it was one.
    fn failure(
        &self,
        store: &mut Store<State>,
        hook: &str,
        deadline: Deadline,
        error: &wasmtime::Error,
    ) -> Error {
        let limits = &self.limits;
        let cause = match (store.data_mut().refused.take(), error.downcast_ref::<Trap>()) {
            (Some(refused), _) => refused,
            (_, Some(Trap::OutOfFuel)) => format!("used up its fuel of {}", limits.fuel),
            (_, Some(Trap::Interrupt)) => {
                let (policy, hook) = (self.name.clone(), hook.into());
                return Error::PolicyLate { policy, hook, deadline_ms: deadline.ms };
            }
            (_, Some(trap)) => format!("trapped: {trap}"),
            _ if format!("{error:?}").contains("hostcalls has been exhausted") => {
                if self.imports.is_empty() {
                    format!("answered with more than {} bytes", limits.output_bytes)
                } else {
                    let most = self.passed_bytes();
                    format!("answered, or called an import, with more than {most} bytes")
                }
            }
            _ => one_line(error),
        };
        Error::Policy { policy: self.name.clone(), problem: format!("{hook}: {cause}") }
    }
}

/// A policy at work on one request.
pub struct Instance {
    hooks: Box<dyn Hooks>,
    component: Arc<Component>,
    store: Store<State>,
    vocabulary: Arc<dyn Vocabulary>,
    deadline: Deadline,
    cost: Cost,
    _alive: ticker::Alive,
}

impl Instance {
    /// Calls a hook within its limits, and checks its answer.
    fn call<T>(
        &mut self,
        hook: &str,
        call: impl FnOnce(&dyn Hooks, &mut Store<State>) -> wasmtime::Result<T>,
        check: impl FnOnce(&T, &dyn Vocabulary, usize) -> Result<(), String>,
    ) -> Result<T> {
        let limits = &self.component.limits;
        let started = Instant::now();
        allow(&mut self.store, limits, self.deadline);
        if let Some(imports) = &mut self.store.data_mut().imports {
            imports.begin();
        }
        let answer = call(&*self.hooks, &mut self.store);
        self.cost = Cost {
            fuel: limits.fuel - self.store.get_fuel().unwrap_or(limits.fuel),
            nanoseconds: u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX),
        };
        let answer =
            answer.map_err(|e| self.component.failure(&mut self.store, hook, self.deadline, &e))?;
        match check(&answer, &*self.vocabulary, limits.output_bytes) {
            Ok(()) => Ok(answer),
            Err(problem) => {
                let policy = self.component.name.clone();
                Err(Error::Policy { policy, problem: format!("{hook}: {problem}") })
            }
        }
    }
}

impl Policy for Instance {
    fn on_prompt(&mut self, prompt: &PromptView) -> Result<Vec<Replacement>> {
        self.call(
            "on-prompt",
            |hooks, store| hooks.on_prompt(store, prompt),
            |answer, _, bytes| validate::replacements(&prompt.system, answer, bytes),
        )
    }

    fn on_request(&mut self, request: &RequestView) -> Result<Plan> {
        self.call(
            "on-request",
            |hooks, store| hooks.on_request(store, request),
            |plan, _, bytes| validate::plan(plan, bytes),
        )
    }

    fn on_step(&mut self, step: &Step) -> Result<Vec<Action>> {
        self.call(
            "on-step",
            |hooks, store| hooks.on_step(store, step),
            |actions, vocabulary, bytes| {
                // Most steps answer with nothing, and sizes of vocabularies need not be at hand.
                if actions.is_empty() {
                    return Ok(());
                }
                validate::actions(actions, vocabulary.size(), bytes)
            },
        )
    }

    fn on_tool_call(&mut self, call: &ToolCallView) -> Result<Verdict> {
        self.call(
            "on-tool-call",
            |hooks, store| hooks.on_tool_call(store, call),
            |verdict, _, bytes| validate::verdict(verdict, bytes),
        )
    }

    fn on_finish(&mut self, summary: &Summary) -> Result<()> {
        self.call("on-finish", |hooks, store| hooks.on_finish(store, summary), |(), _, _| Ok(()))
    }

    fn take_imports(&mut self) -> Vec<ImportCall> {
        let imports = self.store.data_mut().imports.as_mut();
        imports.map(|imports| imports.take()).unwrap_or_default()
    }

    fn cost(&self) -> Cost {
        self.cost
    }
}

/// The version that a component speaks, and its hooks, from the names of its exports.
fn exported<'a>(
    exports: impl Iterator<Item = &'a str>,
) -> Result<(&'static Version, Vec<&'static str>), String> {
    let mut spoken: Option<&'static Version> = None;
    let mut hooks = Vec::new();
    for export in exports {
        let Some(hook) = export.strip_prefix(PACKAGE) else { continue };
        let (hook, speaks) = hook.split_once('@').unwrap_or((hook, "no version"));
        let Some(version) = VERSIONS.into_iter().find(|version| version.number == speaks) else {
            let ours = VERSIONS.map(|version| version.number).join(" and ");
            return Err(format!("speaks contract {speaks}, this server speaks {ours}"));
        };
        if let Some(other) = spoken.filter(|other| other.number != version.number) {
            let (a, b) = (other.number, version.number);
            return Err(format!("exports hooks of contract {a} and of {b}; build it for one"));
        }
        let Some(hook) = version.hooks.iter().find(|known| **known == hook) else {
            return Err(format!("exports `{hook}`, which contract {speaks} lacks"));
        };
        spoken = Some(version);
        hooks.push(*hook);
    }
    let version = spoken.ok_or_else(|| {
        let hooks = VERSIONS[0].hooks.join("`, `");
        format!("exports none of the hooks `{hooks}` (as `{}`)", full_name("on-step", CONTRACT))
    })?;
    Ok((version, hooks))
}

/// Why bytes do not become a component.
fn not_compiled(error: &wasmtime::Error) -> String {
    let line = one_line(error);
    if line.contains("memory has a minimum byte size") {
        return format!("needs more than `policy.memory_bytes`: {line}");
    }
    format!("is not a valid component: {line}")
}

/// Why an import is refused.
fn unknown_import(import: &str, version: &Version) -> String {
    let number = version.number;
    if version.imports.is_empty() {
        return format!("imports `{import}`; contract {number} has no imports but its types");
    }
    let granted = version.imports.iter().map(|known| known.name());
    let known: Vec<_> = granted.chain(version.free.iter().copied()).collect();
    format!("imports `{import}`; contract {number} has only {} and its types", known.join(", "))
}

fn other_shape(policy: &str, error: &wasmtime::Error) -> Error {
    let problem = format!("has a hook of another shape: {}", one_line(error));
    Error::Policy { policy: policy.into(), problem }
}

/// Gives the next call its fuel and its deadline.
fn allow(store: &mut Store<State>, limits: &PolicyConfig, deadline: Deadline) {
    store.set_fuel(limits.fuel).expect("Host::new turns fuel on");
    store.set_epoch_deadline(deadline.ticks);
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
    /// For a component that imports any.
    imports: Option<Box<Imports>>,
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
        CORES as usize
    }

    fn tables(&self) -> usize {
        PARTS as usize
    }

    fn memories(&self) -> usize {
        PARTS as usize
    }
}
