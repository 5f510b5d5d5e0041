//! Parses golden files. A misspelled key is an error with its line, so an expectation cannot pass
//! silently.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::DeserializeSeed;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::case::{Case, Expected, Given, Line};
use crate::contract::{AnswerOf, Call, CallOf, Hook, ImportCall, Params, Plan};

/// A parsed golden file or trace.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Golden {
    /// Cases in the order of their first lines.
    pub cases: Vec<Case>,
    inexact: Option<String>,
}

/// A line of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLine {
    hook: Option<Hook>,
    case: Option<String>,
    input: Option<Map<String, Value>>,
    answer: Option<Value>,
    error: Option<Value>,
    #[serde(default)]
    replaced: bool,
    request: Option<String>,
    profile: Option<String>,
    policy: Option<String>,
    #[serde(default)]
    link: usize,
    #[serde(default)]
    imports: Vec<ImportCall>,
    #[serde(default)]
    given: Given,
    masked: Option<Map<String, Value>>,
    dropped: Option<u64>,
    // For people; not used.
    #[serde(rename = "fuel")]
    _fuel: Option<Value>,
    #[serde(rename = "sha256")]
    _sha256: Option<Value>,
    #[serde(rename = "shadow")]
    _shadow: Option<Value>,
    #[serde(rename = "step")]
    _step: Option<Value>,
    #[serde(rename = "nanoseconds")]
    _nanoseconds: Option<Value>,
}

/// Request, policy and link: lines with the same key are calls of one policy, in order.
type Key = (Option<String>, Option<String>, usize);

impl Golden {
    /// Parses the text of a file.
    ///
    /// # Errors
    /// The first invalid line and the problem.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut golden = Self::default();
        let mut imports: Vec<Vec<ImportCall>> = Vec::new();
        // The current case of each key, and its last hook.
        let mut open: BTreeMap<Key, (usize, Hook)> = BTreeMap::new();
        for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
            let wrong = |problem: String| format!("line {number}: {problem}");
            let raw: RawLine =
                serde_json::from_str(line).map_err(|error| wrong(without_line(&error)))?;
            if let Some(dropped) = raw.dropped.filter(|dropped| *dropped > 0) {
                golden.inexact.get_or_insert(wrong(format!("{dropped} calls are missing")));
            }
            if raw.masked.is_some() {
                golden.inexact.get_or_insert(wrong(
                    "texts and tokens are masked; `trace_text = true` in the profile records them"
                        .into(),
                ));
            }
            let Some(hook) = raw.hook else {
                if raw.dropped.is_some() {
                    continue;
                }
                return Err(wrong("`hook` is missing".into()));
            };
            let key = (raw.request.clone(), raw.policy.clone(), raw.link);
            let begins = match (open.get(&key), hook) {
                _ if raw.case.is_some() => true,
                (None, _) | (_, Hook::OnParams | Hook::OnPrompt) => true,
                (Some((_, before)), Hook::OnRequest) => *before != Hook::OnPrompt,
                (Some(_), _) => false,
            };
            let index = match open.get(&key) {
                Some(&(index, _)) if !begins => index,
                _ => {
                    let name = raw.case.clone().or_else(|| raw.request.clone());
                    golden.cases.push(Case {
                        name: name.unwrap_or_else(|| format!("from line {number}")),
                        profile: raw.profile.clone().unwrap_or_default(),
                        policy: raw.policy.clone(),
                        lines: Vec::new(),
                        imports: [].into(),
                        given: Given::default(),
                    });
                    imports.push(Vec::new());
                    golden.cases.len() - 1
                }
            };
            open.insert(key, (index, hook));
            imports[index].extend_from_slice(&raw.imports);
            golden.cases[index].given.kv.extend(raw.given.kv.clone());
            golden.cases[index].given.tokens.extend(raw.given.tokens.clone());
            golden.cases[index].lines.push(raw.parse(number, hook).map_err(wrong)?);
        }
        if golden.cases.is_empty() {
            return Err("has no line with a hook".into());
        }
        for (case, imports) in golden.cases.iter_mut().zip(imports) {
            case.imports = imports.into();
        }
        Ok(golden)
    }

    /// Why a replay differs from what happened: texts are masked, or calls are missing. `None` if the
    /// file is complete.
    pub fn inexact(&self) -> Option<&str> {
        self.inexact.as_deref()
    }

    /// Names of the policies in the file.
    pub fn policies(&self) -> BTreeSet<&str> {
        self.cases.iter().filter_map(|case| case.policy.as_deref()).collect()
    }

    /// Adds parameters to calls that do not have them, or gives them to all calls if it `replaces` those that they have.
    pub fn add_params(&mut self, params: &BTreeMap<String, String>, replaces: bool) {
        let add = |given: &mut Params| {
            let own: BTreeMap<_, _> = given.drain(..).collect();
            let (mut all, later) =
                if replaces { (own, params.clone()) } else { (params.clone(), own) };
            all.extend(later);
            given.extend(all);
        };
        for line in self.cases.iter_mut().flat_map(|case| &mut case.lines) {
            match &mut line.call {
                Call::Params(view) => add(&mut view.to_mut().params),
                Call::Prompt(view) => add(&mut view.to_mut().params),
                Call::Request(view) => add(&mut view.to_mut().params),
                _ => {}
            }
        }
    }

    /// Number of lines without an expectation.
    pub fn without_expectation(&self) -> usize {
        let lines = self.cases.iter().flat_map(|case| &case.lines);
        let answers = |line: &&Line| !matches!(line.call, Call::Finish(_));
        lines.filter(answers).filter(|line| line.expected.is_none()).count()
    }

    /// Removes the cases of other policies than `policy`.
    pub fn retain_policy(&mut self, policy: &str) {
        self.cases.retain(|case| case.policy.as_deref().is_none_or(|name| name == policy));
    }
}

impl RawLine {
    fn parse(self, number: usize, hook: Hook) -> Result<Line, String> {
        let input = with_defaults(&Call::default_of(hook), self.input.unwrap_or_default());
        let call = strict("input", input, CallOf(hook))?;
        let fails = match self.error {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Bool(true) | Value::String(_)) => true,
            Some(other) => return Err(format!("error: {other} is neither a text nor `true`")),
        };
        // A recorded call that failed may have the answer of the native policy.
        let expected = match self.answer {
            _ if fails => Some(Expected::Failure),
            None => None,
            Some(answer) => Some(expected(hook, answer)?),
        };
        Ok(Line { number, call, expected, replaced: self.replaced && !fails })
    }
}

fn expected(hook: Hook, answer: Value) -> Result<Expected, String> {
    let parse = |answer| strict("answer", answer, AnswerOf(hook));
    let (Hook::OnRequest, Value::Object(fields)) = (hook, &answer) else {
        return parse(answer).map(Expected::Answer);
    };
    let names = fields.keys().cloned().collect();
    let plan = parse(with_defaults(&Plan::default(), fields.clone()))?;
    Ok(Expected::Fields(plan, names))
}

/// The given fields, and those of `default` for the others.
fn with_defaults(default: &impl Serialize, given: Map<String, Value>) -> Value {
    let Ok(Value::Object(mut fields)) = serde_json::to_value(default) else {
        unreachable!("the inputs of hooks are records");
    };
    fields.extend(given);
    Value::Object(fields)
}

/// Deserializes a value; unknown fields are errors.
fn strict<S: for<'de> DeserializeSeed<'de, Value = T>, T>(
    path: &str,
    value: Value,
    seed: S,
) -> Result<T, String> {
    let at = |place: String| match place {
        all if all == "." => path.to_owned(),
        item if item.starts_with('[') => format!("{path}{item}"),
        field => format!("{path}.{field}"),
    };
    let mut unknown = None;
    let mut note = |field: serde_ignored::Path<'_>| {
        unknown.get_or_insert_with(|| field.to_string());
    };
    let mut track = serde_path_to_error::Track::new();
    let deserializer = serde_path_to_error::Deserializer::new(value, &mut track);
    let read = seed.deserialize(serde_ignored::Deserializer::new(deserializer, &mut note));
    match (read, unknown) {
        (Err(error), _) => {
            Err(format!("{}: {}", at(track.path().to_string()), in_words(&error.to_string())))
        }
        (Ok(_), Some(field)) => Err(format!("{} is not a field of the contract", at(field))),
        (Ok(read), None) => Ok(read),
    }
}

/// An error of serde_json, which counts lines from the one that it was given.
fn without_line(error: &serde_json::Error) -> String {
    let (text, column) = (error.to_string(), error.column());
    let place = format!(" at line {} column {column}", error.line());
    format!("column {column}: {}", in_words(text.strip_suffix(&place).unwrap_or(&text)))
}

/// An error of a deserializer in the words of JSON: authors of policies know lists and objects, not the types of this program.
fn in_words(error: &str) -> String {
    let Some((found, expected)) = error
        .strip_prefix("invalid type: ")
        .or(error.strip_prefix("invalid value: "))
        .and_then(|rest| rest.split_once(", expected "))
    else {
        return error.to_owned();
    };
    let (kind, value) = found.split_once(' ').unwrap_or((found, ""));
    let found = match kind {
        "integer" | "boolean" => value.trim_matches('`'),
        "floating" => value.trim_start_matches("point ").trim_matches('`'),
        "string" => value,
        "sequence" => "a list",
        "map" => "an object",
        _ => found,
    };
    let expected = match expected {
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" => "a whole number, not below 0",
        "i64" => "a whole number",
        "f32" | "f64" => "a number",
        "a sequence" => "a list",
        "a map" => "an object",
        other if other.starts_with("struct ") => "an object",
        other if other.contains("enum ") => "a string, or an object with one field",
        other => other,
    };
    format!("is {found}, expected {expected}")
}
