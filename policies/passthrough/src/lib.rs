//! The policy that decides nothing: what the client asked for goes to the engine as it is.
//!
//! No loop rule and no budget of its own: a thought that loops runs to the limit of the request.
//! It is the baseline that other policies are measured against.

use steersman_policy::{Plan, Policy, RequestView};

/// The policy that decides nothing.
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

steersman_policy::export!(Passthrough);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clients_wishes_are_the_plan() {
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
