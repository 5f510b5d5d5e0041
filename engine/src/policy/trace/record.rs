//! What is recorded of a call: plain values, and the line of JSON that they become.

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};

use super::mask::Lengths;
use crate::policy::{
    Action, EarlierCall, ImportCall, Plan, PromptView, Replacement, RequestView, Step, Summary,
    ToolCallView, Verdict,
};

/// A hook of the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hook {
    /// Before the prompt is rendered.
    OnPrompt,
    /// Before anything runs.
    OnRequest,
    /// After tokens are committed.
    OnStep,
    /// Before a client gets a call.
    OnToolCall,
    /// At the end.
    OnFinish,
}

impl Hook {
    /// As in the contract: `on-step`.
    pub fn name(self) -> &'static str {
        match self {
            Self::OnPrompt => "on-prompt",
            Self::OnRequest => "on-request",
            Self::OnStep => "on-step",
            Self::OnToolCall => "on-tool-call",
            Self::OnFinish => "on-finish",
        }
    }
}

/// What a hook is asked, and its answer, which is `None` where it failed.
pub enum Exchange<'q, 'a> {
    /// Of `on-prompt`.
    Prompt(&'q PromptView, Option<&'a [Replacement]>),
    /// Of `on-request`.
    Request(&'q RequestView, Option<&'a Plan>),
    /// Of `on-step`.
    Step(&'q Step, Option<&'a [Action]>),
    /// Of `on-tool-call`.
    ToolCall(&'q ToolCallView, Option<&'a Verdict>),
    /// Of `on-finish`, which answers nothing.
    Finish(&'q Summary),
}

/// As [`Exchange`], kept.
#[derive(Debug, Clone, PartialEq)]
pub enum Call {
    /// Of `on-prompt`.
    Prompt(Box<PromptView>, Option<Vec<Replacement>>),
    /// Of `on-request`.
    Request(Box<(RequestView, Option<Plan>)>),
    /// Of `on-step`.
    Step(Step, Option<Vec<Action>>),
    /// Of `on-tool-call`.
    ToolCall(Box<ToolCallView>, Option<Verdict>),
    /// Of `on-finish`.
    Finish(Box<Summary>),
}

impl Exchange<'_, '_> {
    /// With all texts.
    pub(super) fn copy(&self) -> Call {
        match *self {
            Self::Prompt(prompt, answer) => {
                Call::Prompt(Box::new(prompt.clone()), answer.map(<[_]>::to_vec))
            }
            Self::Request(request, answer) => {
                Call::Request(Box::new((request.clone(), answer.cloned())))
            }
            Self::Step(step, answer) => Call::Step(step.clone(), answer.map(<[_]>::to_vec)),
            Self::ToolCall(call, answer) => Call::ToolCall(Box::new(call.clone()), answer.cloned()),
            Self::Finish(summary) => Call::Finish(Box::new(summary.clone())),
        }
    }
}

impl Call {
    /// Which hook it was.
    pub fn hook(&self) -> Hook {
        match self {
            Self::Prompt(..) => Hook::OnPrompt,
            Self::Request(..) => Hook::OnRequest,
            Self::Step(..) => Hook::OnStep,
            Self::ToolCall(..) => Hook::OnToolCall,
            Self::Finish(_) => Hook::OnFinish,
        }
    }

    /// About what it takes in memory beyond its own size.
    pub(super) fn bytes(&self) -> usize {
        let strings = |texts: &[String]| {
            texts.iter().map(|text| text.len() + size_of::<String>()).sum::<usize>()
        };
        let params = |params: &std::collections::BTreeMap<String, String>| {
            params.iter().map(|(k, v)| k.len() + v.len() + 2 * size_of::<String>()).sum::<usize>()
        };
        match self {
            Self::Prompt(prompt, answer) => {
                let replacement = |r: &Replacement| r.old.len() + r.new.len() + size_of_val(r);
                size_of_val(&**prompt)
                    + prompt.profile.len()
                    + params(&prompt.params)
                    + strings(&prompt.system)
                    + answer.iter().flatten().map(replacement).sum::<usize>()
            }
            Self::Request(both) => {
                let (request, plan) = &**both;
                size_of_val(both)
                    + [&request.id, &request.profile, &request.model, &request.family]
                        .map(String::len)
                        .iter()
                        .sum::<usize>()
                    + request.user.len()
                    + params(&request.params)
                    + strings(&request.tools)
                    + plan.as_ref().and_then(|plan| plan.note.as_ref()).map_or(0, String::len)
            }
            Self::Step(step, answer) => {
                let action = |action: &Action| {
                    size_of::<Action>()
                        + match action {
                            Action::Inject(text)
                            | Action::CloseThinking(text)
                            | Action::Stop(text) => text.len(),
                            Action::Ban(ban) => size_of_val(&*ban.tokens),
                            Action::Bias(bias) => size_of_val(&*bias.tokens),
                            Action::Rewind(_) | Action::Sampling(_) => 0,
                        }
                };
                size_of_val(&*step.tokens)
                    + step.text.len()
                    + answer.iter().flatten().map(action).sum::<usize>()
            }
            Self::ToolCall(call, verdict) => {
                let earlier = |earlier: &EarlierCall| {
                    size_of_val(earlier)
                        + earlier.name.len()
                        + earlier.arguments.len()
                        + earlier.answered.as_ref().map_or(0, String::len)
                };
                let verdict = match verdict {
                    Some(Verdict::Repair(text) | Verdict::Stop(text)) => text.len(),
                    Some(Verdict::Accept) | None => 0,
                };
                size_of_val(&**call)
                    + call.name.len()
                    + call.arguments.len()
                    + call.digest.len()
                    + call.earlier.iter().map(earlier).sum::<usize>()
                    + verdict
            }
            Self::Finish(summary) => size_of_val(&**summary) + summary.reason.len(),
        }
    }
}

/// A call of a hook: with its request, its policy and what it came to. Becomes a JSON object that is a
/// line of a golden file:
///
/// ```json
/// {"request":"chatcmpl-1","profile":"default","policy":"default","sha256":"9f..","link":0,
///  "shadow":false,"hook":"on-step","step":12,"input":{..},"answer":[{"close-thinking":"So: "}],
///  "fuel":4711,"nanoseconds":812}
/// ```
///
/// `error`, `replaced`, `masked`, `imports` and `dropped` stand there where they say something.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// The request's name in logs.
    pub request: String,
    /// The profile that chose the policy.
    pub profile: String,
    /// Its name.
    pub policy: String,
    /// SHA-256 of its component, 64 hex digits.
    pub sha256: String,
    /// Where it stands in the request's chain, from 0.
    pub link: usize,
    /// Whether its decision was not applied.
    pub shadow: bool,
    /// What it was asked and answered.
    pub call: Call,
    /// What failed.
    pub error: Option<String>,
    /// Whether the policy has failed, here or before: then the native policy answered, or nobody.
    pub replaced: bool,
    /// Lengths of what is not shown, by where it would stand; `None` where the profile shows all.
    pub masked: Option<Lengths>,
    /// About one unit a Wasm instruction; deterministic.
    pub fuel: u64,
    /// Time of the call.
    pub nanoseconds: u64,
    /// What the host answered meanwhile.
    pub imports: Vec<ImportCall>,
    /// Calls of this request that were not recorded, for want of room; on its last record.
    pub dropped: u64,
}

impl Serialize for Record {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("request", &self.request)?;
        map.serialize_entry("profile", &self.profile)?;
        map.serialize_entry("policy", &self.policy)?;
        map.serialize_entry("sha256", &self.sha256)?;
        map.serialize_entry("link", &self.link)?;
        map.serialize_entry("shadow", &self.shadow)?;
        map.serialize_entry("hook", &self.call.hook())?;
        match &self.call {
            Call::Prompt(prompt, answer) => both(&mut map, prompt, answer.as_ref())?,
            Call::Request(both_of) => both(&mut map, &both_of.0, both_of.1.as_ref())?,
            Call::Step(step, answer) => {
                map.serialize_entry("step", &step.index)?;
                both(&mut map, step, answer.as_ref())?;
            }
            Call::ToolCall(call, answer) => both(&mut map, call, answer.as_ref())?,
            Call::Finish(summary) => both(&mut map, summary, None::<&()>)?,
        }
        if let Some(error) = &self.error {
            map.serialize_entry("error", error)?;
        }
        if self.replaced {
            map.serialize_entry("replaced", &true)?;
        }
        if let Some(masked) = &self.masked {
            map.serialize_entry("masked", masked)?;
        }
        map.serialize_entry("fuel", &self.fuel)?;
        map.serialize_entry("nanoseconds", &self.nanoseconds)?;
        if !self.imports.is_empty() {
            map.serialize_entry("imports", &self.imports)?;
        }
        if self.dropped > 0 {
            map.serialize_entry("dropped", &self.dropped)?;
        }
        map.end()
    }
}

fn both<M: SerializeMap>(
    map: &mut M,
    input: &impl Serialize,
    answer: Option<&impl Serialize>,
) -> Result<(), M::Error> {
    map.serialize_entry("input", input)?;
    answer.map_or(Ok(()), |answer| map.serialize_entry("answer", answer))
}
