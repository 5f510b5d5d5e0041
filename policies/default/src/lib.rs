//! The policy `default`: enables or disables reasoning, limits it, and closes it if it loops or uses up
//! its budget.
//!
//! - **Prompt**: the line `x-anthropic-billing-header: ...` at the front of system text, which differs
//!   between conversations, is removed, so that the prefix after it can be reused.
//! - **Reasoning**: an explicit choice of the client takes precedence. Otherwise a short question about
//!   a long system text enables reasoning (needle routing: models that answer such questions at once
//!   tend to refuse, or to miss the passage). Otherwise the parameter `reasoning` decides.
//! - **Budget**: the smallest of the client's, the configured one, and what context and limits leave beside
//!   the tokens reserved for the answer. A limit that counts the answer alone takes nothing from it.
//! - **Loops**: a loop or a used-up budget closes the reasoning, with a hint for the kind of answer that
//!   the user asked for. A long exact loop in an answer ends the request.
//!
//! `every` is 0, so the policy costs nothing between events. Decisions are pure functions, tested
//! natively; `settings.rs` has the parameters.

mod hint;
mod settings;
mod task;

use settings::{Reasoning, Settings};
use steersman_policy::{
    Action, LoopReport, Phase, Plan, Policy, PromptEdit, PromptView, RequestView, Step,
    is_billing_header,
};

/// Tokens reserved for the marker and the hint that close the reasoning.
const HINT_TOKENS: u32 = 32;

/// Reasoning with room for fewer tokens is disabled, unless the client asked for it.
const MIN_REASONING: u32 = 64;

/// Number of lines of each system text that are examined for a billing header.
const BILLING_LINES: usize = 4;

/// The policy `default`, with the state of one request.
#[derive(Default)]
pub struct DefaultPolicy {
    settings: Settings,
    has_tools: bool,
    user: String,
}

impl Policy for DefaultPolicy {
    fn on_prompt(&mut self, prompt: PromptView) -> Vec<PromptEdit> {
        prompt.edit_lines(BILLING_LINES, |line| is_billing_header(line).then(String::new))
    }

    fn on_request(&mut self, request: RequestView) -> Plan {
        let (settings, problems) = Settings::read(&request);
        let plan = plan(&request, &settings, problems);
        *self = Self { settings, has_tools: !request.tools.is_empty(), user: request.user };
        plan
    }

    fn on_step(&mut self, step: Step) -> Vec<Action> {
        match step.phase {
            Phase::Reasoning if step.budget_reached || step.loop_found.is_some() => {
                let hint = hint::hint(&self.settings, self.has_tools, &self.user);
                vec![Action::CloseReasoning(hint)]
            }
            Phase::Reasoning => Vec::new(),
            Phase::Answer | Phase::ToolCall => match step.loop_found {
                Some(found) if is_certain(found, self.settings.answer_loop_tokens) => {
                    vec![Action::Stop("the answer is a loop".into())]
                }
                _ => Vec::new(),
            },
        }
    }
}

steersman_policy::export!(DefaultPolicy, without on_tool_call);

/// The plan for a request.
fn plan(request: &RequestView, settings: &Settings, mut notes: Vec<String>) -> Plan {
    let (room, reserve) = request.divide_tokens(settings.answer_reserve, HINT_TOKENS);
    let mut budget =
        request.reasoning_budget.unwrap_or(u32::MAX).min(settings.reasoning_budget).min(room);
    let reasoning = match client_choice(request) {
        _ if !request.can_reason => false,
        Some(choice) => choice,
        None if room < MIN_REASONING => {
            notes.push("reasoning disabled: context or max_tokens leave no room for it".into());
            false
        }
        None if is_needle(request, settings) => {
            budget = budget.min(settings.needle_reasoning_budget);
            notes.push("reasoning enabled: short question about a long system text".into());
            true
        }
        None => settings.reasoning != Reasoning::Off,
    };
    Plan {
        reasoning: Some(reasoning),
        reasoning_budget: Some(budget),
        answer_reserve: Some(reserve),
        loops: Some(settings.loops),
        note: (!notes.is_empty()).then(|| notes.join("; ")),
        ..Plan::default()
    }
}

/// Whether the client asked for reasoning. A budget of 0 disables reasoning, and any other budget alone
/// enables it.
fn client_choice(request: &RequestView) -> Option<bool> {
    match (request.reasoning, request.reasoning_budget) {
        (_, Some(0)) => Some(false),
        (None, Some(_)) => Some(true),
        (reasoning, _) => reasoning,
    }
}

/// Whether this is a short question about a long system text.
fn is_needle(request: &RequestView, settings: &Settings) -> bool {
    settings.needle_system_chars > 0
        && request.system_chars > settings.needle_system_chars
        && request.user.chars().count() < settings.needle_user_chars as usize
        && is_question(&request.user)
}

/// Whether a text contains a question mark or begins with a word that asks.
fn is_question(text: &str) -> bool {
    #[rustfmt::skip]
    const ASKING: &[&str] = &[
        "what", "who", "whose", "whom", "which", "when", "where", "why", "how", "is", "are", "does",
        "do", "did", "can", "find", "tell", "give", "name", "was", "wer", "wessen", "wo", "wann",
        "warum", "wie", "welche", "welcher", "welches", "nenne", "quel", "quelle", "qui", "où",
        "quand", "comment", "pourquoi", "qué", "cuál", "quién", "dónde", "cuándo", "chi", "cosa",
        "quale", "dove", "quando",
    ];
    if text.contains(['?', '？', '؟', '¿']) {
        return true;
    }
    let first = text.split(|c: char| !c.is_alphanumeric()).find(|word| !word.is_empty());
    first.is_some_and(|word| ASKING.contains(&word.to_lowercase().as_str()))
}

/// Whether a loop is exact and covers at least `min_tokens` tokens; never if that is 0.
fn is_certain(found: LoopReport, min_tokens: u32) -> bool {
    let tokens = found.period.saturating_mul(found.repeats);
    found.exact && min_tokens > 0 && tokens >= min_tokens
}

#[cfg(test)]
mod tests;
