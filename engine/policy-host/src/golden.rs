//! Calls policies with the calls of a file and compares the answers, without a model.
//!
//! The file is JSON, one object a line. `input` is the record that the hook is called with; top-level
//! fields that are missing have their default (zero, empty, `false`, `null`). `answer` is the expected
//! answer:
//!
//! ```json
//! {"case":"closes reasoning over its budget","hook":"on-request","input":{"params":[["budget","100"]]},"answer":{"reasoning_budget":100}}
//! {"hook":"on-step","input":{"phase":"Reasoning","budget_reached":true},"answer":[{"CloseReasoning":"In short: "}]}
//! {"hook":"on-tool-call","input":{"name":"search","arguments":"{}"},"answer":"Accept"}
//! {"hook":"on-finish","input":{"reason":"stop"}}
//! ```
//!
//! - `case` names a case and begins a new instance of the policy. So do `on-params` and `on-prompt`, and
//!   `on-request` unless it follows `on-prompt`.
//! - Of an answer of `on-request` only the given fields are compared; other answers are compared whole.
//!   A line without `answer` only calls. With `error` (a text, or `true`) the hook must fail, and the
//!   rest of its case is skipped.
//! - `given` is what the imports of a case find: `{"kv":{"key":"value"},"tokens":{" yes":[5,6]}}`. It stands in any
//!   line of the case.
//! - A trace ([`crate::trace`]) is such a file. Its lines are grouped by `request`, `policy` and `link`,
//!   and `imports` has the results of imports, which are returned again. Lines that the native policy
//!   answered (`replaced`) are skipped.
//! - A trace may be masked, and calls may be missing: then a replay differs from what happened
//!   ([`Golden::inexact`]).

mod case;
mod file;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use crate::contract::{Answer, Call, Hook, Params, Policy};
use crate::error::{Error, Failure};
use crate::sandbox::Component;

use case::{Expected, Line};
pub use file::Golden;

/// Bytes of a text without tokens that are shown.
const SHOWN_BYTES: usize = 100;

/// Mismatches that [`check_golden`] reports, and texts without tokens that one of them names.
const REPORTED: usize = 8;

/// Checks `component` against the text of a golden file; returns the number of cases. Calls that were
/// recorded of other policies are included.
///
/// # Errors
/// [`Error::Refused`] with the lines, the expected answers and the actual ones.
pub fn check_golden(component: &Arc<Component>, golden: &str) -> Result<usize, Error> {
    let refuse = |problem| Error::refused(component.name(), problem);
    let golden = Golden::parse(golden).map_err(|problem| refuse(format!("golden {problem}")))?;
    let mismatches = golden.check(component);
    if mismatches.is_empty() {
        return Ok(golden.cases.len());
    }
    let line = |one: &Decision| {
        let Decision { line, case, case_line, hook, problem, .. } = one;
        let problem = problem.as_deref().unwrap_or_default();
        let place = if line == case_line { "" } else { &format!(" of line {case_line}") };
        format!("golden line {line} (case `{case}`{place}): {}: {problem}", hook.name())
    };
    let lines: Vec<_> = mismatches.iter().take(REPORTED).map(line).collect();
    let more = match mismatches.len().saturating_sub(REPORTED) {
        0 => String::new(),
        more => format!("\nand {more} more"),
    };
    Err(refuse(lines.join("\n") + &more))
}

/// The answer to one call of a replay. As JSON it is the same for the same call and policy.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Decision {
    /// Number of the line, from 1.
    pub line: usize,
    /// Name of the case.
    pub case: String,
    /// Number of the first line of the case.
    #[serde(skip)]
    pub case_line: usize,
    /// The hook.
    pub hook: Hook,
    /// `index` of a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u32>,
    /// The answer; `None` if the hook failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer: Option<Answer>,
    /// The failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Fuel of the call.
    pub fuel: u64,
    /// How the answer differs from the expected one, if it does.
    #[serde(skip)]
    pub problem: Option<String>,
}

impl Decision {
    /// The name of the case, for messages. A line after the first one, which has no name of its own, is said to
    /// belong to that.
    pub fn case_name(&self) -> String {
        match self.case_line {
            first if first == self.line => self.case.clone(),
            first => format!("in the case of line {first}, {}", self.case),
        }
    }
}

impl Golden {
    /// Answers of `component` that differ from the expected ones. A case ends with its first failure.
    pub fn check(&self, component: &Arc<Component>) -> Vec<Decision> {
        let mut decisions = self.replay(component);
        decisions.retain(|decision| decision.problem.is_some());
        decisions
    }

    /// The first call that fails with `params` in place of the parameters that it has, and why. Calls that are
    /// expected to fail are left out.
    pub fn failure_with(&self, component: &Arc<Component>, params: &Params) -> Option<String> {
        for case in &self.cases {
            let is_called =
                |line: &&Line| !line.replaced && line.expected != Some(Expected::Failure);
            let mut instance = match case.start(component) {
                Ok(instance) => instance,
                Err(failure) => return Some(failure.to_string()),
            };
            for line in case.lines.iter().filter(is_called) {
                let mut call = line.call.to_owned();
                match &mut call {
                    Call::Params(view) => view.to_mut().params.clone_from(params),
                    Call::Prompt(view) => view.to_mut().params.clone_from(params),
                    Call::Request(view) => view.to_mut().params.clone_from(params),
                    _ => {}
                }
                if let Err(failure) = instance.call(&call) {
                    let (number, name) = (line.number, &case.name);
                    return Some(format!("golden line {number} (case `{name}`): {failure}"));
                }
            }
        }
        None
    }

    /// The hooks that are called, with their numbers of lines.
    pub fn hooks(&self) -> BTreeMap<Hook, usize> {
        let mut hooks = BTreeMap::new();
        for line in self.cases.iter().flat_map(|case| &case.lines) {
            *hooks.entry(line.call.hook()).or_default() += 1;
        }
        hooks
    }

    /// Answers of `component`, by line.
    pub fn replay(&self, component: &Arc<Component>) -> Vec<Decision> {
        let mut decisions = Vec::new();
        for case in &self.cases {
            // Texts that this case has asked the tokenizer for in vain.
            let mut unknown: Vec<String> = Vec::new();
            let mut decide = |line: &Line,
                              answer: Result<Answer, Failure>,
                              fuel,
                              unknown: &[String]| {
                decisions.push(Decision {
                    line: line.number,
                    case: case.name.clone(),
                    case_line: case.lines.first().map_or(0, |first| first.number),
                    hook: line.call.hook(),
                    step: if let Call::Step(step) = &line.call { Some(step.index) } else { None },
                    problem: line.mismatch(&answer).map(|text| text + &without_tokens(unknown)),
                    error: answer.as_ref().err().map(ToString::to_string),
                    answer: answer.ok(),
                    fuel,
                });
            };
            let mut instance = match case.start(component) {
                Ok(instance) => instance,
                Err(failure) => {
                    decide(&case.lines[0], Err(failure), 0, &[]);
                    continue;
                }
            };
            for line in case.lines.iter().filter(|line| !line.replaced) {
                let answer = instance.call(&line.call);
                let failed = answer.is_err();
                let report = instance.take_report();
                for text in case::unknown_texts(&report.imports) {
                    if unknown.len() < REPORTED && !unknown.contains(&text) {
                        unknown.push(text);
                    }
                }
                decide(line, answer, report.cost.fuel, &unknown[..]);
                if failed {
                    break;
                }
            }
        }
        decisions.sort_by_key(|decision| decision.line);
        decisions
    }
}

/// What a difference says of texts without tokens, in a line of its own; empty if there are none.
fn without_tokens(texts: &[String]) -> String {
    let Some(first) = texts.first() else { return String::new() };
    let quoted =
        |text: &String| Value::from(&text[..text.floor_char_boundary(SHOWN_BYTES)]).to_string();
    let named: Vec<_> = texts.iter().map(quoted).collect();
    format!(
        "\n  no tokenizer in a test, so these texts have no tokens: {}; give them in a line of the case, such as \
         \"given\": {{\"tokens\": {{{}: [7]}}}}",
        named.join(", "),
        quoted(first)
    )
}
