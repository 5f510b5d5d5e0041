//! The parameters of a request's tools: which values a bare text stands for.

use serde_json::{Map, Value};

use super::reader::{compact, is_number};

/// Parts of a schema that are looked at for one parameter: references may be many, and cyclic.
const PARTS: usize = 256;

/// The parameters of a request's tools, by name.
#[derive(Debug, Clone, Default)]
pub struct Schemas(Vec<(String, Value)>);

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

    /// Whether there are no tools.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `name` is one of the tools.
    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(tool, _)| tool == name)
    }

    /// The tool that `name` means, which may have a namespace before it: `default_api:f`, `functions.f`.
    /// `name` itself if it means none.
    pub fn resolve<'a>(&self, name: &'a str) -> &'a str {
        let last = name.rsplit([':', '.', '/']).next().unwrap_or(name);
        if !self.has(name) && self.has(last) { last } else { name }
    }

    /// Whether `name` means one of the tools.
    pub fn knows(&self, name: &str) -> bool {
        self.has(self.resolve(name))
    }

    /// Whether the name of one of the tools begins with `start`.
    pub fn has_name_with(&self, start: &str) -> bool {
        self.0.iter().any(|(tool, _)| tool.starts_with(start))
    }

    /// Whether `key` is a parameter of `function`. Where no parameters are declared, any may be.
    pub fn declares(&self, function: &str, key: &str) -> bool {
        let Some(root) = self.root(function) else { return true };
        let mut has_properties = false;
        let mut is_declared = false;
        each_part(root, root, &mut |part| {
            if let Some(properties) = part.get("properties").and_then(Value::as_object) {
                has_properties |= !properties.is_empty();
                is_declared |= properties.contains_key(key);
            }
        });
        is_declared || !has_properties
    }

    /// `raw` as JSON of the type that the schema gives `parameter` of `function`; a string if the schema gives
    /// none or `raw` does not match it.
    pub fn typed(&self, function: &str, parameter: &str, raw: &str) -> String {
        let typed = self.allowed(function, parameter).read(raw);
        typed.unwrap_or_else(|| Value::from(raw).to_string())
    }

    /// The same; `None` if `raw` matches no type.
    pub fn typed_exactly(&self, function: &str, parameter: &str, raw: &str) -> Option<String> {
        let allowed = self.allowed(function, parameter);
        let text = || allowed.may_be_text().then(|| Value::from(raw).to_string());
        allowed.read(raw).or_else(text)
    }

    /// Whether every text is a string here, so that its value is certain before its end.
    pub fn is_text(&self, function: &str, parameter: &str) -> bool {
        self.allowed(function, parameter).kinds.iter().all(|kind| *kind == "string")
    }

    /// Whether a string is allowed here.
    pub fn may_be_text(&self, function: &str, parameter: &str) -> bool {
        self.allowed(function, parameter).may_be_text()
    }

    fn root(&self, function: &str) -> Option<&Value> {
        self.0.iter().find(|(name, _)| name == function).map(|(_, schema)| schema)
    }

    /// What the schema allows as `parameter` of `function`.
    fn allowed(&self, function: &str, parameter: &str) -> Allowed<'_> {
        let mut allowed = Allowed::default();
        let Some(root) = self.root(function) else { return allowed };
        let (mut own, mut others) = (Vec::new(), Vec::new());
        each_part(root, root, &mut |part| {
            own.extend(part.get("properties").and_then(|all| all.get(parameter)));
            others.extend(part.get("additionalProperties").filter(|schema| schema.is_object()));
        });
        let schemas = if own.is_empty() { others } else { own };
        for schema in schemas {
            each_part(schema, root, &mut |part| allowed.add(part));
        }
        // Every value is a string, so that is tried last: `5` for integer-or-string is the number.
        allowed.kinds.sort_by_key(|kind| *kind == "string");
        allowed.members.sort_by_key(|member| member.is_string());
        allowed
    }
}

/// Calls `visit` with `schema` and the schemas that it consists of, through references and combinations.
fn each_part<'a>(
    schema: &'a Value,
    root: &'a Value,
    visit: &mut impl FnMut(&'a Map<String, Value>),
) {
    let (mut waiting, mut followed) = (vec![schema], Vec::new());
    for _ in 0..PARTS {
        let Some(schema) = waiting.pop() else { return };
        let Value::Object(part) = schema else { continue };
        visit(part);
        // The first is visited next.
        for key in ["allOf", "oneOf", "anyOf"] {
            let parts = part.get(key).and_then(Value::as_array).into_iter().flatten();
            waiting.extend(parts.take(PARTS).collect::<Vec<_>>().into_iter().rev());
        }
        let target = part.get("$ref").and_then(Value::as_str);
        if let Some(target) = target.filter(|target| !followed.contains(target)) {
            followed.push(target);
            waiting.extend(target.strip_prefix('#').and_then(|pointer| root.pointer(pointer)));
        }
    }
}

/// The values that a schema allows.
#[derive(Debug, Default)]
struct Allowed<'a> {
    /// JSON types, in the order in which to try them.
    kinds: Vec<&'a str>,
    /// Those that it lists.
    members: Vec<&'a Value>,
}

impl<'a> Allowed<'a> {
    fn add(&mut self, part: &'a Map<String, Value>) {
        match part.get("type") {
            Some(Value::String(kind)) => self.kinds.push(kind),
            Some(Value::Array(kinds)) => self.kinds.extend(kinds.iter().filter_map(Value::as_str)),
            _ if part.contains_key("properties") => self.kinds.push("object"),
            _ if part.contains_key("items") => self.kinds.push("array"),
            _ => {}
        }
        let listed = part.get("enum").and_then(Value::as_array).into_iter().flatten();
        for value in listed.chain(part.get("const")) {
            self.members.push(value);
            self.kinds.push(kind_of(value));
        }
    }

    fn may_be_text(&self) -> bool {
        self.kinds.is_empty() || self.kinds.contains(&"string")
    }

    /// `raw` as JSON; `None` if it is none of these values, or a string.
    fn read(&self, raw: &str) -> Option<String> {
        let text = raw.trim();
        let as_listed = |member: &&Value| match member {
            Value::String(listed) => (listed == raw || listed == text).then(|| member.to_string()),
            member => read_as(kind_of(member), text)
                .filter(|json| serde_json::from_str::<Value>(json).ok().as_ref() == Some(member)),
        };
        let listed = self.members.iter().find_map(as_listed);
        listed.or_else(|| self.kinds.iter().find_map(|kind| read_as(kind, text)))
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// `text` as JSON of the type `kind`, with the digits of its numbers.
fn read_as(kind: &str, text: &str) -> Option<String> {
    let json = |first: char| text.starts_with(first).then(|| compact(text)).flatten();
    match kind {
        // Templates write earlier calls with Python's `str`, and models imitate them.
        "null" => matches!(text, "null" | "None").then(|| "null".into()),
        "boolean" => match text {
            "true" | "True" => Some("true".into()),
            "false" | "False" => Some("false".into()),
            _ => None,
        },
        "integer" if !is_number(text) => None,
        "integer" if text.contains(['.', 'e', 'E']) => whole(text.parse().ok()?),
        "integer" => Some(text.into()),
        "number" => is_number(text).then(|| text.into()),
        "array" => json('['),
        "object" => json('{'),
        _ => None,
    }
}

/// `5.0` as `5`; `None` if digits would be lost.
fn whole(number: f64) -> Option<String> {
    const EXACT: f64 = 9_007_199_254_740_992.0; // 2^53
    (number.fract() == 0.0 && number.abs() < EXACT).then(|| (number as i64).to_string())
}
