//! Input and output of the engine and of upstreams: plain data without arrays, HTTP or Wasm.
//!
//! The server builds a [`Request`]; what serves its model answers with [`Event`]s. A test can write all of
//! these by hand. What policies see of a request, and do to it before it starts, is the same for all models:
//! [`view`] and [`calls`]. Links MLX with the feature `mlx` only, which the engine sets for the errors of arrays.

pub mod calls;
pub mod error;
mod event;
pub mod live;
mod message;
#[cfg(feature = "mlx")]
pub mod mlx;
mod prefix_name;
pub mod profile;
pub mod span;
mod store_error;
pub mod view;

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use self::event::{Event, FinishReason, Finished, Logprob, PromptToken, TokenLogprob, Usage};
pub use self::message::{Arguments, CallDelta, FunctionCall, Message, ToolCall};
use self::message::{VALUE_BYTES, map_bytes, value_bytes};
pub use self::prefix_name::PrefixName;
use steersman_policy_host as policy;

pub use crate::error::{ConfigError, Error, RequestError, StoreError, UpstreamFault};
use crate::live::Live;
use crate::policy::{
    AnswerForm, Caller, FORM_BYTES, FORM_CHOICES, Retention, SamplingPatch, TokenBias,
};
pub use crate::span::RequestSpan;

/// One request, checked by the server, not yet rendered or tokenized.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Id in logs and replies, unique in this process.
    pub id: String,
    /// The profile that steers this request: a key of `[profiles]`.
    pub profile: String,
    /// Whether a policy of another profile has routed it here; it is not routed again.
    pub is_routed: bool,
    /// Who sends it, as policies see it.
    pub caller: Caller,
    /// The conversation, oldest first; empty only beside a `prompt`.
    pub messages: Vec<Message>,
    /// Names the beginning of the conversation in reports on saved state; `None` gives that no name.
    pub prefix_name: Option<PrefixName>,
    /// A prompt that takes the place of the rendered conversation.
    pub prompt: Option<RawPrompt>,
    /// Where the reply continues the last message, which is the assistant's; `None` begins a message.
    pub continues: Option<Continued>,
    /// Tools that the model may call, as sent by the client: `{"type": "function", "function": ..}`.
    pub tools: Vec<Value>,
    /// Which tools the model may or must call.
    pub tool_choice: ToolChoice,
    /// The form of the answer; `None` leaves it free.
    pub response_format: Option<ResponseFormat>,
    /// Extra variables for the chat template: `chat_template_kwargs` without `enable_thinking`.
    pub template_variables: Map<String, Value>,
    /// Whether the client asks for reasoning; `None` leaves the choice to the policy.
    pub reasoning: Option<bool>,
    /// How much the client wants the model to reason, for chat templates that have a variable for it.
    pub effort: Option<Effort>,
    /// Maximum number of reasoning tokens, if the client sets one.
    pub reasoning_budget: Option<u32>,
    /// Maximum number of tokens of the reply, reasoning included. `engine.max_tokens` applies if the client
    /// limits neither the reply nor its answer.
    pub max_tokens: Option<u32>,
    /// Maximum number of tokens of answer and tool calls; reasoning does not count.
    pub max_answer_tokens: Option<u32>,
    /// Sampling parameters set by the client.
    pub sampling: SamplingPatch,
    /// What the client adds to the logits of tokens.
    pub biases: Vec<TokenBias>,
    /// Penalties of tokens that have occurred.
    pub penalties: Penalties,
    /// Tokens before which the reply does not end its turn.
    pub min_tokens: u32,
    /// Whether the model cannot end its turn: the reply ends at a limit or a stop string.
    pub ignores_end: bool,
    /// Number of likeliest tokens in each [`Event::Logprob`]; `None` sends no such events.
    pub logprobs: Option<u32>,
    /// Number of likeliest tokens in each [`Event::PromptToken`]; `None` sends no such events. With them, the
    /// whole prompt runs, even if its state is saved.
    pub prompt_logprobs: Option<u32>,
    /// Asks for the embedding of the prompt instead of a reply. Policies do not see such a request, its
    /// whole prompt runs, and nothing of it is saved.
    pub embedding: Option<Embedding>,
    /// How long saved state is protected at save points where the plan saves it, at least.
    pub retain: Vec<Retention>,
    /// Seed of the noise; `None` chooses a random one.
    pub seed: Option<u64>,
    /// Stop strings: each ends the answer and is not part of it.
    pub stop: Vec<String>,
    /// Whether a policy may rewind answer text: false for a stream, whose client has already
    /// received it.
    pub revisable: bool,
    /// Whether calls are sent while they are written, unless a policy gives verdicts on calls.
    pub streams_calls: bool,
    /// When the request ends with [`RequestError::Deadline`](crate::RequestError::Deadline) unless it
    /// has ended before; `None` for never.
    pub deadline: Option<Instant>,
    /// Most sequences of its profile that run at the same time; 0 is no limit. Further ones wait.
    pub running_limit: usize,
    /// Where the engine writes how far it is. Each choice needs one of its own.
    pub live: Arc<Live>,
    /// Parent of its spans; its log lines have the fields of this.
    pub span: RequestSpan,
}

impl Request {
    /// Whether all tokens of its prompt must run, saved or not.
    pub fn needs_whole_prompt(&self) -> bool {
        self.prompt_logprobs.is_some() || self.embedding.is_some()
    }

    /// Whether the reply continues an answer that has text, whose form cannot be enforced any more.
    pub fn has_begun_answer(&self) -> bool {
        let last = self.messages.last().filter(|_| self.continues.is_some());
        last.is_some_and(|last| !last.content.is_empty())
    }

    /// Bytes of its text: messages, tools, template variables, form and stop strings.
    pub fn text_bytes(&self) -> usize {
        let messages: usize = self.messages.iter().map(Message::text_bytes).sum();
        let tools: usize = self.tools.iter().map(value_bytes).sum();
        let prompt = match &self.prompt {
            None => 0,
            Some(RawPrompt::Text(text)) => text.len(),
            Some(RawPrompt::Tokens(tokens)) => size_of_val(tokens.as_slice()),
            Some(RawPrompt::Infill { prefix, suffix }) => prefix.len() + suffix.len(),
        };
        let format = self.response_format.as_ref().map_or(0, ResponseFormat::text_bytes);
        let stops: usize = self.stop.iter().map(|stop| VALUE_BYTES + stop.len()).sum();
        prompt + messages + tools + format + stops + map_bytes(&self.template_variables)
    }
}

/// A request, and how its other choices differ from it. They share its prompt.
#[derive(Debug, Default)]
pub struct Choices {
    /// The request, which is the first choice.
    pub request: Request,
    /// The other choices.
    pub others: Vec<Choice>,
}

impl From<Request> for Choices {
    /// A request with a single choice.
    fn from(request: Request) -> Self {
        Self { request, others: Vec::new() }
    }
}

impl Choices {
    /// Its choices as requests of their own, the first one first.
    pub fn requests(&self) -> impl Iterator<Item = Request> {
        let others = self.others.iter().map(|choice| choice.of(&self.request));
        std::iter::once_with(|| self.request.clone()).chain(others)
    }

    /// Where the engine writes how far its choices are, the first one first.
    pub fn live(&self) -> impl Iterator<Item = &Arc<Live>> {
        std::iter::once(&self.request.live).chain(self.others.iter().map(|choice| &choice.live))
    }
}

/// A choice of a request beside the first.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    /// [`Request::id`]
    pub id: String,
    /// [`Request::seed`]
    pub seed: Option<u64>,
    /// [`Request::live`]
    pub live: Arc<Live>,
}

impl Choice {
    /// The choice as a request of its own, whose first choice is `first`.
    pub fn of(&self, first: &Request) -> Request {
        let Self { id, seed, live } = self.clone();
        // The prompt of a further choice does not run.
        Request { id, seed, live, prompt_logprobs: None, ..first.clone() }
    }
}

/// Reasoning budget of the effort `low`.
const LOW_EFFORT_TOKENS: u32 = 1024;

/// Reasoning budget of the effort `medium`.
const MEDIUM_EFFORT_TOKENS: u32 = 8192;

/// Levels of reasoning, ascending.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effort {
    /// No reasoning.
    None,
    /// The same.
    Minimal,
    /// A small budget.
    Low,
    /// A larger one.
    Medium,
    /// As much as the policy allows.
    High,
    /// The same, and a template may tell them apart.
    XHigh,
    /// The same, and a template may tell them apart.
    Max,
}

impl Effort {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::None, Self::Minimal, Self::Low, Self::Medium, Self::High, Self::XHigh, Self::Max];

    /// Its name in all protocols and chat templates.
    pub fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Minimal => "minimal",
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
            Self::XHigh => "xhigh",
            Self::Max => "max",
        }
    }

    /// Whether to reason.
    pub fn reasons(self) -> bool {
        !matches!(self, Self::None | Self::Minimal)
    }

    /// Reasoning tokens; `None` for as many as the policy allows.
    pub fn budget(self) -> Option<u32> {
        match self {
            Self::Low => Some(LOW_EFFORT_TOKENS),
            Self::Medium => Some(MEDIUM_EFFORT_TOKENS),
            Self::None | Self::Minimal | Self::High | Self::XHigh | Self::Max => None,
        }
    }
}

/// The part of a message in which a reply continues it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Continued {
    /// The reply continues the reasoning of the message.
    Reasoning,
    /// The reply continues the answer of the message, whose reasoning has ended.
    Answer,
}

/// Which tools the model may or must call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToolChoice {
    /// Whether the reply must call a tool instead of answering.
    pub is_required: bool,
    /// Names of the only tools that may be called; `None` for all.
    pub allowed: Option<Vec<String>>,
    /// Whether the reply ends after its first call.
    pub is_single: bool,
}

/// The form of an answer, which tokens outside of it cannot leave.
#[derive(Debug, Clone, PartialEq)]
pub struct ResponseFormat {
    /// Where the client demands it, for errors: `response_format.json_schema.schema`.
    pub field: &'static str,
    /// The form.
    pub form: Form,
}

/// The forms of an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Form {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema accepts.
    JsonSchema(Value),
    /// Text that a regular expression matches as a whole, in the syntax of the crate `regex`.
    Regex(String),
    /// Text of a context-free grammar, in llguidance's dialect of Lark or in GBNF.
    Lark(String),
    /// One of these texts.
    Choice(Vec<String>),
}

impl ResponseFormat {
    /// The form that a policy plans.
    ///
    /// # Errors
    /// If its schema is not JSON.
    pub fn planned(form: AnswerForm) -> Result<Self, String> {
        let form = match form {
            AnswerForm::JsonObject => Form::JsonObject,
            AnswerForm::JsonSchema(schema) => {
                let schema = serde_json::from_str(&schema);
                Form::JsonSchema(schema.map_err(|error| format!("the schema of `form`: {error}"))?)
            }
            AnswerForm::Regex(regex) => Form::Regex(regex),
            AnswerForm::Grammar(grammar) => Form::Lark(grammar),
            AnswerForm::Choice(texts) => Form::Choice(texts),
        };
        Ok(Self { field: "form", form })
    }

    /// The form as policies see it, truncated.
    pub fn seen(&self) -> AnswerForm {
        let cut = |text: &str| text[..text.floor_char_boundary(FORM_BYTES)].to_string();
        let mut left = FORM_BYTES;
        let mut fits = |text: &&String| {
            let fits = text.len() <= left;
            left = left.saturating_sub(text.len());
            fits
        };
        match &self.form {
            Form::JsonObject => AnswerForm::JsonObject,
            Form::JsonSchema(schema) => AnswerForm::JsonSchema(cut(&schema.to_string())),
            Form::Regex(regex) => AnswerForm::Regex(cut(regex)),
            Form::Lark(grammar) => AnswerForm::Grammar(cut(grammar)),
            Form::Choice(texts) => AnswerForm::Choice(
                texts.iter().take(FORM_CHOICES).take_while(|text| fits(text)).cloned().collect(),
            ),
        }
    }

    fn text_bytes(&self) -> usize {
        match &self.form {
            Form::JsonObject => VALUE_BYTES,
            Form::JsonSchema(schema) => value_bytes(schema),
            Form::Regex(text) | Form::Lark(text) => text.len(),
            Form::Choice(texts) => texts.iter().map(|text| VALUE_BYTES + text.len()).sum(),
        }
    }
}

/// A prompt as the client wrote it, which no template renders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RawPrompt {
    /// Special tokens that the text spells are parsed, and the tokenizer adds its own (`bos`).
    Text(String),
    /// Ids of the model's vocabulary.
    Tokens(Vec<u32>),
    /// What stands before and after the text that the model fills in. Spells no special tokens.
    Infill {
        /// The text before.
        prefix: String,
        /// The text after.
        suffix: String,
    },
}

/// Sampling parameters of a request.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Smallest set of tokens with at least this probability mass, in (0, 1].
    pub top_p: f32,
    /// Only the k likeliest tokens; 0 is all.
    pub top_k: u32,
    /// Only tokens at least this fraction as likely as the likeliest, in [0, 1].
    pub min_p: f32,
}

impl Default for Sampling {
    /// Greedy, without filters.
    fn default() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0 }
    }
}

impl Sampling {
    /// Whether tokens are dropped before one is sampled.
    pub fn has_filters(&self) -> bool {
        self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0
    }

    /// Checks all ranges.
    ///
    /// # Errors
    /// Names every parameter that is out of range.
    pub fn check(&self) -> Result<(), String> {
        let Self { temperature, top_p, top_k: _, min_p } = *self;
        let ranges = [
            ("temperature", temperature, (0.0..=2.0).contains(&temperature), "from 0 to 2"),
            ("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0, at most 1"),
            ("min_p", min_p, (0.0..=1.0).contains(&min_p), "from 0 to 1"),
        ];
        let problems: Vec<_> = ranges
            .iter()
            .filter(|(.., is_valid, _)| !is_valid)
            .map(|(name, value, _, range)| format!("{name} is {value}, must be {range}"))
            .collect();
        if problems.is_empty() { Ok(()) } else { Err(problems.join("; ")) }
    }

    /// These parameters with the values of `patch`.
    #[must_use]
    pub fn with(self, patch: &SamplingPatch) -> Self {
        Self {
            temperature: patch.temperature.unwrap_or(self.temperature),
            top_p: patch.top_p.unwrap_or(self.top_p),
            top_k: patch.top_k.unwrap_or(self.top_k),
            min_p: patch.min_p.unwrap_or(self.min_p),
        }
    }
}

/// Penalties of tokens that have occurred, applied to logits after biases: first `repetition`, then the
/// others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Penalties {
    /// Subtracted once from tokens of the reply.
    pub presence: f32,
    /// Subtracted from tokens of the reply as often as they occur.
    pub frequency: f32,
    /// Positive logits of tokens of prompt and reply are divided by it, negative ones multiplied.
    pub repetition: f32,
    /// Number of newest tokens that `repetition` counts; 0 for all.
    pub window: u32,
}

impl Penalties {
    /// Whether they change no logit.
    pub fn is_empty(&self) -> bool {
        let Self { presence, frequency, repetition, window: _ } = *self;
        presence == 0.0 && frequency == 0.0 && repetition == 1.0
    }
}

impl Default for Penalties {
    /// None.
    fn default() -> Self {
        Self { presence: 0.0, frequency: 0.0, repetition: 1.0, window: 0 }
    }
}

/// The embedding that a request asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Embedding {
    /// Number of its first dimensions to keep; `None` for all.
    pub dimensions: Option<u32>,
    /// Whether a prompt that is too long is cut, with a note, instead of refused.
    pub truncates: bool,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_text_of_a_request_counts() {
        let text = "x".repeat(1000);
        let message = Message { role: "user".into(), ..Message::default() };
        let object = |value: Value| value.as_object().unwrap().clone();
        let call =
            FunctionCall { name: "f".into(), arguments: object(json!({"a": [text]})).into() };
        let call = ToolCall { id: "1".into(), kind: "function".into(), function: call };
        let requests = [
            Request {
                messages: vec![Message { content: text.clone(), ..message.clone() }],
                ..Request::default()
            },
            Request {
                messages: vec![Message {
                    reasoning_content: Some(text.clone()),
                    ..message.clone()
                }],
                ..Request::default()
            },
            Request {
                messages: vec![Message { tool_calls: vec![call], ..message.clone() }],
                ..Request::default()
            },
            Request { tools: vec![json!({"function": {"name": text}})], ..Request::default() },
            Request {
                template_variables: object(json!({"list": [{"key": text}]})),
                ..Request::default()
            },
            Request { messages: vec![message; 100], ..Request::default() },
            Request { stop: vec![text.clone()], ..Request::default() },
            Request { stop: vec![String::new(); 125], ..Request::default() },
            Request { prompt: Some(RawPrompt::Text(text.clone())), ..Request::default() },
            Request { prompt: Some(RawPrompt::Tokens(vec![1; 250])), ..Request::default() },
            Request {
                prompt: Some(RawPrompt::Infill {
                    prefix: text[..400].into(),
                    suffix: text[400..].into(),
                }),
                ..Request::default()
            },
        ];
        for request in requests {
            let bytes = request.text_bytes();
            assert!((1000..=1200).contains(&bytes), "{bytes}");
        }
    }
}
