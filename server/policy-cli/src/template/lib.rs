//! Closes reasoning that becomes long.
//!
//! One value of [`MyPolicy`] serves one request, so its fields are the state of that request.

use steersman_policy::{Action, Phase, Plan, Policy, RequestView, Step};

/// Limit on reasoning tokens.
const REASONING_TOKENS: u32 = 1024;

/// The policy.
#[derive(Default)]
pub struct MyPolicy;

impl Policy for MyPolicy {
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
// export!(MyPolicy) has the former, export!(MyPolicy, with on_text) both.
steersman_policy::export!(MyPolicy, without on_tool_call);

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
        assert_eq!(MyPolicy.on_step(step(1023)), []);
        assert_eq!(MyPolicy.on_step(step(1024)), [Action::CloseReasoning("In short: ".into())]);
    }
}
