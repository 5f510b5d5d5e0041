//! Parses the text between `<tool_call>` and `</tool_call>`.
//!
//! There are two formats. The content tells which one, since a model's name does not:
//! - Qwen3-Coder and Qwen3.5: `<function=name>` with `<parameter=key>` blocks. Values are bare
//!   text, typed by the tool's JSON schema ([`Schemas`]).
//! - Hermes, Qwen2.5 and Qwen3: `{"name": .., "arguments": {..}}`, or a list of these.
//!
//! Never repairs: bad markup is [`Malformed`], and the reply emits it as text.
//!
//! Source: Qwen3-Coder `qwen3coder_tool_parser.py`; Hermes function calling format.

use serde_json::{Map, Value};

use crate::request::FunctionCall;

/// Depth to which a schema's `$ref` and `anyOf` are followed.
const SCHEMA_DEPTH: usize = 8;

/// Why a text is not a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Malformed {
    /// The text ends inside a value, so the closing tag may belong to that value.
    InsideValue,
    /// Anything else.
    Broken,
}

/// The parameters of a request's tools, by name.
#[derive(Debug, Clone, Default)]
pub(super) struct Schemas(Vec<(String, Value)>);

impl Schemas {
    /// Takes `{"type": "function", "function": {"name", "parameters"}}` or the inner object.
    pub fn new(tools: &[Value]) -> Self {
        let schema = |tool: &Value| {
            let function = tool.get("function").unwrap_or(tool);
            let name = function.get("name")?.as_str()?.to_string();
            Some((name, function.get("parameters").cloned().unwrap_or_default()))
        };
        Self(tools.iter().filter_map(schema).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// `raw` as a JSON value of the type that the schema gives `parameter` of `function`; a string
    /// if the schema gives none or `raw` does not match it.
    fn typed(&self, function: &str, parameter: &str, raw: &str) -> Value {
        let root = self.0.iter().find(|(name, _)| name == function).map(|(_, schema)| schema);
        let mut types = Vec::new();
        if let Some(root) = root
            && let Some(schema) = root.get("properties").and_then(|all| all.get(parameter))
        {
            collect_types(schema, root, &mut types, SCHEMA_DEPTH);
        }
        let text = raw.trim();
        types.iter().find_map(|kind| read_as(kind, text)).unwrap_or_else(|| raw.into())
    }
}

/// Whether `text`, which follows `<tool_call>`, may still become a call.
pub(super) fn is_plausible(text: &str) -> bool {
    let text = text.trim_start();
    let opening = "<function=";
    text.is_empty()
        || text.starts_with(['{', '['])
        || text.starts_with(opening)
        || opening.starts_with(text)
}

/// Parses `text`, the whole content between the tags.
pub(super) fn parse(text: &str, schemas: &Schemas) -> Result<Vec<FunctionCall>, Malformed> {
    let text = text.trim();
    if text.starts_with("<function=") { parse_xml(text, schemas) } else { parse_json(text) }
}

fn parse_xml(text: &str, schemas: &Schemas) -> Result<Vec<FunctionCall>, Malformed> {
    let mut calls = Vec::new();
    let mut rest = text;
    while let Some(inside) = rest.strip_prefix("<function=") {
        let (name, body) = tag_value(inside)?;
        let mut arguments = Map::new();
        rest = body.trim_start();
        while let Some(inside) = rest.strip_prefix("<parameter=") {
            let (key, body) = tag_value(inside)?;
            let (value, after) = parameter_value(body)?;
            arguments.insert(key.into(), schemas.typed(name, key, value));
            rest = after;
        }
        rest = rest.strip_prefix("</function>").ok_or(Malformed::Broken)?.trim_start();
        calls.push(FunctionCall { name: name.into(), arguments });
    }
    if rest.is_empty() { Ok(calls) } else { Err(Malformed::Broken) }
}

/// Splits `name>rest`.
fn tag_value(text: &str) -> Result<(&str, &str), Malformed> {
    let (value, rest) = text.split_once('>').ok_or(Malformed::Broken)?;
    let value = value.trim();
    if value.is_empty() || value.contains(['<', '\n']) {
        return Err(Malformed::Broken);
    }
    Ok((value, rest))
}

/// Splits the text after `<parameter=key>` into the value and the text after `</parameter>`.
///
/// A value may contain `</parameter>` (in code that writes XML): only one that precedes another
/// parameter or the end of the function closes the value.
fn parameter_value(body: &str) -> Result<(&str, &str), Malformed> {
    for (at, tag) in body.match_indices("</parameter>") {
        let after = body[at + tag.len()..].trim_start();
        if after.starts_with("<parameter=") || after.starts_with("</function>") {
            let value = &body[..at];
            let value = value.strip_prefix('\n').unwrap_or(value);
            return Ok((value.strip_suffix('\n').unwrap_or(value), after));
        }
    }
    Err(Malformed::InsideValue)
}

fn parse_json(text: &str) -> Result<Vec<FunctionCall>, Malformed> {
    match serde_json::from_str(text) {
        Ok(Value::Array(calls)) if !calls.is_empty() => calls.into_iter().map(json_call).collect(),
        Ok(call) => Ok(vec![json_call(call)?]),
        Err(_) if ends_inside_string(text) => Err(Malformed::InsideValue),
        Err(_) => Err(Malformed::Broken),
    }
}

fn json_call(mut call: Value) -> Result<FunctionCall, Malformed> {
    let arguments = match call.get("arguments").or(call.get("parameters")) {
        Some(Value::Object(arguments)) => arguments.clone(),
        Some(Value::String(text)) => serde_json::from_str(text).map_err(|_| Malformed::Broken)?,
        Some(Value::Null) | None => Map::new(),
        Some(_) => return Err(Malformed::Broken),
    };
    match call.get_mut("name").map(Value::take) {
        Some(Value::String(name)) if !name.is_empty() => Ok(FunctionCall { name, arguments }),
        _ => Err(Malformed::Broken),
    }
}

fn ends_inside_string(text: &str) -> bool {
    let (mut inside, mut escaped) = (false, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if inside => escaped = true,
            b'"' => inside = !inside,
            _ => {}
        }
    }
    inside
}

/// Collects the JSON types that `schema` allows, in the order in which to try them.
fn collect_types<'a>(schema: &'a Value, root: &'a Value, types: &mut Vec<&'a str>, depth: usize) {
    if depth == 0 {
        return;
    }
    match schema.get("type") {
        Some(Value::String(kind)) => types.push(kind),
        Some(Value::Array(kinds)) => types.extend(kinds.iter().filter_map(Value::as_str)),
        _ => {}
    }
    if let Some(target) = schema.get("$ref").and_then(Value::as_str)
        && let Some(schema) = target.strip_prefix('#').and_then(|pointer| root.pointer(pointer))
    {
        collect_types(schema, root, types, depth - 1);
    }
    for key in ["anyOf", "oneOf", "allOf"] {
        for schema in schema.get(key).and_then(Value::as_array).into_iter().flatten() {
            collect_types(schema, root, types, depth - 1);
        }
    }
    for value in schema.get("enum").and_then(Value::as_array).into_iter().flatten() {
        types.push(match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        });
    }
    // Every value is a string, so that is tried last: `5` for integer-or-string is the number.
    types.sort_by_key(|kind| *kind == "string");
}

/// `text` as a value of the JSON type `kind`.
fn read_as(kind: &str, text: &str) -> Option<Value> {
    let json = || serde_json::from_str::<Value>(text).ok();
    match kind {
        // Templates write earlier calls with Python's `str`, and models imitate them.
        "null" => matches!(text, "null" | "None").then_some(Value::Null),
        "boolean" => match text {
            "true" | "True" => Some(true.into()),
            "false" | "False" => Some(false.into()),
            _ => None,
        },
        "integer" => match json()? {
            Value::Number(number) if number.is_i64() || number.is_u64() => Some(number.into()),
            Value::Number(number) => whole(number.as_f64()?),
            _ => None,
        },
        "number" => json().filter(Value::is_number),
        "array" => json().filter(Value::is_array),
        "object" => json().filter(Value::is_object),
        _ => None,
    }
}

/// `5.0` as `5`; `None` if digits would be lost.
fn whole(number: f64) -> Option<Value> {
    const EXACT: f64 = 9_007_199_254_740_992.0; // 2^53
    (number.fract() == 0.0 && number.abs() < EXACT).then(|| (number as i64).into())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// `expected` lists the calls as `[name, arguments]`; `null` for malformed text.
    fn check(text: &str, expected: Value) {
        let schemas = Schemas::new(&[json!({"type": "function", "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"}, "whole": {"type": "integer"},
                    "number": {"type": "number"}, "flag": {"type": "boolean"},
                    "list": {"type": "array"}, "map": {"$ref": "#/$defs/Map"},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "either": {"type": ["string", "integer"]},
                    "level": {"enum": [1, 2]}, "any": {},
                },
                "$defs": {"Map": {"type": "object"}},
            },
        }})]);
        let calls = match parse(text, &schemas) {
            Ok(calls) => calls.into_iter().map(|call| json!([call.name, call.arguments])).collect(),
            Err(_) => Value::Null,
        };
        assert_eq!(calls, expected, "{text}");
    }

    fn check_value(parameter: &str, value: &str, expected: Value) {
        let text =
            format!("<function=f>\n<parameter={parameter}>\n{value}\n</parameter>\n</function>");
        check(&text, json!([["f", {parameter: expected}]]));
    }

    #[test]
    fn values_have_the_types_of_the_schema() {
        check_value("text", "5", json!("5"));
        check_value("text", "  two\n\nlines ", json!("  two\n\nlines "));
        check_value("text", "{\"a\": 1}", json!("{\"a\": 1}"));
        check_value("whole", "42", json!(42));
        check_value("whole", " -3.0 ", json!(-3));
        check_value("number", "2.5", json!(2.5));
        check_value("number", "2", json!(2));
        check_value("flag", "true", json!(true));
        check_value("flag", "False", json!(false));
        check_value("list", "[1, \"a\"]", json!([1, "a"]));
        check_value("map", "{\"b\": 1, \"a\": {}}", json!({"b": 1, "a": {}}));
        check_value("maybe", "null", Value::Null);
        check_value("maybe", "x", json!("x"));
        check_value("either", "7", json!(7));
        check_value("either", "007", json!("007"));
        check_value("level", "2", json!(2));
    }

    #[test]
    fn values_that_match_no_schema_are_strings() {
        check_value("any", "5", json!("5"));
        check_value("unknown", "true", json!("true"));
        check_value("whole", "many", json!("many"));
        check_value("map", "[1]", json!("[1]"));
        check_value("text", "", json!(""));
    }

    #[test]
    fn arguments_keep_their_order() {
        let text = "<function=f>\n<parameter=b>\n1\n</parameter>\n\
            <parameter=a>\n2\n</parameter>\n</function>";
        let calls = parse(text, &Schemas::default()).expect("well-formed");
        assert_eq!(serde_json::to_string(&calls[0].arguments).unwrap(), r#"{"b":"1","a":"2"}"#);
    }

    #[test]
    fn values_may_contain_closing_tags() {
        check_value("text", "<a></parameter></a>", json!("<a></parameter></a>"));
        check_value("text", "</function>", json!("</function>"));
    }

    #[test]
    fn calls_may_have_no_arguments() {
        check("\n<function=g>\n</function>\n", json!([["g", {}]]));
        check("{\"name\": \"g\"}", json!([["g", {}]]));
    }

    #[test]
    fn json_calls_may_be_single_or_a_list() {
        let call = r#"{"name": "f", "arguments": {"text": "</tool_call>", "whole": 1}}"#;
        let read = json!(["f", {"text": "</tool_call>", "whole": 1}]);
        check(call, json!([read]));
        check(&format!("[{call},\n{call}]"), json!([read, read]));
        check(r#"{"name": "f", "arguments": "{\"whole\": 1}"}"#, json!([["f", {"whole": 1}]]));
        check(r#"{"name": "f", "parameters": {"whole": 1}}"#, json!([["f", {"whole": 1}]]));
    }

    #[test]
    fn malformed_text_is_not_a_call() {
        for text in [
            "",
            "f(1)",
            "{}",
            "[]",
            "{\"name\": \"\"}",
            "{\"name\": \"f\", \"arguments\": [1]}",
            "{\"name\": \"f\", \"arguments\": {}",
            "{'name': 'f'}",
            "<function=>\n</function>",
            "<function=f",
            "<function=f>\n",
            "<function=f>\nx\n</function>",
            "<function=f>\n</function>\nand more",
            "<function=f>\n<parameter=a>\n1\n</function>",
        ] {
            check(text, Value::Null);
        }
    }
}
