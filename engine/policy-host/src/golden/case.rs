//! The cases of a golden file: calls, what is expected of them, and what their imports find.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use similar::TextDiff;

use crate::contract::{Answer, Call, ImportCall, Vocabulary, no_vocabulary};
use crate::error::Failure;
use crate::sandbox::{Component, Context, GIVEN_KV, Instance};

/// The calls of one instance, in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// Name of the case; for a trace the request id.
    pub name: String,
    /// Profile of the request.
    pub profile: String,
    /// Name of the policy, if the file has it.
    pub policy: Option<String>,
    /// The calls; at least one.
    pub lines: Vec<Line>,
    /// Results of imports, in order.
    pub imports: Arc<[ImportCall]>,
    /// What imports find that have no result.
    pub given: Given,
}

/// What the imports of a case find.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Given {
    /// Keys and values of `kv`.
    pub kv: BTreeMap<String, String>,
    /// Tokens of texts, for `tokenizer`. Other texts have none.
    pub tokens: BTreeMap<String, Vec<u32>>,
}

/// A call and its expected answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// Number of the line, from 1.
    pub number: usize,
    /// The call.
    pub call: Call<'static>,
    /// The expectation; `None` if the file has none.
    pub expected: Option<Expected>,
    /// The native policy answered this call when it was recorded: it is skipped.
    pub replaced: bool,
}

/// What is expected of a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Expected {
    /// This answer.
    Answer(Answer),
    /// An answer with the values of this one in these fields.
    Fields(Answer, Vec<String>),
    /// A failure.
    Failure,
}

impl Case {
    /// An instance for this case, whose imports return the recorded results.
    ///
    /// # Errors
    /// As [`Component::instantiate`].
    pub fn start(&self, component: &Arc<Component>) -> Result<Instance, Failure> {
        let imports = self.imports.iter().cloned();
        component.instantiate(&Context {
            request: self.name.clone(),
            profile: self.profile.clone(),
            vocabulary: match self.given.tokens.is_empty() {
                true => no_vocabulary(),
                false => Arc::new(GivenTokens(self.given.tokens.clone())),
            },
            recorded: Some(self.given.kv.iter().map(given_kv).chain(imports).collect()),
        })
    }
}

fn given_kv((key, value): (&String, &String)) -> ImportCall {
    let (call, arguments) = (GIVEN_KV.into(), vec![key.clone()]);
    ImportCall { call, arguments, answer: Some(value.clone()) }
}

/// A tokenizer that knows some texts.
struct GivenTokens(BTreeMap<String, Vec<u32>>);

impl Vocabulary for GivenTokens {
    fn encode(&self, text: &str) -> Option<Vec<u32>> {
        Some(self.0.get(text).cloned().unwrap_or_default())
    }

    fn decode(&self, tokens: &[u32]) -> String {
        // The text of all of them, or else those of the single ones.
        let text = |wanted: &[u32]| {
            self.0.iter().find(|(_, tokens)| *tokens == wanted).map(|(text, _)| text.as_str())
        };
        let single = || tokens.iter().filter_map(|token| text(&[*token])).collect();
        text(tokens).map_or_else(single, str::to_owned)
    }

    fn size(&self) -> u32 {
        u32::MAX
    }
}

/// The texts that were to be tokenized and have no tokens.
pub fn unknown_texts(calls: &[ImportCall]) -> impl Iterator<Item = String> {
    calls.iter().filter_map(|ImportCall { call, arguments, answer }| {
        let text = arguments.first().filter(|text| !text.is_empty())?;
        (call == "tokenizer.encode" && answer.as_deref() == Some("[]")).then(|| text.clone())
    })
}

impl Line {
    /// How an answer differs from the expected one, if it does.
    pub fn mismatch(&self, answer: &Result<Answer, Failure>) -> Option<String> {
        match (&self.expected, answer) {
            (Some(Expected::Failure), Err(_)) | (None, Ok(_)) => None,
            (_, Err(failure)) => Some(format!("failed: {failure}")),
            (Some(Expected::Failure), Ok(got)) => {
                Some(format!("expected a failure, got {}", json(got)))
            }
            (Some(Expected::Fields(expected, fields)), Ok(got)) => {
                let (expected, got) = (value(expected), value(got));
                let differs = |field: &&String| expected[*field] != got[*field];
                let differing: Vec<_> = fields.iter().filter(differs).collect();
                let only = |of: &Value| {
                    Value::Object(
                        differing.iter().map(|f| ((*f).clone(), of[*f].clone())).collect(),
                    )
                };
                (!differing.is_empty()).then(|| difference(&only(&expected), &only(&got)))
            }
            (Some(Expected::Answer(expected)), Ok(got)) => {
                (expected != got).then(|| difference(&value(expected), &value(got)))
            }
        }
    }
}

/// The lines of two answers, with `-` before those that were expected only, and `+` before those
/// that were found.
fn difference(expected: &Value, found: &Value) -> String {
    let [expected, found] = [expected, found].map(|answer| format!("{answer:#}\n"));
    let mut text = "the answer differs (- expected, + found)".to_owned();
    for change in TextDiff::from_lines(&expected, &found).iter_all_changes() {
        text += &format!("\n  {} {}", change.tag(), change.value().trim_end());
    }
    text
}

fn json(answer: &Answer) -> String {
    serde_json::to_string(answer).expect("records have string keys only")
}

fn value(of: &impl Serialize) -> Value {
    serde_json::to_value(of).expect("records have string keys only")
}
