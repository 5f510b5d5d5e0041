//! The parameters of a request's tools: which values their schemas allow.

use serde_json::{Map, Value};

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
    pub(super) fn allowed(&self, function: &str, parameter: &str) -> Allowed<'_> {
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
pub(super) struct Allowed<'a> {
    /// JSON types, in the order in which to try them.
    pub(super) kinds: Vec<&'a str>,
    /// The values that it lists.
    pub(super) members: Vec<&'a Value>,
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

    pub(super) fn may_be_text(&self) -> bool {
        self.kinds.is_empty() || self.kinds.contains(&"string")
    }
}

/// The JSON type of a value, as schemas name it.
pub(super) fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}
