//! The contract in Rust: the types of `wit/policy.wit`, the calls and answers of the hooks, and the
//! trait that every policy and every wrapper around one implements.
//!
//! `bindgen!` generates the types, and golden files and traces serialize them as they are: fields in
//! snake_case, cases in PascalCase.
//!
//! To add a hook, add its interface to `wit/`, and here a row of `hooks!` and a default of its record.
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
    Action, AnswerForm, Ban, Bias, Caller, Candidate, Counted, DrawnToken, EarlierCall, LoopReport,
    LoopRule, MessageView, Observations, Outlook, ParamsView, Phase, Plan, PreparedParams,
    PromptEdit, PromptView, Refusal, Replacement, RequestView, Retention, SamplingChange,
    SamplingPatch, SavePoint, Step, Summary, TextChange, TextVerdict, TextView, TokenBias,
    ToolCallView, Verdict, Watched, WatchedToken,
};

/// Version of the contract in `wit/`.
pub const CONTRACT: &str = "0.6.0";

/// Bytes of each system message that a policy sees.
pub const SYSTEM_BYTES: usize = 256 * 1024;
/// Edits in one answer of `on-prompt`.
pub const MAX_EDITS: usize = 16;
/// Highest temperature.
pub const MAX_TEMPERATURE: f32 = 10.0;
/// Bytes of texts in one answer of `on-params`.
pub const PREPARED_BYTES: usize = 1 << 20;
/// Messages that a policy sees.
pub const MESSAGES: usize = 64;
/// Bytes of each of them.
pub const MESSAGE_BYTES: usize = 2048;
/// Bytes of the description of a tool that a policy sees.
pub const DESCRIPTION_BYTES: usize = 1024;
/// Pairs of `caller.metadata`.
pub const METADATA: usize = 16;
/// Bytes of a name of `caller.metadata`.
pub const METADATA_NAME_BYTES: usize = 64;
/// Bytes of a value of `caller.metadata`.
pub const METADATA_BYTES: usize = 512;
/// Bytes of the value of a header that a policy sees.
pub const HEADER_BYTES: usize = 1024;
/// Stop strings of a plan.
pub const MAX_STOPS: usize = 16;
/// Bytes of the last user message that a policy sees.
pub const USER_BYTES: usize = 16 * 1024;
/// Bytes of the client's form that a policy sees.
pub const FORM_BYTES: usize = 16 * 1024;
/// Choices of the client's form that a policy sees.
pub const FORM_CHOICES: usize = 256;
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
/// Texts in `plan.on-texts`.
pub const MAX_EVENT_TEXTS: usize = 16;
/// Bytes of each of them.
pub const EVENT_TEXT_BYTES: usize = 256;
/// `plan.candidates` at most.
pub const MAX_CANDIDATES: u32 = 8;
/// Tokens of `plan.watch`.
pub const MAX_WATCHED: usize = 16;
/// Smallest `watched.logprob`: JSON has no infinity.
pub const MIN_LOGPROB: f32 = -10_000.0;
/// Largest `drawn-token.margin`.
pub const MAX_MARGIN: f32 = 100.0;
/// Bytes of answer text that a policy may hold back.
pub const HELD_BYTES: usize = 1024;
/// Labels of one answer of `on-finish`.
pub const MAX_LABELS: usize = 16;
/// Bytes of the name of a label.
pub const LABEL_NAME_BYTES: usize = 64;
/// Bytes of the value of a label.
pub const LABEL_BYTES: usize = 512;
/// Bytes of the arguments of a tool call that a policy sees.
pub const ARGUMENT_BYTES: usize = 16 * 1024;
/// Earlier tool calls that a policy sees.
pub const EARLIER_CALLS: usize = 64;
/// Repairs of tool calls in one request.
pub const MAX_REPAIRS: u32 = 4;

/// Parameters as policies see them, sorted by name.
pub type Params = Vec<(String, String)>;

/// Names and values that a reply carries, as policies return them.
pub type Labels = Vec<(String, String)>;

/// The record that a hook is called with. It determines the hook and the type of the answer.
pub trait HookInput: Clone {
    /// What the hook returns.
    type Answer;

    /// The call with this record.
    fn call(&self) -> Call<'_>;

    /// The answer to such a call; `None` if it is that of another hook.
    fn answer(answer: Answer) -> Option<Self::Answer>;
}

/// Everything that exists once for each hook.
macro_rules! hooks {
    ($($(#[$doc:meta])+ $hook:ident = $name:literal, $module:ident::$function:ident:
        $case:ident($record:ident) -> $answer:ty;)+) => {
        /// A hook of the contract, in the order in which a request calls them.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        pub enum Hook {
            $($(#[$doc])+ $hook),+
        }

        impl Hook {
            /// All hooks.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$hook),+];

            /// Name of the interface, `on-step`.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$hook => $name),+
                }
            }
        }

        /// A call of a hook.
        #[allow(clippy::large_enum_variant, reason = "a box would be an allocation in each call")]
        #[derive(Debug, Clone, PartialEq, Serialize)]
        #[serde(untagged)]
        pub enum Call<'a> {
            $(#[doc = concat!("Of `", $name, "`.")] $case(Cow<'a, $record>)),+
        }

        /// The answer of a hook.
        #[allow(clippy::large_enum_variant, reason = "a box would be an allocation in each call")]
        #[derive(Debug, Clone, PartialEq, Serialize)]
        #[serde(untagged)]
        pub enum Answer {
            $(#[doc = concat!("Of `", $name, "`.")] $case($answer)),+
        }

        impl Call<'_> {
            /// The hook that is called.
            pub fn hook(&self) -> Hook {
                match self {
                    $(Self::$case(_) => Hook::$hook),+
                }
            }

            /// The same call with records of its own.
            pub fn to_owned(&self) -> Call<'static> {
                match self {
                    $(Self::$case(record) => Call::$case(Cow::Owned(record.as_ref().clone()))),+
                }
            }

            /// The call of `hook` with its default record.
            pub(crate) fn default_of(hook: Hook) -> Call<'static> {
                match hook {
                    $(Hook::$hook => Call::$case(Cow::default())),+
                }
            }

            /// The answer of a policy that does not export the hook.
            pub fn default_answer(&self) -> Answer {
                match self {
                    $(Self::$case(_) => Answer::$case(Default::default())),+
                }
            }
        }

        impl<'de> DeserializeSeed<'de> for CallOf {
            type Value = Call<'static>;

            fn deserialize<D: Deserializer<'de>>(self, call: D) -> Result<Self::Value, D::Error> {
                match self.0 {
                    $(Hook::$hook => Deserialize::deserialize(call).map(Cow::Owned).map(Call::$case)),+
                }
            }
        }

        impl<'de> DeserializeSeed<'de> for AnswerOf {
            type Value = Answer;

            fn deserialize<D: Deserializer<'de>>(self, answer: D) -> Result<Answer, D::Error> {
                match self.0 {
                    $(Hook::$hook => Deserialize::deserialize(answer).map(Answer::$case)),+
                }
            }
        }

        $(impl HookInput for $record {
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
        })+

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
            pub(crate) fn new<T: 'static>(
                pre: &InstancePre<T>,
                is_exported: impl Fn(&str) -> bool,
            ) -> wasmtime::Result<Self> {
                Ok(Self {$(
                    $module: is_exported($name)
                        .then(|| exports::$module::GuestIndices::new(pre))
                        .transpose()?
                ),+})
            }

            /// Finds the same hooks in an instance.
            pub(crate) fn load<T: 'static>(
                &self,
                store: &mut Store<T>,
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
            pub(crate) fn call<T: 'static>(
                &self,
                store: &mut Store<T>,
                call: &Call<'_>,
            ) -> wasmtime::Result<Answer> {
                match call {
                    $(Call::$case(input) => match &self.$module {
                        None => Ok(call.default_answer()),
                        Some(guest) => guest.$function(store, input).map(Answer::$case),
                    }),+
                }
            }
        }
    };
}

hooks! {
    /// Before requests have a text of the parameters.
    OnParams = "on-params", on_params::call_on_params: Params(ParamsView) -> PreparedParams;
    /// Before the prompt is rendered.
    OnPrompt = "on-prompt", on_prompt::call_on_prompt: Prompt(PromptView) -> Vec<PromptEdit>;
    /// Before prefill.
    OnRequest = "on-request", on_request::call_on_request: Request(RequestView) -> Plan;
    /// After tokens are committed.
    OnStep = "on-step", on_step::call_on_step: Step(Step) -> Vec<Action>;
    /// Before the client receives a piece of the answer.
    OnText = "on-text", on_text::call_on_text: Text(TextView) -> TextVerdict;
    /// Before the client receives a tool call.
    OnToolCall = "on-tool-call", on_tool_call::call_on_tool_call: ToolCall(ToolCallView) -> Verdict;
    /// At the end.
    OnFinish = "on-finish", on_finish::call_on_finish: Finish(Summary) -> Labels;
}

/// The hooks that cost a request something by being exported: answers, or tool calls, wait for them. `on-params`
/// can turn them off for some parameters.
pub const OPTIONAL_HOOKS: [Hook; 2] = [Hook::OnText, Hook::OnToolCall];

/// The text that [`PreparedParams::replaced`] has for the name of a hook that it turns off.
pub const HOOK_OFF: &str = "off";

impl PreparedParams {
    /// Returns true if the policy needs no calls of `hook` with these parameters.
    pub fn turns_off(&self, hook: Hook) -> bool {
        let is_hook = |(name, text): &(String, String)| name == hook.name() && text == HOOK_OFF;
        OPTIONAL_HOOKS.contains(&hook) && self.replaced.iter().any(is_hook)
    }
}

/// Deserializes the record of a hook.
pub(crate) struct CallOf(pub Hook);

/// Deserializes the answer of a hook.
pub(crate) struct AnswerOf(pub Hook);

/// The policies of one request, or one of them. It lives as long as the request.
pub trait Policy: Send {
    /// Calls a hook. The answer belongs to the same hook as the call.
    ///
    /// # Errors
    /// [`Failure`] if the policy failed and its profile fails closed.
    fn call(&mut self, call: &Call<'_>) -> Result<Answer, Failure>;

    /// Whether calls of `hook` are known to be quick, so that they may run on a thread for which other
    /// requests wait.
    fn is_quick(&self, _hook: Hook) -> bool {
        true
    }

    /// Whether calls of `hook` can have an effect: otherwise the answer is [`Call::default_answer`].
    fn has(&self, _hook: Hook) -> bool {
        true
    }

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

/// A use of an import and its result, which an exact replay needs. Recorded for all functions of `kv` and
/// `tokenizer`; the other imports return nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportCall {
    /// Interface and function, `kv.get`.
    pub call: String,
    /// Arguments; lists of tokens as JSON.
    pub arguments: Vec<String>,
    /// `kv.get`: the value. `kv.set`: the refusal (`bad-key`, `full`), or `None`. `kv.delete` and
    /// `kv.expire`: `true` or `false`. `kv.add`: the sum, or the refusal. `kv.list`: the keys as JSON.
    /// `tokenizer.encode`: the tokens as JSON. `tokenizer.decode`: the text.
    pub answer: Option<String>,
}

/// The served model as far as policies depend on it: its tokenizer, and the forms that it can enforce.
pub trait Vocabulary: Send + Sync {
    /// Tokens of a text, without special tokens; `None` if the tokenizer fails.
    fn encode(&self, text: &str) -> Option<Vec<u32>>;

    /// Text of tokens; unknown ones are skipped.
    fn decode(&self, tokens: &[u32]) -> String;

    /// One more than the largest token.
    fn size(&self) -> u32;

    /// Checks that a form can be enforced.
    ///
    /// # Errors
    /// What cannot be enforced, in one line.
    fn check_form(&self, _form: &AnswerForm) -> Result<(), String> {
        Ok(())
    }
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

impl Observations {
    /// `None` if there is nothing to observe.
    pub fn if_any(self) -> Option<Self> {
        (self != Self::default()).then_some(self)
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

macro_rules! empty_by_default {
    ($($record:ident { $($field:ident),+ $(,)? })+) => {$(
        impl Default for $record {
            fn default() -> Self {
                Self { $($field: Default::default()),+ }
            }
        }
    )+};
}

// bindgen! cannot derive Default: it would derive it for variants too.
empty_by_default! {
    ParamsView { profile, params }
    PreparedParams { replaced, problems }
    PromptView { profile, params, system }
    SamplingPatch { temperature, top_p, top_k, min_p }
    RequestView {
        id, profile, model, family, params, prompt_tokens, context_left, messages, system_chars,
        user, tools, can_reason, reasoning, reasoning_budget, max_tokens, max_answer_tokens, form, sampling,
        seed, time, caller, conversation, tool_descriptions,
    }
    Caller { key, user, metadata, headers }
    MessageView { role, bytes, text, calls, digest }
    Plan {
        reasoning, reasoning_budget, answer_reserve, sampling, loops, every, checkpoint_every, note,
        retain, form, refuse, max_tokens, stop, tools, on_phase, on_newline, on_texts, on_tokens,
        candidates, route, limit_counts, watch,
    }
    Step {
        index, phase, reasoning_tokens, answer_tokens, reasoning_left, tokens, text, loop_found,
        budget_reached, phase_changed, newline, observed,
    }
    Observations { texts_found, token_found, drawn, outlook }
    TextView { position, text, end }
    EarlierCall { name, arguments, answered }
    ToolCallView { name, arguments, digest, index, earlier }
    Summary { reason, prompt_tokens, reasoning_tokens, answer_tokens, loops, tool_calls }
}

#[allow(clippy::derivable_impls, reason = "the type is generated")]
impl Default for Phase {
    fn default() -> Self {
        Self::Answer
    }
}

#[allow(clippy::derivable_impls, reason = "the type is generated")]
impl Default for TextVerdict {
    fn default() -> Self {
        Self::Pass
    }
}

#[allow(clippy::derivable_impls, reason = "the type is generated")]
impl Default for Verdict {
    fn default() -> Self {
        Self::Accept
    }
}
