//! Closes reasoning that becomes long.
//!
//! One value of [`TYPE`] serves one request, so its fields are the state of that request.

use steersman_policy::{Action, Phase, Plan, Policy, RequestView, Step};

/// Limit on reasoning tokens.
const REASONING_TOKENS: u32 = 1024;

/// The policy.
#[derive(Default)]
pub struct TYPE;

impl Policy for TYPE {
    fn on_request(&mut self, request: RequestView) -> Plan {
        Plan { reasoning: request.reasoning, every: 16, ..Plan::default() }
    }

    fn on_step(&mut self, step: Step) -> Vec<Action> {
        let is_long = step.reasoning_tokens >= REASONING_TOKENS;
        if step.phase == Phase::Reasoning && is_long {
            return vec![Action::CloseReasoning("In short: ".into())];
        }
        Vec::new()
    }
}

// The hooks of the component. `on_tool_call` is left out, and `on_text` is not there, until they are named here:
// export!(TYPE) has the former, export!(TYPE, with on_text) both.
steersman_policy::export!(TYPE, without on_tool_call);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_reasoning_is_closed() {
        let step = |reasoning_tokens| Step {
            phase: Phase::Reasoning,
            reasoning_tokens,
            ..Step::default()
        };
        assert_eq!(TYPE.on_step(step(1023)), []);
        assert_eq!(TYPE.on_step(step(1024)), [Action::CloseReasoning("In short: ".into())]);
    }
}
