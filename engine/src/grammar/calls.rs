//! The grammar of tool calls, in the two formats that [`crate::text`] parses: `<function=name>` blocks and
//! JSON. The model's chat template decides which.
//!
//! Arguments of a strict tool follow its schema, with their properties in its order. Those of other tools
//! are free: only the markup and the name are enforced.

use std::fmt::Write;

use serde_json::{Value, json};

use super::{Scope, refused, schema, with_options};
use crate::error::RequestError;
use crate::request::Request;
use crate::text::Text;

/// The rule for an answer instead of calls.
pub const ANSWER: &str = "answer";

/// Depth to which `$ref` and `anyOf` are followed.
const SCHEMA_DEPTH: usize = 8;

/// The calls that a request allows.
pub struct Calls {
    /// Whether the reply must contain a call.
    pub is_required: bool,
    is_single: bool,
    /// The tags, as terms of a grammar.
    tags: [String; 2],
    has_blocks: bool,
    tools: Vec<Tool>,
}

struct Tool {
    /// Index in the request.
    index: usize,
    name: String,
    /// Its parameters if they are enforced.
    parameters: Option<Value>,
}

impl Calls {
    /// The calls of `request`, if its reply needs a grammar of them.
    ///
    /// # Errors
    /// [`RequestError::Structure`] if it requires or allows tools that it does not have.
    pub fn new(request: &Request, text: &Text) -> Result<Option<Self>, RequestError> {
        let choice = &request.tool_choice;
        let mut tools: Vec<Tool> = request.tools.iter().enumerate().filter_map(tool).collect();
        if let Some(allowed) = &choice.allowed {
            if let Some(name) = allowed.iter().find(|name| tools.iter().all(|t| t.name != **name)) {
                return Err(refused("tool_choice", format!("`{name}` is none of the tools")));
            }
            tools.retain(|tool| allowed.contains(&tool.name));
        }
        if tools.is_empty() {
            return match choice.is_required {
                true => Err(refused("tool_choice", "requires a call, but there are no tools")),
                false => Ok(None),
            };
        }
        let is_strict = tools.iter().any(|tool| tool.parameters.is_some());
        let is_free = !choice.is_required && choice.allowed.is_none() && !is_strict;
        if is_free && request.response_format.is_none() {
            return Ok(None);
        }
        let tags = match text.call_markers() {
            Some(ids) => ids.map(|id| format!("<[{id}]>")),
            None => ["<tool_call>", "</tool_call>"].map(|tag| json!(tag).to_string()),
        };
        Ok(Some(Self {
            is_required: choice.is_required,
            is_single: choice.is_single,
            tags,
            has_blocks: text.writes_function_blocks(),
            tools,
        }))
    }

    /// Checks that the schemas of strict tools can be enforced.
    ///
    /// # Errors
    /// [`RequestError::Structure`] with the path of what cannot.
    pub fn check(
        &self,
        compile: &dyn Fn(&Value) -> Result<(), String>,
    ) -> Result<(), RequestError> {
        for Tool { index, parameters, .. } in &self.tools {
            let Some(parameters) = parameters else { continue };
            let path = format!("tools[{index}].function.parameters");
            schema::check(&path, parameters, compile)?;
            if self.has_blocks {
                check_block(&path, parameters)?;
            }
        }
        Ok(())
    }

    /// The Lark grammar. With [`Scope::Answer`] the reply consists of calls, or of the rule [`ANSWER`] if
    /// it `may_answer`; with [`Scope::Call`] it is one call after its opening tag.
    pub fn lark(&self, scope: Scope, may_answer: bool) -> String {
        let [open, close] = &self.tags;
        let more = if self.is_single { "" } else { " (\"\\n\" call)*" };
        let mut lark = match (scope, may_answer) {
            (Scope::Call, _) => "start: body\n".to_string(),
            (Scope::Answer, false) => format!("start: call{more}\n"),
            (Scope::Answer, true) => format!("start: @{ANSWER} | call{more}\n"),
        };
        let names: Vec<String> = (0..self.tools.len()).map(|i| format!("tool_{i}")).collect();
        if scope == Scope::Answer {
            let _ = writeln!(lark, "call: {open} body");
        }
        let _ = writeln!(lark, "body: \"\\n\" ({}) \"\\n\" {close}", names.join(" | "));
        for (i, tool) in self.tools.iter().enumerate() {
            let rule = if self.has_blocks { tool.block() } else { tool.json() };
            let _ = writeln!(lark, "tool_{i}: {rule}");
        }
        if self.has_blocks {
            // The first closing tag ends a text, as models write it.
            lark.push_str("text[lazy]: /(?s:.*)/ \"\\n</parameter>\\n\"\n");
            lark.push_str("parameter: \"<parameter=\" /[^<>\\n]+/ \">\\n\" text\n");
        }
        lark
    }
}

fn tool((index, tool): (usize, &Value)) -> Option<Tool> {
    let function = tool.get("function").unwrap_or(tool);
    let name = function.get("name")?.as_str()?.to_string();
    let is_strict = function.get("strict") == Some(&Value::Bool(true));
    let parameters = function.get("parameters").filter(|schema| !schema.is_null());
    let parameters = parameters.cloned().unwrap_or_else(|| json!({"type": "object"}));
    Some(Tool { index, name, parameters: is_strict.then_some(parameters) })
}

impl Tool {
    /// `{"name": .., "arguments": ..}`
    fn json(&self) -> String {
        let head = format!("{{\"name\": {}, \"arguments\": ", json!(self.name));
        let schema = self.parameters.clone().unwrap_or_else(|| json!({"type": "object"}));
        format!("{} %json {} \"}}\"", json!(head), with_options(schema))
    }

    /// `<function=name>` with `<parameter=key>` blocks.
    fn block(&self) -> String {
        let head = json!(format!("<function={}>\n", self.name));
        let tail = "\"</function>\"";
        let Some(schema) = &self.parameters else {
            return format!("{head} parameter* {tail}");
        };
        let required = schema.get("required").and_then(Value::as_array);
        let is_required =
            |key: &str| required.is_some_and(|all| all.iter().any(|name| name == key));
        let mut rule = head.to_string();
        for (key, value) in properties(schema) {
            let open = json!(format!("<parameter={key}>\n"));
            let optional = if is_required(key) { "" } else { "?" };
            let _ = write!(rule, " ({open} {}){optional}", parameter(value, schema));
        }
        rule + " " + tail
    }
}

/// The value of a parameter and its closing tag, as terms of a grammar.
fn parameter(value: &Value, root: &Value) -> String {
    let close = "\"\\n</parameter>\\n\"";
    let choices = value.get("enum").and_then(Value::as_array);
    if let Some(choices) = choices.filter(|all| all.iter().all(Value::is_string)) {
        let choices: Vec<String> = choices.iter().map(Value::to_string).collect();
        return format!("({}) {close}", choices.join(" | "));
    }
    if may_be_text(value, root, SCHEMA_DEPTH) {
        return "text".into();
    }
    let mut schema = value.clone();
    for keyword in ["$defs", "definitions"] {
        if let (Some(part), Some(definitions)) = (schema.as_object_mut(), root.get(keyword)) {
            part.entry(keyword).or_insert_with(|| definitions.clone());
        }
    }
    format!("%json {} {close}", with_options(schema))
}

/// Whether strings are among the values of `schema`: they stand in a block without quotes.
fn may_be_text(schema: &Value, root: &Value, depth: usize) -> bool {
    let Value::Object(keywords) = schema else { return true };
    if depth == 0 {
        return true;
    }
    if let Some(target) = keywords.get("$ref").and_then(Value::as_str) {
        let found = target.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
        return found.is_none_or(|schema| may_be_text(schema, root, depth - 1));
    }
    if let Some(kind) = keywords.get("type") {
        return kind == "string"
            || kind.as_array().is_some_and(|all| all.iter().any(|k| k == "string"));
    }
    if let Some(value) = keywords.get("const") {
        return value.is_string();
    }
    if let Some(values) = keywords.get("enum").and_then(Value::as_array) {
        return values.iter().any(Value::is_string);
    }
    for list in ["anyOf", "oneOf"] {
        if let Some(parts) = keywords.get(list).and_then(Value::as_array) {
            return parts.iter().any(|part| may_be_text(part, root, depth - 1));
        }
    }
    true
}

fn properties(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    schema.get("properties").and_then(Value::as_object).into_iter().flatten()
}

/// Checks that blocks can express what the schema demands of strings.
fn check_block(path: &str, schema: &Value) -> Result<(), RequestError> {
    for (key, value) in properties(schema) {
        let keywords = ["pattern", "format", "minLength", "maxLength"];
        let is_text = may_be_text(value, schema, SCHEMA_DEPTH);
        let Some(keyword) = keywords.into_iter().find(|k| is_text && value.get(k).is_some()) else {
            continue;
        };
        let problem = "this keyword of a string is not enforced in the format in which this model \
                       writes calls; remove it, or `strict`";
        return Err(refused(&format!("{path}.properties.{key}.{keyword}"), problem));
    }
    Ok(())
}
