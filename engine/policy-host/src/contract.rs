//! The contract in Rust: the types of `wit/policy.wit`, the calls and answers of the hooks, and the
//! trait that every policy and every wrapper around one implements.
//!
//! `bindgen!` generates the types, and golden files and traces serialize them as they are: fields in
//! snake_case, cases in PascalCase.
//!
//! To add a hook, add its interface to `wit/`, and here a [`Hook`], a case of [`Call`] and of
//! [`Answer`], a row of `hook_input!` and of `exports!`, and a default of its record.
//!
//! # Why
//! Records are owned and lowered by reference: a call copies texts and tokens once, into the guest's
//! memory, as borrowed records would.

#![allow(unsafe_code, reason = "bindgen! implements wasmtime's unsafe traits for the records")]

use std::borrow::Cow;
use std::sync::Arc;

use serde::de::DeserializeSeed;
use serde::{Deserialize, Deserializer, Serialize};
use wasmtime::Store;
use wasmtime::component::{Instance, InstancePre};

use crate::error::Failure;
use crate::sandbox::State;

#[allow(missing_docs, reason = "generated; wit/policy.wit has the documentation")]
pub(crate) mod bindings {
    wasmtime::component::bindgen!({
        path: "../../wit",
        world: "policy-with-host",
        imports: { default: trappable },
        additional_derives: [Clone, PartialEq, serde::Serialize, serde::Deserialize],
    });
}

use bindings::exports::steersman::policy as exports;
pub use bindings::steersman::policy::types::{
    Action, Ban, Bias, EarlierCall, LoopReport, LoopRule, Phase, Plan, PromptView, Replacement,
    RequestView, Retention, SamplingChange, SamplingPatch, SavePoint, Step, Summary, TokenBias,
    ToolCallView, Verdict,
};

/// Version of the contract in `wit/`.
pub const CONTRACT: &str = "0.3.0";

/// Bytes of each system message that a policy sees.
pub const SYSTEM_BYTES: usize = 256 * 1024;
/// Replacements in one answer of `on-prompt`.
pub const MAX_REPLACEMENTS: usize = 16;
/// Highest temperature.
pub const MAX_TEMPERATURE: f32 = 10.0;
/// Bytes of the last user message that a policy sees.
pub const USER_BYTES: usize = 16 * 1024;
/// Fewest tokens between two checkpoints of a reply.
pub const MIN_CHECKPOINT_EVERY: u32 = 16;
/// Entries of `plan.retain`.
pub const MAX_RETENTIONS: usize = 16;
/// Longest retention, in seconds.
pub const MAX_RETENTION_SECONDS: u32 = 24 * 60 * 60;
/// Tokens that one call of `on-step` sees.
pub const STEP_TOKENS: usize = 1024;
/// Tokens of one ban or bias.
pub const MAX_TOKENS: usize = 256;
/// Largest bias.
pub const MAX_BIAS: f32 = 100.0;
/// Actions in one answer of `on-step`.
pub const MAX_ACTIONS: usize = 16;
/// Bytes of the arguments of a tool call that a policy sees.
pub const ARGUMENT_BYTES: usize = 16 * 1024;
/// Earlier tool calls that a policy sees.
pub const EARLIER_CALLS: usize = 64;
/// Repairs of tool calls in one request.
pub const MAX_REPAIRS: u32 = 4;

/// Parameters as policies see them, sorted by name.
pub type Params = Vec<(String, String)>;

/// A hook of the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hook {
    /// Before the prompt is rendered.
    OnPrompt,
    /// Before prefill.
    OnRequest,
    /// After tokens are committed.
    OnStep,
    /// Before the client receives a tool call.
    OnToolCall,
    /// At the end.
    OnFinish,
}

impl Hook {
    /// All hooks, in the order in which a request calls them.
    pub const ALL: [Self; 5] =
        [Self::OnPrompt, Self::OnRequest, Self::OnStep, Self::OnToolCall, Self::OnFinish];

    /// Name of the interface, `on-step`.
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

/// A call of a hook.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Call<'a> {
    /// Of `on-prompt`.
    Prompt(Cow<'a, PromptView>),
    /// Of `on-request`.
    Request(Cow<'a, RequestView>),
    /// Of `on-step`.
    Step(Cow<'a, Step>),
    /// Of `on-tool-call`.
    ToolCall(Cow<'a, ToolCallView>),
    /// Of `on-finish`.
    Finish(Cow<'a, Summary>),
}

/// The answer of a hook.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Answer {
    /// Of `on-prompt`.
    Prompt(Vec<Replacement>),
    /// Of `on-request`.
    Request(Plan),
    /// Of `on-step`.
    Step(Vec<Action>),
    /// Of `on-tool-call`.
    ToolCall(Verdict),
    /// Of `on-finish`, which returns nothing.
    Finish,
}

impl Call<'_> {
    /// The hook that is called.
    pub fn hook(&self) -> Hook {
        match self {
            Self::Prompt(_) => Hook::OnPrompt,
            Self::Request(_) => Hook::OnRequest,
            Self::Step(_) => Hook::OnStep,
            Self::ToolCall(_) => Hook::OnToolCall,
            Self::Finish(_) => Hook::OnFinish,
        }
    }

    /// The same call with records of its own.
    pub fn to_owned(&self) -> Call<'static> {
        match self {
            Self::Prompt(view) => Call::Prompt(Cow::Owned(view.as_ref().clone())),
            Self::Request(view) => Call::Request(Cow::Owned(view.as_ref().clone())),
            Self::Step(step) => Call::Step(Cow::Owned(step.as_ref().clone())),
            Self::ToolCall(view) => Call::ToolCall(Cow::Owned(view.as_ref().clone())),
            Self::Finish(summary) => Call::Finish(Cow::Owned(summary.as_ref().clone())),
        }
    }

    /// The call of `hook` with its default record.
    pub(crate) fn default_of(hook: Hook) -> Call<'static> {
        match hook {
            Hook::OnPrompt => Call::Prompt(Cow::default()),
            Hook::OnRequest => Call::Request(Cow::default()),
            Hook::OnStep => Call::Step(Cow::default()),
            Hook::OnToolCall => Call::ToolCall(Cow::default()),
            Hook::OnFinish => Call::Finish(Cow::default()),
        }
    }

    /// The answer of a policy that does not export the hook.
    pub fn default_answer(&self) -> Answer {
        match self {
            Self::Prompt(_) => Answer::Prompt(Vec::new()),
            Self::Request(_) => Answer::Request(Plan::default()),
            Self::Step(_) => Answer::Step(Vec::new()),
            Self::ToolCall(_) => Answer::ToolCall(Verdict::Accept),
            Self::Finish(_) => Answer::Finish,
        }
    }
}

/// Deserializes the record of a hook.
pub(crate) struct CallOf(pub Hook);

impl<'de> DeserializeSeed<'de> for CallOf {
    type Value = Call<'static>;

    fn deserialize<D: Deserializer<'de>>(self, record: D) -> Result<Self::Value, D::Error> {
        Ok(match self.0 {
            Hook::OnPrompt => Call::Prompt(Cow::Owned(Deserialize::deserialize(record)?)),
            Hook::OnRequest => Call::Request(Cow::Owned(Deserialize::deserialize(record)?)),
            Hook::OnStep => Call::Step(Cow::Owned(Deserialize::deserialize(record)?)),
            Hook::OnToolCall => Call::ToolCall(Cow::Owned(Deserialize::deserialize(record)?)),
            Hook::OnFinish => Call::Finish(Cow::Owned(Deserialize::deserialize(record)?)),
        })
    }
}

/// Deserializes the answer of a hook.
pub(crate) struct AnswerOf(pub Hook);

impl<'de> DeserializeSeed<'de> for AnswerOf {
    type Value = Answer;

    fn deserialize<D: Deserializer<'de>>(self, answer: D) -> Result<Self::Value, D::Error> {
        Ok(match self.0 {
            Hook::OnPrompt => Answer::Prompt(Deserialize::deserialize(answer)?),
            Hook::OnRequest => Answer::Request(Deserialize::deserialize(answer)?),
            Hook::OnStep => Answer::Step(Deserialize::deserialize(answer)?),
            Hook::OnToolCall => Answer::ToolCall(Deserialize::deserialize(answer)?),
            Hook::OnFinish => <()>::deserialize(answer).map(|()| Answer::Finish)?,
        })
    }
}

/// The record that a hook is called with. It determines the hook and the type of the answer.
pub trait HookInput: Clone {
    /// What the hook returns.
    type Answer;

    /// The call with this record.
    fn call(&self) -> Call<'_>;

    /// The answer to such a call; `None` if it is that of another hook.
    fn answer(answer: Answer) -> Option<Self::Answer>;

    /// The reverse of [`Self::answer`].
    fn wrap(answer: Self::Answer) -> Answer;
}

macro_rules! hook_input {
    ($($record:ident: $case:ident -> $answer:ty),+ $(,)?) => {$(
        impl HookInput for $record {
            type Answer = $answer;

            fn call(&self) -> Call<'_> {
                Call::$case(Cow::Borrowed(self))
            }

            fn answer(answer: Answer) -> Option<$answer> {
                match answer {
                    Answer::$case(answer) => Some(answer),
                    _ => None,
                }
            }

            fn wrap(answer: $answer) -> Answer {
                Answer::$case(answer)
            }
        }
    )+};
}

hook_input! {
    PromptView: Prompt -> Vec<Replacement>,
    RequestView: Request -> Plan,
    Step: Step -> Vec<Action>,
    ToolCallView: ToolCall -> Verdict,
}

impl HookInput for Summary {
    type Answer = ();

    fn call(&self) -> Call<'_> {
        Call::Finish(Cow::Borrowed(self))
    }

    fn answer(answer: Answer) -> Option<()> {
        (answer == Answer::Finish).then_some(())
    }

    fn wrap((): ()) -> Answer {
        Answer::Finish
    }
}

/// The policies of one request, or one of them. It lives as long as the request.
pub trait Policy: Send {
    /// Calls a hook. The answer belongs to the same hook as the call.
    ///
    /// # Errors
    /// [`Failure`] if the policy failed and its profile fails closed.
    fn call(&mut self, call: &Call<'_>) -> Result<Answer, Failure>;

    /// What the last call took, and what happened during it. Resets the report.
    fn take_report(&mut self) -> CallReport {
        CallReport::default()
    }
}

impl dyn Policy + '_ {
    /// Calls the hook of `input`.
    ///
    /// # Errors
    /// As [`Policy::call`].
    pub fn ask<T: HookInput>(&mut self, input: &T) -> Result<T::Answer, Failure> {
        let answer = self.call(&input.call())?;
        Ok(T::answer(answer).expect("Policy::call answers for the hook that it was called with"))
    }
}

/// What a call took, and what happened during it.
#[derive(Debug, Default)]
pub struct CallReport {
    /// Fuel and time.
    pub cost: Cost,
    /// Imports that the guest used, in order; those of the start function come with the first call.
    pub imports: Vec<ImportCall>,
    /// The failure, even if another policy answered in its place.
    pub failure: Option<Failure>,
    /// Whether the policy has failed, now or in an earlier call, so that the native policy answers.
    pub replaced: bool,
    /// Notes for the reply.
    pub notes: Vec<String>,
}

/// What a call took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// About one unit a Wasm instruction; deterministic.
    pub fuel: u64,
    /// Duration of the call.
    pub nanoseconds: u64,
}

/// A use of an import and its result, which an exact replay needs. Recorded for `kv.get`, `kv.set`,
/// `kv.delete`, `tokenizer.encode` and `tokenizer.decode`; the other imports return nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportCall {
    /// Interface and function, `kv.get`.
    pub call: String,
    /// Arguments; lists of tokens as JSON.
    pub arguments: Vec<String>,
    /// `kv.get`: the value. `kv.set`: the refusal (`bad-key`, `full`), or `None`. `kv.delete`: `true`
    /// or `false`. `tokenizer.encode`: the tokens as JSON. `tokenizer.decode`: the text.
    pub answer: Option<String>,
}

/// The tokenizer of the served model.
pub trait Vocabulary: Send + Sync {
    /// Tokens of a text, without special tokens; `None` if the tokenizer fails.
    fn encode(&self, text: &str) -> Option<Vec<u32>>;

    /// Text of tokens; unknown ones are skipped.
    fn decode(&self, tokens: &[u32]) -> String;

    /// One more than the largest token.
    fn size(&self) -> u32;
}

/// A vocabulary for use without a model: it has every token, and none has text.
pub fn no_vocabulary() -> Arc<dyn Vocabulary> {
    struct Empty;

    impl Vocabulary for Empty {
        fn encode(&self, _: &str) -> Option<Vec<u32>> {
            Some(Vec::new())
        }

        fn decode(&self, _: &[u32]) -> String {
            String::new()
        }

        fn size(&self) -> u32 {
            u32::MAX
        }
    }

    Arc::new(Empty)
}

macro_rules! exports {
    ($($module:ident: $case:ident($record:ident) => $function:ident),+ $(,)?) => {
        /// Indices of the hooks that a component exports.
        pub(crate) struct HookIndices {
            $($module: Option<exports::$module::GuestIndices>),+
        }

        /// The hooks that an instance exports.
        pub(crate) struct Guest {
            $($module: Option<exports::$module::Guest>),+
        }

        impl HookIndices {
            /// Finds the hooks that `is_exported` names.
            ///
            /// # Errors
            /// If a hook does not have the type that the contract gives it.
            pub(crate) fn new(
                pre: &InstancePre<State>,
                is_exported: impl Fn(&str) -> bool,
            ) -> wasmtime::Result<Self> {
                let is = |module: &str| is_exported(&module.replace('_', "-"));
                Ok(Self {$(
                    $module: is(stringify!($module))
                        .then(|| exports::$module::GuestIndices::new(pre))
                        .transpose()?
                ),+})
            }

            /// Finds them in an instance.
            pub(crate) fn load(
                &self,
                store: &mut Store<State>,
                instance: &Instance,
            ) -> wasmtime::Result<Guest> {
                Ok(Guest {$(
                    $module: self.$module
                        .as_ref()
                        .map(|indices| indices.load(&mut *store, instance))
                        .transpose()?
                ),+})
            }
        }

        impl Guest {
            /// Calls a hook; one that is not exported answers [`Call::default_answer`].
            pub(crate) fn call(
                &self,
                store: &mut Store<State>,
                call: &Call<'_>,
            ) -> wasmtime::Result<Answer> {
                match call {
                    $(Call::$case(input) => match &self.$module {
                        None => Ok(call.default_answer()),
                        Some(guest) => guest.$function(store, input).map($record::wrap),
                    }),+
                }
            }
        }
    };
}

exports! {
    on_prompt: Prompt(PromptView) => call_on_prompt,
    on_request: Request(RequestView) => call_on_request,
    on_step: Step(Step) => call_on_step,
    on_tool_call: ToolCall(ToolCallView) => call_on_tool_call,
    on_finish: Finish(Summary) => call_on_finish,
}

// Generated types derive no Default: enums and variants could not.

impl Default for PromptView {
    fn default() -> Self {
        Self { profile: String::new(), params: Vec::new(), system: Vec::new() }
    }
}

impl SamplingPatch {
    /// These values, and those of `other` for values that are not set.
    pub fn or(self, other: Self) -> Self {
        Self {
            temperature: self.temperature.or(other.temperature),
            top_p: self.top_p.or(other.top_p),
            top_k: self.top_k.or(other.top_k),
            min_p: self.min_p.or(other.min_p),
        }
    }

    /// These values without those that `other` sets.
    pub fn without(self, other: &Self) -> Self {
        Self {
            temperature: self.temperature.filter(|_| other.temperature.is_none()),
            top_p: self.top_p.filter(|_| other.top_p.is_none()),
            top_k: self.top_k.filter(|_| other.top_k.is_none()),
            min_p: self.min_p.filter(|_| other.min_p.is_none()),
        }
    }

    /// Whether no value is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

#[allow(clippy::derivable_impls, reason = "the record is generated")]
impl Default for SamplingPatch {
    fn default() -> Self {
        Self { temperature: None, top_p: None, top_k: None, min_p: None }
    }
}

impl Default for RequestView {
    fn default() -> Self {
        Self {
            id: String::new(),
            profile: String::new(),
            model: String::new(),
            family: String::new(),
            params: Vec::new(),
            prompt_tokens: 0,
            context_left: 0,
            messages: 0,
            system_chars: 0,
            user: String::new(),
            tools: Vec::new(),
            can_reason: false,
            reasoning: None,
            reasoning_budget: None,
            max_tokens: None,
            sampling: SamplingPatch::default(),
            seed: 0,
        }
    }
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            reasoning: None,
            reasoning_budget: None,
            answer_reserve: None,
            sampling: SamplingPatch::default(),
            loops: None,
            every: 0,
            checkpoint_every: 0,
            note: None,
            retain: None,
        }
    }
}

impl Default for Step {
    fn default() -> Self {
        Self {
            index: 0,
            phase: Phase::Answer,
            reasoning_tokens: 0,
            answer_tokens: 0,
            reasoning_left: 0,
            tokens: Vec::new(),
            text: String::new(),
            loop_found: None,
            budget_reached: false,
        }
    }
}

#[allow(clippy::derivable_impls, reason = "the record is generated")]
impl Default for EarlierCall {
    fn default() -> Self {
        Self { name: String::new(), arguments: String::new(), answered: None }
    }
}

impl Default for ToolCallView {
    fn default() -> Self {
        Self {
            name: String::new(),
            arguments: String::new(),
            digest: String::new(),
            index: 0,
            earlier: Vec::new(),
        }
    }
}

impl Default for Summary {
    fn default() -> Self {
        Self {
            reason: String::new(),
            prompt_tokens: 0,
            reasoning_tokens: 0,
            answer_tokens: 0,
            loops: 0,
            tool_calls: 0,
        }
    }
}
