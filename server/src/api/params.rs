//! Parameters that several protocols have: numbers, stop strings, tools, reasoning.
//!
//! Each protocol names its own field in errors.

use std::collections::HashMap;

use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use serde_json::{Map, Value};
use steersman_engine::policy::nearest;
pub use steersman_engine::request::Effort;
use steersman_engine::request::{
    Arguments, Form, FunctionCall, Message, Request, ResponseFormat, ToolCall,
};

use super::error::ApiError;

/// Maximum number of stop strings of a request; each step searches for all of them.
const STOPS: usize = 16;

/// Most bytes of a stop string. Each sequence holds what is searched for, and a stop string is a few words.
const STOP_BYTES: usize = 4 << 10;

/// Most choices of a request: each holds an instance of its policies while it waits.
const CHOICES: u64 = 32;

/// `stream_options` of OpenAI's chats and completions.
#[derive(Deserialize, JsonSchema)]
pub struct StreamOptions {
    /// Whether a stream ends with a chunk that contains the usage.
    pub include_usage: Option<bool>,
    /// The last chunk has the usage: earlier ones would count what may be rewound.
    #[serde(rename = "continuous_usage_stats")]
    _continuous_usage_stats: Option<bool>,
    /// Padding against observers of encrypted traffic.
    #[serde(rename = "include_obfuscation")]
    _include_obfuscation: Option<bool>,
}

/// A number of tokens; -1 is no limit.
pub fn limit(name: &str, tokens: Option<i64>) -> Result<Option<u32>, ApiError> {
    match tokens {
        None | Some(-1) => Ok(None),
        Some(tokens) if tokens < 1 => {
            let message = format!("{name}: must be at least 1, or -1 for the server's default");
            Err(ApiError::value(name, message))
        }
        Some(tokens) => Ok(Some(u32::try_from(tokens).unwrap_or(u32::MAX))),
    }
}

/// Limits the reply of `request` to `tokens` by a field whose API counts reasoning too, if the client has
/// `asked_for_reasoning`. Otherwise it may not know of the reasoning that a policy or the model's template enables:
/// then the field limits the answer alone, as `max_tokens` of chats always does.
pub fn limit_reply(request: &mut Request, tokens: Option<u32>, asked_for_reasoning: bool) {
    match asked_for_reasoning {
        true => request.max_tokens = tokens,
        false => request.max_answer_tokens = tokens,
    }
}

/// Choices of one request: `n`. `best_of` may only say the same, since nothing here picks the best.
pub fn choices(n: Option<u64>, best_of: Option<u64>) -> Result<usize, ApiError> {
    let n = n.unwrap_or(1);
    if !(1..=CHOICES).contains(&n) {
        return Err(ApiError::value("n", format!("n: is {n}, must be 1 to {CHOICES}")));
    }
    if let Some(best_of) = best_of.filter(|best_of| *best_of != n) {
        let message = format!(
            "best_of: is {best_of}, must be equal to n, which is {n}: send n and choose the best"
        );
        return Err(ApiError::unsupported("best_of", message));
    }
    // Cast: at most CHOICES.
    Ok(n as usize)
}

/// A string or a list of strings, in the field `name`.
pub fn stops(name: &str, stop: Option<Value>) -> Result<Vec<String>, ApiError> {
    let is_list = matches!(stop, Some(Value::Array(_)));
    let stops: Vec<String> = match stop {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::String(stop)) => vec![stop],
        Some(list @ Value::Array(_)) => super::json::typed(name, &list)?,
        Some(_) => {
            let message = format!("{name}: must be a string or a list of strings");
            return Err(ApiError::invalid("invalid_type", name, message));
        }
    };
    if stops.len() > STOPS {
        let message = format!("{name}: {} strings, at most {STOPS} are allowed", stops.len());
        return Err(ApiError::value(name, message));
    }
    if stops.iter().any(String::is_empty) {
        let message =
            format!("{name}: must not contain an empty string, which would end every answer");
        return Err(ApiError::value(name, message));
    }
    let is_long = |(_, stop): &(usize, &String)| stop.len() > STOP_BYTES;
    if let Some((i, long)) = stops.iter().enumerate().find(is_long) {
        let path = if is_list { format!("{name}[{i}]") } else { name.into() };
        let bytes = long.len();
        let message = format!("{path}: has {bytes} bytes, a stop string has at most {STOP_BYTES}");
        return Err(ApiError::value(path, message));
    }
    Ok(stops)
}

/// A seed is any 64-bit integer; a negative one stands for its two's complement.
pub fn seed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let Some(number) = Option::<serde_json::Number>::deserialize(deserializer)? else {
        return Ok(None);
    };
    let bits = number.as_u64().or_else(|| number.as_i64().map(i64::cast_unsigned));
    bits.map(Some).ok_or_else(|| D::Error::custom(format!("{number} is not a 64-bit integer")))
}

/// A call in a conversation; `arguments` is a JSON object, or one in a string.
///
/// What is no object becomes the value of `arguments` in one, with a note: a malformed call must not
/// block the rest of its conversation.
pub fn tool_call(
    path: &str,
    id: String,
    name: String,
    arguments: Value,
    notes: &mut Vec<String>,
) -> ToolCall {
    let text = arguments.as_str().map(str::trim);
    let other = text.and_then(|text| serde_json::from_str(text).ok());
    let arguments = match text.and_then(Arguments::parse) {
        Some(arguments) => arguments,
        None if text == Some("") => Arguments::default(),
        None => match other.unwrap_or(arguments) {
            Value::Object(values) => values.into(),
            Value::Null => Arguments::default(),
            other => {
                notes.push(format!("{path}: is no JSON object; the model sees it as `arguments`"));
                Map::from_iter([("arguments".to_string(), other)]).into()
            }
        },
    };
    ToolCall { id, kind: "function".into(), function: FunctionCall { name, arguments } }
}

/// A tool in the form that chat templates read; its schema stands in the field `parameters`.
pub fn tool(name: &str, mut tool: Map<String, Value>, parameters: &str) -> Value {
    let mut function = Map::from_iter([("name".to_string(), name.into())]);
    for key in ["description", "strict"] {
        let value = tool.shift_remove(key).filter(|value| !value.is_null() && *value != false);
        function.extend(value.map(|value| (key.to_string(), value)));
    }
    let parameters = tool.shift_remove(parameters).filter(|parameters| !parameters.is_null());
    let any = || serde_json::json!({"type": "object", "properties": {}});
    function.insert("parameters".into(), parameters.unwrap_or_else(any));
    serde_json::json!({"type": "function", "function": function})
}

/// The note on a tool that is no function.
pub fn tool_left_out(path: &str, kind: &str) -> String {
    format!(
        "{path}: left out, because the model is offered functions only, and this tool is of type `{kind}`; if \
         the client runs it, offer it as a function"
    )
}

/// The field of the schema of `tools[i]`, and the tool, if it is a function; others, of type `kind`, are left out,
/// with a note.
///
/// # Errors
/// 400 if a function has no name.
pub fn function(
    i: usize,
    kind: &str,
    tool: Map<String, Value>,
    notes: &mut Vec<String>,
) -> Result<Option<(String, Value)>, ApiError> {
    let path = format!("tools[{i}]");
    if kind != "function" {
        notes.push(tool_left_out(&path, kind));
        return Ok(None);
    }
    let function = tool.get("function").and_then(Value::as_object);
    function_name(&format!("{path}.function"), function.unwrap_or(&Map::new()), "parameters")?;
    Ok(Some((format!("{path}.function.parameters"), tool.into())))
}

/// The name of a function whose schema stands in the field `schema`. Vendors add fields to functions, which templates
/// may use, so most unknown ones are allowed.
///
/// # Errors
/// 400 if it has none, or a field that is spelt like a known one, or is that of another API: the function would lose
/// what it says.
pub fn function_name(
    path: &str,
    tool: &Map<String, Value>,
    schema: &'static str,
) -> Result<String, ApiError> {
    let known = ["name", "description", schema, "strict"];
    let of_others = ["parameters", "input_schema", "inputSchema"];
    let is_slip = |field: &&String| {
        !known.contains(&field.as_str())
            && (of_others.contains(&field.as_str()) || nearest(field, known).is_some())
    };
    if let Some(slip) = tool.keys().find(is_slip) {
        return Err(ApiError::unknown_field(format!("{path}.{slip}"), known));
    }
    let name = tool.get("name").and_then(Value::as_str).filter(|name| !name.is_empty());
    name.map(str::to_string).ok_or_else(|| {
        let param = format!("{path}.name");
        let message = format!("{param}: must be the function's name");
        ApiError::value(param, message)
    })
}

/// The fields of the schemas and the tools of `functions`, each of which comes after the field of its schema.
///
/// # Errors
/// 400 if a schema is no object, or if two functions with one name differ: nobody could tell which one a call means.
pub fn offered(functions: Vec<(String, Value)>) -> Result<(Vec<String>, Vec<Value>), ApiError> {
    let mut named: HashMap<&str, &Value> = HashMap::new();
    for (field, tool) in &functions {
        let function = &tool["function"];
        if !matches!(function["parameters"], Value::Object(_) | Value::Null) {
            let message = format!("{field}: must be an object, a JSON schema");
            return Err(ApiError::invalid("invalid_type", field, message));
        }
        let name = function["name"].as_str().unwrap_or_default();
        if named.insert(name, tool).is_some_and(|other| other != tool) {
            let path = field.rsplit_once('.').map_or("tools", |(path, _)| path);
            let message = format!("{path}.name: another tool has the name `{name}`");
            return Err(ApiError::value(format!("{path}.name"), message));
        }
    }
    Ok(functions.into_iter().unzip())
}

/// The form of a reply that is JSON: any object, or what `schema` accepts, which stands in `field`.
pub fn json_form(field: &'static str, schema: Option<Value>) -> ResponseFormat {
    ResponseFormat { field, form: schema.map_or(Form::JsonObject, Form::JsonSchema) }
}

/// A conversation with its instructions, which some protocols have beside it. The engine writes it for the chat
/// template: system messages may stand anywhere.
pub fn with_instructions(instructions: &str, messages: Vec<Message>) -> Vec<Message> {
    let system = (!instructions.is_empty()).then(|| Message {
        role: "system".into(),
        content: instructions.into(),
        ..Message::default()
    });
    system.into_iter().chain(messages).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn functions_have_one_definition_and_schemas_that_are_objects() {
        let field = |i| format!("tools[{i}].input_schema");
        let function = |schema| tool("f", Map::from_iter([("s".to_string(), schema)]), "s");
        let offer = |schemas: &[Value]| {
            let all = schemas.iter().enumerate().map(|(i, s)| (field(i), function(s.clone())));
            offered(all.collect()).map_err(|error| error.param)
        };
        let object = json!({"type": "object"});
        assert_eq!(offer(&[object.clone(), object.clone()]).unwrap().0, [field(0), field(1)]);
        assert!(offer(&[json!(null)]).is_ok());
        for other in [json!(5), json!([]), json!("{}"), json!(true)] {
            assert_eq!(offer(&[object.clone(), other]), Err(Some(field(1))));
        }
        assert_eq!(offer(&[object, json!({})]), Err(Some("tools[1].name".into())));
    }

    /// The function reached the model without its parameters.
    #[test]
    fn slips_in_the_fields_of_functions_are_refused_by_name() {
        for (schema, field, words) in [
            ("parameters", "parameter", "did you mean `parameters`?"),
            ("parameters", "input_schema", "this route has `parameters` for it"),
            ("parameters", "descripton", "did you mean `description`?"),
            ("input_schema", "input_shema", "did you mean `input_schema`?"),
            ("input_schema", "parameters", "this route has `input_schema` for it"),
        ] {
            let function = json!({"name": "f", field: {"type": "object"}});
            let error = function_name("tools[0]", function.as_object().unwrap(), schema);
            let error = error.unwrap_err();
            assert_eq!(
                (error.code, error.param),
                ("unknown_parameter", Some(format!("tools[0].{field}")))
            );
            assert!(error.message.contains(words), "{}", error.message);
        }
        // Fields that vendors have, or that templates may use.
        let others = [
            "type",
            "cache_control",
            "defer_loading",
            "allowed_callers",
            "input_examples",
            "eager_input_streaming",
            "response",
            "title",
            "returns",
            "format",
            "x",
        ];
        for (schema, other) in ["parameters", "input_schema"]
            .into_iter()
            .flat_map(|schema| others.map(|other| (schema, other)))
        {
            let function = json!({"name": "f", "strict": true, schema: {}, other: {}});
            assert_eq!(
                function_name("tools[0]", function.as_object().unwrap(), schema).unwrap(),
                "f",
                "{other}"
            );
        }
    }

    /// A4: 16 stop strings of 900 kB were accepted. Each choice copied them five times, 2.4 GB for n = 32, and each
    /// step of all requests walked them.
    #[test]
    fn long_stop_strings_are_refused_by_name() {
        let long = "a".repeat(STOP_BYTES + 1);
        for (stop, param) in [
            (json!(long), "stop"),
            (json!(["b", long]), "stop[1]"),
            (json!(vec![long.clone(); 16]), "stop[0]"),
        ] {
            let error = stops("stop", Some(stop)).unwrap_err();
            let status = error.status.as_u16();
            assert_eq!((status, error.param.as_deref()), (400, Some(param)), "{}", error.message);
            assert!(error.message.contains("4096"), "{}", error.message);
        }
        let longest = "é".repeat(STOP_BYTES / 2);
        assert_eq!(stops("stop", Some(json!([longest]))).unwrap(), [longest]);
    }

    /// A call that this server sent, with `1e999` or more digits than 64 bits have, came back as text in `arguments`,
    /// or rounded.
    #[test]
    fn arguments_come_back_as_they_were_sent() {
        let arguments = |value: Value| {
            let mut notes = Vec::new();
            let call = tool_call("path", "1".into(), "f".into(), value, &mut notes);
            (call.function.arguments.to_json(), notes.len())
        };
        for (sent, json, notes) in [
            (
                json!(r#"{"a":1e999,"b":10000000000000000000001}"#),
                r#"{"a":1e999,"b":10000000000000000000001}"#,
                0,
            ),
            (json!(" {\"a\" : [1, \"b c\"]}\n"), r#"{"a":[1,"b c"]}"#, 0),
            (json!({"a": 1}), r#"{"a":1}"#, 0),
            (json!(" "), "{}", 0),
            (json!("null"), "{}", 0),
            (json!(null), "{}", 0),
            (json!("[1]"), r#"{"arguments":[1]}"#, 1),
            (json!(r#"{"a":007}"#), r#"{"arguments":"{\"a\":007}"}"#, 1),
            (json!(r#"{"a": 1e999 x}"#), r#"{"arguments":"{\"a\": 1e999 x}"}"#, 1),
            (json!("{\"a"), r#"{"arguments":"{\"a"}"#, 1),
        ] {
            assert_eq!(arguments(sent.clone()), (json.to_string(), notes), "{sent}");
        }
    }
}
