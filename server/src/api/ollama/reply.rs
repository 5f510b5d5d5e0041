//! The objects of Ollama's replies.

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use steersman_engine::request::{Arguments, ToolCall};

use crate::api::extension::Extension;
use crate::api::probability::TokenProbabilities;
use crate::api::reply::{Head, all_digits};

/// A reply, or one line of it.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "{C}")]
pub struct Line<C> {
    pub model: String,
    pub created_at: String,
    pub done: bool,
    #[serde(flatten)]
    pub content: C,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<TokenProbabilities>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub done_reason: Option<DoneReason>,
    #[serde(flatten)]
    pub end: Option<End>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steersman: Option<Extension>,
}

impl<C> Line<C> {
    /// A line with this content, the last one if `done`.
    pub fn new(head: &Head, content: C, done: bool) -> Self {
        Self {
            model: head.model.clone(),
            created_at: Timestamp::now().to_string(),
            done,
            content,
            logprobs: Vec::new(),
            done_reason: None,
            end: None,
            steersman: None,
        }
    }
}

/// What the last line of a reply adds. Durations are in nanoseconds.
#[derive(Debug, Serialize, JsonSchema)]
pub struct End {
    pub total_duration: u64,
    /// Until the request started: the model is loaded, the request waited.
    pub load_duration: u64,
    pub prompt_eval_count: u32,
    pub prompt_eval_duration: u64,
    pub eval_count: u32,
    pub eval_duration: u64,
}

#[derive(Debug, Clone, Copy, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "OllamaReason")]
pub enum DoneReason {
    Stop,
    Length,
    Load,
    Unload,
}

/// The content of a line.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum Content {
    Chat(ChatContent),
    Generated(GeneratedContent),
}

/// The content of a line of `/api/chat`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "OllamaChat")]
pub struct ChatContent {
    message: Message,
}

/// The content of a line of `/api/generate`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "OllamaGenerated")]
pub struct GeneratedContent {
    response: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "OllamaMessage")]
struct Message {
    #[schemars(extend("const" = "assistant"))]
    role: &'static str,
    content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "OllamaCall")]
struct Call {
    id: String,
    function: Function,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "OllamaFunction")]
struct Function {
    index: usize,
    name: String,
    #[serde(serialize_with = "all_digits")]
    #[schemars(with = "Map<String, Value>")]
    arguments: Arguments,
}

impl Content {
    /// The content of a line of a chat, with calls of which the first has the number `first`.
    pub fn chat(answer: String, thinking: String, first: usize, calls: &[&ToolCall]) -> Self {
        let call = |(index, call): (usize, &&ToolCall)| {
            let (name, arguments) = (call.function.name.clone(), call.function.arguments.clone());
            Call {
                id: call.id.clone(),
                function: Function { index: first + index, name, arguments },
            }
        };
        let message = Message {
            role: "assistant",
            content: answer,
            thinking: Some(thinking).filter(|thinking| !thinking.is_empty()),
            tool_calls: calls.iter().enumerate().map(call).collect(),
        };
        Self::Chat(ChatContent { message })
    }

    /// The content of a line of a generated text.
    pub fn generated(response: String, thinking: String) -> Self {
        let thinking = Some(thinking).filter(|thinking| !thinking.is_empty());
        Self::Generated(GeneratedContent { response, thinking })
    }
}

/// The reply of `/api/embed`, or of `/api/embeddings`.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum EmbedReply {
    Many(Box<Embedded>),
    One(OneEmbedding),
}

/// The reply of `/api/embed`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "OllamaEmbedded")]
pub struct Embedded {
    pub model: String,
    /// One vector of length 1 for each text.
    pub embeddings: Vec<Vec<f64>>,
    /// Durations are in nanoseconds.
    pub total_duration: u64,
    pub load_duration: u64,
    pub prompt_eval_count: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steersman: Option<Extension>,
}

/// The reply of `/api/embeddings`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "OllamaEmbedding")]
pub struct OneEmbedding {
    /// A vector of length 1; empty without a text.
    pub embedding: Vec<f64>,
}

#[cfg(test)]
mod tests {
    use steersman_engine::request::FunctionCall;

    use super::*;

    /// Integers beyond 64 bits were rounded, and `1e999` was a string.
    #[test]
    fn numbers_of_calls_keep_their_digits() {
        let json = r#"{"id":10000000000000000000001,"far":1e999,"sum":0.10,"none":-0}"#;
        let arguments = Arguments::written(Map::new(), json);
        let function = FunctionCall { name: "f".into(), arguments };
        let call = ToolCall { id: "1".into(), kind: "function".into(), function };
        let content = Content::chat(String::new(), String::new(), 0, &[&call]);
        let line = serde_json::to_string(&Line::new(&Head::default(), content, true)).unwrap();
        assert!(line.contains(&format!(r#""name":"f","arguments":{json}}}"#)), "{line}");
    }
}
