//! The policy for agents that want strict JSON or call tools.
//!
//! - **PromptView**: what changes with every request at the front of system text (a billing header, a
//!   clock, a request's id) is taken out, so that all behind it can be reused ([`noise`]).
//! - **Thought**: short. A used-up budget closes it with the head of what the contract says comes
//!   next: a step where tools are offered, else JSON where it is asked for ([`head`]).
//! - **Loop in a thought**: rewound to where its block stood once, and a few words instead of the
//!   repeats; a further loop closes the thought ([`escape`]).
//! - **Call of a tool**: arguments that are no JSON object are written again; so is a call that was
//!   made before and got the same result each time, and one that insists ends the request
//!   ([`guard`]).
//!
//! Called for events alone (`every` = 0). All decisions are pure functions, tested natively; the
//! parameters stand in `settings.rs`.

mod escape;
mod guard;
mod head;
mod json;
mod noise;
mod settings;

use head::Form;
use settings::{Reasoning, Settings};
use steersman_policy::{
    Action, LoopReport, Phase, Plan, Policy, PromptView, Replacement, RequestView, Step,
    ToolCallView, Verdict,
};

/// Tokens that the marker and the head after a closed thought may need.
const HEAD_TOKENS: u32 = 32;

/// The policy: what it must remember of the request.
#[derive(Default)]
pub struct Agent {
    settings: Settings,
    /// Whether system text asks for JSON: seen before the prompt is rendered.
    system_wants_json: bool,
    form: Form,
    escapes: u32,
    guard: guard::Guard,
}

impl Policy for Agent {
    fn on_prompt(&mut self, prompt: PromptView) -> Vec<Replacement> {
        let (settings, _) = Settings::read(&prompt.params);
        self.system_wants_json = prompt.system.iter().any(|text| head::wants_json(text));
        settings.strip.replacements(&prompt)
    }

    fn on_request(&mut self, request: RequestView) -> Plan {
        let (settings, complaints) = Settings::read(&request.params);
        let plan = plan(&request, &settings, complaints);
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
                if is_sure(found, self.settings.answer_loop_tokens) =>
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

/// The plan of a request.
fn plan(request: &RequestView, settings: &Settings, notes: Vec<String>) -> Plan {
    let reserve = request.max_tokens.unwrap_or(settings.answer_reserve);
    let reserve = reserve.min(request.context_left / 2);
    let room = request.context_left.saturating_sub(reserve).saturating_sub(HEAD_TOKENS);
    let budget =
        request.reasoning_budget.unwrap_or(u32::MAX).min(settings.reasoning_budget).min(room);
    let reasoning = match (request.reasoning, request.reasoning_budget) {
        _ if !request.can_reason => false,
        (_, Some(0)) => false,
        (Some(wish), _) => wish,
        (None, Some(_)) => true,
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

/// Whether a loop in an answer is beyond doubt: exact, and as long as the parameter says.
fn is_sure(found: LoopReport, least_tokens: u32) -> bool {
    let tokens = found.period.saturating_mul(found.repeats);
    found.exact && least_tokens > 0 && tokens >= least_tokens
}

#[cfg(test)]
mod tests;
