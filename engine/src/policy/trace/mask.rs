//! Hides what was said. A masked record has the types of any other: texts and lists of tokens are
//! empty, and [`Lengths`] says how long they were (bytes of a text, numbers of tokens), by where they
//! would stand: `input.text`, `input.params.hint_sql`, `answer[0].inject`.
//!
//! Hidden are all words of the user, of the system text, of the model and its tool calls, and all that
//! a policy says itself, since it may repeat them: injected text, replacements, notes, reasons, why it
//! failed, tokens that it bans or biases, and what it asked of its imports. To be seen are names (of the
//! request, its profile, model, tools and parameters), numbers, digests, and what a policy decided.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::record::{Call, Exchange};
use crate::policy::wasm::OWN_WORDS;
use crate::policy::{
    Action, Ban, Bias, ImportCall, Plan, PromptView, Replacement, RequestView, Step, ToolCallView,
    Verdict,
};

/// Lengths of what is hidden, by where it would stand. What was empty is not in it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lengths(Vec<(Cow<'static, str>, usize)>);

impl Lengths {
    /// Where something is hidden, and how long it is.
    pub fn iter(&self) -> impl Iterator<Item = (&str, usize)> {
        self.0.iter().map(|(path, length)| (&**path, *length))
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.iter().map(|entry| size_of_val(entry) + entry.0.len()).sum()
    }

    fn text(&mut self, path: impl Into<Cow<'static, str>>, text: &str) -> String {
        self.length(path, text.len());
        String::new()
    }

    fn list<T>(&mut self, path: impl Into<Cow<'static, str>>, list: &[T]) -> Vec<T> {
        self.length(path, list.len());
        Vec::new()
    }

    fn length(&mut self, path: impl Into<Cow<'static, str>>, length: usize) {
        if length > 0 {
            self.0.push((path.into(), length));
        }
    }

    fn params(&mut self, params: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        let hide = |(key, value): (&String, &String)| {
            (key.clone(), self.text(format!("input.params.{key}"), value))
        };
        params.iter().map(hide).collect()
    }
}

impl Serialize for Lengths {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (path, length) in &self.0 {
            map.serialize_entry(path, length)?;
        }
        map.end()
    }
}

impl Exchange<'_, '_> {
    /// Without its texts, whose lengths go to `lengths`.
    pub(super) fn mask(&self, lengths: &mut Lengths) -> Call {
        match *self {
            Self::Prompt(prompt, answer) => {
                let prompt = PromptView {
                    profile: prompt.profile.clone(),
                    params: lengths.params(&prompt.params),
                    system: (prompt.system.iter().enumerate())
                        .map(|(i, text)| lengths.text(format!("input.system[{i}]"), text))
                        .collect(),
                };
                let hide = |(i, replacement): (usize, &Replacement)| Replacement {
                    message: replacement.message,
                    old: lengths.text(format!("answer[{i}].old"), &replacement.old),
                    new: lengths.text(format!("answer[{i}].new"), &replacement.new),
                };
                let answer = answer.map(|list| list.iter().enumerate().map(hide).collect());
                Call::Prompt(Box::new(prompt), answer)
            }
            Self::Request(request, plan) => {
                let request = RequestView {
                    params: lengths.params(&request.params),
                    user: lengths.text("input.user", &request.user),
                    id: request.id.clone(),
                    profile: request.profile.clone(),
                    model: request.model.clone(),
                    family: request.family.clone(),
                    tools: request.tools.clone(),
                    ..*request
                };
                let hide = |plan: &Plan| Plan {
                    note: plan.note.as_ref().map(|note| lengths.text("answer.note", note)),
                    keep: plan.keep.clone(),
                    ..*plan
                };
                Call::Request(Box::new((request, plan.map(hide))))
            }
            Self::Step(step, actions) => {
                let step = Step {
                    tokens: lengths.list("input.tokens", &step.tokens),
                    text: lengths.text("input.text", &step.text),
                    ..*step
                };
                let hide = |(i, action)| self::action(i, action, lengths);
                Call::Step(step, actions.map(|list| list.iter().enumerate().map(hide).collect()))
            }
            Self::ToolCall(call, verdict) => {
                let call = ToolCallView {
                    arguments: lengths.text("input.arguments", &call.arguments),
                    name: call.name.clone(),
                    digest: call.digest.clone(),
                    earlier: call.earlier.clone(),
                    index: call.index,
                };
                let hide = |verdict: &Verdict| match verdict {
                    Verdict::Accept => Verdict::Accept,
                    Verdict::Repair(text) => Verdict::Repair(lengths.text("answer.repair", text)),
                    Verdict::Stop(text) => Verdict::Stop(lengths.text("answer.stop", text)),
                };
                Call::ToolCall(Box::new(call), verdict.map(hide))
            }
            Self::Finish(summary) => Call::Finish(Box::new(summary.clone())),
        }
    }
}

fn action(i: usize, action: &Action, lengths: &mut Lengths) -> Action {
    let path = |rest: &str| format!("answer[{i}].{rest}");
    match action {
        Action::Inject(text) => Action::Inject(lengths.text(path("inject"), text)),
        Action::CloseThinking(text) => {
            Action::CloseThinking(lengths.text(path("close-thinking"), text))
        }
        Action::Rewind(tokens) => Action::Rewind(*tokens),
        Action::Ban(Ban { tokens, steps }) => {
            Action::Ban(Ban { tokens: lengths.list(path("ban.tokens"), tokens), steps: *steps })
        }
        Action::Bias(Bias { tokens, steps }) => {
            Action::Bias(Bias { tokens: lengths.list(path("bias.tokens"), tokens), steps: *steps })
        }
        Action::Sampling(other) => Action::Sampling(*other),
        Action::Stop(reason) => Action::Stop(lengths.text(path("stop"), reason)),
    }
}

/// Hides what a policy said of its failure.
pub(super) fn error(error: &mut Option<String>, lengths: &mut Lengths) {
    let Some(text) = error else { return };
    if let Some(at) = text.find(OWN_WORDS) {
        lengths.length("error", text.len() - at - OWN_WORDS.len());
        text.truncate(at + OWN_WORDS.trim_end_matches(": ").len());
    }
}

/// Hides what imports were asked and answered.
pub(super) fn imports(calls: &mut [ImportCall], lengths: &mut Lengths) {
    for (i, call) in calls.iter_mut().enumerate() {
        for (j, argument) in call.arguments.iter_mut().enumerate() {
            *argument = lengths.text(format!("imports[{i}].arguments[{j}]"), argument);
        }
        if let Some(answer) = &mut call.answer {
            *answer = lengths.text(format!("imports[{i}].answer"), answer);
        }
    }
}
