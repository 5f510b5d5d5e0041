//! Parses the body of `POST /v1/messages` into the engine's [`Request`].
//!
//! One message of Anthropic's may hold text, reasoning, calls and results of tools. It becomes the
//! messages that chat templates read: results are messages of their own, and the rest of a turn is one.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};
use steersman_engine::policy::{Retention, SavePoint};
use steersman_engine::request::{Message, Request, ResponseFormat, ToolCall, ToolChoice};

use super::Messages;
use crate::api::error::ApiError;
use crate::api::params::{self, Effort};
use crate::api::protocol::{Call, Parsed};
use crate::api::sampling::Sampling;
use crate::api::schema::Schemas;
use crate::api::schema::shapes::{EffortWord, TextOrItems};
use crate::api::unknown::{Unknown, fields_of};
use crate::api::{fields, json};

/// What separates the blocks of one text.
const BETWEEN_BLOCKS: &str = "\n\n";

/// The fields of the body that have an effect.
#[derive(Deserialize, JsonSchema)]
struct Body {
    model: Option<String>,
    #[schemars(required, length(min = 1))]
    messages: Option<Vec<MessageBody>>,
    /// A text, or blocks of text.
    #[schemars(with = "Option<TextOrItems>")]
    system: Option<Value>,
    #[schemars(range(min = -1))]
    max_tokens: Option<i64>,
    stream: Option<bool>,
    #[schemars(with = "Option<Vec<String>>")]
    stop_sequences: Option<Value>,
    /// Each with `name`, `description` and `input_schema`.
    tools: Option<Vec<Map<String, Value>>>,
    tool_choice: Option<ToolChoiceBody>,
    #[schemars(with = "Option<Thinking>")]
    thinking: Option<Value>,
    output_config: Option<OutputConfig>,
    cache_control: Option<Value>,
}

#[derive(Deserialize, JsonSchema)]
#[schemars(rename = "AnthropicMessage")]
struct MessageBody {
    /// `user`, `assistant` or `system`
    role: String,
    #[schemars(with = "Blocks")]
    content: Value,
}

#[derive(Deserialize, JsonSchema)]
#[schemars(rename = "AnthropicToolChoice")]
struct ToolChoiceBody {
    #[serde(rename = "type")]
    kind: String,
    disable_parallel_tool_use: Option<bool>,
    name: Option<String>,
}

#[derive(JsonSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Thinking {
    Enabled { budget_tokens: u32 },
    Disabled,
    Adaptive,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum ThinkingType {
    Enabled,
    Disabled,
    Adaptive,
}

impl Thinking {
    /// Reads the field. Serde's errors of an enum with tags name the whole of it only.
    ///
    /// # Errors
    /// 400 naming its field.
    fn parse(thinking: &Value) -> Result<Self, ApiError> {
        const BUDGET: &str = "thinking.budget_tokens";
        let fields = thinking.as_object().cloned();
        let mut fields = fields.ok_or_else(|| {
            ApiError::invalid("invalid_type", "thinking", "thinking: must be an object")
        })?;
        json::whole_numbers(&mut fields);
        let field = |name: &str| fields.get(name).filter(|value| !value.is_null());
        let missing = |path: &str| ApiError::missing(path, format!("{path}: missing"));
        let kind = field("type").ok_or_else(|| missing("thinking.type"))?;
        Ok(match json::typed("thinking.type", kind)? {
            ThinkingType::Enabled => {
                let tokens = field("budget_tokens").ok_or_else(|| missing(BUDGET))?;
                Self::Enabled { budget_tokens: json::typed(BUDGET, tokens)? }
            }
            ThinkingType::Disabled => Self::Disabled,
            ThinkingType::Adaptive => Self::Adaptive,
        })
    }
}

#[derive(Deserialize, JsonSchema)]
struct OutputConfig {
    #[schemars(with = "Option<EffortWord>")]
    effort: Option<Effort>,
    format: Option<Value>,
}

/// A block of a message.
#[derive(Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block {
    Text {
        text: String,
    },
    Thinking {
        thinking: String,
    },
    RedactedThinking {
        #[serde(rename = "data")]
        _data: Option<Value>,
    },
    ToolUse {
        id: String,
        name: String,
        #[serde(default)]
        input: Value,
    },
    ToolResult {
        tool_use_id: String,
        content: Option<Value>,
        is_error: Option<bool>,
    },
}

/// A text, or blocks.
#[derive(JsonSchema)]
#[schemars(untagged)]
#[expect(dead_code, reason = "only its schema is used")]
enum Blocks {
    Text(String),
    Blocks(Vec<Block>),
}

/// Types of [`Block`]s, and the fields that each may have: those that are read, and those of Anthropic's that do
/// not change what the model reads.
const BLOCKS: &[(&str, &[&str])] = &[
    ("text", TEXT),
    ("thinking", &["thinking", "signature"]),
    ("redacted_thinking", &["data"]),
    ("tool_use", &["id", "name", "input", "caller", "cache_control"]),
    ("tool_result", &["tool_use_id", "content", "is_error", "cache_control"]),
];

/// Types of [`Block`]s, and their fields that are texts.
const TEXTS: &[(&str, &[&str])] = &[
    ("text", &["text"]),
    ("thinking", &["thinking"]),
    ("tool_use", &["id", "name"]),
    ("tool_result", &["tool_use_id"]),
];

/// The fields of a block of text.
const TEXT: &[&str] = &["text", "citations", "cache_control"];

/// The schema of a body.
pub fn schema(schemas: &mut Schemas) -> Value {
    let parts = [schemas.of::<Body>(), schemas.of::<Sampling>()];
    schemas.body(fields::MESSAGES, &parts)
}

/// Parses a body. Without `max_tokens`, which Anthropic requires, the server's default applies.
///
/// # Errors
/// 400 naming the field.
pub fn parse(mut fields: Map<String, Value>) -> Result<Parsed<Messages>, ApiError> {
    fields::check(fields::MESSAGES, &fields)?;
    let sampling = Sampling::take("", &mut fields)?;
    let mut body: Body = json::typed_body(fields)?;
    let (model, stream) = (body.model.take(), body.stream.unwrap_or(false));
    Ok(Parsed { model, stream, call: body.check(sampling) })
}

impl Body {
    fn check(self, sampling: Sampling) -> Result<Call<Messages>, ApiError> {
        let mut notes = Vec::new();
        let mut unknown = Unknown::default();
        let retain = self.retain()?;
        let (tool_fields, tools) =
            params::offered(tools(self.tools.unwrap_or_default(), &mut notes)?)?;
        let tool_choice = self.tool_choice.map(ToolChoiceBody::check).transpose()?;
        let tool_choice = tool_choice.unwrap_or_default();
        let tools_hidden = tool_choice.allowed.as_ref().is_some_and(Vec::is_empty);
        let (effort, format) = match self.output_config {
            Some(config) => (config.effort, config.format.filter(|format| !format.is_null())),
            None => (None, None),
        };
        let response_format = format.map(output_format).transpose()?;
        let thinking = self.thinking.filter(|thinking| !thinking.is_null());
        let thinking = thinking.map(|thinking| {
            unknown.check("thinking", "body", &thinking, &["budget_tokens", "display"]);
            Thinking::parse(&thinking)
        });
        let thinking = thinking.transpose()?;
        let asked = matches!(thinking, Some(Thinking::Enabled { .. } | Thinking::Adaptive));
        let (reasoning, reasoning_budget) = match thinking {
            Some(Thinking::Enabled { budget_tokens }) => (Some(true), Some(budget_tokens)),
            // The policy decides.
            Some(Thinking::Adaptive) => (None, None),
            // Clients that do not ask for it may not know blocks of that type.
            Some(Thinking::Disabled) | None => (Some(false), None),
        };
        let of_effort = effort.and_then(Effort::budget).filter(|_| reasoning != Some(false));
        let (system, messages) = (self.system, self.messages.unwrap_or_default());
        let messages = conversation(system, messages, &mut notes, &mut unknown)?;
        notes.extend(unknown.notes());
        let mut request = Request {
            messages,
            tools: if tools_hidden { Vec::new() } else { tools },
            tool_choice,
            response_format,
            reasoning,
            effort,
            reasoning_budget: reasoning_budget.or(of_effort),
            sampling: sampling.check()?,
            stop: params::stops("stop_sequences", self.stop_sequences)?,
            retain,
            ..Request::default()
        };
        let limit = params::limit("max_tokens", self.max_tokens)?;
        params::limit_reply(&mut request, limit, asked);
        Ok(Call {
            protocol: Messages::default(),
            requests: vec![request],
            choices: 1,
            tool_fields,
            notes,
        })
    }
}

impl Body {
    /// How long the marks `cache_control` protect saved state: those of tools and system text the state
    /// after both, one of the last message or of the whole body the state after the prompt, others the
    /// states after messages.
    fn retain(&self) -> Result<Vec<Retention>, ApiError> {
        let mut retain = Vec::new();
        let mut add = |at, path: &str, value: &Value| -> Result<(), ApiError> {
            let seconds = marks(path, value)?.into_iter();
            retain.extend(seconds.map(|seconds| Retention { at, seconds }));
            Ok(())
        };
        for (i, tool) in self.tools.iter().flatten().enumerate() {
            add(SavePoint::System, &format!("tools[{i}]"), &Value::Object(tool.clone()))?;
        }
        add(SavePoint::System, "system", self.system.as_ref().unwrap_or(&Value::Null))?;
        let messages = self.messages.as_deref().unwrap_or_default();
        for (i, message) in messages.iter().enumerate() {
            let is_last = i + 1 == messages.len();
            let at = if is_last { SavePoint::Prompt } else { SavePoint::Turns };
            add(at, &format!("messages[{i}].content"), &message.content)?;
        }
        if let Some(mark) = &self.cache_control {
            let seconds = mark_seconds("cache_control", mark)?;
            retain.push(Retention { at: SavePoint::Prompt, seconds });
        }
        Ok(retain)
    }
}

/// Seconds of all marks `cache_control` of a tool, or of the blocks in `value`.
fn marks(path: &str, value: &Value) -> Result<Vec<u32>, ApiError> {
    match value {
        Value::Array(blocks) => {
            let of = |(k, block): (usize, &Value)| marks(&format!("{path}[{k}]"), block);
            Ok(blocks.iter().enumerate().map(of).collect::<Result<Vec<_>, _>>()?.concat())
        }
        Value::Object(block) => {
            let mark = block.get("cache_control").filter(|mark| !mark.is_null());
            let own = mark.map(|mark| mark_seconds(&format!("{path}.cache_control"), mark));
            // The result of a tool has blocks of its own.
            let inner = block.get("content").unwrap_or(&Value::Null);
            let mut all = marks(&format!("{path}.content"), inner)?;
            all.extend(own.transpose()?);
            Ok(all)
        }
        _ => Ok(Vec::new()),
    }
}

/// Seconds of a mark: five minutes or an hour.
fn mark_seconds(path: &str, mark: &Value) -> Result<u32, ApiError> {
    let ttl = mark.get("ttl").unwrap_or(&Value::Null);
    match (mark["type"].as_str(), ttl) {
        (Some("ephemeral"), Value::Null) => Ok(300),
        (Some("ephemeral"), ttl) if ttl == "5m" => Ok(300),
        (Some("ephemeral"), ttl) if ttl == "1h" => Ok(3600),
        _ => {
            let message =
                format!("{path}: must be of type `ephemeral`, with a ttl of `5m` or `1h` if any");
            Err(ApiError::value(path, message))
        }
    }
}

impl ToolChoiceBody {
    /// An empty list of allowed tools hides all.
    fn check(self) -> Result<ToolChoice, ApiError> {
        let (is_required, allowed) = match (self.kind.as_str(), self.name) {
            ("auto", _) => (false, None),
            ("any", _) => (true, None),
            ("none", _) => (false, Some(Vec::new())),
            ("tool", Some(name)) => (true, Some(vec![name])),
            ("tool", None) => {
                let message = "tool_choice.name: must be the tool's name";
                return Err(ApiError::missing("tool_choice.name", message));
            }
            (kind, _) => {
                let message =
                    format!("tool_choice.type: is `{kind}`, must be auto, any, tool or none");
                return Err(ApiError::value("tool_choice.type", message));
            }
        };
        let is_single = self.disable_parallel_tool_use == Some(true);
        Ok(ToolChoice { is_required, allowed, is_single })
    }
}

/// `output_config.format`: a schema.
fn output_format(format: Value) -> Result<ResponseFormat, ApiError> {
    let schema = format.get("schema").filter(|_| format["type"] == "json_schema");
    let Some(schema) = schema else {
        let message = "output_config.format: must have the type json_schema and a schema";
        return Err(ApiError::value("output_config.format", message));
    };
    Ok(params::json_form("output_config.format.schema", Some(schema.clone())))
}

/// The functions among the tools, each after the field of its schema.
fn tools(
    tools: Vec<Map<String, Value>>,
    notes: &mut Vec<String>,
) -> Result<Vec<(String, Value)>, ApiError> {
    let mut functions = Vec::new();
    for (i, tool) in tools.into_iter().enumerate() {
        let kind = tool.get("type").and_then(Value::as_str).unwrap_or("custom");
        if kind == "function" {
            let message = format!(
                "tools[{i}]: has the form of OpenAI's API; write `name`, `description` and `input_schema`, without \
                 `type` or with `custom`"
            );
            return Err(ApiError::value(format!("tools[{i}]"), message));
        }
        if kind != "custom" {
            notes.push(params::tool_left_out(&format!("tools[{i}]"), kind));
            continue;
        }
        let path = format!("tools[{i}]");
        let name = params::function_name(&path, &tool, "input_schema")?;
        let field = format!("{path}.input_schema");
        functions.push((field, params::tool(&name, tool, "input_schema")));
    }
    Ok(functions)
}

/// The conversation as templates read it.
fn conversation(
    system: Option<Value>,
    messages: Vec<MessageBody>,
    notes: &mut Vec<String>,
    unknown: &mut Unknown,
) -> Result<Vec<Message>, ApiError> {
    if messages.is_empty() {
        let message = "messages: must be a list of at least one message";
        return Err(ApiError::missing("messages", message));
    }
    let system = text("system", &system.unwrap_or_default(), unknown)?;
    let mut turns = Vec::new();
    for (i, MessageBody { role, content }) in messages.into_iter().enumerate() {
        let path = format!("messages[{i}].content");
        match role.as_str() {
            "system" => turns.push(plain("system", text(&path, &content, unknown)?)),
            "user" => user_turn(&path, content, &mut turns, unknown)?,
            "assistant" => {
                let blocks = blocks(&path, content, unknown)?;
                turns.push(assistant_turn(&path, blocks, notes)?);
            }
            _ => {
                let param = format!("messages[{i}].role");
                let message = format!("{param}: is `{role}`, must be user, assistant or system");
                return Err(ApiError::value(param, message));
            }
        }
    }
    Ok(params::with_instructions(&system, turns))
}

fn plain(role: &str, content: String) -> Message {
    Message { role: role.into(), content, ..Message::default() }
}

/// Results of tools, each a message, and the user's text after them.
fn user_turn(
    path: &str,
    content: Value,
    turns: &mut Vec<Message>,
    unknown: &mut Unknown,
) -> Result<(), ApiError> {
    let mut said = String::new();
    let blocks = blocks(path, content, unknown)?;
    let is_empty = blocks.is_empty();
    for (k, block) in blocks.into_iter().enumerate() {
        match block {
            Block::Text { text } => append(&mut said, &text),
            Block::ToolResult { tool_use_id, content, is_error } => {
                if !said.is_empty() {
                    turns.push(plain("user", std::mem::take(&mut said)));
                }
                let path = format!("{path}[{k}].content");
                let result = text(&path, &content.unwrap_or_default(), unknown)?;
                let failed = if is_error == Some(true) { "Error: " } else { "" };
                turns.push(Message {
                    tool_call_id: Some(tool_use_id),
                    ..plain("tool", format!("{failed}{result}"))
                });
            }
            Block::Thinking { .. } | Block::RedactedThinking { .. } | Block::ToolUse { .. } => {
                return Err(misplaced(&format!("{path}[{k}]"), "an assistant"));
            }
        }
    }
    if !said.is_empty() || is_empty {
        turns.push(plain("user", said));
    }
    Ok(())
}

fn assistant_turn(
    path: &str,
    blocks: Vec<Block>,
    notes: &mut Vec<String>,
) -> Result<Message, ApiError> {
    let (mut said, mut reasoning) = (String::new(), String::new());
    let mut tool_calls: Vec<ToolCall> = Vec::new();
    for (k, block) in blocks.into_iter().enumerate() {
        match block {
            Block::Text { text } => append(&mut said, &text),
            Block::Thinking { thinking } => append(&mut reasoning, &thinking),
            // Only its author can read it.
            Block::RedactedThinking { .. } => {}
            Block::ToolUse { id, name, input } => {
                let path = format!("{path}[{k}].input");
                tool_calls.push(params::tool_call(&path, id, name, input, notes));
            }
            Block::ToolResult { .. } => {
                return Err(misplaced(&format!("{path}[{k}]"), "a user"));
            }
        }
    }
    let reasoning_content = Some(reasoning).filter(|reasoning| !reasoning.is_empty());
    Ok(Message { reasoning_content, tool_calls, ..plain("assistant", said) })
}

fn misplaced(path: &str, role: &str) -> ApiError {
    let param = format!("{path}.type");
    let message = format!("{param}: only {role} message may have such a block");
    ApiError::value(param, message)
}

/// The blocks of a string or a list.
fn blocks(path: &str, content: Value, unknown: &mut Unknown) -> Result<Vec<Block>, ApiError> {
    let parts = match content {
        Value::String(text) => return Ok(vec![Block::Text { text }]),
        Value::Array(parts) => parts,
        _ => {
            let message = format!("{path}: must be a string or a list of blocks");
            return Err(ApiError::invalid("invalid_type", path, message));
        }
    };
    let block = |(k, part): (usize, &Value)| {
        let path = format!("{path}[{k}]");
        let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
        let Some(known) = fields_of(BLOCKS, kind) else {
            let param = format!("{path}.type");
            let message = format!(
                "{param}: is `{kind}`; supported are text, thinking, tool_use and tool_result"
            );
            return Err(ApiError::unsupported(param, message));
        };
        unknown.check(&path, kind, part, known);
        json::check_texts(&path, part, fields_of(TEXTS, kind).unwrap_or_default())?;
        json::typed(&path, part)
    };
    parts.iter().enumerate().map(block).collect()
}

/// The text of a string or a list of text blocks.
fn text(path: &str, content: &Value, unknown: &mut Unknown) -> Result<String, ApiError> {
    let parts = match content {
        Value::Null => return Ok(String::new()),
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        _ => {
            let message = format!("{path}: must be a string or a list of text blocks");
            return Err(ApiError::invalid("invalid_type", path, message));
        }
    };
    let mut joined = String::new();
    for (k, part) in parts.iter().enumerate() {
        let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
        let (Some(text), "text") = (part.get("text").and_then(Value::as_str), kind) else {
            let param = format!("{path}[{k}].type");
            let message = format!("{param}: is `{kind}`; only blocks of type text are supported");
            return Err(ApiError::unsupported(param, message));
        };
        unknown.check(&format!("{path}[{k}]"), kind, part, TEXT);
        append(&mut joined, text);
    }
    Ok(joined)
}

/// Adds a block to a text.
fn append(text: &mut String, block: &str) {
    if !text.is_empty() && !block.is_empty() {
        *text += BETWEEN_BLOCKS;
    }
    *text += block;
}
