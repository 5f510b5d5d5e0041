//! Contract 0.1: `wit/v0.1`, frozen. It has no imports, and fewer hooks, actions and fields.
//!
//! Parameters are borrowed: a call copies text and tokens straight into the guest's memory.

#![allow(unsafe_code, reason = "bindgen! implements wasmtime's unsafe traits for our records")]

use wasmtime::Store;
use wasmtime::component::InstancePre;

use super::{Found, Hooks, State, Version, optional};
use crate::policy as plain;

wasmtime::component::bindgen!({
    path: "../wit/v0.1",
    world: "policy",
    ownership: Borrowing { duplicate_if_necessary: true },
});

use exports::steersman::policy::{on_finish, on_request, on_step};
use steersman::policy::types as wit;

/// This version.
pub const VERSION: Version = Version {
    number: "0.1.0",
    hooks: &["on-request", "on-step", "on-finish"],
    imports: &[],
    free: &[],
    link: |_| Ok(()),
    find,
};

fn find(pre: &InstancePre<State>) -> wasmtime::Result<Found> {
    let on_request = optional(pre, "on-request", &VERSION, on_request::GuestIndices::new)?;
    let on_step = optional(pre, "on-step", &VERSION, on_step::GuestIndices::new)?;
    let on_finish = optional(pre, "on-finish", &VERSION, on_finish::GuestIndices::new)?;
    Ok(Box::new(move |store, instance| {
        Ok(Box::new(Guest {
            on_request: on_request.as_ref().map(|i| i.load(&mut *store, instance)).transpose()?,
            on_step: on_step.as_ref().map(|i| i.load(&mut *store, instance)).transpose()?,
            on_finish: on_finish.as_ref().map(|i| i.load(&mut *store, instance)).transpose()?,
        }))
    }))
}

struct Guest {
    on_request: Option<on_request::Guest>,
    on_step: Option<on_step::Guest>,
    on_finish: Option<on_finish::Guest>,
}

impl Hooks for Guest {
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
        }
    }
}

impl From<wit::Plan> for plain::Plan {
    fn from(plan: wit::Plan) -> Self {
        Self {
            thinking: plan.thinking,
            think_budget: plan.think_budget,
            answer_reserve: plan.answer_reserve,
            loops: plan.loops.map(|rule| plain::LoopRule {
                max_period: rule.max_period,
                repeats: rule.repeats,
                min_tokens: rule.min_tokens,
                similarity: rule.similarity,
            }),
            every: plan.every,
            note: plan.note,
            keep: plan.keep.map(|list| list.into_iter().map(plain::Keep::from).collect()),
            ..Self::default()
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
            wit::Action::Stop(reason) => Self::Stop(reason),
        }
    }
}
