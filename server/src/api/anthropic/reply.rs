//! The objects of Anthropic's messages.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use steersman_engine::request::{self, Arguments, FinishReason};

use crate::api::error::AnthropicError;
use crate::api::extension::Extension;
use crate::api::reply::{Head, Part, all_digits};

/// A message of Anthropic's.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct MessageReply {
    id: String,
    #[serde(rename = "type")]
    #[schemars(extend("const" = "message"))]
    kind: &'static str,
    #[schemars(extend("const" = "assistant"))]
    role: &'static str,
    model: String,
    content: Vec<ContentBlock>,
    stop_reason: Option<StopReason>,
    stop_sequence: Option<String>,
    usage: MessageUsage,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steersman: Option<Extension>,
}

impl MessageReply {
    /// A message with these parts, whose end is not known yet.
    pub fn new(head: &Head, parts: &[Part], usage: request::Usage) -> Self {
        Self {
            id: head.id.clone(),
            kind: "message",
            role: "assistant",
            model: head.model.clone(),
            content: parts.iter().filter_map(|part| ContentBlock::new(part, &head.id)).collect(),
            stop_reason: None,
            stop_sequence: None,
            usage: usage.into(),
            steersman: None,
        }
    }

    /// The message that has ended like this.
    pub fn ended(self, end: Stop, steersman: Extension) -> Self {
        let Stop { stop_reason, stop_sequence } = end;
        Self { stop_reason, stop_sequence, steersman: Some(steersman), ..self }
    }
}

/// A block. Clients keep reasoning only if it has a signature, which nothing here verifies.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ContentBlock {
    Thinking {
        thinking: String,
        signature: String,
    },
    Text {
        text: String,
    },
    ToolUse {
        id: String,
        name: String,
        #[serde(serialize_with = "all_digits")]
        #[schemars(with = "Map<String, Value>")]
        input: Arguments,
    },
}

impl ContentBlock {
    /// The block of a part. Only streams have open calls, and they send their parts as they come. What this server ran
    /// is no block: official clients know none for it.
    fn new(part: &Part, signature: &str) -> Option<Self> {
        match part {
            Part::Reasoning(text) => {
                Some(Self::Thinking { thinking: text.clone(), signature: signature.into() })
            }
            Part::Answer(text) => Some(Self::Text { text: text.clone() }),
            Part::OpenCall { .. } | Part::Ran(_) => None,
            Part::ToolCall(call) => Some(Self::ToolUse {
                id: call.id.clone(),
                name: call.function.name.clone(),
                input: call.function.arguments.clone(),
            }),
        }
    }
}

#[derive(Debug, Clone, Copy, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum StopReason {
    EndTurn,
    StopSequence,
    MaxTokens,
    ToolUse,
}

/// Why a message ended.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Stop {
    stop_reason: Option<StopReason>,
    stop_sequence: Option<String>,
}

impl From<&FinishReason> for Stop {
    fn from(reason: &FinishReason) -> Self {
        let (stop_reason, stop_sequence) = match reason {
            FinishReason::Stop | FinishReason::Policy(_) => (StopReason::EndTurn, None),
            FinishReason::StopString(stop) => (StopReason::StopSequence, Some(stop.clone())),
            FinishReason::Length => (StopReason::MaxTokens, None),
            FinishReason::ToolCalls => (StopReason::ToolUse, None),
        };
        Self { stop_reason: Some(stop_reason), stop_sequence }
    }
}

/// Counts of tokens: those that were restored from saved state are counted apart.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct MessageUsage {
    input_tokens: u32,
    cache_creation_input_tokens: u32,
    /// Restored from saved state.
    cache_read_input_tokens: u32,
    output_tokens: u32,
    output_tokens_details: ThinkingTokens,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ThinkingTokens {
    /// Tokens of reasoning among `output_tokens`.
    thinking_tokens: u32,
}

impl From<request::Usage> for MessageUsage {
    fn from(usage: request::Usage) -> Self {
        Self {
            input_tokens: usage.prompt_tokens - usage.cached_tokens,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: usage.cached_tokens,
            output_tokens: usage.reply_tokens(),
            output_tokens_details: ThinkingTokens { thinking_tokens: usage.reasoning_tokens },
        }
    }
}

/// An event of a stream.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum StreamEvent {
    /// A part of the message.
    Message(MessageEvent),
    /// The end of a stream that fails.
    Error(AnthropicError),
}

/// An event of a streamed message.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum MessageEvent {
    MessageStart { message: MessageReply },
    ContentBlockStart { index: usize, content_block: ContentBlock },
    ContentBlockDelta { index: usize, delta: Delta },
    ContentBlockStop { index: usize },
    MessageDelta { delta: Stop, usage: MessageUsage, steersman: Extension },
    MessageStop {},
    Ping {},
}

impl MessageEvent {
    /// The name of the event, which is its type.
    pub fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop {} => "message_stop",
            Self::Ping {} => "ping",
        }
    }
}

/// A piece of a block.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "type")]
#[schemars(rename = "BlockDelta")]
pub enum Delta {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: String },
    #[serde(rename = "text_delta")]
    Text { text: String },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: String },
    #[serde(rename = "signature_delta")]
    Signature { signature: String },
}

/// The tokens of a prompt.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct InputTokens {
    pub input_tokens: usize,
}

#[cfg(test)]
mod tests {
    use steersman_engine::request::{FunctionCall, ToolCall};

    use super::*;

    /// Whole replies said `1e+22` where streams have the digits that the model wrote.
    #[test]
    fn numbers_of_calls_keep_their_digits() {
        let json = r#"{"id":10000000000000000000001,"far":1e999,"sum":0.10,"none":-0}"#;
        let arguments = Arguments::written(Map::new(), json);
        let function = FunctionCall { name: "f".into(), arguments };
        let call = ToolCall { id: "1".into(), kind: "function".into(), function };
        let block = ContentBlock::new(&Part::ToolCall(call), "");
        let block = serde_json::to_string(&block).unwrap();
        assert_eq!(block, format!(r#"{{"type":"tool_use","id":"1","name":"f","input":{json}}}"#));
    }
}
