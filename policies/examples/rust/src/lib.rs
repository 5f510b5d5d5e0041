//! Keeps replies brief: limits reasoning, ends the answer at a phrase, bans a token, and repairs tool
//! calls that already have a result.
//!
//! One value of [`Brief`] serves one request, so its fields are the state of that request.

use steersman_policy::{
    Action, Ban, Phase, Plan, Policy, RequestView, Step, ToolCallView, Verdict,
};

/// The policy, configured by its parameters.
pub struct Brief {
    /// Limit on reasoning tokens: the parameter `budget`.
    budget: u32,
    /// Text that ends the answer: the parameter `phrase`.
    phrase: String,
    /// A token to ban from the first step on: the parameter `ban`.
    ban: Option<u32>,
    /// The end of the answer so far, in which the phrase may begin.
    tail: String,
}

impl Default for Brief {
    fn default() -> Self {
        Self { budget: 100, phrase: String::new(), ban: None, tail: String::new() }
    }
}

impl Policy for Brief {
    fn on_request(&mut self, request: RequestView) -> Plan {
        let mut notes = Vec::new();
        if let Some(budget) = number(&request, "budget", &mut notes) {
            self.budget = budget;
        }
        self.budget = self.budget.min(request.reasoning_budget.unwrap_or(u32::MAX));
        self.ban = number(&request, "ban", &mut notes);
        self.phrase = request.param("phrase").unwrap_or_default().into();
        Plan {
            reasoning: request.reasoning,
            reasoning_budget: Some(self.budget),
            every: 8,
            note: (!notes.is_empty()).then(|| notes.join("; ")),
            ..Plan::default()
        }
    }

    fn on_step(&mut self, step: Step) -> Vec<Action> {
        let mut actions = Vec::new();
        // Once is enough: the ban holds for the rest of the reply.
        if let Some(token) = self.ban.take() {
            actions.push(Action::Ban(Ban { tokens: vec![token], steps: 0 }));
        }
        let is_long = step.budget_reached || step.reasoning_tokens >= self.budget;
        if step.phase == Phase::Reasoning && is_long {
            actions.push(Action::CloseReasoning("In short: ".into()));
        }
        if step.phase == Phase::Answer && !self.phrase.is_empty() {
            self.tail.push_str(&step.text);
            if self.tail.contains(&self.phrase) {
                actions.push(Action::Stop(format!("the answer contains `{}`", self.phrase)));
            }
            let end = self.tail.len().saturating_sub(self.phrase.len());
            self.tail.drain(..self.tail.floor_char_boundary(end));
        }
        actions
    }

    fn on_tool_call(&mut self, call: ToolCallView) -> Verdict {
        let is_answered = |earlier: &steersman_policy::EarlierCall| {
            earlier.name == call.name
                && earlier.arguments == call.digest
                && earlier.answered.is_some()
        };
        if call.earlier.iter().any(is_answered) {
            return Verdict::Repair("I have that result already: ".into());
        }
        Verdict::Accept
    }
}

steersman_policy::export!(Brief);

/// Parses a number of up to nine digits; anything else becomes a note.
fn number(request: &RequestView, name: &str, notes: &mut Vec<String>) -> Option<u32> {
    let text = request.param(name)?;
    let is_number = text.len() <= 9 && text.bytes().all(|digit| digit.is_ascii_digit());
    let number = is_number.then(|| text.parse().ok()).flatten();
    if number.is_none() {
        notes.push(format!("parameter `{name}` cannot be `{text}`"));
    }
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasoning_over_its_budget_is_closed() {
        let step = Step { phase: Phase::Reasoning, reasoning_tokens: 100, ..Step::default() };
        let close = [Action::CloseReasoning("In short: ".into())];
        assert_eq!(Brief::default().on_step(step), close);
    }

    #[test]
    fn an_answer_ends_at_the_phrase_even_if_it_arrives_in_parts() {
        let mut brief = Brief { phrase: "über Bord".into(), ..Brief::default() };
        let mut answer = |text: &str| brief.on_step(Step { text: text.into(), ..Step::default() });
        assert_eq!(answer("Er ging üb"), []);
        assert_eq!(answer("er Bo"), []);
        assert_eq!(answer("rd."), [Action::Stop("the answer contains `über Bord`".into())]);
    }
}
