//! The policy that decides nothing: what the client asked for goes to the engine as it is.
//!
//! No loop rule and no budget of its own: a thought that loops runs to the limit of the request.
//! It is the baseline that other policies are measured against.

use steersman_policy::{Plan, Policy, Request};

/// The policy that decides nothing.
#[derive(Default)]
pub struct Passthrough;

impl Policy for Passthrough {
    fn on_request(&mut self, request: Request) -> Plan {
        Plan { thinking: request.thinking, think_budget: request.think_budget, ..Plan::default() }
    }
}

steersman_policy::export!(Passthrough);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clients_wishes_are_the_plan() {
        let request = Request { thinking: Some(true), think_budget: Some(9), ..Request::default() };
        let plan = Passthrough.on_request(request);
        assert_eq!((plan.thinking, plan.think_budget), (Some(true), Some(9)));
        assert_eq!(Passthrough.on_request(Request::default()), Plan::default());
    }
}
