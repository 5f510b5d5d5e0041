//! The objects of OpenAI's chat completions.

use schemars::JsonSchema;
use serde::Serialize;
use steersman_engine::request::{self, ToolCall};

use crate::api::extension::{Extension, ToolRun};
use crate::api::probability::TokenProbabilities;
use crate::api::reply::Reply;

/// A chat completion.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ChatCompletion {
    /// Also the id of the request's trace.
    pub id: String,
    #[schemars(extend("const" = "chat.completion"))]
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    pub model: String,
    /// Digest over weights, numeric format and the policies of the request.
    pub system_fingerprint: String,
    pub choices: Vec<ChatChoice>,
    pub usage: Usage,
    pub steersman: Option<Extension>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ChatChoice {
    pub index: usize,
    pub message: AssistantMessage,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: FinishReason,
    /// With several choices only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steersman: Option<Extension>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct AssistantMessage {
    #[schemars(extend("const" = "assistant"))]
    role: &'static str,
    /// Null if there are only calls.
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call>,
}

impl From<&Reply> for AssistantMessage {
    fn from(reply: &Reply) -> Self {
        let tool_calls: Vec<Call> = reply.tool_calls().map(Into::into).collect();
        let content = reply.answer();
        let calls_only = content.is_empty() && !tool_calls.is_empty();
        let reasoning = Some(reply.reasoning()).filter(|reasoning| !reasoning.is_empty());
        Self {
            role: "assistant",
            content: (!calls_only).then_some(content),
            reasoning_content: reasoning.clone(),
            reasoning,
            tool_calls,
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "ToolCall")]
struct Call {
    id: String,
    #[serde(rename = "type")]
    #[schemars(extend("const" = "function"))]
    kind: String,
    function: CalledFunction,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct CalledFunction {
    name: String,
    /// JSON in a string.
    arguments: String,
}

impl From<&ToolCall> for Call {
    fn from(call: &ToolCall) -> Self {
        let arguments = call.function.arguments.to_json();
        let function = CalledFunction { name: call.function.name.clone(), arguments };
        Self { id: call.id.clone(), kind: call.kind.clone(), function }
    }
}

/// Why a reply ended.
#[derive(Debug, Clone, Copy, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    Stop,
    Length,
    ToolCalls,
}

impl From<&request::FinishReason> for FinishReason {
    fn from(reason: &request::FinishReason) -> Self {
        match reason {
            request::FinishReason::Stop
            | request::FinishReason::StopString(_)
            | request::FinishReason::Policy(_) => Self::Stop,
            request::FinishReason::Length => Self::Length,
            request::FinishReason::ToolCalls => Self::ToolCalls,
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ChatLogprobs {
    content: Vec<TokenProbabilities>,
    refusal: Option<()>,
}

impl ChatLogprobs {
    /// `logprobs` of a choice; `None` without tokens.
    pub fn new(content: Vec<TokenProbabilities>) -> Option<Self> {
        (!content.is_empty()).then_some(Self { content, refusal: None })
    }
}

/// Counts of tokens, in chats and completions.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Usage {
    prompt_tokens: u32,
    /// Tokens of reasoning and answer.
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptTokens,
    completion_tokens_details: CompletionTokens,
}

#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct PromptTokens {
    /// Restored from saved state instead of computed.
    pub cached_tokens: u32,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct CompletionTokens {
    reasoning_tokens: u32,
    /// Drafted tokens that were accepted: OpenAI counts tokens here that the client predicted.
    accepted_prediction_tokens: u32,
    rejected_prediction_tokens: u32,
    /// Tokens that the form left no choice about.
    forced_tokens: u32,
    /// Feed-forward blocks skipped in every pass.
    skipped_layers: u32,
}

impl From<request::Usage> for Usage {
    fn from(usage: request::Usage) -> Self {
        let completion_tokens = usage.reply_tokens();
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens,
            total_tokens: usage.prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokens { cached_tokens: usage.cached_tokens },
            completion_tokens_details: CompletionTokens {
                reasoning_tokens: usage.reasoning_tokens,
                accepted_prediction_tokens: usage.accepted_tokens,
                rejected_prediction_tokens: usage.drafted_tokens - usage.accepted_tokens,
                forced_tokens: usage.forced_tokens,
                skipped_layers: usage.skipped_layers,
            },
        }
    }
}

/// One event of a streamed chat completion.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ChatCompletionChunk {
    pub id: String,
    #[schemars(extend("const" = "chat.completion.chunk"))]
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub system_fingerprint: String,
    pub choices: Vec<ChunkChoice>,
    /// With `include_usage`: null until the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    /// In the last chunk of a choice, and after a call of an MCP tool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steersman: Option<ChunkExtension>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum ChunkExtension {
    /// In the last chunk of a choice.
    End(Extension),
    /// After a call of an MCP tool.
    Ran { profile: String, tool_run: ToolRun },
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ChunkChoice {
    pub index: usize,
    pub delta: Delta,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: Option<FinishReason>,
}

/// A piece of a message.
#[derive(Debug, Default, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallPiece>,
}

impl Delta {
    /// The beginning of a message.
    pub fn begin() -> Self {
        Self { role: Some("assistant"), content: Some(String::new()), ..Self::default() }
    }

    /// A piece of the answer.
    pub fn answer(piece: String) -> Self {
        Self { content: Some(piece), ..Self::default() }
    }

    /// A piece of the reasoning, under both of its names.
    pub fn reasoning(piece: String) -> Self {
        let reasoning_content = Some(piece.clone());
        Self { reasoning_content, reasoning: Some(piece), ..Self::default() }
    }

    /// A piece of a call.
    pub fn call(piece: CallPiece) -> Self {
        Self { tool_calls: vec![piece], ..Self::default() }
    }
}

/// A call of a tool, or a piece of one.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(deny_unknown_fields)]
pub enum CallPiece {
    /// All of a call.
    Whole {
        id: String,
        #[serde(rename = "type")]
        kind: String,
        function: CalledFunction,
        index: usize,
    },
    /// The beginning of a call.
    Begin {
        index: usize,
        id: String,
        #[serde(rename = "type")]
        kind: &'static str,
        function: CalledFunction,
    },
    /// More of the arguments.
    More { index: usize, function: Arguments },
}

/// A piece of the arguments of a call.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "ArgumentsPiece")]
pub struct Arguments {
    arguments: String,
}

impl CallPiece {
    /// All of `call`, whose number is `index`.
    pub fn whole(index: usize, call: &ToolCall) -> Self {
        let Call { id, kind, function } = call.into();
        Self::Whole { id, kind, function, index }
    }

    /// The beginning of call `index`.
    pub fn begin(index: usize, id: String, name: String, arguments: String) -> Self {
        let function = CalledFunction { name, arguments };
        Self::Begin { index, id, kind: "function", function }
    }

    /// More of the arguments of call `index`.
    pub fn more(index: usize, arguments: String) -> Self {
        Self::More { index, function: Arguments { arguments } }
    }
}
