//! What goes into the engine and what comes out: plain data, no arrays, no HTTP, no Wasm.
//!
//! The server builds a [`Request`], the engine answers with [`Event`]s. Everything here can be
//! written by hand in a test.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::Error;

/// One chat request, checked by the server, not yet rendered or tokenised.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Name of the request in logs and replies, unique in this process.
    pub id: String,
    /// Name of the profile whose policy steers this request: a key of `[profiles]`.
    pub profile: String,
    /// The conversation, oldest first; never empty.
    pub messages: Vec<Message>,
    /// Tools the model may call, as the client sent them (`{"type": "function", "function": ..}`).
    pub tools: Vec<Value>,
    /// Further variables for the chat template (`chat_template_kwargs` without `enable_thinking`).
    pub template_variables: Map<String, Value>,
    /// Whether the client wants a thought; `None` leaves it to the policy.
    pub reasoning: Option<bool>,
    /// Most tokens a thought may have, if the client says so.
    pub reasoning_budget: Option<u32>,
    /// Most tokens the answer may have (thoughts not counted); `None` is the configured default.
    pub max_tokens: Option<u32>,
    /// What the client said about sampling.
    pub sampling: SamplingOverrides,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// Whether parts of the answer can be taken back: not where they are on their way to the client
    /// already.
    pub revisable: bool,
}

/// One message of the conversation, in the form chat templates read.
///
/// Content is always text here: the server joins text parts and refuses other kinds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    pub role: String,
    /// The text; empty where the client sent null.
    pub content: String,
    /// The thought of an earlier assistant turn, where the client sends it back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Calls that an assistant turn made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// On `tool` messages: the call that this is the result of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The speaker's or the tool's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A call of a tool: `{"id", "type": "function", "function": {"name", "arguments"}}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Identifies the call among those of the conversation.
    pub id: String,
    /// Always `function`.
    #[serde(rename = "type")]
    pub kind: String,
    /// What is called, and with what.
    pub function: FunctionCall,
}

/// Name and arguments of a called function.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FunctionCall {
    /// A name out of the request's tools.
    pub name: String,
    /// The arguments as JSON values (the API's JSON-in-a-string is parsed by the server, and
    /// written again by it: templates want the values).
    pub arguments: Map<String, Value>,
}

/// Sampling parameters as far as the client gave them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SamplingOverrides {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// Smallest set of tokens with at least this probability mass, in (0, 1].
    pub top_p: Option<f32>,
    /// Only the k likeliest tokens; 0 is all.
    pub top_k: Option<u32>,
    /// Only tokens at least this fraction as likely as the likeliest, in [0, 1].
    pub min_p: Option<f32>,
    /// Seed of the random stream; without it each request draws its own.
    pub seed: Option<u64>,
}

/// Sampling parameters in force for a request.
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
    /// Greedy, with no filter.
    fn default() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0 }
    }
}

/// What the engine says of a request, in this order: `Started`, pieces, then one `Finished` or
/// `Failed`; or `Failed` alone.
#[derive(Debug)]
pub enum Event {
    /// The request was admitted.
    Started {
        /// Hex digest over weights, numeric format and this request's policies: equal digests,
        /// equal answers.
        fingerprint: String,
    },
    /// The next piece of the thought.
    Reasoning(String),
    /// The next piece of the answer.
    Answer(String),
    /// The policy took back what was said last: so many bytes of the thought and of the answer.
    Rewound {
        /// Bytes at the end of all `Reasoning`.
        reasoning: usize,
        /// Bytes at the end of all `Answer`; 0 where [`Request::revisable`] is false.
        answer: usize,
    },
    /// A complete tool call.
    ToolCall(ToolCall),
    /// The request ended well; nothing follows.
    Finished(Finished),
    /// The request ended with an error; nothing follows.
    Failed(Error),
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    /// Why it ended.
    pub reason: FinishReason,
    /// What it used.
    pub usage: Usage,
    /// What the policy did to it, in words, oldest first (also in the log).
    pub notes: Vec<String>,
}

/// Why a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended its turn, or a stop string was found.
    Stop,
    /// The answer reached `max_tokens`, or the context is full.
    Length,
    /// The turn ended with calls of tools.
    ToolCalls,
    /// The policy ended the request, and this is why.
    Policy(String),
}

/// Tokens of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the rendered prompt.
    pub prompt_tokens: u32,
    /// How many of these were restored from saved state instead of computed.
    pub cached_tokens: u32,
    /// Tokens of thoughts, markers and injected text included.
    pub reasoning_tokens: u32,
    /// Tokens of the answer and its tool calls, injected text included.
    pub answer_tokens: u32,
    /// Tokens that were guessed ahead.
    pub drafted_tokens: u32,
    /// How many of these were right, and so are among the tokens of thoughts and answer.
    pub accepted_tokens: u32,
    /// Layers whose feed-forward block was left out, in every pass: `engine.skip_kl` allows a loss.
    pub skipped_layers: u32,
}
