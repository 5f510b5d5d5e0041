//! The grammar of tool calls, as the model's [`Format`] writes them ([`Written`]).
//!
//! Arguments of a strict tool follow its schema, with their properties in its order. Those of other tools
//! are free: only the markup and the name are enforced.

use std::collections::HashSet;
use std::fmt::Write;

use serde_json::{Value, json};

use super::closed::closed;
use super::parameter::{Parameter, Strings};
use super::{FORM_BYTES, Scope, refused, schema, with_options};
use crate::tool_call::{Arguments, Format, Text as Spelling, Written};
use crate::{Text, harmony};
use steersman_request::Request;
use steersman_request::error::RequestError;

/// The rule for an answer instead of calls.
pub const ANSWER: &str = "answer";

/// The calls that a request allows.
pub struct Calls {
    /// Whether the reply must contain a call.
    pub is_required: bool,
    is_single: bool,
    text: Text,
    format: &'static Format,
    tools: Vec<Tool>,
}

struct Tool {
    /// Index in the request.
    index: usize,
    name: String,
    /// Its parameters if they are enforced.
    parameters: Option<Value>,
    /// The same in a format that writes parameters one by one; see [`Calls::divide`].
    block: Option<Block>,
}

/// The parameters of a strict tool in a format that writes them one by one.
struct Block {
    /// An object with properties.
    schema: Value,
    /// What each property allows, in formats that write strings otherwise than JSON does.
    parameters: Vec<(String, Parameter)>,
}

impl Block {
    fn of(path: &str, schema: &Value, text: Spelling) -> Result<Self, RequestError> {
        let schema = flattened(path, &closed(schema))?;
        let mut parameters = Vec::new();
        if text == Spelling::Json {
            return Ok(Self { schema, parameters });
        }
        for (key, property) in properties(&schema) {
            let place = format!("{path}.properties.{key}");
            let parameter = Parameter::of(&place, property, path, &schema)?;
            if text == Spelling::Bare && parameter.is_ambiguous() {
                let problem = "a string that looks like another value is read as that value in the format \
                               in which this model writes calls, so its schema is not enforced; leave out \
                               the string, or `strict`";
                return Err(refused(&place, problem));
            }
            if !parameter.is_empty() {
                parameters.push((key.clone(), parameter));
            } else if is_required(&schema, key) {
                return Err(refused(&place, "allows no value, but is required"));
            }
        }
        Ok(Self { schema, parameters })
    }
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
            // A body may have ten thousand of both.
            let known: HashSet<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
            if let Some(name) = allowed.iter().find(|name| !known.contains(name.as_str())) {
                return Err(refused("tool_choice", format!("`{name}` is none of the tools")));
            }
            let allowed: HashSet<&str> = allowed.iter().map(String::as_str).collect();
            tools.retain(|tool| allowed.contains(tool.name.as_str()));
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
        Ok(Some(Self {
            is_required: choice.is_required,
            is_single: choice.is_single,
            text: text.clone(),
            format: text.call_format(),
            tools,
        }))
    }

    /// No calls, for a grammar of messages.
    pub fn none(text: &Text) -> Self {
        Self {
            is_required: false,
            is_single: true,
            text: text.clone(),
            format: text.call_format(),
            tools: Vec::new(),
        }
    }

    /// Where the grammar of calls begins that an answer may stand instead of.
    pub fn lazy_scope(&self) -> Scope {
        if self.format.bare.is_some() { Scope::Opening } else { Scope::Call }
    }

    /// The schemas of strict tools.
    pub fn schemas(&self) -> impl Iterator<Item = &Value> {
        self.tools.iter().filter_map(|tool| tool.parameters.as_ref())
    }

    /// Whether the grammar has the schemas of strict tools as a whole.
    pub fn embed_schemas(&self) -> bool {
        matches!(self.format.written.arguments, Arguments::Json)
    }

    /// Checks the size of the schemas of strict tools, before a grammar is written of them.
    ///
    /// # Errors
    /// [`RequestError::Structure`] with the path of the first that is too large.
    pub fn check_size(&self) -> Result<(), RequestError> {
        let (mut all, mut copied) = (0, 0);
        for Tool { index, parameters, .. } in &self.tools {
            let Some(parameters) = parameters else { continue };
            let bytes = parameters.to_string().len();
            let definitions = ["$defs", "definitions"].iter().filter_map(|key| parameters.get(key));
            let definitions: usize = definitions.map(|value| value.to_string().len()).sum();
            all += bytes;
            // Each parameter of a block has a grammar of its own, with the definitions.
            copied +=
                if self.embed_schemas() { 0 } else { properties(parameters).count() * definitions };
            if bytes > FORM_BYTES || all > 4 * FORM_BYTES || copied > 32 * FORM_BYTES {
                let problem = format!(
                    "has {bytes} bytes, all strict tools up to it {all}, and {copied} with definitions repeated \
                     for each parameter; the limits are {FORM_BYTES}, {} and {}; write less, or leave out \
                     `strict`",
                    4 * FORM_BYTES,
                    32 * FORM_BYTES,
                );
                return Err(refused(&parameters_path(*index), problem));
            }
        }
        Ok(())
    }

    /// Divides the schemas of strict tools into their parameters, if the format writes these one by one.
    ///
    /// # Errors
    /// [`RequestError::Structure`] with the path of what the format cannot express.
    pub fn divide(&mut self) -> Result<(), RequestError> {
        let Arguments::Parameters { text, .. } = &self.format.written.arguments else {
            return Ok(());
        };
        for tool in &mut self.tools {
            if let Some(parameters) = &tool.parameters {
                tool.block = Some(Block::of(&parameters_path(tool.index), parameters, *text)?);
            }
        }
        Ok(())
    }

    /// Checks how much work the schemas of strict tools are.
    ///
    /// # Errors
    /// [`RequestError::Structure`] with the path of what is too much.
    pub fn check_bounds(&self) -> Result<(), RequestError> {
        for Tool { index, parameters, .. } in &self.tools {
            let Some(parameters) = parameters else { continue };
            schema::check_bounds(&parameters_path(*index), parameters)?;
        }
        Ok(())
    }

    /// Checks that the schemas of strict tools can be enforced.
    ///
    /// # Errors
    /// [`RequestError::Structure`] with the path of what cannot.
    pub fn check(
        &self,
        compile: &dyn Fn(&Value) -> Result<(), String>,
    ) -> Result<(), RequestError> {
        for Tool { index, parameters, block, .. } in &self.tools {
            let Some(parameters) = parameters else { continue };
            let path = parameters_path(*index);
            schema::check(&path, parameters, compile)?;
            let Some(block) = block else { continue };
            for (key, parameter) in &block.parameters {
                let Some(others) = &parameter.others else { continue };
                let schema = with_definitions(others, &block.schema);
                let place = format!("{path}.properties.{key}");
                compile(&schema).map_err(|problem| refused(&place, problem))?;
            }
        }
        Ok(())
    }

    /// The Lark grammar. With [`Scope::Answer`] the reply consists of calls, or of the rule [`ANSWER`] if
    /// it `may_answer`; with [`Scope::Opening`] of calls, or of text that does not begin as a call does;
    /// with [`Scope::Call`] it is what follows the opening tag, with its closing tag.
    pub fn lark(&self, scope: Scope, may_answer: bool) -> String {
        let Written { section: [begin, end], call: [head, ..], between, .. } = self.format.written;
        let mut lark = String::new();
        let tools = |rule: &str| {
            let names: Vec<_> = (0..self.tools.len()).map(|i| format!("{rule}_{i}")).collect();
            format!("({})", names.join(" | "))
        };
        let more = match self.is_single {
            true => String::new(),
            false => format!(" ({} {})*", self.terms(between), tools("tool")),
        };
        // What the opening tag stands in: the section of all calls, or each call.
        let open = self.format.open.unwrap_or_default();
        let start = match scope {
            Scope::Call if begin.is_empty() && head.starts_with(open) => {
                // Without a closing tag the scope lasts to the end of the reply.
                let more = if self.format.close.is_some() { "" } else { &more };
                for (i, tool) in self.tools.iter().enumerate() {
                    let rule = self.tool(i, tool, head.strip_prefix(open).unwrap_or(head));
                    let _ = writeln!(lark, "rest_{i}: {rule}");
                }
                format!("{}{more}", tools("rest"))
            }
            Scope::Call => {
                let begin = begin.strip_prefix(open).unwrap_or(begin);
                format!("{} {}{more} {}", self.terms(begin), tools("tool"), self.terms(end))
            }
            Scope::Answer | Scope::Opening | Scope::Message { .. } => {
                format!("{} {}{more} {}", self.terms(begin), tools("tool"), self.terms(end))
            }
        };
        let _ = match (scope, may_answer, self.format.bare) {
            (Scope::Opening, _, Some(bare)) => {
                writeln!(lark, "start: {start} | /(?s:\\s*([^\\s\\{bare}].*)?)/")
            }
            (_, true, _) => writeln!(lark, "start: @{ANSWER} | {start}"),
            (_, false, _) => writeln!(lark, "start: {start}"),
        };
        for (i, tool) in self.tools.iter().enumerate() {
            let rule = self.tool(i, tool, head);
            let _ = writeln!(lark, "tool_{i}: {rule}");
            lark.push_str(&self.parameters(i, tool));
        }
        if let Arguments::Parameters { key: [open, after], text, close, separator } =
            &self.format.written.arguments
        {
            lark.push_str(&self.text_rule(*text, close));
            let json = || {
                let kinds = json!({"type": ["number", "boolean", "null", "array", "object"]});
                format!("%json {}", with_options(kinds))
            };
            let (tag, open, after) = (self.terms(close), self.terms(open), self.terms(after));
            let value = match text {
                Spelling::Bare => format!("{after} text"),
                Spelling::Declared(other) => {
                    format!("({after} text | {} {} {tag})", self.terms(other), json())
                }
                Spelling::Json | Spelling::Quoted(_) => {
                    format!("{after} (text | {}) {tag}", json())
                }
            };
            let key =
                if separator.is_empty() { "/[^<>\"\\n]+/" } else { "/[A-Za-z_][A-Za-z0-9_]*/" };
            let separator = self.terms(separator);
            let _ = writeln!(lark, "parameter: {open} {key} {value}");
            let _ = writeln!(lark, "free: (parameter ({separator} parameter)*)?");
        }
        lark
    }

    /// The Lark grammar of messages ([`Scope::Message`]): a header, and the body of a call, or of an answer
    /// that has the rule [`ANSWER`]. The body of reasoning is free, and so is that of another answer.
    pub fn lark_of_messages(&self, has_answer: bool) -> String {
        let begin = self.terms(harmony::GENERATION_PROMPT);
        let header = |header: &str| {
            self.terms(header.strip_prefix(harmony::GENERATION_PROMPT).unwrap_or(header))
        };
        let mut bodies = vec![header(harmony::REASONING_HEADER)];
        if has_answer {
            bodies.push(format!("{} @{ANSWER}", header(harmony::ANSWER_HEADER)));
        } else if !self.is_required {
            bodies.extend([harmony::ANSWER_HEADER, harmony::PREAMBLE_HEADER].map(header));
        }
        let mut lark = String::new();
        for (i, tool) in self.tools.iter().enumerate() {
            let head = harmony::CALL_HEADER;
            let head = head.strip_prefix(harmony::GENERATION_PROMPT).unwrap_or(head);
            let _ = writeln!(lark, "tool_{i}: {}", self.tool(i, tool, head));
        }
        if !self.tools.is_empty() {
            let names: Vec<_> = (0..self.tools.len()).map(|i| format!("tool_{i}")).collect();
            let _ = writeln!(lark, "call: {}", names.join(" | "));
            let between = self.terms(self.format.written.between);
            bodies.push(match self.is_single {
                true => "call".into(),
                false => format!("call ({between} {begin} call)*"),
            });
        }
        let _ = writeln!(lark, "start: ({begin})? ({})", bodies.join(" | "));
        lark
    }

    /// The rule of a parameter that is a string, with what closes it if it stands bare.
    fn text_rule(&self, text: Spelling, close: &str) -> String {
        let is_token = |term: &String| term.starts_with('<');
        match text {
            // The first closing tag ends a text, as models write it. No text has a token that is a tag.
            Spelling::Bare | Spelling::Declared(_) => match &self.split(close)[..] {
                all @ [first, ..] if is_token(first) => {
                    format!("text: /(?s:.*)/ {}\n", all.join(" "))
                }
                [first, all @ ..] if all.first().is_some_and(is_token) => {
                    format!("TEXT: /(?s:.*)/ {first}\ntext: TEXT {}\n", all.join(" "))
                }
                all => format!("text[lazy]: /(?s:.*)/ {}\n", all.join(" ")),
            },
            Spelling::Json => "text: %json {\"type\": \"string\"}\n".into(),
            Spelling::Quoted(quote) => {
                let quote = self.terms(quote);
                let lazy = if is_token(&quote) { "" } else { "[lazy]" };
                format!("text{lazy}: {quote} /(?s:.*)/ {quote}\n")
            }
        }
    }

    /// The rule of a call that begins with `head`.
    fn tool(&self, index: usize, tool: &Tool, head: &str) -> String {
        let Written { call: [_, before, after], is_numbered, arguments, .. } = &self.format.written;
        // In JSON the name stands in quotes.
        let name = match head.ends_with("{\"name\": \"") {
            true => json!(tool.name).to_string().trim_matches('"').to_string(),
            false => tool.name.clone(),
        };
        let number = if *is_numbered { "\":\" /[0-9]+/ " } else { "" };
        let arguments = match arguments {
            Arguments::Json => {
                let schema = tool.parameters.as_ref().map(closed);
                let schema = schema.unwrap_or_else(|| json!({"type": "object"}));
                format!("%json {}", with_options(schema))
            }
            Arguments::Parameters { .. } if tool.parameters.is_none() => "free".into(),
            Arguments::Parameters { .. } => format!("first_{index}_0"),
        };
        let (head, before) = (self.terms(&format!("{head}{name}")), self.terms(before));
        format!("{head} {number}{before} {arguments} {}", self.terms(after))
    }

    /// The rules of the parameters of a strict tool: `first_TOOL_N` is those from the `N`th on, and
    /// `more_TOOL_N` too, after another one.
    fn parameters(&self, index: usize, tool: &Tool) -> String {
        let mut rules = String::new();
        let (
            Some(Block { schema, parameters }),
            Arguments::Parameters { key: [open, after], text, close, separator },
        ) = (&tool.block, &self.format.written.arguments)
        else {
            return rules;
        };
        let separator = self.terms(separator);
        let mut count = 0;
        let whole = properties(schema).map(|(key, value)| (key, value, None));
        let split = parameters.iter().map(|(key, parameter)| (key, &Value::Null, Some(parameter)));
        let all: Vec<_> = if *text == Spelling::Json { whole.collect() } else { split.collect() };
        for (n, (key, value, parameter)) in all.into_iter().enumerate() {
            let open = |after: &str| self.terms(&format!("{open}{key}{after}"));
            let close = self.terms(close);
            let parameter = match parameter {
                // Strings are as in JSON.
                None => format!("{} {} {close}", open(after), json_value(value, schema)),
                Some(parameter) => {
                    let strings = self.strings(&parameter.strings, *text, &close);
                    let strings = strings.map(|strings| format!("{} {strings}", open(after)));
                    let after = if let Spelling::Declared(other) = text { other } else { after };
                    // A bare text may be any value, and is read as one.
                    let is_covered = *text == Spelling::Bare && parameter.strings == Strings::Free;
                    let others = parameter.others.as_ref().filter(|_| !is_covered);
                    let others = others.map(|others| {
                        format!("{} {} {close}", open(after), json_value(others, schema))
                    });
                    let all: Vec<_> = strings.into_iter().chain(others).collect();
                    format!("({})", all.join(" | "))
                }
            };
            let next = n + 1;
            let (skip_first, skip_more) = match is_required(schema, key) {
                true => (String::new(), String::new()),
                false => (format!(" | first_{index}_{next}"), format!(" | more_{index}_{next}")),
            };
            let _ = writeln!(
                rules,
                "first_{index}_{n}: {parameter} more_{index}_{next}{skip_first}\n\
                 more_{index}_{n}: {separator} {parameter} more_{index}_{next}{skip_more}"
            );
            count = next;
        }
        let _ = writeln!(rules, "first_{index}_{count}: \"\"\nmore_{index}_{count}: \"\"");
        rules
    }

    /// Strings of a parameter and `tag`, which closes it, as terms; `None` if there are none.
    fn strings(&self, strings: &Strings, text: Spelling, tag: &str) -> Option<String> {
        let quote = if let Spelling::Quoted(quote) = text { quote } else { "" };
        match strings {
            Strings::Free if quote.is_empty() => Some("text".into()),
            Strings::Free => Some(format!("text {tag}")),
            Strings::Listed(all) if all.is_empty() => None,
            Strings::Listed(all) => {
                let term = |text: &String| match self.terms(&format!("{quote}{text}{quote}")) {
                    empty if empty.is_empty() => "\"\"".into(),
                    term => term,
                };
                let all: Vec<String> = all.iter().map(term).collect();
                Some(format!("({}) {tag}", all.join(" | ")))
            }
        }
    }

    /// `text` as terms: the tags in it that are tokens, and literals between them.
    fn terms(&self, text: &str) -> String {
        self.split(text).join(" ")
    }

    fn split(&self, text: &str) -> Vec<String> {
        let Format { open, close, inner, .. } = self.format;
        let tags = open.iter().chain(close).chain(*inner);
        let tags: Vec<_> =
            tags.filter_map(|tag| Some((*tag, self.text.call_token(tag)?))).collect();
        let (mut terms, mut rest) = (Vec::new(), text);
        while !rest.is_empty() {
            let first = tags.iter().filter_map(|&(tag, id)| Some((rest.find(tag)?, tag, id))).min();
            let (at, tag, id) = first.unwrap_or((rest.len(), "", 0));
            if at > 0 {
                terms.push(json!(&rest[..at]).to_string());
            }
            if !tag.is_empty() {
                terms.push(format!("<[{id}]>"));
            }
            rest = &rest[at + tag.len()..];
        }
        terms
    }
}

/// Where the schema of a tool stands in the request.
fn parameters_path(index: usize) -> String {
    format!("tools[{index}].function.parameters")
}

fn tool((index, tool): (usize, &Value)) -> Option<Tool> {
    let function = tool.get("function").unwrap_or(tool);
    let name = function.get("name")?.as_str()?.to_string();
    let is_strict = function.get("strict") == Some(&Value::Bool(true));
    let parameters = function.get("parameters").filter(|schema| !schema.is_null());
    let parameters = parameters.cloned().unwrap_or_else(|| json!({"type": "object"}));
    Some(Tool { index, name, parameters: is_strict.then_some(parameters), block: None })
}

/// `schema` as a term, with the definitions of `root`.
fn json_value(schema: &Value, root: &Value) -> String {
    format!("%json {}", with_options(with_definitions(schema, root)))
}

fn with_definitions(schema: &Value, root: &Value) -> Value {
    let mut schema = schema.clone();
    for keyword in ["$defs", "definitions"] {
        if let (Some(part), Some(definitions)) = (schema.as_object_mut(), root.get(keyword)) {
            part.entry(keyword).or_insert_with(|| definitions.clone());
        }
    }
    schema
}

fn is_required(schema: &Value, key: &str) -> bool {
    let required = schema.get("required").and_then(Value::as_array);
    required.is_some_and(|all| all.iter().any(|name| name == key))
}

fn properties(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    schema.get("properties").and_then(Value::as_object).into_iter().flatten()
}

/// The parameters `schema` at `path` of a format that writes them one by one: an object with properties, which a
/// reference at its root may have.
fn flattened(path: &str, schema: &Value) -> Result<Value, RequestError> {
    /// References at the root.
    const DEPTH: usize = 8;
    let (mut place, mut found) = (path.to_string(), schema);
    for _ in 0..DEPTH {
        let Some(target) = found.get("$ref").and_then(Value::as_str) else { break };
        let pointer = target.strip_prefix('#').unwrap_or(target);
        let Some(next) = schema.pointer(pointer) else { break };
        (place, found) = (format!("{path}{}", pointer.replace('/', ".")), next);
    }
    let mut flat = found.clone();
    let Some(keywords) = flat.as_object_mut() else { return Ok(json!({"type": "object"})) };
    // Parameters that are not declared are not written, so nothing is demanded of them.
    const NOT_ENFORCED: [&str; 8] =
        ["$ref", "allOf", "anyOf", "oneOf", "const", "enum", "minProperties", "maxProperties"];
    if let Some(keyword) = NOT_ENFORCED.into_iter().find(|keyword| keywords.contains_key(*keyword))
    {
        let problem = "this keyword is not enforced for the parameters as a whole in the format in which this \
                       model writes calls; declare all parameters in `properties`, or remove `strict`";
        return Err(refused(&format!("{place}.{keyword}"), problem));
    }
    for definitions in ["$defs", "definitions"] {
        if let Some(all) = schema.get(definitions) {
            keywords.entry(definitions).or_insert_with(|| all.clone());
        }
    }
    let required = keywords.get("required").and_then(Value::as_array).into_iter().flatten();
    let is_declared =
        |key: &str| keywords.get("properties").is_some_and(|all| all.get(key).is_some());
    let missing = required.filter_map(Value::as_str).find(|key| !is_declared(key));
    if let Some(key) = missing {
        let problem = format!("names `{key}`, which `properties` do not have; declare it");
        return Err(refused(&format!("{place}.required"), problem));
    }
    Ok(flat)
}
