//! Converts the client's messages to the engine's.
//!
//! Text parts are joined and arguments of calls parsed; fields that a role may not have are errors.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;
use steersman_engine::request::{Continued, Message, ToolCall};

use crate::api::error::ApiError;
use crate::api::params;
use crate::api::schema::shapes::Content;

/// One message as the client sends it.
#[derive(Deserialize, JsonSchema)]
#[schemars(rename = "ChatMessage")]
pub struct MessageBody {
    /// `system`, `developer`, `user`, `assistant` or `tool`
    #[schemars(required)]
    role: Option<String>,
    #[schemars(with = "Option<Content>")]
    content: Option<Value>,
    name: Option<String>,
    /// Reasoning of an earlier turn, under the name that our replies use.
    reasoning_content: Option<String>,
    /// The same under the name that other servers use.
    reasoning: Option<String>,
    tool_calls: Option<Vec<CallBody>>,
    tool_call_id: Option<String>,
    // OpenAI's replies contain these, mostly empty, and clients send replies back unchanged.
    refusal: Option<Value>,
    annotations: Option<Value>,
    audio: Option<Value>,
    function_call: Option<Value>,
    // Libraries add these to replies of other servers, and send them back.
    #[serde(rename = "provider_specific_fields")]
    _provider_specific_fields: Option<Value>,
    #[serde(rename = "thinking_blocks")]
    _thinking_blocks: Option<Value>,
    #[serde(rename = "reasoning_details")]
    _reasoning_details: Option<Value>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<Value>,
    // OpenAI's packages add what they parsed of a reply, here and in calls, and send it back.
    #[serde(rename = "parsed")]
    _parsed: Option<Value>,
}

impl MessageBody {
    /// Where a reply can continue this message; `None` if it cannot.
    pub fn continued(&self) -> Option<Continued> {
        let is_ours = self.role.as_deref() == Some("assistant");
        let has_calls = self.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty());
        let has_answer = self.content.as_ref().is_some_and(|content| !content.is_null());
        let has_reasoning = self.reasoning_content.is_some() || self.reasoning.is_some();
        match (has_answer, has_reasoning) {
            _ if !is_ours || has_calls => None,
            (true, _) => Some(Continued::Answer),
            (false, true) => Some(Continued::Reasoning),
            (false, false) => None,
        }
    }
}

#[derive(Deserialize, JsonSchema)]
#[schemars(rename = "ChatCall")]
struct CallBody {
    id: Option<String>,
    #[serde(rename = "type", default = "function")]
    kind: String,
    function: FunctionBody,
    /// Chunks of a stream contain it, and some clients send it back.
    #[serde(rename = "index")]
    _index: Option<u32>,
    #[serde(rename = "provider_specific_fields")]
    _provider_specific_fields: Option<Value>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<Value>,
}

#[derive(Deserialize, JsonSchema)]
#[schemars(rename = "ChatCallFunction")]
struct FunctionBody {
    name: String,
    #[serde(default)]
    arguments: Value,
    #[serde(rename = "provider_specific_fields")]
    _provider_specific_fields: Option<Value>,
    #[serde(rename = "parsed_arguments")]
    _parsed_arguments: Option<Value>,
}

fn function() -> String {
    "function".into()
}

/// Converts `messages`.
///
/// # Errors
/// 400 naming the field by its path.
pub fn parse(
    messages: Option<Vec<MessageBody>>,
    notes: &mut Vec<String>,
) -> Result<Vec<Message>, ApiError> {
    let messages = messages.unwrap_or_default();
    if messages.is_empty() {
        let message = "messages: must be a list of at least one message";
        return Err(ApiError::missing("messages", message));
    }
    messages.into_iter().enumerate().map(|(i, body)| message(i, body, notes)).collect()
}

fn message(i: usize, body: MessageBody, notes: &mut Vec<String>) -> Result<Message, ApiError> {
    let at = |field: &str| format!("messages[{i}].{field}");
    let wrong = |field: &str, problem: &str| {
        let param = at(field);
        let message = format!("{param}: {problem}");
        ApiError::value(param, message)
    };
    for (field, value) in [("audio", &body.audio), ("function_call", &body.function_call)] {
        if value.as_ref().is_some_and(|value| !value.is_null() && *value != Value::Array(vec![])) {
            let message = format!("{}: is not supported; leave it out", at(field));
            return Err(ApiError::unsupported(at(field), message));
        }
    }

    let role = body.role.ok_or_else(|| wrong("role", "missing"))?;
    let (assistant, tool) = match role.as_str() {
        "system" | "developer" | "user" => (false, false),
        "assistant" => (true, false),
        "tool" => (false, true),
        _ => {
            let problem =
                format!("is `{role}`, must be system, developer, user, assistant or tool");
            return Err(wrong("role", &problem));
        }
    };
    let reasoning = match (body.reasoning_content, body.reasoning) {
        (Some(one), Some(other)) if one != other => {
            return Err(wrong("reasoning", "differs from reasoning_content; drop one of them"));
        }
        (one, other) => one.or(other),
    };
    let tool_calls = body.tool_calls.unwrap_or_default();
    if !assistant && reasoning.is_some() {
        return Err(wrong("reasoning_content", "only an assistant message may have it"));
    }
    if !assistant && !tool_calls.is_empty() {
        return Err(wrong("tool_calls", "only an assistant message may have them"));
    }
    if tool && body.tool_call_id.is_none() {
        return Err(wrong(
            "tool_call_id",
            "missing; give the id of the call that this message answers",
        ));
    }
    if !tool && body.tool_call_id.is_some() {
        return Err(wrong("tool_call_id", "only a tool message may have it"));
    }
    let mut content = match body.content {
        // Clients send back replies without an answer, and results of tools that return nothing.
        None if !assistant && !tool => return Err(wrong("content", "missing")),
        content => text(&at("content"), content, assistant)?,
    };
    match body.refusal {
        None | Some(Value::Null) => {}
        Some(Value::Array(list)) if list.is_empty() => {}
        Some(Value::String(refusal)) if assistant => content += &refusal,
        Some(_) if assistant => return Err(wrong("refusal", "must be a string")),
        Some(_) => return Err(wrong("refusal", "only an assistant message may have it")),
    }
    match body.annotations {
        None | Some(Value::Null) => {}
        Some(Value::Array(list)) if list.is_empty() => {}
        Some(Value::Array(_)) if assistant => {
            notes.push(format!("{}: left out, the model reads the text only", at("annotations")));
        }
        Some(_) if assistant => return Err(wrong("annotations", "must be a list")),
        Some(_) => return Err(wrong("annotations", "only an assistant message may have them")),
    }
    let tool_calls = tool_calls
        .into_iter()
        .enumerate()
        .map(|(k, call)| tool_call(&at(&format!("tool_calls[{k}]")), call, notes))
        .collect::<Result<_, _>>()?;
    Ok(Message {
        role,
        content,
        reasoning_content: reasoning,
        tool_calls,
        tool_call_id: body.tool_call_id,
        name: body.name,
    })
}

/// The text of a string, null or a list of text parts, which are concatenated. A refusal is text of the assistant.
fn text(path: &str, content: Option<Value>, is_assistant: bool) -> Result<String, ApiError> {
    let parts = match content {
        None | Some(Value::Null) => return Ok(String::new()),
        Some(Value::String(text)) => return Ok(text),
        Some(Value::Array(parts)) => parts,
        Some(_) => {
            let message = format!("{path}: must be a string or a list of text parts");
            return Err(ApiError::invalid("invalid_type", path, message));
        }
    };
    let part = |(k, part): (usize, &Value)| {
        if !part.is_object() {
            let param = format!("{path}[{k}]");
            let message = format!("{param}: must be an object with a `type`");
            return Err(ApiError::invalid("invalid_type", param, message));
        }
        let kind = part.get("type").and_then(Value::as_str).unwrap_or("");
        let key = match kind {
            "text" => "text",
            "refusal" if is_assistant => "refusal",
            _ => "",
        };
        if key.is_empty() {
            let param = format!("{path}[{k}].type");
            let message = format!("{param}: is `{kind}`; only parts of type `text` are supported");
            return Err(ApiError::unsupported(param, message));
        }
        // `cache_control` tells other servers what to cache; here every prefix is cached.
        let known = |name: &&String| ["type", key, "cache_control"].contains(&name.as_str());
        let unknown = part.as_object().and_then(|part| part.keys().find(|name| !known(name)));
        if let Some(name) = unknown {
            let param = format!("{path}[{k}].{name}");
            return Err(ApiError::unknown_field(param, ["type", key, "cache_control"]));
        }
        part.get(key).and_then(Value::as_str).map(str::to_string).ok_or_else(|| {
            let param = format!("{path}[{k}].{key}");
            let message = format!("{param}: must be a string");
            ApiError::invalid("invalid_type", param, message)
        })
    };
    parts.iter().enumerate().map(part).collect()
}

/// A call, whose arguments the API sends as JSON in a string.
fn tool_call(path: &str, call: CallBody, notes: &mut Vec<String>) -> Result<ToolCall, ApiError> {
    if call.kind != "function" {
        let param = format!("{path}.type");
        let message = format!("{param}: only \"function\" is supported");
        return Err(ApiError::unsupported(param, message));
    }
    let FunctionBody { name, arguments, .. } = call.function;
    let path = format!("{path}.function.arguments");
    Ok(params::tool_call(&path, call.id.unwrap_or_default(), name, arguments, notes))
}
