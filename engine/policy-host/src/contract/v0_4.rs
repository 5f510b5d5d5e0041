//! Contract 0.4, which components built for it have: the records that differ from today's, and its hooks and
//! imports under their names.
//!
//! A component sees the fields that 0.4 has. What its answers lack is empty. Records that are the same in both
//! are not repeated: a component knows them by their fields, not by the version.

#![allow(
    unsafe_code,
    reason = "records implement wasmtime's unsafe traits; types of hooks are checked once"
)]

use wasmtime::component::{
    ComponentExportIndex, ComponentNamedList, ComponentType, Func, Instance, InstancePre, Lift,
    Linker, Lower, TypedFunc,
};
use wasmtime::{Store, StoreContextMut};

use super::bindings::steersman::policy::{counters, failure, kv, log, tokenizer};
use super::{
    Answer, AnswerForm, Call, Hook, LoopReport, LoopRule, ParamsView, Phase, PreparedParams,
    PromptEdit, PromptView, Refusal, Replacement, RequestView, Retention, SamplingPatch, Summary,
    ToolCallView, Verdict,
};
use crate::contract::{Action, Plan as CurrentPlan};
use crate::sandbox::State;

/// The version.
pub const CONTRACT: &str = "0.4.0";

/// `plan` of 0.4.
#[derive(ComponentType, Lift)]
#[component(record)]
struct Plan {
    reasoning: Option<bool>,
    #[component(name = "reasoning-budget")]
    reasoning_budget: Option<u32>,
    #[component(name = "answer-reserve")]
    answer_reserve: Option<u32>,
    sampling: SamplingPatch,
    loops: Option<LoopRule>,
    every: u32,
    #[component(name = "checkpoint-every")]
    checkpoint_every: u32,
    note: Option<String>,
    retain: Option<Vec<Retention>>,
    form: Option<AnswerForm>,
    refuse: Option<Refusal>,
    #[component(name = "max-tokens")]
    max_tokens: Option<u32>,
    stop: Vec<String>,
    tools: Option<Vec<String>>,
    #[component(name = "on-phase")]
    on_phase: bool,
    #[component(name = "on-newline")]
    on_newline: bool,
}

/// `step` of 0.4.
#[derive(ComponentType, Lower)]
#[component(record)]
struct Step<'a> {
    index: u32,
    phase: Phase,
    #[component(name = "reasoning-tokens")]
    reasoning_tokens: u32,
    #[component(name = "answer-tokens")]
    answer_tokens: u32,
    #[component(name = "reasoning-left")]
    reasoning_left: u32,
    tokens: &'a [u32],
    text: &'a str,
    #[component(name = "loop-found")]
    loop_found: Option<LoopReport>,
    #[component(name = "budget-reached")]
    budget_reached: bool,
    #[component(name = "phase-changed")]
    phase_changed: bool,
    newline: bool,
}

impl From<Plan> for CurrentPlan {
    fn from(plan: Plan) -> Self {
        Self {
            reasoning: plan.reasoning,
            reasoning_budget: plan.reasoning_budget,
            answer_reserve: plan.answer_reserve,
            sampling: plan.sampling,
            loops: plan.loops,
            every: plan.every,
            checkpoint_every: plan.checkpoint_every,
            note: plan.note,
            retain: plan.retain,
            form: plan.form,
            refuse: plan.refuse,
            max_tokens: plan.max_tokens,
            stop: plan.stop,
            tools: plan.tools,
            on_phase: plan.on_phase,
            on_newline: plan.on_newline,
            ..Self::default()
        }
    }
}

impl<'a> Step<'a> {
    fn of(step: &'a super::Step) -> Self {
        Self {
            index: step.index,
            phase: step.phase,
            reasoning_tokens: step.reasoning_tokens,
            answer_tokens: step.answer_tokens,
            reasoning_left: step.reasoning_left,
            tokens: &step.tokens,
            text: &step.text,
            loop_found: step.loop_found,
            budget_reached: step.budget_reached,
            phase_changed: step.phase_changed,
            newline: step.newline,
        }
    }
}

/// The hooks that a component exports, by [`Hook`].
pub struct HookIndices([Option<ComponentExportIndex>; Hook::ALL.len()]);

/// The hooks that an instance exports.
pub struct Guest([Option<Func>; Hook::ALL.len()]);

impl HookIndices {
    /// Finds the hooks that `is_exported` names. [`Self::load`] checks their types.
    ///
    /// # Errors
    /// If an interface lacks its function.
    pub fn new(
        pre: &InstancePre<State>,
        is_exported: impl Fn(&str) -> bool,
    ) -> wasmtime::Result<Self> {
        let mut indices = [const { None }; Hook::ALL.len()];
        for hook in Hook::ALL.into_iter().filter(|hook| is_exported(hook.name())) {
            let name = hook.name();
            let interface = format!("steersman:policy/{name}@{CONTRACT}");
            let component = pre.component();
            let interface = component.get_export_index(None, &interface);
            let function = interface.and_then(|at| component.get_export_index(Some(&at), name));
            let missing = || wasmtime::Error::msg(format!("has no function `{name}`"));
            indices[hook as usize] = Some(function.ok_or_else(missing)?);
        }
        Ok(Self(indices))
    }

    /// Finds them in an instance, and checks their types.
    pub fn load(&self, store: &mut Store<State>, instance: &Instance) -> wasmtime::Result<Guest> {
        let mut functions = [None; Hook::ALL.len()];
        for hook in Hook::ALL {
            let Some(index) = &self.0[hook as usize] else { continue };
            let function = instance.get_func(&mut *store, index);
            let function = function.ok_or_else(|| wasmtime::Error::msg("is no function"))?;
            let store = &*store;
            match hook {
                Hook::OnParams => {
                    function.typed::<(&ParamsView,), (PreparedParams,)>(store)?;
                }
                Hook::OnPrompt => {
                    function.typed::<(&PromptView,), (Vec<Replacement>,)>(store)?;
                }
                Hook::OnRequest => {
                    function.typed::<(&RequestView,), (Plan,)>(store)?;
                }
                Hook::OnStep => {
                    function.typed::<(Step<'_>,), (Vec<Action>,)>(store)?;
                }
                Hook::OnText => {}
                Hook::OnToolCall => {
                    function.typed::<(&ToolCallView,), (Verdict,)>(store)?;
                }
                Hook::OnFinish => {
                    function.typed::<(&Summary,), ()>(store)?;
                }
            }
            functions[hook as usize] = Some(function);
        }
        Ok(Guest(functions))
    }
}

impl Guest {
    /// Calls a hook; one that is not exported answers [`Call::default_answer`].
    pub fn call(&self, store: &mut Store<State>, call: &Call<'_>) -> wasmtime::Result<Answer> {
        let Some(function) = self.0[call.hook() as usize] else { return Ok(call.default_answer()) };
        match call {
            Call::Params(view) => {
                invoke(function, store, (&**view,)).map(|(answer,)| Answer::Params(answer))
            }
            // 0.4 is not called without system text.
            Call::Prompt(view) if view.system.iter().all(String::is_empty) => {
                Ok(call.default_answer())
            }
            Call::Prompt(view) => {
                let answer = invoke(function, store, (&**view,));
                answer.map(|(replacements,): (Vec<Replacement>,)| {
                    Answer::Prompt(replacements.into_iter().map(PromptEdit::Replace).collect())
                })
            }
            Call::Request(view) => {
                let answer = invoke(function, store, (&**view,));
                answer.map(|(plan,): (Plan,)| Answer::Request(plan.into()))
            }
            Call::Step(step) => {
                invoke(function, store, (Step::of(step),)).map(|(answer,)| Answer::Step(answer))
            }
            // 0.4 does not have it.
            Call::Text(_) => Ok(call.default_answer()),
            Call::ToolCall(view) => {
                invoke(function, store, (&**view,)).map(|(answer,)| Answer::ToolCall(answer))
            }
            Call::Finish(summary) => {
                invoke(function, store, (&**summary,)).map(|()| call.default_answer())
            }
        }
    }
}

/// Calls a function of these types.
fn invoke<P, R>(function: Func, store: &mut Store<State>, params: P) -> wasmtime::Result<R>
where
    P: ComponentNamedList + Lower,
    R: ComponentNamedList + Lift + Send + Sync + 'static,
{
    // SAFETY: `HookIndices::load` has checked that the function of each hook has the types with which
    // `Guest::call` calls it; the private functions of this file are the only ones that make a `Guest`.
    let function = unsafe { TypedFunc::<P, R>::new_unchecked(function) };
    function.call(store, params)
}

/// Adds the imports of 0.4, which do the same as today's.
pub fn add_to_linker(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    type Caller<'a> = StoreContextMut<'a, State>;
    let name = |interface: &str| format!("steersman:policy/{interface}@{CONTRACT}");
    linker.instance(&name("failure"))?.func_wrap(
        "fail",
        |mut caller: Caller<'_>, (message,): (String,)| {
            failure::Host::fail(caller.data_mut(), message)
        },
    )?;
    linker.instance(&name("log"))?.func_wrap(
        "write",
        |mut caller: Caller<'_>, (level, line): (log::Level, String)| {
            log::Host::write(caller.data_mut(), level, line)
        },
    )?;
    let mut map = linker.instance(&name("kv"))?;
    map.func_wrap("get", |mut caller: Caller<'_>, (key,): (String,)| {
        Ok((kv::Host::get(caller.data_mut(), key)?,))
    })?;
    map.func_wrap("set", |mut caller: Caller<'_>, (key, value): (String, String)| {
        Ok((kv::Host::set(caller.data_mut(), key, value)?,))
    })?;
    map.func_wrap("delete", |mut caller: Caller<'_>, (key,): (String,)| {
        Ok((kv::Host::delete(caller.data_mut(), key)?,))
    })?;
    map.func_wrap("add", |mut caller: Caller<'_>, (key, by): (String, i64)| {
        Ok((kv::Host::add(caller.data_mut(), key, by)?,))
    })?;
    map.func_wrap("expire", |mut caller: Caller<'_>, (key, seconds): (String, u32)| {
        Ok((kv::Host::expire(caller.data_mut(), key, seconds)?,))
    })?;
    map.func_wrap(
        "list",
        |mut caller: Caller<'_>, (prefix, after, limit): (String, String, u32)| {
            Ok((kv::Host::list(caller.data_mut(), prefix, after, limit)?,))
        },
    )?;
    let mut texts = linker.instance(&name("tokenizer"))?;
    texts.func_wrap("encode", |mut caller: Caller<'_>, (text,): (String,)| {
        Ok((tokenizer::Host::encode(caller.data_mut(), text)?,))
    })?;
    texts.func_wrap("decode", |mut caller: Caller<'_>, (tokens,): (Vec<u32>,)| {
        Ok((tokenizer::Host::decode(caller.data_mut(), tokens)?,))
    })?;
    linker.instance(&name("counters"))?.func_wrap(
        "add",
        |mut caller: Caller<'_>, (name, by): (String, u64)| {
            counters::Host::add(caller.data_mut(), name, by)
        },
    )
}
