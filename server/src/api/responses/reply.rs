//! The objects of OpenAI's responses.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use steersman_engine::request;

use crate::api::chat::PromptTokens;
use crate::api::extension::Extension;
use crate::api::probability::TokenProbabilities;

/// A response.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct ResponseBody {
    pub id: String,
    #[schemars(extend("const" = "response"))]
    pub object: &'static str,
    pub created_at: u64,
    pub status: Status,
    pub background: bool,
    pub error: Option<ResponseError>,
    pub incomplete_details: Option<Incomplete>,
    pub model: String,
    pub output: Vec<OutputItem>,
    pub usage: Option<ResponseUsage>,
    /// The fields of the request that OpenAI's responses repeat.
    #[serde(flatten)]
    pub repeated: Map<String, Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steersman: Option<Extension>,
}

/// The status of a response, or of an item of its output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "ResponseStatus")]
pub enum Status {
    #[default]
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ResponseError {
    pub code: &'static str,
    pub message: String,
}

#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Incomplete {
    pub reason: &'static str,
}

/// Reasoning, a message, a call of a function, or a call of an MCP tool.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum OutputItem {
    Reasoning(ReasoningItem),
    Message(MessageItem),
    Call(CallItem),
    McpCall(McpCallItem),
}

#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ReasoningItem {
    pub id: String,
    #[serde(rename = "type")]
    #[schemars(extend("const" = "reasoning"))]
    pub kind: &'static str,
    pub summary: Vec<OutputPart>,
    pub content: Vec<OutputPart>,
    pub status: Status,
}

#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct MessageItem {
    pub id: String,
    #[serde(rename = "type")]
    #[schemars(extend("const" = "message"))]
    pub kind: &'static str,
    pub role: &'static str,
    pub status: Status,
    pub content: Vec<OutputPart>,
}

#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct CallItem {
    pub id: String,
    #[serde(rename = "type")]
    #[schemars(extend("const" = "function_call"))]
    pub kind: &'static str,
    pub call_id: String,
    pub status: Status,
    pub name: String,
    pub arguments: String,
}

#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct McpCallItem {
    pub id: String,
    #[serde(rename = "type")]
    #[schemars(extend("const" = "mcp_call"))]
    pub kind: &'static str,
    pub status: Status,
    pub server_label: String,
    pub name: String,
    pub arguments: Option<String>,
    pub output: Option<String>,
    pub error: Option<String>,
    pub approval_request_id: Option<()>,
}

/// A text of an item.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[serde(tag = "type")]
pub enum OutputPart {
    #[serde(rename = "summary_text")]
    Summary { text: String },
    #[serde(rename = "reasoning_text")]
    Reasoning { text: String },
    #[serde(rename = "output_text")]
    Output { text: String, annotations: [(); 0], logprobs: Vec<TokenProbabilities> },
}

/// Counts of tokens.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ResponseUsage {
    input_tokens: u32,
    input_tokens_details: PromptTokens,
    output_tokens: u32,
    output_tokens_details: ReasoningTokens,
    total_tokens: u32,
}

#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ReasoningTokens {
    reasoning_tokens: u32,
}

impl From<request::Usage> for ResponseUsage {
    fn from(usage: request::Usage) -> Self {
        let output_tokens = usage.reply_tokens();
        Self {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: PromptTokens { cached_tokens: usage.cached_tokens },
            output_tokens,
            output_tokens_details: ReasoningTokens { reasoning_tokens: usage.reasoning_tokens },
            total_tokens: usage.prompt_tokens + output_tokens,
        }
    }
}

/// An event of a streamed response. Which fields it has depends on its type.
#[derive(Debug, Default, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ResponseEvent {
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub sequence_number: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response: Option<ResponseBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub item_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub item: Option<OutputItem>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub summary_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<OutputPart>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arguments: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<TokenProbabilities>>,
}

/// The answer to the deletion of a response.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct DeletedResponse {
    pub id: String,
    #[schemars(extend("const" = "response"))]
    pub object: &'static str,
    pub deleted: bool,
}

/// A page of the items of an input.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct InputItems {
    #[schemars(extend("const" = "list"))]
    pub object: &'static str,
    #[schemars(with = "Vec<Map<String, Value>>")]
    pub data: Vec<Value>,
    /// Null if there are no items.
    #[schemars(with = "Option<String>")]
    pub first_id: Value,
    #[schemars(with = "Option<String>")]
    pub last_id: Value,
    pub has_more: bool,
}
