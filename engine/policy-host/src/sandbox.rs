//! The sandbox: compiles components and calls their hooks within limits. The only user of wasmtime's engine; the types of
//! `contract.rs` are wasmtime's bindings.
//!
//! A [`Component`] is compiled once, on any thread. An [`Instance`] (one wasmtime `Store`) serves one
//! request, so guest globals are the state of that request and a trap affects one request. The linker
//! provides the imports of the contract and nothing else: no WASI, clock, random numbers or network. A
//! component with any other import is refused at load; [`Component::check_grants`] compares its imports
//! with the grants of a profile.
//!
//! Every call, including instantiation, has these limits from [`PolicyConfig`]: fuel, which is
//! deterministic and can be replayed; an epoch deadline, for work that fuel does not count; memory,
//! with constant limits for tables, instances and handles; the bytes of the answer, checked while it is
//! lifted, before the host allocates; and the number and bytes of import calls. `check.rs` then checks
//! the answer against the contract.
//!
//! # Why
//! `component-model-async` is disabled (it adds 0.4 us a call), as are GC, threads and 64-bit memories,
//! which no policy needs. NaNs are canonical and relaxed SIMD is deterministic, so a trace replays bit
//! for bit on another machine. A memory reserves `memory_bytes` of address space: the default of
//! 4 GiB saves bounds checks, which cost nothing here, but fails under `ulimit -v`. So did the pooling
//! allocator, which reserved the memories of all instances at the start: 8.6 GB.
//!
//! A policy in JavaScript or Python contains an interpreter of 10 to 20 MB with an initial memory of
//! 9.5 or 12.9 MB, the latter in 38 core instances. `memory_bytes` and [`MAX_CORE_INSTANCES`] allow
//! them and cost a small policy nothing: untouched pages are address space only. Policies in
//! both languages can be built with WASI stubbed out, so the host provides none.
//!
//! Measured on two x86-64 cores under load (4 runnable threads): a step of the default policy takes
//! 0.8 us at the median and 1.0 us at the 99th percentile in a release build, including fuel and time readings.
//! Instantiating takes 14 us at the median. `steersman policy bench`
//! repeats it.

mod compile;
mod compiled;
mod count;
mod engine;
mod imports;
mod pace;
mod params;
mod ticker;

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use sha2::{Digest, Sha256};
use wasmtime::component::InstancePre;
use wasmtime::component::types::ComponentItem;
use wasmtime::{Engine, ResourceLimiter, Store, Trap};

use crate::check;
use crate::config::{Grant, PolicyConfig};
use crate::contract::{
    Action, Answer, CONTRACT, Call, CallReport, Cost, Guest, Hook, HookIndices, ImportCall,
    MAX_ACTIONS, MAX_TOKENS, Policy, TokenBias, Vocabulary, no_vocabulary,
};
use crate::error::{Cause, Error, Failure};
use compile::Failed;
pub use compile::{
    CompilerLimits, LimitedBy, Urgency, compile_if_asked, compiler_limits, this_program,
};
pub use engine::Host;
pub use imports::GIVEN_KV;
use imports::{Imports, Services};
use pace::Pace;
use ticker::{Deadline, Ticker};

/// Largest component; those with a JavaScript or Python interpreter have up to 20 MB.
pub const COMPONENT_BYTES: usize = 64 << 20;

/// Shortest deadline of a call in a dry run. Fuel limits what the guest computes; the time it takes on
/// a busy machine says nothing about the policy.
const DRY_RUN_DEADLINE_MS: u64 = 10_000;

/// Instances that exist at a time, which is the number of requests that use a policy.
const MAX_INSTANCES: usize = 256;

/// Core instances of one component: a Python interpreter has 38.
const MAX_CORE_INSTANCES: usize = 64;

/// Memories, and tables, of one component.
const MAX_MEMORIES: usize = 8;

/// Resource handles of one instance. The contract has none; a component may define its own.
const MAX_HANDLES: usize = 1000;

/// Elements of one table.
const MAX_TABLE_ELEMENTS: usize = 20_000;

/// Bytes that the lists of one answer take in the host: as many actions as allowed, each a bias of as
/// many tokens as allowed. No other list is longer.
const LIST_BYTES: usize = MAX_ACTIONS * (size_of::<Action>() + MAX_TOKENS * size_of::<TokenBias>());

/// Prefix of the names of all interfaces of the contract.
const PACKAGE: &str = "steersman:policy/";

/// The import that needs no grant.
const FAILURE: &str = "failure";

/// The request of an instance.
#[derive(Clone)]
pub struct Context {
    /// Request id.
    pub request: String,
    /// Profile of the request: together with the name of the policy, the namespace of `kv`.
    pub profile: String,
    /// Tokenizer of the served model.
    pub vocabulary: Arc<dyn Vocabulary>,
    /// `None` for a real request. In a dry run, recorded results of imports, which are returned again.
    /// Calls that are not recorded use an empty map in memory and `vocabulary`. Nothing is stored,
    /// logged or counted.
    pub recorded: Option<Arc<[ImportCall]>>,
}

impl Context {
    /// A dry run without a request, a model or recorded results.
    pub fn dry_run() -> Self {
        Self {
            request: String::new(),
            profile: String::new(),
            vocabulary: no_vocabulary(),
            recorded: Some(Arc::default()),
        }
    }

    fn deadline(&self, limits: &PolicyConfig) -> Deadline {
        let least = if self.recorded.is_some() { DRY_RUN_DEADLINE_MS } else { 0 };
        Deadline::new(limits.deadline_ms.max(least), limits.deadline_ms)
    }
}

/// A compiled policy.
pub struct Component {
    name: String,
    sha256: [u8; 32],
    hooks: Vec<&'static str>,
    imports: Vec<Grant>,
    pre: InstancePre<State>,
    indices: HookIndices,
    prepared: params::Prepared,
    pace: Pace,
    ticker: Arc<Ticker>,
    services: Arc<Services>,
    limits: PolicyConfig,
}

impl Component {
    /// Validates and compiles `bytes`, within limits if [`PolicyConfig::compiler`] is set. Takes tens of
    /// milliseconds for a small policy and half a minute for one with an interpreter. Runs no guest code.
    ///
    /// # Errors
    /// [`Error::NotCompiled`]; [`Error::Refused`] if `bytes` exports no hook or a hook that the contract
    /// does not have, or imports anything else. [`Self::instantiate`] checks the types of hooks.
    pub fn load(host: &Host, name: &str, bytes: &[u8]) -> Result<Self, Error> {
        Self::load_with(host, name, bytes, Urgency::Awaited)
    }

    /// As [`Self::load`], with the limits of a compilation by its urgency.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_with(
        host: &Host,
        name: &str,
        bytes: &[u8],
        urgency: Urgency,
    ) -> Result<Self, Error> {
        let refuse = |problem: String| Error::refused(name, problem);
        if bytes.len() > COMPONENT_BYTES {
            let size = bytes.len();
            return Err(refuse(format!("has {size} bytes, more than {COMPONENT_BYTES}")));
        }
        let sha256 = Sha256::digest(bytes).into();
        let compile = || host.compiler.compile(&host.engine, bytes, urgency);
        let component = match &host.compiled {
            Some(compiled) => compiled.component(&host.engine, &sha256, compile),
            None => compile().and_then(|code| compiled::from_compiler(&host.engine, &code)),
        };
        let component = component.map_err(|Failed { problem, is_transient }| {
            Error::NotCompiled { policy: name.into(), problem, is_transient }
        })?;
        let ty = component.component_type();
        let exports = ty.exports(&host.engine).map(|(export, _)| export);
        let hooks = exported_hooks(exports).map_err(refuse)?;
        let mut imports = Vec::new();
        for (import, item) in ty.imports(&host.engine) {
            if is_types_only(import, &item.ty, &host.engine) || import == full_name(FAILURE) {
                continue;
            }
            let known = Grant::ALL.into_iter().find(|known| import == full_name(known.name()));
            imports.push(known.ok_or_else(|| {
                let known = Grant::ALL.map(Grant::name).join(", ");
                refuse(format!(
                    "imports `{import}`; contract {CONTRACT} has only {known}, {FAILURE} and its types"
                ))
            })?);
        }
        let pre = host
            .linker
            .instantiate_pre(&component)
            .map_err(|error| refuse(format!("cannot be linked: {}", one_line(&error))))?;
        let is_exported = |hook: &str| hooks.contains(&hook);
        let indices =
            HookIndices::new(&pre, is_exported).map_err(|error| refuse(wrong_type(&error)))?;
        Ok(Self {
            name: name.into(),
            sha256,
            pace: Pace::new(&hooks),
            hooks,
            imports,
            indices,
            prepared: params::Prepared::default(),
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

    /// Names of the hooks that it exports, `on-step`.
    pub fn hooks(&self) -> &[&'static str] {
        &self.hooks
    }

    /// Interfaces that it imports and that need a grant.
    pub fn imports(&self) -> &[Grant] {
        &self.imports
    }

    /// Full names of these interfaces: `steersman:policy/kv@0.5.0`.
    pub fn import_names(&self) -> Vec<String> {
        self.imports.iter().map(|import| full_name(import.name())).collect()
    }

    /// Compares its imports with the `grants` of a profile.
    ///
    /// # Errors
    /// [`Error::Refused`] names the first import that is not granted.
    pub fn check_grants(&self, grants: &[Grant]) -> Result<(), Error> {
        let Some(import) = self.imports.iter().find(|import| !grants.contains(import)) else {
            return Ok(());
        };
        let problem = format!(
            "imports `{}`, which the profile does not grant: add \"{}\" to its `grants`",
            full_name(import.name()),
            import.name()
        );
        Err(Error::refused(&self.name, problem))
    }

    /// Starts an instance on the calling thread. Runs the component's start function under the limits
    /// of a call. Imports are available whether granted or not: call [`Self::check_grants`] before.
    ///
    /// # Errors
    /// [`Failure`] if the start function fails, a hook has another type than in the contract, or
    /// [`MAX_INSTANCES`] exist already.
    pub fn instantiate(self: &Arc<Self>, context: &Context) -> Result<Instance, Failure> {
        let limits = &self.limits;
        let imports = (!self.imports.is_empty())
            .then(|| Box::new(Imports::new(&self.name, context, &self.services, limits)));
        let state =
            State { memory_bytes: 0, memory_limit: limits.memory_bytes, failed: None, imports };
        let mut store = Store::new(self.pre.engine(), state);
        store.limiter(|state| state);
        store.set_hostcall_fuel(self.passed_bytes());
        store.set_max_component_handles(MAX_HANDLES);
        let alive = self.ticker.watch(MAX_INSTANCES).ok_or_else(|| {
            let cause = Cause::Limit(format!("{MAX_INSTANCES} instances exist already"));
            Failure { policy: self.name.clone(), hook: "start", cause }
        })?;
        let deadline = context.deadline(limits);
        let (fuel, output_bytes) = (limits.fuel, limits.output_bytes);
        refuel(&mut store, fuel, deadline);
        let instance = self.pre.instantiate(&mut store);
        let instance =
            instance.map_err(|error| self.failure(&mut store, "start", fuel, deadline, &error))?;
        let guest = self.indices.load(&mut store, &instance);
        let guest = guest.map_err(|error| Failure {
            policy: self.name.clone(),
            hook: "start",
            cause: Cause::Answer(wrong_type(&error)),
        })?;
        Ok(Instance {
            guest,
            component: self.clone(),
            store,
            vocabulary: context.vocabulary.clone(),
            fuel,
            output_bytes,
            deadline,
            cost: Cost::default(),
            _alive: alive,
        })
    }

    /// Bytes that the guest may pass at a time, in an answer or through an import.
    fn passed_bytes(&self) -> usize {
        let answer = self.limits.output_bytes.saturating_add(LIST_BYTES);
        if self.imports.is_empty() {
            answer
        } else {
            answer.max(imports::passed_bytes(&self.limits))
        }
    }

    fn failure(
        &self,
        store: &mut Store<State>,
        hook: &'static str,
        fuel: u64,
        deadline: Deadline,
        error: &wasmtime::Error,
    ) -> Failure {
        let cause = match (store.data_mut().failed.take(), error.downcast_ref::<Trap>()) {
            (Some(cause), _) => cause,
            (_, Some(Trap::OutOfFuel)) => Cause::Fuel(fuel),
            (_, Some(Trap::Interrupt)) => Cause::Deadline(deadline.ms),
            (_, Some(trap)) => Cause::Trap(trap.to_string()),
            _ if hook == "start" => Cause::Limit(format!("cannot be started: {}", one_line(error))),
            // wasmtime has no type for an answer that cannot be lifted, so the limit is always named.
            _ => Cause::Answer(format!(
                "the answer or an import's argument cannot be read: {} (an answer may have {} bytes)",
                one_line(error),
                self.limits.output_bytes
            )),
        };
        Failure { policy: self.name.clone(), hook, cause }
    }
}

/// A policy at work on one request.
pub struct Instance {
    guest: Guest,
    component: Arc<Component>,
    store: Store<State>,
    vocabulary: Arc<dyn Vocabulary>,
    /// Fuel of each call.
    fuel: u64,
    /// Bytes of text in each answer.
    output_bytes: usize,
    deadline: Deadline,
    cost: Cost,
    _alive: ticker::Alive,
}

impl Instance {
    fn call_guest(&mut self, call: &Call<'_>) -> Result<Answer, Failure> {
        let started = Instant::now();
        refuel(&mut self.store, self.fuel, self.deadline);
        if let Some(imports) = &mut self.store.data_mut().imports {
            imports.begin();
        }
        let answer = self.guest.call(&mut self.store, call);
        self.cost = Cost {
            fuel: self.fuel - self.store.get_fuel().unwrap_or(self.fuel),
            nanoseconds: u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX),
        };
        self.component.pace.learn(call.hook(), self.cost.nanoseconds);
        let hook = call.hook().name();
        let answer = answer.map_err(|error| {
            self.component.failure(&mut self.store, hook, self.fuel, self.deadline, &error)
        })?;
        match check::answer(call, &answer, &*self.vocabulary, self.output_bytes) {
            Ok(()) => Ok(answer),
            Err(problem) => {
                let policy = self.component.name.clone();
                Err(Failure { policy, hook, cause: Cause::Answer(problem) })
            }
        }
    }
}

impl Policy for Instance {
    fn call(&mut self, call: &Call<'_>) -> Result<Answer, Failure> {
        if let Call::Params(params) = call {
            self.cost = Cost::default();
            let prepared = self.component.prepare(&params.profile, &params.params)?;
            return Ok(Answer::Params((*prepared).clone()));
        }
        let prepared = self.with_prepared(call)?;
        self.call_guest(prepared.as_ref().unwrap_or(call))
    }

    fn is_quick(&self, hook: Hook) -> bool {
        self.component.pace.is_quick(hook)
    }

    fn has(&self, hook: Hook) -> bool {
        self.component.hooks.contains(&hook.name())
    }

    fn take_report(&mut self) -> CallReport {
        let imports = self.store.data_mut().imports.as_mut();
        CallReport {
            cost: self.cost,
            imports: imports.map(|imports| imports.take()).unwrap_or_default(),
            ..CallReport::default()
        }
    }
}

/// Full name of an interface of the contract.
fn full_name(interface: &str) -> String {
    format!("{PACKAGE}{interface}@{CONTRACT}")
}

/// The hooks among the exports of a component.
fn exported_hooks<'a>(exports: impl Iterator<Item = &'a str>) -> Result<Vec<&'static str>, String> {
    let mut hooks = Vec::new();
    for export in exports {
        let Some(hook) = export.strip_prefix(PACKAGE) else { continue };
        let (hook, version) = hook.split_once('@').unwrap_or((hook, "without a version"));
        if version != CONTRACT {
            return Err(format!(
                "exports `{hook}` of contract {version}; this server has contract {CONTRACT}: build it \
                 again for {CONTRACT}"
            ));
        }
        let Some(hook) = Hook::ALL.into_iter().find(|known| known.name() == hook) else {
            return Err(format!("exports `{hook}`, which contract {CONTRACT} does not have"));
        };
        hooks.push(hook.name());
    }
    if hooks.is_empty() {
        let known = Hook::ALL.map(Hook::name).join("`, `");
        let example = full_name(Hook::OnStep.name());
        return Err(format!("exports none of the hooks `{known}` (as `{example}`)"));
    }
    Ok(hooks)
}

fn wrong_type(error: &wasmtime::Error) -> String {
    format!("exports a hook with another type than the contract: {}", one_line(error))
}

/// Sets fuel and deadline of the next call.
fn refuel(store: &mut Store<State>, fuel: u64, deadline: Deadline) {
    store.set_fuel(fuel).expect("Host::new enables fuel");
    store.set_epoch_deadline(deadline.ticks);
}

/// Whether an import contains types only, which need nothing from the host. `wit-bindgen` generates
/// one for the interface `types`.
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

/// Data of a store: its limits, its imports, and the limit that ended it.
pub(crate) struct State {
    /// Of all memories.
    memory_bytes: usize,
    memory_limit: usize,
    failed: Option<Cause>,
    /// `None` for a component without imports.
    imports: Option<Box<Imports>>,
}

impl State {
    /// Records the cause of a failure; the error ends the guest.
    fn fail(&mut self, cause: Cause) -> wasmtime::Error {
        let error = wasmtime::Error::msg(cause.to_string());
        self.failed = Some(cause);
        error
    }
}

impl ResourceLimiter for State {
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        let limit = self.memory_limit;
        let wanted = self.memory_bytes.saturating_add(desired.saturating_sub(current));
        if wanted <= limit {
            self.memory_bytes = wanted;
            return Ok(true);
        }
        // `Ok(false)` would let the guest continue and fail for another reason.
        Err(self.fail(Cause::Limit(format!(
            "wanted {wanted} bytes of memory, the limit is {limit} (`policy.memory_bytes`)"
        ))))
    }

    fn table_growing(
        &mut self,
        _current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        if desired <= MAX_TABLE_ELEMENTS {
            return Ok(true);
        }
        Err(self.fail(Cause::Limit(format!(
            "wanted {desired} table elements, the limit is {MAX_TABLE_ELEMENTS}"
        ))))
    }

    fn instances(&self) -> usize {
        MAX_CORE_INSTANCES
    }

    fn tables(&self) -> usize {
        MAX_MEMORIES
    }

    fn memories(&self) -> usize {
        MAX_MEMORIES
    }
}
