//! A compiled policy, and its instances.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use sha2::{Digest, Sha256};
use wasmtime::Store;
use wasmtime::component::InstancePre;

use super::compile::{Failed, Urgency};
use super::compiled;
use super::context::Context;
use super::engine::Host;
use super::failure::{CallLimits, cause, one_line, wrong_type};
use super::imports::{Imports, Services, passed_bytes};
use super::interfaces::{exported_hooks, full_name, imported_grants};
use super::pace::Pace;
use super::params::{self, Outcome, Prepared};
use super::state::State;
use super::ticker::{Alive, Deadline, Ticker};
use crate::check;
use crate::config::{Grant, PolicyConfig};
use crate::contract::{
    Action, Answer, Call, CallReport, Cost, Guest, Hook, HookIndices, MAX_ACTIONS, MAX_TOKENS,
    PREPARED_BYTES, Params, ParamsView, Policy, TokenBias, Vocabulary,
};
use crate::error::{Cause, Error, Failure};
use crate::shipped::is_shipped;

/// Largest component; those with a JavaScript or Python interpreter have up to 20 MB.
pub const COMPONENT_BYTES: usize = 64 << 20;

/// Instances that exist at a time, which is the number of requests that use a policy.
const MAX_INSTANCES: usize = 256;

/// Resource handles of one instance. The contract has none; a component may define its own.
const MAX_HANDLES: usize = 1000;

/// Bytes that the lists of one answer take in the host: as many actions as allowed, each a bias of
/// as many tokens as allowed. No other list is longer.
const LIST_BYTES: usize = MAX_ACTIONS * (size_of::<Action>() + MAX_TOKENS * size_of::<TokenBias>());

/// A compiled policy.
pub struct Component {
    name: String,
    sha256: [u8; 32],
    hooks: Vec<&'static str>,
    imports: Vec<Grant>,
    /// Whether it is one of those inside the binary.
    is_shipped: bool,
    pre: InstancePre<State>,
    indices: HookIndices,
    prepared: Prepared,
    pace: Pace,
    ticker: Arc<Ticker>,
    services: Arc<Services>,
    limits: PolicyConfig,
}

impl Component {
    /// Validates and compiles `bytes`, within limits if [`PolicyConfig::compiler`] is set. Takes
    /// tens of milliseconds for a small policy and half a minute for one with an interpreter. Runs
    /// no guest code.
    ///
    /// # Errors
    /// [`Error::NotCompiled`]; [`Error::Refused`] if `bytes` exports no hook or a hook that the
    /// contract does not have, or imports anything else. [`Self::instantiate`] checks the types of
    /// hooks.
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
        let imports = ty.imports(&host.engine).map(|(import, item)| (import, item.ty));
        let imports = imported_grants(imports, &host.engine).map_err(refuse)?;
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
            is_shipped: is_shipped(bytes),
            pace: Pace::new(&hooks),
            hooks,
            imports,
            indices,
            prepared: Prepared::default(),
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

    /// The grants that its imports need. The shipped policies may ask the tokenizer without one: it tells nothing
    /// but the model's vocabulary, and the operator who would grant it trusts the binary.
    pub fn needed_grants(&self) -> Vec<Grant> {
        let is_free = |grant: &Grant| self.is_shipped && *grant == Grant::Tokenizer;
        self.imports.iter().copied().filter(|grant| !is_free(grant)).collect()
    }

    /// Full names of the interfaces that it imports, but for `failure`: `steersman:policy/kv@0.6.0`.
    pub fn import_names(&self) -> Vec<String> {
        self.imports.iter().map(|import| full_name(import.name())).collect()
    }

    /// Compares its imports with the `grants` of a profile.
    ///
    /// # Errors
    /// [`Error::Refused`] names the first import that is not granted.
    pub fn check_grants(&self, grants: &[Grant]) -> Result<(), Error> {
        let needed = self.needed_grants();
        let Some(import) = needed.iter().find(|import| !grants.contains(import)) else {
            return Ok(());
        };
        let problem = format!(
            "imports `{}`, which the profile does not grant: add \"{}\" to its `grants`",
            full_name(import.name()),
            import.name()
        );
        Err(Error::refused(&self.name, problem))
    }

    /// Starts an instance on the calling thread. Runs the component's start function under the
    /// limits of a call. Imports are available whether granted or not: call [`Self::check_grants`]
    /// before.
    ///
    /// # Errors
    /// [`Failure`] if the start function fails, a hook has another type than in the contract, or
    /// [`MAX_INSTANCES`] exist already.
    pub fn instantiate(self: &Arc<Self>, context: &Context) -> Result<Instance, Failure> {
        let limits = &self.limits;
        let imports = (!self.imports.is_empty())
            .then(|| Box::new(Imports::new(&self.name, context, &self.services, limits)));
        let state = State::new(limits.memory_bytes, imports);
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
        let instance = instance
            .map_err(|error| self.failure(&mut store, "start", (fuel, deadline), &error))?;
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
        if self.imports.is_empty() { answer } else { answer.max(passed_bytes(&self.limits)) }
    }

    /// What `on-params` makes of these parameters; nothing if the component does not export that
    /// hook. It is called once for equal parameters, in a dry run that takes up to a second or so.
    ///
    /// # Errors
    /// [`Failure`] if the policy fails.
    pub fn prepare(self: &Arc<Self>, profile: &str, params: &Params) -> Outcome {
        if !self.hooks.contains(&Hook::OnParams.name()) {
            return Ok(Arc::default());
        }
        if let Some(outcome) = self.prepared.get(profile, params) {
            return outcome;
        }
        let view = ParamsView { profile: profile.into(), params: params.clone() };
        let mut instance = self.instantiate(&Context::dry_run())?;
        instance.fuel = self.limits.fuel.saturating_mul(params::FUEL);
        instance.output_bytes = PREPARED_BYTES;
        instance.store.set_hostcall_fuel(PREPARED_BYTES.saturating_add(LIST_BYTES));
        let outcome = instance.call_guest(&Call::Params(Cow::Borrowed(&view))).map(|answer| {
            let Answer::Params(prepared) = answer else { unreachable!("the hook was `on-params`") };
            Arc::new(prepared)
        });
        self.prepared.put(view, &outcome);
        outcome
    }

    /// Returns true if the policy exports `hook` and needs its calls with these parameters: `on-params` can turn some
    /// hooks off ([`PreparedParams::turns_off`]).
    pub fn needs(self: &Arc<Self>, hook: Hook, profile: &str, params: &Params) -> bool {
        let is_off = || {
            // The request calls it again, and reports the failure.
            self.prepare(profile, params).is_ok_and(|prepared| prepared.turns_off(hook))
        };
        self.hooks.contains(&hook.name()) && !is_off()
    }

    fn failure(
        &self,
        store: &mut Store<State>,
        hook: &'static str,
        (fuel, deadline): (u64, Deadline),
        error: &wasmtime::Error,
    ) -> Failure {
        let limits =
            CallLimits { fuel, deadline_ms: deadline.ms, output_bytes: self.limits.output_bytes };
        let cause = cause(store.data_mut().take_cause(), error, hook, &limits);
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
    _alive: Alive,
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
            self.component.failure(&mut self.store, hook, (self.fuel, self.deadline), &error)
        })?;
        match check::answer(call, &answer, &*self.vocabulary, self.output_bytes) {
            Ok(()) => Ok(answer),
            Err(problem) => {
                let policy = self.component.name.clone();
                Err(Failure { policy, hook, cause: Cause::Answer(problem) })
            }
        }
    }

    /// The call with the texts that `on-params` puts in place of parameters; `None` if there are
    /// none.
    fn with_prepared(&self, call: &Call<'_>) -> Result<Option<Call<'static>>, Failure> {
        let Some((profile, params)) = params::configured(call) else { return Ok(None) };
        if !self.component.hooks.contains(&Hook::OnParams.name()) {
            return Ok(None);
        }
        let prepared = self.component.prepare(profile, params)?;
        Ok(params::with_prepared(call, &prepared))
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

/// Sets fuel and deadline of the next call.
fn refuel(store: &mut Store<State>, fuel: u64, deadline: Deadline) {
    store.set_fuel(fuel).expect("Host::new enables fuel");
    store.set_epoch_deadline(deadline.ticks);
}
