//! Messages of a conversation, and the tool calls in them.

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// One message of the conversation, in the form that chat templates read.
///
/// Content is always text: the server joins text parts and rejects other kinds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    pub role: String,
    /// The text; empty if the client sent null.
    pub content: String,
    /// Reasoning of an earlier assistant turn, if the client sends it back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Tool calls of an assistant turn.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The call that a `tool` message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Name of the speaker or the tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// Returns true for text of the operator or of the developer, which is not a turn.
    pub fn is_system(&self) -> bool {
        matches!(self.role.as_str(), "system" | "developer")
    }

    pub(super) fn text_bytes(&self) -> usize {
        let optional = [&self.reasoning_content, &self.tool_call_id, &self.name];
        let optional: usize = optional.into_iter().flatten().map(String::len).sum();
        let call = |ToolCall { id, kind: _, function }: &ToolCall| {
            VALUE_BYTES + id.len() + function.name.len() + map_bytes(&function.arguments)
        };
        let calls: usize = self.tool_calls.iter().map(call).sum();
        VALUE_BYTES + self.role.len() + self.content.len() + optional + calls
    }
}

/// Bytes that count for what has no text of its own, such as a number or an empty message: it takes
/// time and memory too.
pub(super) const VALUE_BYTES: usize = 8;

pub(super) fn value_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(values) => VALUE_BYTES + values.iter().map(value_bytes).sum::<usize>(),
        Value::Object(map) => VALUE_BYTES + map_bytes(map),
        Value::Null | Value::Bool(_) | Value::Number(_) => VALUE_BYTES,
    }
}

pub(super) fn map_bytes(map: &Map<String, Value>) -> usize {
    map.iter().map(|(key, value)| key.len() + value_bytes(value)).sum()
}

/// A tool call: `{"id", "type": "function", "function": {"name", "arguments"}}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Unique in the conversation.
    pub id: String,
    /// Always `function`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The function and its arguments.
    pub function: FunctionCall,
}

/// The next piece of a call that is being written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallDelta {
    /// [`ToolCall::id`]
    pub id: String,
    /// Name of the function, in the first piece only.
    pub name: Option<String>,
    /// The next piece of the arguments as JSON. All pieces of a complete call are its arguments.
    pub arguments: String,
}

/// A function with its arguments.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FunctionCall {
    /// Name of one of the request's tools.
    pub name: String,
    /// The arguments as JSON values, since templates read values. The server converts from and to
    /// the API's JSON in a string.
    pub arguments: Arguments,
}

/// The arguments of a call: values, and the JSON that the model wrote where values cannot hold it.
///
/// A [`Value`] has integers of 64 bits and the numbers of an `f64`; a model may write longer ones, which its
/// client reads in full.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Arguments {
    values: Map<String, Value>,
    /// The JSON, if it is not that of the values.
    json: Option<Box<str>>,
}

impl Arguments {
    /// The `values` of `json`.
    pub fn written(values: Map<String, Value>, json: &str) -> Self {
        let own = serde_json::to_string(&values).unwrap_or_default();
        Self { values, json: (own != json).then(|| json.into()) }
    }

    /// The arguments that `json` has; `None` if it is no object. Among the values, a number beyond those of a [`Value`]
    /// and an integer beyond 64 bits are strings of their digits.
    pub fn parse(json: &str) -> Option<Self> {
        // A number as a key of an object would become a string with the others.
        serde_json::from_str::<IgnoredAny>(json).ok()?;
        Some(Self::written(serde_json::from_str(&in_range(json)).ok()?, &compact(json)))
    }

    /// Compact JSON with all digits.
    pub fn to_json(&self) -> String {
        match &self.json {
            Some(json) => json.to_string(),
            None => serde_json::to_string(&self.values).unwrap_or_default(),
        }
    }
}

/// `json`, with numbers that a [`Value`] cannot hold, and integers that it would round, as strings.
fn in_range(json: &str) -> String {
    let (mut out, mut is_string, mut is_escaped) = (String::new(), false, false);
    let mut rest = json;
    while let Some(c) = rest.chars().next() {
        if !is_string && (c == '-' || c.is_ascii_digit()) {
            let ends = |c: char| !c.is_ascii_digit() && !"+-.eE".contains(c);
            let (number, after) = rest.split_at(rest.find(ends).unwrap_or(rest.len()));
            let quote = if is_held(number) { "" } else { "\"" };
            out.extend([quote, number, quote]);
            rest = after;
            continue;
        }
        out.push(c);
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' if is_string => is_escaped = true,
            '"' => is_string = !is_string,
            _ => {}
        }
        rest = &rest[c.len_utf8()..];
    }
    out
}

/// Whether a [`Value`] holds the number `text`, an integer with all its digits, or `text` is no number.
fn is_held(text: &str) -> bool {
    let is_integer = !text.contains(['.', 'e', 'E']);
    match serde_json::from_str::<Value>(text) {
        // Short ones are exact in any type.
        Ok(number) => text.len() < 16 || !is_integer || !number.is_f64(),
        Err(_) => serde_json::from_str::<IgnoredAny>(text).is_err(),
    }
}

/// `json` without white space between its values.
fn compact(json: &str) -> String {
    let (mut is_string, mut is_escaped) = (false, false);
    let is_kept = |c: &char| {
        let is_kept = is_string || !c.is_ascii_whitespace();
        match *c {
            _ if is_escaped => is_escaped = false,
            '\\' if is_string => is_escaped = true,
            '"' => is_string = !is_string,
            _ => {}
        }
        is_kept
    };
    json.chars().filter(is_kept).collect()
}

impl From<Map<String, Value>> for Arguments {
    fn from(values: Map<String, Value>) -> Self {
        Self { values, json: None }
    }
}

impl From<Arguments> for Value {
    fn from(arguments: Arguments) -> Self {
        arguments.values.into()
    }
}

impl std::ops::Deref for Arguments {
    type Target = Map<String, Value>;

    fn deref(&self) -> &Self::Target {
        &self.values
    }
}

impl Serialize for Arguments {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.values.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Arguments {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Map::deserialize(deserializer).map(Self::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `{1e999: 1}` was taken, as `"1e999"` can be a key, and its text, which is no JSON, was sent on.
    #[test]
    fn arguments_are_json_also_where_their_numbers_are_kept_as_digits() {
        let digits = "{\"a\": 123456789012345678901234567890, \"b\": [1e999]}";
        let arguments = Arguments::parse(digits).unwrap();
        assert_eq!(arguments["a"], "123456789012345678901234567890");
        assert_eq!(arguments.to_json(), "{\"a\":123456789012345678901234567890,\"b\":[1e999]}");
        for wrong in ["{1e999: 1}", "{123456789012345678901234567890: 1}", "{\"a\": 1 e999}", "{"] {
            assert_eq!(Arguments::parse(wrong), None, "{wrong}");
        }
    }
}
