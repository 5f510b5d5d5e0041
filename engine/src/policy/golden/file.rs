//! Reads files of questions and answers, strictly: a name that the contract lacks is an error with
//! its line, so that a misspelt expectation is none that always holds.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Answer, Case, Expected, Line, Question};
use crate::policy::ImportCall;
use crate::policy::trace::Hook;

/// A file, read.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Golden {
    /// In order of their first lines.
    pub cases: Vec<Case>,
    /// What the imports of each case answered.
    pub(super) imports: Vec<Arc<[ImportCall]>>,
    inexact: Option<String>,
}

/// A line as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    hook: Option<Hook>,
    case: Option<String>,
    input: Option<Value>,
    answer: Option<Value>,
    error: Option<Value>,
    #[serde(default)]
    replaced: bool,
    request: Option<String>,
    profile: Option<String>,
    policy: Option<String>,
    #[serde(default)]
    link: usize,
    fuel: Option<u64>,
    #[serde(default)]
    imports: Vec<ImportCall>,
    masked: Option<Map<String, Value>>,
    dropped: Option<u64>,
    // For people.
    #[serde(rename = "sha256")]
    _sha256: Option<Value>,
    #[serde(rename = "shadow")]
    _shadow: Option<Value>,
    #[serde(rename = "step")]
    _step: Option<Value>,
    #[serde(rename = "nanoseconds")]
    _nanoseconds: Option<Value>,
}

/// Lines that belong to one instance after another.
type Group = (Option<String>, Option<String>, usize);

impl Golden {
    /// Reads the text of a file.
    ///
    /// # Errors
    /// The line and what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut golden = Self::default();
        let mut imports: Vec<Vec<ImportCall>> = Vec::new();
        // Of each group: its case at present, and the hook asked last.
        let mut open: BTreeMap<Group, (usize, Hook)> = BTreeMap::new();
        for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
            let wrong = |problem: String| format!("line {number}: {problem}");
            let written: Written =
                serde_json::from_str(line).map_err(|error| wrong(in_line(&error)))?;
            if let Some(dropped) = written.dropped.filter(|dropped| *dropped > 0) {
                golden.inexact.get_or_insert(wrong(format!("{dropped} calls are missing")));
            }
            if written.masked.is_some() {
                golden.inexact.get_or_insert(wrong(
                    "texts and tokens are masked; `trace_text = true` in the profile records them"
                        .into(),
                ));
            }
            let Some(hook) = written.hook else {
                if written.dropped.is_some() {
                    continue;
                }
                return Err(wrong("`hook` is missing".into()));
            };
            let group = (written.request.clone(), written.policy.clone(), written.link);
            let begins = match (open.get(&group), hook) {
                _ if written.case.is_some() => true,
                (None, _) | (_, Hook::OnPrompt) => true,
                (Some((_, before)), Hook::OnRequest) => *before != Hook::OnPrompt,
                (Some(_), _) => false,
            };
            let at = match open.get(&group) {
                Some(&(at, _)) if !begins => at,
                _ => {
                    let named = || written.request.clone();
                    let name = written.case.clone().or_else(named);
                    golden.cases.push(Case {
                        name: name.unwrap_or_else(|| format!("from line {number}")),
                        profile: written.profile.clone().unwrap_or_default(),
                        policy: written.policy.clone(),
                        lines: Vec::new(),
                    });
                    imports.push(Vec::new());
                    golden.cases.len() - 1
                }
            };
            open.insert(group, (at, hook));
            imports[at].extend_from_slice(&written.imports);
            golden.cases[at].lines.push(written.read(number, hook).map_err(wrong)?);
        }
        if golden.cases.is_empty() {
            return Err("has no line with a hook".into());
        }
        golden.imports = imports.into_iter().map(Arc::from).collect();
        Ok(golden)
    }

    /// Why what is replayed is not what happened: texts are masked, or calls are missing. `None` where
    /// all is there.
    pub fn inexact(&self) -> Option<&str> {
        self.inexact.as_deref()
    }

    /// The policies of which the file tells.
    pub fn policies(&self) -> BTreeSet<&str> {
        self.cases.iter().filter_map(|case| case.policy.as_deref()).collect()
    }

    /// With these parameters, where a question does not have them.
    pub fn add_params(&mut self, params: &BTreeMap<String, String>) {
        let questions = self.cases.iter_mut().flat_map(|case| &mut case.lines);
        for Line { question, .. } in questions {
            let given = match question {
                Question::Prompt(prompt) => &mut prompt.params,
                Question::Request(request) => &mut request.params,
                _ => continue,
            };
            for (name, value) in params {
                given.entry(name.clone()).or_insert_with(|| value.clone());
            }
        }
    }

    /// How many lines say nothing of the answer.
    pub fn unjudged(&self) -> usize {
        let lines = self.cases.iter().flat_map(|case| &case.lines);
        let answers = |line: &&Line| !matches!(line.question, Question::Finish(_));
        lines.filter(answers).filter(|line| line.expected.is_none()).count()
    }

    /// Without what other policies than `policy` were asked.
    pub fn only(&mut self, policy: &str) {
        let of = |case: &Case| case.policy.as_deref().is_none_or(|name| name == policy);
        let mut kept = self.cases.iter().map(of);
        self.imports.retain(|_| kept.next().unwrap_or(false));
        self.cases.retain(of);
    }
}

impl Written {
    fn read(self, number: usize, hook: Hook) -> Result<Line, String> {
        let input = self.input.unwrap_or_else(|| Value::Object(Map::new()));
        let question = match hook {
            Hook::OnPrompt => Question::Prompt(strict("input", input)?),
            Hook::OnRequest => Question::Request(strict("input", input)?),
            Hook::OnStep => Question::Step(strict("input", input)?),
            Hook::OnToolCall => Question::ToolCall(strict("input", input)?),
            Hook::OnFinish => Question::Finish(strict("input", input)?),
        };
        let fails = match self.error {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Bool(true) | Value::String(_)) => true,
            Some(other) => return Err(format!("error: {other} is neither a text nor `true`")),
        };
        // A call that failed may have an answer all the same: that of the native policy.
        let expected = match self.answer {
            _ if fails => Some(Expected::Error),
            None => None,
            Some(answer) => Some(expected(hook, answer)?),
        };
        let replaced = self.replaced && !fails;
        Ok(Line { number, question, expected, replaced, fuel: self.fuel })
    }
}

fn expected(hook: Hook, answer: Value) -> Result<Expected, String> {
    Ok(Expected::Answer(match hook {
        Hook::OnPrompt => Answer::Prompt(strict("answer", answer)?),
        Hook::OnRequest => {
            let given = answer.as_object().into_iter().flat_map(Map::keys).cloned().collect();
            return Ok(Expected::Plan(strict("answer", answer)?, given));
        }
        Hook::OnStep => Answer::Step(strict("answer", answer)?),
        Hook::OnToolCall => Answer::ToolCall(strict("answer", answer)?),
        Hook::OnFinish if answer.is_null() => Answer::Finish,
        Hook::OnFinish => return Err("answer: on-finish answers nothing".into()),
    }))
}

/// Reads a value all of which has a name in `T`.
fn strict<T: Serialize + DeserializeOwned>(path: &str, value: Value) -> Result<T, String> {
    let read: T = serde_path_to_error::deserialize(&value).map_err(|error| {
        let place = match error.path().to_string() {
            all if all == "." => String::new(),
            item if item.starts_with('[') => item,
            field => format!(".{field}"),
        };
        format!("{path}{place}: {}", error.inner())
    })?;
    // All fields are written, so what is not written again has been ignored.
    let known = serde_json::to_value(&read).map_err(|error| format!("{path}: {error}"))?;
    match ignored(path, &value, &known) {
        None => Ok(read),
        Some(problem) => Err(problem),
    }
}

/// The first name in `given` that `known` lacks.
fn ignored(path: &str, given: &Value, known: &Value) -> Option<String> {
    match (given, known) {
        (Value::Object(given), Value::Object(known)) => given.iter().find_map(|(name, value)| {
            let path = format!("{path}.{name}");
            match known.get(name) {
                Some(known) => ignored(&path, value, known),
                None => {
                    let names: Vec<_> = known.keys().map(String::as_str).collect();
                    Some(format!("{path} is no field; there are {}", names.join(", ")))
                }
            }
        }),
        (Value::Array(given), Value::Array(known)) => given
            .iter()
            .zip(known)
            .enumerate()
            .find_map(|(i, (given, known))| ignored(&format!("{path}[{i}]"), given, known)),
        _ => None,
    }
}

/// serde_json ends with a place in the line, which is the only one there.
fn in_line(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    match text.strip_suffix(&place) {
        Some(problem) => format!("column {}: {problem}", error.column()),
        None => text,
    }
}
