//! The parameters of a request's tools: which values a bare text stands for.

use serde_json::Value;

/// Depth to which a schema's `$ref` and `anyOf` are followed.
const SCHEMA_DEPTH: usize = 8;

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

    /// Whether the name of one of the tools begins with `start`.
    pub fn has_name_with(&self, start: &str) -> bool {
        self.0.iter().any(|(tool, _)| tool.starts_with(start))
    }

    /// `raw` as a JSON value of the type that the schema gives `parameter` of `function`; a string
    /// if the schema gives none or `raw` does not match it.
    pub fn typed(&self, function: &str, parameter: &str, raw: &str) -> Value {
        let text = raw.trim();
        let types = self.types(function, parameter);
        types.iter().find_map(|kind| read_as(kind, text)).unwrap_or_else(|| raw.into())
    }

    /// Whether every text is a string here, so that its value is certain before its end.
    pub fn is_text(&self, function: &str, parameter: &str) -> bool {
        self.types(function, parameter).iter().all(|kind| *kind == "string")
    }

    /// Whether a string is allowed here.
    pub fn may_be_text(&self, function: &str, parameter: &str) -> bool {
        let types = self.types(function, parameter);
        types.is_empty() || types.contains(&"string")
    }

    /// The JSON types of a parameter, in the order in which to try them.
    fn types(&self, function: &str, parameter: &str) -> Vec<&str> {
        let root = self.0.iter().find(|(name, _)| name == function).map(|(_, schema)| schema);
        let mut types = Vec::new();
        if let Some(root) = root
            && let Some(schema) = root.get("properties").and_then(|all| all.get(parameter))
        {
            collect_types(schema, root, &mut types, SCHEMA_DEPTH);
        }
        types
    }
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
