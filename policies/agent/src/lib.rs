//! The policy `agent`, for agents that parse strict JSON or call tools.
//!
//! - **Prompt**: text at the front of system text that changes with every request (a billing header, a
//!   clock, a request id) is removed, so that the prefix after it can be reused ([`noise`]).
//! - **Reasoning**: short. A used-up budget closes it with the beginning of what follows: a call or an
//!   answer if the request has tools, otherwise JSON if it was asked for ([`head`]).
//! - **Loop in reasoning**: rewound to its first block, with a few words in place of the repeats; the
//!   next loop closes the reasoning ([`escape`]).
//! - **Tool call**: a call with malformed arguments is repaired; so is a call that was made before and
//!   got the same result each time, and if the model insists, the request ends ([`guard`]).
//!
//! `every` is 0, so the policy costs nothing between events. Decisions are pure functions, tested
//! natively; `settings.rs` has the parameters.

mod escape;
mod guard;
mod head;
mod json;
mod noise;
mod settings;

use head::Form;
use settings::{Reasoning, Settings};
use steersman_policy::{
    Action, LoopReport, Phase, Plan, Policy, PromptEdit, PromptView, RequestView, Step,
    ToolCallView, Verdict,
};

/// Tokens reserved for the marker and the head that close the reasoning.
const HEAD_TOKENS: u32 = 32;

/// Reasoning with room for fewer tokens is disabled, unless the client asked for it.
const MIN_REASONING: u32 = 64;

/// The policy `agent`, with the state of one request.
#[derive(Default)]
pub struct Agent {
    settings: Settings,
    /// Whether system text asks for JSON; set by `on_prompt`.
    system_wants_json: bool,
    form: Form,
    escapes: u32,
    guard: guard::Guard,
}

impl Policy for Agent {
    fn on_prompt(&mut self, prompt: PromptView) -> Vec<PromptEdit> {
        let (settings, _) = Settings::read(&prompt.params);
        self.system_wants_json = prompt.system.iter().any(|text| head::wants_json(text));
        settings.strip.edits(&prompt)
    }

    fn on_request(&mut self, request: RequestView) -> Plan {
        let (settings, problems) = Settings::read(&request.params);
        let plan = plan(&request, &settings, problems);
        let wants_json = self.system_wants_json || head::wants_json(&request.user);
        self.form = head::form(settings.answer, !request.tools.is_empty(), wants_json);
        self.settings = settings;
        plan
    }

    fn on_step(&mut self, step: Step) -> Vec<Action> {
        match (step.phase, step.loop_found) {
            (Phase::Reasoning, Some(found))
                if !step.budget_reached && self.escapes < self.settings.escapes =>
            {
                self.escapes += 1;
                escape::actions(found, &step.tokens, &self.settings.escape_text)
            }
            (Phase::Reasoning, found) if step.budget_reached || found.is_some() => {
                vec![Action::CloseReasoning(head::text(self.form, &self.settings).into())]
            }
            (Phase::Answer | Phase::ToolCall, Some(found))
                if is_certain(found, self.settings.answer_loop_tokens) =>
            {
                vec![Action::Stop("the answer is a loop".into())]
            }
            _ => Vec::new(),
        }
    }

    fn on_tool_call(&mut self, call: ToolCallView) -> Verdict {
        self.guard.judge(&call, &self.settings)
    }
}

steersman_policy::export!(Agent);

/// The plan for a request.
fn plan(request: &RequestView, settings: &Settings, mut notes: Vec<String>) -> Plan {
    let (room, reserve) = request.divide_tokens(settings.answer_reserve, HEAD_TOKENS);
    let budget =
        request.reasoning_budget.unwrap_or(u32::MAX).min(settings.reasoning_budget).min(room);
    let reasoning = match (request.reasoning, request.reasoning_budget) {
        _ if !request.can_reason => false,
        (_, Some(0)) => false,
        (Some(choice), _) => choice,
        (None, Some(_)) => true,
        (None, None) if room < MIN_REASONING => {
            notes.push("reasoning disabled: context or max_tokens leave no room for it".into());
            false
        }
        (None, None) => settings.reasoning == Reasoning::On,
    };
    Plan {
        reasoning: Some(reasoning),
        reasoning_budget: Some(budget),
        answer_reserve: Some(reserve),
        loops: Some(settings.loops),
        checkpoint_every: if settings.escapes > 0 { settings.checkpoint_every } else { 0 },
        note: (!notes.is_empty()).then(|| notes.join("; ")),
        ..Plan::default()
    }
}

/// Whether a loop is exact and covers at least `min_tokens` tokens; never if that is 0.
fn is_certain(found: LoopReport, min_tokens: u32) -> bool {
    let tokens = found.period.saturating_mul(found.repeats);
    found.exact && min_tokens > 0 && tokens >= min_tokens
}

#[cfg(test)]
mod tests;
