//! The policy that ships as `default`: decides whether a request thinks and how long, and leads a
//! thought that is a loop, or too long, to the answer.
//!
//! - **Reasoning**: an explicit wish of the client counts. Else a short question to a long system
//!   text thinks (needle routing: models that answer at once tend to refuse or miss what they
//!   would find by reasoning). Else the parameter `reasoning` decides.
//! - **Budget**: the smallest of the client's, the configured one, and what the context leaves
//!   beside the answer's reserve, so that an answer always fits.
//! - **Loops and used-up budgets** in a thought close it with a hint typed by task; a sure loop in
//!   an answer ends the request.
//!
//! Called for events alone (`every` = 0), so it costs nothing in the steps between. All decisions
//! are pure functions, tested natively; the parameters stand in `settings.rs`.

mod hint;
mod settings;
mod task;

use settings::{Reasoning, Settings};
use steersman_policy::{Action, LoopReport, Phase, Plan, Policy, RequestView, Step};

/// Tokens that the marker and the hint after a closed thought may need.
const HINT_TOKENS: u32 = 32;

/// A thought with room for fewer tokens is not begun, unless the client asked for it.
const LEAST_THOUGHT: u32 = 64;

/// The default policy: what it must remember of the request.
#[derive(Default)]
pub struct DefaultPolicy {
    settings: Settings,
    has_tools: bool,
    user: String,
}

impl Policy for DefaultPolicy {
    fn on_request(&mut self, request: RequestView) -> Plan {
        let (settings, complaints) = Settings::read(&request);
        let plan = plan(&request, &settings, complaints);
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
                Some(found) if is_sure(found, self.settings.answer_loop_tokens) => {
                    vec![Action::Stop("the answer is a loop".into())]
                }
                _ => Vec::new(),
            },
        }
    }
}

steersman_policy::export!(DefaultPolicy);

/// The plan of a request.
fn plan(request: &RequestView, settings: &Settings, mut notes: Vec<String>) -> Plan {
    let reserve = request.max_tokens.unwrap_or(settings.answer_reserve);
    let reserve = reserve.min(request.context_left / 2);
    let room = request.context_left.saturating_sub(reserve).saturating_sub(HINT_TOKENS);
    let mut budget =
        request.reasoning_budget.unwrap_or(u32::MAX).min(settings.reasoning_budget).min(room);
    let reasoning = match wish(request) {
        _ if !request.can_reason => false,
        Some(wish) => wish,
        None if room < LEAST_THOUGHT => {
            notes.push("no thought: the context is almost full".into());
            false
        }
        None if is_needle(request, settings) => {
            budget = budget.min(settings.needle_reasoning_budget);
            notes.push("reasoning: short question about a long system text".into());
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

/// What the client says about reasoning: a budget of 0 is a wish for no thought, any other budget
/// one for a thought.
fn wish(request: &RequestView) -> Option<bool> {
    match (request.reasoning, request.reasoning_budget) {
        (_, Some(0)) => Some(false),
        (None, Some(_)) => Some(true),
        (reasoning, _) => reasoning,
    }
}

/// Whether a short question asks for something in a long system text.
fn is_needle(request: &RequestView, settings: &Settings) -> bool {
    settings.needle_system_chars > 0
        && request.system_chars > settings.needle_system_chars
        && request.user.chars().count() < settings.needle_user_chars as usize
        && is_question(&request.user)
}

/// Whether a text asks something: by its mark, or by its first word.
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

/// Whether a loop in an answer is beyond doubt: exact, and as long as the parameter says.
fn is_sure(found: LoopReport, least_tokens: u32) -> bool {
    let tokens = found.period.saturating_mul(found.repeats);
    found.exact && least_tokens > 0 && tokens >= least_tokens
}

#[cfg(test)]
mod tests;
