//! Contract 0.2: `wit`, with all hooks, actions and imports.
//!
//! Parameters are borrowed: a call copies text and tokens straight into the guest's memory.

#![allow(unsafe_code, reason = "bindgen! implements wasmtime's unsafe traits for our records")]

use wasmtime::Store;
use wasmtime::component::{HasSelf, InstancePre, Linker};

use super::{Found, Hooks, State, Version, optional};
use crate::config::Grant;
use crate::policy as plain;
use crate::policy::wasm::imports::Level;
use crate::policy::wasm::kv::Refusal;

wasmtime::component::bindgen!({
    path: "../wit",
    world: "policy-with-host",
    ownership: Borrowing { duplicate_if_necessary: true },
    imports: { default: trappable },
});

use exports::steersman::policy::{on_finish, on_prompt, on_request, on_step, on_tool_call};
use steersman::policy::types as wit;
use steersman::policy::{counters, failure, kv, log, tokenizer};

/// This version.
pub const VERSION: Version = Version {
    number: "0.2.0",
    hooks: &["on-prompt", "on-request", "on-step", "on-tool-call", "on-finish"],
    imports: &Grant::ALL,
    free: &["failure"],
    link,
    find,
};

/// As [`super::LIST_BYTES`]: as many actions as there may be, each a bias of as many tokens as it may
/// name. No other list is longer.
pub const LIST_BYTES: usize =
    plain::ACTIONS * (size_of::<wit::Action>() + plain::TOKENS * size_of::<wit::TokenBias>());

fn link(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    failure::add_to_linker::<_, HasSelf<State>>(linker, |state| state)?;
    log::add_to_linker::<_, HasSelf<State>>(linker, |state| state)?;
    kv::add_to_linker::<_, HasSelf<State>>(linker, |state| state)?;
    tokenizer::add_to_linker::<_, HasSelf<State>>(linker, |state| state)?;
    counters::add_to_linker::<_, HasSelf<State>>(linker, |state| state)
}

fn find(pre: &InstancePre<State>) -> wasmtime::Result<Found> {
    let on_prompt = optional(pre, "on-prompt", &VERSION, on_prompt::GuestIndices::new)?;
    let on_request = optional(pre, "on-request", &VERSION, on_request::GuestIndices::new)?;
    let on_step = optional(pre, "on-step", &VERSION, on_step::GuestIndices::new)?;
    let on_tool_call = optional(pre, "on-tool-call", &VERSION, on_tool_call::GuestIndices::new)?;
    let on_finish = optional(pre, "on-finish", &VERSION, on_finish::GuestIndices::new)?;
    Ok(Box::new(move |store, instance| {
        Ok(Box::new(Guest {
            on_prompt: on_prompt.as_ref().map(|i| i.load(&mut *store, instance)).transpose()?,
            on_request: on_request.as_ref().map(|i| i.load(&mut *store, instance)).transpose()?,
            on_step: on_step.as_ref().map(|i| i.load(&mut *store, instance)).transpose()?,
            on_tool_call: on_tool_call
                .as_ref()
                .map(|i| i.load(&mut *store, instance))
                .transpose()?,
            on_finish: on_finish.as_ref().map(|i| i.load(&mut *store, instance)).transpose()?,
        }))
    }))
}

struct Guest {
    on_prompt: Option<on_prompt::Guest>,
    on_request: Option<on_request::Guest>,
    on_step: Option<on_step::Guest>,
    on_tool_call: Option<on_tool_call::Guest>,
    on_finish: Option<on_finish::Guest>,
}

impl Hooks for Guest {
    fn on_prompt(
        &self,
        store: &mut Store<State>,
        prompt: &plain::PromptView,
    ) -> wasmtime::Result<Vec<plain::Replacement>> {
        let Some(guest) = &self.on_prompt else { return Ok(Vec::new()) };
        let params: Vec<_> = prompt.params.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let system: Vec<_> = prompt.system.iter().map(String::as_str).collect();
        let prompt = wit::Prompt { profile: &prompt.profile, params: &params, system: &system };
        let replacements = guest.call_on_prompt(store, prompt)?;
        Ok(replacements.into_iter().map(plain::Replacement::from).collect())
    }

    fn on_request(
        &self,
        store: &mut Store<State>,
        request: &plain::RequestView,
    ) -> wasmtime::Result<plain::Plan> {
        let Some(guest) = &self.on_request else { return Ok(plain::Plan::default()) };
        let params: Vec<_> = request.params.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let tools: Vec<_> = request.tools.iter().map(String::as_str).collect();
        let request = wit::Request {
            id: &request.id,
            profile: &request.profile,
            model: &request.model,
            family: &request.family,
            params: &params,
            prompt_tokens: request.prompt_tokens,
            context_left: request.context_left,
            messages: request.messages,
            system_chars: request.system_chars,
            user: &request.user,
            tools: &tools,
            can_think: request.can_think,
            thinking: request.thinking,
            think_budget: request.think_budget,
            max_tokens: request.max_tokens,
            sampling: request.sampling.into(),
            seed: request.seed,
        };
        Ok(guest.call_on_request(store, request)?.into())
    }

    fn on_step(
        &self,
        store: &mut Store<State>,
        step: &plain::Step,
    ) -> wasmtime::Result<Vec<plain::Action>> {
        let Some(guest) = &self.on_step else { return Ok(Vec::new()) };
        let actions = guest.call_on_step(store, step.into())?;
        Ok(actions.into_iter().map(plain::Action::from).collect())
    }

    fn on_tool_call(
        &self,
        store: &mut Store<State>,
        call: &plain::ToolCallView,
    ) -> wasmtime::Result<plain::Verdict> {
        let Some(guest) = &self.on_tool_call else { return Ok(plain::Verdict::Accept) };
        let earlier: Vec<_> = call.earlier.iter().map(wit::EarlierCall::from).collect();
        let call = wit::ToolCall {
            name: &call.name,
            arguments: &call.arguments,
            digest: &call.digest,
            index: call.index,
            earlier: &earlier,
        };
        Ok(guest.call_on_tool_call(store, call)?.into())
    }

    fn on_finish(
        &self,
        store: &mut Store<State>,
        summary: &plain::Summary,
    ) -> wasmtime::Result<()> {
        let Some(guest) = &self.on_finish else { return Ok(()) };
        guest.call_on_finish(store, summary.into())
    }
}

impl<'a> From<&'a plain::Step> for wit::Step<'a> {
    fn from(step: &'a plain::Step) -> Self {
        Self {
            index: step.index,
            phase: match step.phase {
                plain::Phase::Think => wit::Phase::Think,
                plain::Phase::Answer => wit::Phase::Answer,
                plain::Phase::ToolCall => wit::Phase::ToolCall,
            },
            think_tokens: step.think_tokens,
            answer_tokens: step.answer_tokens,
            think_left: step.think_left,
            tokens: &step.tokens,
            text: &step.text,
            loop_found: step.loop_found.map(|found| wit::LoopReport {
                period: found.period,
                repeats: found.repeats,
                exact: found.exact,
            }),
            budget_reached: step.budget_reached,
        }
    }
}

impl<'a> From<&'a plain::Summary> for wit::Summary<'a> {
    fn from(summary: &'a plain::Summary) -> Self {
        Self {
            reason: &summary.reason,
            prompt_tokens: summary.prompt_tokens,
            think_tokens: summary.think_tokens,
            answer_tokens: summary.answer_tokens,
            loops: summary.loops,
            tool_calls: summary.tool_calls,
        }
    }
}

impl From<wit::Plan> for plain::Plan {
    fn from(plan: wit::Plan) -> Self {
        Self {
            thinking: plan.thinking,
            think_budget: plan.think_budget,
            answer_reserve: plan.answer_reserve,
            sampling: plan.sampling.into(),
            loops: plan.loops.map(|rule| plain::LoopRule {
                max_period: rule.max_period,
                repeats: rule.repeats,
                min_tokens: rule.min_tokens,
                similarity: rule.similarity,
            }),
            every: plan.every,
            checkpoint_every: plan.checkpoint_every,
            note: plan.note,
            keep: plan.keep.map(|list| list.into_iter().map(plain::Keep::from).collect()),
        }
    }
}

impl From<wit::Keep> for plain::Keep {
    fn from(keep: wit::Keep) -> Self {
        Self {
            at: match keep.at {
                wit::Anchor::System => plain::Anchor::System,
                wit::Anchor::Turns => plain::Anchor::Turns,
                wit::Anchor::Prompt => plain::Anchor::Prompt,
                wit::Anchor::Reply => plain::Anchor::Reply,
            },
            seconds: keep.seconds.min(plain::KEEP_SECONDS),
        }
    }
}

impl From<wit::Action> for plain::Action {
    fn from(action: wit::Action) -> Self {
        match action {
            wit::Action::Inject(text) => Self::Inject(text),
            wit::Action::CloseThinking(text) => Self::CloseThinking(text),
            wit::Action::Rewind(tokens) => Self::Rewind(tokens),
            wit::Action::Ban(ban) => Self::Ban(plain::Ban { tokens: ban.tokens, steps: ban.steps }),
            wit::Action::Bias(bias) => {
                let plain =
                    |one: wit::TokenBias| plain::TokenBias { token: one.token, bias: one.bias };
                let tokens = bias.tokens.into_iter().map(plain).collect();
                Self::Bias(plain::Bias { tokens, steps: bias.steps })
            }
            wit::Action::Sampling(resample) => Self::Sampling(plain::Resample {
                sampling: resample.sampling.into(),
                steps: resample.steps,
            }),
            wit::Action::Stop(reason) => Self::Stop(reason),
        }
    }
}

impl From<wit::Verdict> for plain::Verdict {
    fn from(verdict: wit::Verdict) -> Self {
        match verdict {
            wit::Verdict::Accept => Self::Accept,
            wit::Verdict::Repair(text) => Self::Repair(text),
            wit::Verdict::Stop(reason) => Self::Stop(reason),
        }
    }
}

impl From<wit::Replacement> for plain::Replacement {
    fn from(replacement: wit::Replacement) -> Self {
        let wit::Replacement { message, old, new } = replacement;
        Self { message, old, new }
    }
}

impl From<wit::Sampling> for plain::SamplingChange {
    fn from(sampling: wit::Sampling) -> Self {
        let wit::Sampling { temperature, top_p, top_k, min_p } = sampling;
        Self { temperature, top_p, top_k, min_p }
    }
}

impl From<plain::SamplingChange> for wit::Sampling {
    fn from(sampling: plain::SamplingChange) -> Self {
        let plain::SamplingChange { temperature, top_p, top_k, min_p } = sampling;
        Self { temperature, top_p, top_k, min_p }
    }
}

impl<'a> From<&'a plain::EarlierCall> for wit::EarlierCall<'a> {
    fn from(call: &'a plain::EarlierCall) -> Self {
        Self { name: &call.name, arguments: &call.arguments, answered: call.answered.as_deref() }
    }
}

impl failure::Host for State {
    fn fail(&mut self, why: String) -> wasmtime::Result<()> {
        Err(self.fail(&why))
    }
}

impl log::Host for State {
    fn write(&mut self, level: log::Level, line: String) -> wasmtime::Result<()> {
        let level = match level {
            log::Level::Debug => Level::Debug,
            log::Level::Info => Level::Info,
            log::Level::Warn => Level::Warn,
        };
        self.call("log.write", |imports| imports.log(level, &line))
    }
}

impl kv::Host for State {
    fn get(&mut self, key: String) -> wasmtime::Result<Option<String>> {
        self.call("kv.get", |imports| imports.get(key))
    }

    fn set(&mut self, key: String, value: String) -> wasmtime::Result<Result<(), kv::Refusal>> {
        let answer = self.call("kv.set", |imports| imports.set(key, value))?;
        Ok(answer.map_err(|refusal| match refusal {
            Refusal::BadKey => kv::Refusal::BadKey,
            Refusal::Full => kv::Refusal::Full,
        }))
    }

    fn delete(&mut self, key: String) -> wasmtime::Result<bool> {
        self.call("kv.delete", |imports| imports.delete(key))
    }
}

impl tokenizer::Host for State {
    fn encode(&mut self, text: String) -> wasmtime::Result<Vec<u32>> {
        self.call("tokenizer.encode", |imports| imports.encode(text))
    }

    fn decode(&mut self, tokens: Vec<u32>) -> wasmtime::Result<String> {
        self.call("tokenizer.decode", |imports| imports.decode(&tokens))
    }
}

impl counters::Host for State {
    fn add(&mut self, name: String, by: u64) -> wasmtime::Result<()> {
        self.call("counters.add", |imports| imports.count(&name, by))
    }
}
