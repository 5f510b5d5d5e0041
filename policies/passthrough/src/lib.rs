//! The baseline for measurements: the plan is what the client asked for.
//!
//! It has no budget of its own and no loop detection: reasoning that loops runs to the limit of the
//! request.

use steersman_policy::{Plan, Policy, RequestView};

/// The policy `passthrough`.
#[derive(Default)]
pub struct Passthrough;

impl Policy for Passthrough {
    fn on_request(&mut self, request: RequestView) -> Plan {
        Plan {
            reasoning: request.reasoning,
            reasoning_budget: request.reasoning_budget,
            ..Plan::default()
        }
    }
}

steersman_policy::export!(Passthrough, without on_tool_call);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plan_is_what_the_client_asked_for() {
        let request = RequestView {
            reasoning: Some(true),
            reasoning_budget: Some(9),
            ..RequestView::default()
        };
        let plan = Passthrough.on_request(request);
        assert_eq!((plan.reasoning, plan.reasoning_budget), (Some(true), Some(9)));
        assert_eq!(Passthrough.on_request(RequestView::default()), Plan::default());
    }
}
