//! Parses the fields that fix the form of a reply: `response_format`, its names in vLLM and llama.cpp, and
//! `tool_choice` with what belongs to it.
//!
//! The engine checks whether a form can be enforced; here are names, types and contradictions.

use serde_json::{Map, Value};
use steersman_engine::request::{Form, Request, ResponseFormat};

use super::error::ApiError;

/// The fields that this module reads.
pub const FIELDS: [&str; 10] = [
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "grammar",
    "tool_choice",
    "parallel_tool_calls",
];

/// The fields among them that are about tools.
pub const TOOL_FIELDS: [&str; 2] = ["tool_choice", "parallel_tool_calls"];

/// Reads `fields`, a part of a body, into `request`, which has its tools.
///
/// # Errors
/// 400 naming the field.
pub fn apply(mut fields: Map<String, Value>, request: &mut Request) -> Result<(), ApiError> {
    let of_tools = super::fields::take(&mut fields, &TOOL_FIELDS);
    let mut format: Option<(String, Option<ResponseFormat>)> = None;
    for (name, value) in fields.into_iter().filter(|(_, value)| !value.is_null()) {
        let form = form(&name, value)?;
        if let Some((other, Some(_))) = &format
            && form.is_some()
        {
            let message = format!("{name}: `{other}` fixes the form already; drop one");
            return Err(ApiError::value(name, message));
        }
        if form.is_some() || format.is_none() {
            format = Some((name, form));
        }
    }
    request.response_format = format.and_then(|(_, form)| form);
    choose_tools(of_tools, request)
}

/// Reads `tool_choice` and `parallel_tool_calls` of `fields` into `request`, which has its tools.
///
/// # Errors
/// 400 naming the field.
pub fn choose_tools(fields: Map<String, Value>, request: &mut Request) -> Result<(), ApiError> {
    for (name, value) in fields.into_iter().filter(|(_, value)| !value.is_null()) {
        if name == "tool_choice" {
            tool_choice(value, request)?;
        } else {
            request.tool_choice.is_single = !boolean(&name, &value)?;
        }
    }
    Ok(())
}

/// The form that one field demands; `None` for text.
fn form(name: &str, value: Value) -> Result<Option<ResponseFormat>, ApiError> {
    let format = |field, form| Ok(Some(ResponseFormat { field, form }));
    match name {
        "response_format" => response_format(value),
        "structured_outputs" => structured_outputs(value),
        "guided_json" => format("guided_json", Form::JsonSchema(schema(name, value)?)),
        "json_schema" => format("json_schema", Form::JsonSchema(schema(name, value)?)),
        "guided_regex" => format("guided_regex", Form::Regex(string(name, value)?)),
        "guided_choice" => format("guided_choice", Form::Choice(strings(name, value)?)),
        "guided_grammar" => format("guided_grammar", Form::Lark(string(name, value)?)),
        _ => format("grammar", Form::Lark(string(name, value)?)),
    }
}

fn response_format(value: Value) -> Result<Option<ResponseFormat>, ApiError> {
    const NAME: &str = "response_format";
    let Value::Object(mut fields) = value else { return Err(not(NAME, "an object")) };
    let kind = fields.shift_remove("type");
    let (field, form) = match kind.as_ref().and_then(Value::as_str) {
        Some("text") => return Ok(None),
        // llama.cpp and others put a schema beside it.
        Some("json_object") => match fields.shift_remove("schema") {
            Some(schema) => ("response_format.schema", Form::JsonSchema(schema)),
            None => (NAME, Form::JsonObject),
        },
        Some("json_schema") => {
            let Some(Value::Object(mut inner)) = fields.shift_remove("json_schema") else {
                let path = "response_format.json_schema";
                return Err(not(path, "an object with the keys `name` and `schema`"));
            };
            let field = "response_format.json_schema.schema";
            let Some(schema) = inner.shift_remove("schema") else {
                return Err(not(field, "a JSON schema"));
            };
            (field, Form::JsonSchema(schema))
        }
        Some("regex") => {
            let field = "response_format.pattern";
            let pattern = fields.shift_remove("pattern").unwrap_or_default();
            (field, Form::Regex(string(field, pattern)?))
        }
        Some("grammar") => {
            let field = "response_format.grammar";
            let grammar = fields.shift_remove("grammar").unwrap_or_default();
            (field, Form::Lark(string(field, grammar)?))
        }
        _ => {
            let path = "response_format.type";
            let kinds = "\"text\", \"json_object\", \"json_schema\", \"regex\" or \"grammar\"";
            return Err(not(path, kinds));
        }
    };
    Ok(Some(ResponseFormat { field, form }))
}

/// vLLM's object of one form.
fn structured_outputs(value: Value) -> Result<Option<ResponseFormat>, ApiError> {
    const NAME: &str = "structured_outputs";
    let Value::Object(fields) = value else { return Err(not(NAME, "an object")) };
    let mut form = None;
    for (key, value) in fields.into_iter().filter(|(_, value)| !value.is_null()) {
        let path = format!("{NAME}.{key}");
        let (field, own) = match key.as_str() {
            "json" => ("structured_outputs.json", Form::JsonSchema(schema(&path, value)?)),
            "regex" => ("structured_outputs.regex", Form::Regex(string(&path, value)?)),
            "choice" => ("structured_outputs.choice", Form::Choice(strings(&path, value)?)),
            "grammar" => ("structured_outputs.grammar", Form::Lark(string(&path, value)?)),
            "json_object" if value == Value::Bool(false) => continue,
            "json_object" => ("structured_outputs.json_object", Form::JsonObject),
            _ => {
                let message = format!(
                    "{path}: is not supported; use `json`, `json_object`, `regex`, `choice` or \
                     `grammar`"
                );
                return Err(ApiError::unsupported(path, message));
            }
        };
        if form.replace(ResponseFormat { field, form: own }).is_some() {
            return Err(ApiError::value(
                NAME,
                format!("{NAME}: has several forms; drop all but one"),
            ));
        }
    }
    Ok(form)
}

/// `tool_choice`: a mode, one function, or a list of allowed ones.
fn tool_choice(value: Value, request: &mut Request) -> Result<(), ApiError> {
    const NAME: &str = "tool_choice";
    let choice = &mut request.tool_choice;
    let name_of = |value: &Value| {
        let name = value.get("function").unwrap_or(value).get("name");
        name.and_then(Value::as_str).map(str::to_string)
    };
    match (value.as_str(), value.get("type").and_then(Value::as_str)) {
        (Some("auto"), _) => {}
        (Some("none"), _) => {
            request.tools.clear();
            choice.allowed = Some(Vec::new());
        }
        (Some("required" | "any"), _) => choice.is_required = true,
        (None, Some("function")) => {
            let Some(name) = name_of(&value) else {
                return Err(not("tool_choice.function.name", "the function's name"));
            };
            (choice.is_required, choice.allowed) = (true, Some(vec![name]));
        }
        (None, Some("allowed_tools")) => {
            let inner = value.get("allowed_tools").unwrap_or(&value);
            choice.is_required = inner.get("mode").and_then(Value::as_str) == Some("required");
            let tools = inner.get("tools").and_then(Value::as_array);
            let names = tools.and_then(|tools| tools.iter().map(name_of).collect());
            let Some(names) = names else {
                return Err(not("tool_choice.allowed_tools.tools", "a list of functions"));
            };
            choice.allowed = Some(names);
        }
        _ => {
            let kinds = "\"auto\", \"none\", \"required\", a function, or allowed tools";
            return Err(not(NAME, kinds));
        }
    }
    Ok(())
}

/// A schema, which some clients send as JSON in a string.
fn schema(path: &str, value: Value) -> Result<Value, ApiError> {
    match value {
        Value::String(text) => {
            serde_json::from_str(&text).map_err(|error| not(path, &format!("JSON: {error}")))
        }
        value => Ok(value),
    }
}

fn string(path: &str, value: Value) -> Result<String, ApiError> {
    match value {
        Value::String(text) => Ok(text),
        _ => Err(not(path, "a string")),
    }
}

fn strings(path: &str, value: Value) -> Result<Vec<String>, ApiError> {
    serde_json::from_value(value).map_err(|_| not(path, "a list of strings"))
}

fn boolean(path: &str, value: &Value) -> Result<bool, ApiError> {
    value.as_bool().ok_or_else(|| not(path, "true or false"))
}

fn not(path: &str, what: &str) -> ApiError {
    ApiError::invalid("invalid_value", path, format!("{path}: must be {what}"))
}
