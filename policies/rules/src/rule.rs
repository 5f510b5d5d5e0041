//! One rule, read and checked.

use steersman_policy::{Action, Plan, Step, Verdict};

use super::when::When;

/// A rule.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    /// What must hold.
    pub when: When,
    /// What happens then.
    pub act: Act,
    /// How often in a request; 0 is every time.
    pub times: u32,
}

/// What a rule does: at one of the moments that a policy is asked.
#[derive(Debug, Clone, PartialEq)]
pub enum Act {
    /// Before the prompt is rendered: takes these out of system text.
    Prompt {
        /// Where they stand first.
        spans: Vec<String>,
        /// Lines that begin so.
        lines: Vec<String>,
    },
    /// Before anything runs: what is set here is planned so.
    Request(Box<Plan>),
    /// While tokens are drawn.
    Step(Vec<Deed>),
    /// When a tool is called.
    Tool(Verdict),
}

/// An action, or one that depends on the step.
#[derive(Debug, Clone, PartialEq)]
pub enum Deed {
    /// This action.
    Do(Action),
    /// Back to where the loop's block stood once.
    RewindLoop,
}

impl Rule {
    /// Whether it has acted as often as it may.
    pub fn is_used_up(&self, acted: u32) -> bool {
        self.times > 0 && acted >= self.times
    }
}

impl Deed {
    /// Whether it goes back.
    pub fn rewinds(&self) -> bool {
        matches!(self, Self::RewindLoop | Self::Do(Action::Rewind(_)))
    }

    /// Whether it says how the reply goes on.
    pub fn leads(&self) -> bool {
        self.rewinds() || matches!(self, Self::Do(Action::Inject(_) | Action::CloseReasoning(_)))
    }

    /// Whether it ends the request.
    pub fn stops(&self) -> bool {
        matches!(self, Self::Do(Action::Stop(_)))
    }

    /// What it is in a step; nothing where there is no loop to go back in.
    pub fn action(&self, step: &Step) -> Option<Action> {
        match self {
            Self::Do(action) => Some(action.clone()),
            Self::RewindLoop => step.loop_found.map(|found| {
                Action::Rewind(found.period.saturating_mul(found.repeats.saturating_sub(1)))
            }),
        }
    }
}
