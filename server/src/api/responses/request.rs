//! Parses the body of `POST /v1/responses` into the engine's [`Request`].
//!
//! Items become the messages that chat templates read: consecutive items of the assistant (reasoning,
//! text, calls) are one message.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use steersman_engine::request::{Message, Request, ResponseFormat, ToolCall};

use super::{Responses, labels};
use crate::api::error::ApiError;
use crate::api::params::{self, Effort};
use crate::api::protocol::{Call, Parsed};
use crate::api::sampling::Sampling;
use crate::api::schema::Schemas;
use crate::api::schema::shapes::{EffortWord, Function, Structure, TextOrItems};
use crate::api::typed::one_of;
use crate::api::unknown::{Unknown, fields_of};
use crate::api::{fields, json, probability, structure};
use crate::mcp;

/// Fields that a response repeats, and what it has in place of absent ones.
const REPEATED: &[(&str, &str)] = &[
    ("instructions", "null"),
    ("max_output_tokens", "null"),
    ("metadata", "{}"),
    ("parallel_tool_calls", "true"),
    ("previous_response_id", "null"),
    ("prompt_cache_key", "null"),
    ("reasoning", r#"{"effort": null, "summary": null}"#),
    ("safety_identifier", "null"),
    ("service_tier", r#""default""#),
    ("store", "true"),
    ("temperature", "null"),
    ("text", r#"{"format": {"type": "text"}}"#),
    ("tool_choice", r#""auto""#),
    ("tools", "[]"),
    ("top_logprobs", "0"),
    ("top_p", "null"),
    ("truncation", r#""disabled""#),
    ("user", "null"),
];

/// In `include`: asks for the probabilities of the tokens of the text.
pub const LOGPROBS: &str = "message.output_text.logprobs";

/// The values of `include` that OpenAI documents. All but the first are about what no response here has, or has in
/// any case.
const INCLUDES: [&str; 8] = [
    LOGPROBS,
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
];

/// Checks the values of `include`.
///
/// # Errors
/// 400 naming the first that is unknown.
pub fn check_include<'a>(names: impl Iterator<Item = &'a str>) -> Result<(), ApiError> {
    for name in names {
        if !INCLUDES.contains(&name) {
            let message = format!("include: has `{name}`, must be {}", one_of(&INCLUDES));
            return Err(ApiError::value("include", message));
        }
    }
    Ok(())
}

/// The fields of the body that have an effect.
#[derive(Deserialize, JsonSchema)]
struct Body {
    model: Option<String>,
    /// A text, or items: `message`, `reasoning`, `function_call`, `function_call_output`, `mcp_call`.
    #[schemars(with = "Option<TextOrItems>")]
    input: Option<Value>,
    instructions: Option<String>,
    #[schemars(range(min = -1))]
    max_output_tokens: Option<i64>,
    stream: Option<bool>,
    #[schemars(with = "Option<Vec<Function>>")]
    tools: Option<Vec<Map<String, Value>>>,
    reasoning: Option<Reasoning>,
    text: Option<Text>,
    previous_response_id: Option<String>,
    store: Option<bool>,
    include: Option<Vec<String>>,
    #[schemars(range(max = 20))]
    top_logprobs: Option<u32>,
}

#[derive(Deserialize, JsonSchema)]
#[schemars(rename = "ResponseReasoning")]
struct Reasoning {
    #[schemars(with = "Option<EffortWord>")]
    effort: Option<Effort>,
    summary: Option<String>,
    generate_summary: Option<String>,
}

#[derive(Deserialize, JsonSchema)]
#[schemars(rename = "ResponseText")]
struct Text {
    format: Option<Value>,
    #[serde(rename = "verbosity")]
    _verbosity: Option<String>,
}

/// An item of the input.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Item {
    Message {
        role: String,
        content: Value,
    },
    FunctionCall {
        call_id: String,
        name: String,
        arguments: Value,
    },
    FunctionCallOutput {
        call_id: String,
        output: Value,
    },
    Reasoning {
        summary: Option<Value>,
        content: Option<Value>,
    },
    McpCall {
        id: String,
        server_label: String,
        name: String,
        arguments: Value,
        output: Option<String>,
        error: Option<Value>,
    },
}

/// Types of [`Item`]s, and the fields that each may have: those that are read, and those of our own items and
/// OpenAI's that do not change what the model reads.
const ITEMS: &[(&str, &[&str])] = &[
    ("message", &["id", "role", "content", "status", "phase"]),
    ("function_call", &["id", "call_id", "name", "arguments", "status", "caller"]),
    ("function_call_output", &["id", "call_id", "output", "status", "caller", "name"]),
    ("reasoning", &["id", "summary", "content", "encrypted_content", "status"]),
    (
        "mcp_call",
        &[
            "id",
            "server_label",
            "name",
            "arguments",
            "output",
            "error",
            "status",
            "approval_request_id",
        ],
    ),
];

/// Types of [`Item`]s, and their fields that are texts.
const TEXTS: &[(&str, &[&str])] = &[
    ("message", &["role"]),
    ("function_call", &["call_id", "name"]),
    ("function_call_output", &["call_id"]),
    ("mcp_call", &["id", "server_label", "name"]),
];

/// Types of parts of a content, and the fields that each may have.
const PARTS: &[(&str, &[&str])] = &[
    // Every prefix is cached.
    ("input_text", &["text", "prompt_cache_breakpoint"]),
    ("output_text", &["text", "annotations", "logprobs"]),
    ("text", &["text"]),
    ("summary_text", &["text"]),
    ("reasoning_text", &["text"]),
    ("refusal", &["refusal"]),
];

/// The schema of a body.
pub fn schema(schemas: &mut Schemas) -> Value {
    let parts = [schemas.of::<Body>(), schemas.of::<Sampling>(), schemas.of::<Structure>()];
    schemas.body(fields::RESPONSES, &parts)
}

/// Parses a body.
///
/// # Errors
/// 400 naming the field.
pub fn parse(mut fields: Map<String, Value>) -> Result<Parsed<Responses>, ApiError> {
    fields::check(fields::RESPONSES, &fields)?;
    labels::check(&fields)?;
    let repeated = REPEATED.iter().map(|(name, default)| {
        let value = fields.get(*name).filter(|value| !value.is_null()).cloned();
        let default = || serde_json::from_str(default).expect("the table contains JSON");
        ((*name).to_string(), value.unwrap_or_else(default))
    });
    let repeated = repeated.collect();
    let structure = fields::take(&mut fields, &structure::TOOL_FIELDS);
    let sampling = Sampling::take("", &mut fields)?;
    let mut body: Body = json::typed_body(fields)?;
    let (model, stream) = (body.model.take(), body.stream.unwrap_or(false));
    Ok(Parsed { model, stream, call: body.check(structure, sampling, repeated) })
}

impl Body {
    fn check(
        self,
        structure: Map<String, Value>,
        sampling: Sampling,
        repeated: Map<String, Value>,
    ) -> Result<Call<Responses>, ApiError> {
        let mut notes = Vec::new();
        let format = self.text.and_then(|text| text.format);
        let response_format = format.map_or(Ok(None), text_format)?;
        let input = self.input.unwrap_or_default();
        let messages = match &input {
            Value::String(text) => vec![plain("user", text.clone())],
            Value::Array(items) => conversation(items, &mut notes)?,
            Value::Null if self.previous_response_id.is_none() => {
                let message = "input: must be a string or a list of items";
                return Err(ApiError::missing("input", message));
            }
            Value::Null => Vec::new(),
            _ => {
                let message = "input: must be a string or a list of items";
                return Err(ApiError::invalid("invalid_type", "input", message));
            }
        };
        let (effort, summary) = match self.reasoning {
            Some(Reasoning { effort, summary, generate_summary }) => {
                (effort, summary.or(generate_summary))
            }
            None => (None, None),
        };
        check_include(self.include.iter().flatten().map(String::as_str))?;
        let wants_logprobs = self.include.iter().flatten().any(|name| name == LOGPROBS);
        let condition = format!("\"{LOGPROBS}\" in include");
        let logprobs = probability::logprobs(wants_logprobs, self.top_logprobs, &condition)?;
        let (tool_fields, tools) =
            params::offered(tools(self.tools.unwrap_or_default(), &mut notes)?)?;
        let mut request = Request {
            tools,
            response_format,
            reasoning: effort.map(Effort::reasons),
            effort,
            reasoning_budget: effort.and_then(Effort::budget),
            sampling: sampling.check()?,
            logprobs,
            ..Request::default()
        };
        let limit = params::limit("max_output_tokens", self.max_output_tokens)?;
        let asked = request.reasoning == Some(true);
        params::limit_reply(&mut request, limit, asked);
        structure::choose_tools(structure, &mut request)?;
        let protocol = Responses {
            instructions: self.instructions.unwrap_or_default(),
            messages,
            previous: self.previous_response_id,
            input: match input {
                Value::String(text) => json!([{
                    "type": "message", "role": "user",
                    "content": [{"type": "input_text", "text": text}],
                }]),
                input => input,
            },
            repeated,
            stores: self.store != Some(false),
            summarizes: summary.is_some(),
            ..Responses::default()
        };
        Ok(Call { protocol, requests: vec![request], choices: 1, tool_fields, notes })
    }
}

/// `text.format`: text, any JSON object, or a schema.
fn text_format(format: Value) -> Result<Option<ResponseFormat>, ApiError> {
    match (format["type"].as_str(), format.get("schema")) {
        (Some("text"), _) => Ok(None),
        (Some("json_object"), _) => Ok(Some(params::json_form("text.format", None))),
        (Some("json_schema"), Some(schema)) => {
            Ok(Some(params::json_form("text.format.schema", Some(schema.clone()))))
        }
        _ => {
            let message = "text.format: must have the type text, json_object, or json_schema with \
                           a schema";
            Err(ApiError::value("text.format", message))
        }
    }
}

/// The functions among the tools, each after the field of its schema.
fn tools(
    tools: Vec<Map<String, Value>>,
    notes: &mut Vec<String>,
) -> Result<Vec<(String, Value)>, ApiError> {
    let mut functions = Vec::new();
    for (i, tool) in tools.into_iter().enumerate() {
        let path = format!("tools[{i}]");
        let kind = tool.get("type").and_then(Value::as_str).unwrap_or_default();
        if kind != "function" {
            notes.push(params::tool_left_out(&path, kind));
            continue;
        }
        let name = params::function_name(&path, &tool, "parameters")?;
        let field = format!("{path}.parameters");
        functions.push((field, params::tool(&name, tool, "parameters")));
    }
    Ok(functions)
}

fn plain(role: &str, content: String) -> Message {
    Message { role: role.into(), content, ..Message::default() }
}

/// The messages of a list of items.
fn conversation(items: &[Value], notes: &mut Vec<String>) -> Result<Vec<Message>, ApiError> {
    let mut messages: Vec<Message> = Vec::new();
    let mut unknown = Unknown::default();
    for (i, item) in items.iter().enumerate() {
        let path = format!("input[{i}]");
        let kind = item.get("type").and_then(Value::as_str).unwrap_or("message");
        if kind == "item_reference" {
            let param = format!("{path}.type");
            let message = format!("{param}: send the item itself, or previous_response_id");
            return Err(ApiError::unsupported(param, message));
        }
        let Some(known) = fields_of(ITEMS, kind) else {
            notes.push(format!("{path}: left out, because items of type `{kind}` are not known"));
            continue;
        };
        unknown.check(&path, kind, item, known);
        json::check_texts(&path, item, fields_of(TEXTS, kind).unwrap_or_default())?;
        labels::check_ids(&path, item)?;
        let mut tagged = item.clone();
        if let Some(item) = tagged.as_object_mut() {
            item.insert("type".into(), kind.into());
        }
        match json::typed_object(&path, &tagged)? {
            Item::Message { role, content } => {
                let text = text(&format!("{path}.content"), &content, &mut unknown)?;
                match role.as_str() {
                    "assistant" => append(&mut assistant(&mut messages).content, &text),
                    "user" | "system" | "developer" => messages.push(plain(&role, text)),
                    _ => {
                        let param = format!("{path}.role");
                        let message = format!(
                            "{param}: is `{role}`, must be user, assistant, system or developer"
                        );
                        return Err(ApiError::value(param, message));
                    }
                }
            }
            Item::FunctionCall { call_id, name, arguments } => {
                let path = format!("{path}.arguments");
                let call = params::tool_call(&path, call_id, name, arguments, notes);
                assistant(&mut messages).tool_calls.push(call);
            }
            Item::FunctionCallOutput { call_id, output } => {
                let output = text(&format!("{path}.output"), &output, &mut unknown)?;
                messages.push(Message { tool_call_id: Some(call_id), ..plain("tool", output) });
            }
            Item::McpCall { id, server_label, name, arguments, output, error } => {
                let name = mcp::full_name(&server_label, &name);
                let path = format!("{path}.arguments");
                let call = params::tool_call(&path, id, name, arguments, notes);
                let result = match error {
                    Some(Value::String(error)) => mcp::error_result(&error),
                    Some(error) if !error.is_null() => mcp::error_result(&error.to_string()),
                    _ => output.unwrap_or_default(),
                };
                add_call(&mut messages, call, result);
            }
            Item::Reasoning { summary, content } => {
                let parts = [(content, "content"), (summary, "summary")];
                let mut reasoning = String::new();
                for (part, name) in parts {
                    if let Some(part) = part.filter(|_| reasoning.is_empty()) {
                        reasoning = text(&format!("{path}.{name}"), &part, &mut unknown)?;
                    }
                }
                if !reasoning.is_empty() {
                    let message = assistant(&mut messages);
                    append(message.reasoning_content.get_or_insert_default(), &reasoning);
                }
            }
        }
    }
    notes.extend(unknown.notes());
    Ok(messages)
}

/// Adds a call that this server ran, and its result. Calls in a row belong to one message.
pub fn add_call(messages: &mut Vec<Message>, call: ToolCall, result: String) {
    let results = messages.iter().rev().take_while(|message| message.role == "tool").count();
    let at = messages.len() - results;
    let result = Message {
        tool_call_id: Some(call.id.clone()),
        name: Some(call.function.name.clone()),
        ..plain("tool", result)
    };
    match messages[..at].last_mut().filter(|before| before.role == "assistant") {
        Some(before) => before.tool_calls.push(call),
        None => messages
            .insert(at, Message { tool_calls: vec![call], ..plain("assistant", String::new()) }),
    }
    messages.push(result);
}

/// The last message if it is the assistant's; otherwise a new one, appended.
pub fn assistant(messages: &mut Vec<Message>) -> &mut Message {
    if messages.last().is_none_or(|last| last.role != "assistant") {
        messages.push(plain("assistant", String::new()));
    }
    messages.last_mut().expect("there is one now")
}

/// The text of a string or a list of parts.
fn text(path: &str, content: &Value, unknown: &mut Unknown) -> Result<String, ApiError> {
    let parts = match content {
        Value::Null => return Ok(String::new()),
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        _ => {
            let message = format!("{path}: must be a string or a list of text parts");
            return Err(ApiError::invalid("invalid_type", path, message));
        }
    };
    let mut joined = String::new();
    for (k, part) in parts.iter().enumerate() {
        let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
        let text = part.get("text").or(part.get("refusal")).and_then(Value::as_str);
        let (Some(text), Some(known)) = (text, fields_of(PARTS, kind)) else {
            let param = format!("{path}[{k}].type");
            let message = format!("{param}: is `{kind}`; only parts with text are supported");
            return Err(ApiError::unsupported(param, message));
        };
        unknown.check(&format!("{path}[{k}]"), kind, part, known);
        joined += text;
    }
    Ok(joined)
}

fn append(text: &mut String, more: &str) {
    if !text.is_empty() && !more.is_empty() {
        *text += "\n\n";
    }
    *text += more;
}
