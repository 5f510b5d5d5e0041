//! Asks policies what a file of questions and expected answers asks, without a model.
//!
//! The file is JSON, an object a line. What a hook is asked stands in `input`, with the names of
//! [`super::RequestView`] and its like, and fields that are not there have the value that says nothing
//! (zero, empty, `false`, `null`); what it shall answer stands in `answer`:
//!
//! ```json
//! {"case":"a thought over its budget is closed","hook":"on-request","input":{"params":{"budget":"100"}},"answer":{"think_budget":100}}
//! {"hook":"on-step","input":{"phase":"think","budget_reached":true},"answer":[{"close-thinking":"In short: "}]}
//! {"hook":"on-tool-call","input":{"name":"search","arguments":"{}"},"answer":"accept"}
//! {"hook":"on-finish","input":{"reason":"stop"}}
//! ```
//!
//! - `case` names what is shown, and begins a new instance of the policy. So does `on-prompt`, and
//!   `on-request` after anything but `on-prompt`.
//! - Of the answer of `on-request` only the fields that are given count; other answers count whole. A
//!   line without `answer` only calls. With `error` (a text, or `true`) the hook shall fail, and the
//!   rest of its case is not asked.
//! - What is recorded of real requests ([`super::trace`]) is such a file. Its lines belong together by
//!   `request`, `policy` and `link`; what the policy's imports answered then is in `imports`, and they
//!   answer so again. Lines that the native policy answered (`replaced`) are not asked.
//! - `answer` may be masked, and calls may be missing: then nothing that is replayed is what happened
//!   ([`Golden::inexact`]).

mod file;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use super::trace::Hook;
use super::wasm::{Component, Instance, Scene};
use super::{
    Action, Plan, Policy, PromptView, Replacement, RequestView, Step, Summary, ToolCallView,
    Verdict, no_vocabulary,
};
use crate::error::{Error, Result};

pub use file::Golden;

/// Most failures that [`check`] tells of.
const FAILURES: usize = 8;

/// Asks `component` all that `golden` (JSON, a question a line) asks; the number of cases. What stands
/// there of other policies, by name, is asked all the same.
///
/// # Errors
/// [`crate::Error::Policy`] names the line, what was expected and what came.
pub fn check(component: &Arc<Component>, golden: &str) -> Result<usize> {
    let refuse = |problem| Error::Policy { policy: component.name().into(), problem };
    let golden = Golden::parse(golden).map_err(|problem| refuse(format!("golden {problem}")))?;
    let failures = golden.check(component);
    if failures.is_empty() {
        return Ok(golden.cases.len());
    }
    let lines: Vec<_> = failures.iter().take(FAILURES).map(|one| format!("golden {one}")).collect();
    let more = match failures.len().saturating_sub(FAILURES) {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    Err(refuse(lines.join("; ") + &more))
}

/// What one instance is asked, in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// What it shows; of a recorded request its name.
    pub name: String,
    /// The profile that chose the policy.
    pub profile: String,
    /// The policy that was asked, where the file tells.
    pub policy: Option<String>,
    /// The questions; at least one.
    pub lines: Vec<Line>,
}

/// A question, and what is known of its answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// Its number in the file, from 1.
    pub number: usize,
    /// What is asked.
    pub question: Question,
    /// What shall be answered; `None` where nothing is said of it.
    pub expected: Option<Expected>,
    /// The native policy answered when this was recorded: nobody is asked.
    pub replaced: bool,
    /// What the call took when it was recorded.
    pub fuel: Option<u64>,
}

/// What a hook is asked.
#[derive(Debug, Clone, PartialEq)]
pub enum Question {
    /// `on-prompt`.
    Prompt(PromptView),
    /// `on-request`.
    Request(Box<RequestView>),
    /// `on-step`.
    Step(Step),
    /// `on-tool-call`.
    ToolCall(ToolCallView),
    /// `on-finish`.
    Finish(Summary),
}

/// What a hook answers.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Answer {
    /// Of `on-prompt`.
    Prompt(Vec<Replacement>),
    /// Of `on-request`.
    Request(Box<Plan>),
    /// Of `on-step`.
    Step(Vec<Action>),
    /// Of `on-tool-call`.
    ToolCall(Verdict),
    /// Of `on-finish`: nothing.
    Finish,
}

/// What is expected of a hook.
#[derive(Debug, Clone, PartialEq)]
pub enum Expected {
    /// This answer.
    Answer(Answer),
    /// A plan with these values of these fields.
    Plan(Box<Plan>, Vec<String>),
    /// A failure.
    Error,
}

/// What a policy was asked and decided when a file was replayed. As JSON it is the same whenever the
/// same is asked of the same policy.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Decision {
    /// Number of the line, from 1.
    pub line: usize,
    /// [`Case::name`].
    pub case: String,
    /// The hook.
    pub hook: Hook,
    /// `Step::index` of `on-step`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u32>,
    /// What was answered; `None` where the hook failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer: Option<Answer>,
    /// What failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What the call took.
    pub fuel: u64,
}

/// A question that was not answered as expected. Shows as one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Number of the line, from 1.
    pub line: usize,
    /// [`Case::name`].
    pub case: String,
    /// The hook.
    pub hook: Hook,
    /// What was expected, and what came.
    pub problem: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { line, case, hook, problem } = self;
        write!(f, "line {line} (case `{case}`): {}: {problem}", hook.name())
    }
}

impl Golden {
    /// What `component` does not answer as expected. A case ends with its first failed call.
    pub fn check(&self, component: &Arc<Component>) -> Vec<Failure> {
        let mut failures = Vec::new();
        self.ask(component, |case, line, answer, _| {
            if let Some(problem) = line.problem(answer) {
                failures.push(Failure {
                    line: line.number,
                    case: case.name.clone(),
                    hook: line.question.hook(),
                    problem,
                });
            }
        });
        failures.sort_by_key(|failure| failure.line);
        failures
    }

    /// What `component` decides, by line.
    pub fn replay(&self, component: &Arc<Component>) -> Vec<Decision> {
        let mut decisions = Vec::new();
        self.ask(component, |case, line, answer, fuel| {
            decisions.push(Decision {
                line: line.number,
                case: case.name.clone(),
                hook: line.question.hook(),
                step: match &line.question {
                    Question::Step(step) => Some(step.index),
                    _ => None,
                },
                answer: answer.as_ref().ok().cloned(),
                error: answer.as_ref().err().map(ToString::to_string),
                fuel,
            });
        });
        decisions.sort_by_key(|decision| decision.line);
        decisions
    }

    /// Asks all, case by case, and tells `answered` of each answer and its fuel.
    fn ask(
        &self,
        component: &Arc<Component>,
        mut answered: impl FnMut(&Case, &Line, &Result<Answer>, u64),
    ) {
        for (at, case) in self.cases.iter().enumerate() {
            let mut instance = match self.start(at, component) {
                Ok(instance) => instance,
                Err(error) => {
                    answered(case, &case.lines[0], &Err(error), 0);
                    continue;
                }
            };
            for line in case.lines.iter().filter(|line| !line.replaced) {
                let answer = line.question.ask(&mut instance);
                answered(case, line, &answer, instance.cost().fuel);
                if answer.is_err() {
                    break;
                }
            }
        }
    }

    /// An instance for the case of this index, whose imports answer as recorded.
    ///
    /// # Errors
    /// As [`Component::instantiate`].
    ///
    /// # Panics
    /// When there are fewer cases.
    pub fn start(&self, case: usize, component: &Arc<Component>) -> Result<Instance> {
        component.instantiate(&Scene {
            request: self.cases[case].name.clone(),
            profile: self.cases[case].profile.clone(),
            vocabulary: no_vocabulary(),
            recorded: Some(self.imports[case].clone()),
        })
    }
}

impl Question {
    /// Which hook is asked.
    pub fn hook(&self) -> Hook {
        match self {
            Self::Prompt(_) => Hook::OnPrompt,
            Self::Request(_) => Hook::OnRequest,
            Self::Step(_) => Hook::OnStep,
            Self::ToolCall(_) => Hook::OnToolCall,
            Self::Finish(_) => Hook::OnFinish,
        }
    }

    /// Asks it.
    ///
    /// # Errors
    /// Those of the hook.
    pub fn ask(&self, policy: &mut dyn Policy) -> Result<Answer> {
        Ok(match self {
            Self::Prompt(prompt) => Answer::Prompt(policy.on_prompt(prompt)?),
            Self::Request(request) => Answer::Request(Box::new(policy.on_request(request)?)),
            Self::Step(step) => Answer::Step(policy.on_step(step)?),
            Self::ToolCall(call) => Answer::ToolCall(policy.on_tool_call(call)?),
            Self::Finish(summary) => {
                policy.on_finish(summary)?;
                Answer::Finish
            }
        })
    }
}

impl Line {
    /// What is wrong with an answer, if anything.
    pub fn problem(&self, answer: &Result<Answer>) -> Option<String> {
        match (&self.expected, answer) {
            (Some(Expected::Error), Err(_)) => None,
            (_, Err(error)) => Some(format!("failed: {error}")),
            (None, Ok(_)) => None,
            (Some(Expected::Error), Ok(got)) => {
                Some(format!("expected a failure, got {}", json(got)))
            }
            (Some(Expected::Plan(plan, fields)), Ok(got)) => {
                let (expected, got) = (value(plan), value(got));
                let differs = |field: &&String| expected[*field] != got[*field];
                let one = |field: &String| {
                    let (expected, got) = (&expected[field], &got[field]);
                    format!("{field}: expected {expected}, got {got}")
                };
                let differing: Vec<_> = fields.iter().filter(differs).map(one).collect();
                (!differing.is_empty()).then(|| differing.join("; "))
            }
            (Some(Expected::Answer(expected)), Ok(got)) => {
                let told = || format!("expected {}, got {}", json(expected), json(got));
                (expected != got).then(told)
            }
        }
    }
}

fn json(answer: &Answer) -> String {
    serde_json::to_string(answer).expect("plain data becomes JSON")
}

fn value(of: &impl Serialize) -> Value {
    serde_json::to_value(of).expect("plain data becomes JSON")
}
