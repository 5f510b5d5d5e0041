//! A rule, parsed and checked.

use steersman_policy::{Action, Plan, Step, Verdict};

use super::pack;
use super::when::Condition;

/// A rule.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    /// All must hold.
    pub when: Vec<Condition>,
    pub effect: Effect,
    /// How often it applies in a request; 0 is every time.
    pub times: u32,
}

/// What a rule does, in one of the hooks.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// In `on-prompt`: removes text from system text.
    Prompt {
        /// Spans, of which the first occurrence is removed.
        spans: Vec<String>,
        /// Prefixes of lines.
        lines: Vec<String>,
    },
    /// In `on-request`: the values set here go into the plan.
    Request(Box<Plan>),
    /// In `on-step`.
    Step(Vec<StepEffect>),
    /// In `on-tool-call`.
    ToolCall(Verdict),
    /// In `on-step`, packed: it is unpacked when the rule applies. Few rules do.
    PackedStep { packed: &'static str, rewinds: bool },
    /// In `on-tool-call`, packed.
    PackedToolCall(&'static str),
}

/// An action, or one that depends on the step.
#[derive(Debug, Clone, PartialEq)]
pub enum StepEffect {
    /// A fixed action.
    Do(Action),
    /// A rewind to the first block of the loop.
    RewindLoop,
}

impl Rule {
    /// Whether it has applied as often as it may.
    pub fn is_exhausted(&self, applied: u32) -> bool {
        self.times > 0 && applied >= self.times
    }
}

impl Effect {
    /// Whether it may rewind.
    pub fn rewinds(&self) -> bool {
        match self {
            Self::Step(effects) => effects.iter().any(StepEffect::rewinds),
            Self::PackedStep { rewinds, .. } => *rewinds,
            _ => false,
        }
    }

    /// Unpacks an effect that was left packed. One that cannot be read does nothing: `on-params` packed it.
    pub fn unpack(&mut self) {
        match *self {
            Self::PackedStep { packed, .. } => {
                *self = pack::effect(packed).unwrap_or(Self::Step(Vec::new()))
            }
            Self::PackedToolCall(packed) => {
                *self = pack::effect(packed).unwrap_or(Self::Step(Vec::new()))
            }
            _ => {}
        }
    }
}

impl StepEffect {
    pub fn rewinds(&self) -> bool {
        matches!(self, Self::RewindLoop | Self::Do(Action::Rewind(_)))
    }

    /// Whether it changes the text from which the reply continues.
    pub fn redirects(&self) -> bool {
        self.rewinds() || matches!(self, Self::Do(Action::Inject(_) | Action::CloseReasoning(_)))
    }

    pub fn stops(&self) -> bool {
        matches!(self, Self::Do(Action::Stop(_)))
    }

    /// Its action for a step; `None` for a rewind of a loop without a loop.
    pub fn action(&self, step: &Step) -> Option<Action> {
        match self {
            Self::Do(action) => Some(action.clone()),
            Self::RewindLoop => step.loop_found.map(|found| {
                Action::Rewind(found.period.saturating_mul(found.repeats.saturating_sub(1)))
            }),
        }
    }
}
