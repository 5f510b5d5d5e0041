//! The typed bindings of `wit/`, and how its records become those of [`crate::policy`].
//!
//! Parameters are borrowed: a call copies text and tokens straight into the guest's memory.

#![allow(unsafe_code, reason = "bindgen! implements wasmtime's unsafe traits for our records")]

use crate::policy as plain;

wasmtime::component::bindgen!({
    path: "../wit/v0.1",
    world: "policy",
    ownership: Borrowing { duplicate_if_necessary: true },
});

pub use steersman::policy::types::Action;
use steersman::policy::types::{self as wit};

/// Calls `f` with the request as the guest gets it. A closure, since the lists of pairs and names
/// must outlive the record that borrows them.
pub fn with_request<T>(request: &plain::RequestView, f: impl FnOnce(wit::Request<'_>) -> T) -> T {
    let params: Vec<_> = request.params.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    let tools: Vec<_> = request.tools.iter().map(String::as_str).collect();
    f(wit::Request {
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
    })
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

impl From<Action> for plain::Action {
    fn from(action: Action) -> Self {
        match action {
            Action::Inject(text) => Self::Inject(text),
            Action::CloseThinking(text) => Self::CloseThinking(text),
            Action::Stop(reason) => Self::Stop(reason),
        }
    }
}

/// Bytes of text in an action.
pub fn action_bytes(action: &Action) -> usize {
    match action {
        Action::Inject(text) | Action::CloseThinking(text) | Action::Stop(text) => text.len(),
    }
}
