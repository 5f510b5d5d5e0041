//! Finds what in a JSON schema cannot be enforced.
//!
//! The compiler says that it rejects a schema, and not where. The place is found by compiling parts: the
//! innermost schema that is rejected on its own, and the keyword of it without which it is accepted.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::refused;
use crate::error::RequestError;

/// How long to look for the place of a problem.
const SEARCH: Duration = Duration::from_secs(1);

/// Keywords that hold schemas by name.
const BY_NAME: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// Keywords that hold a list of schemas.
const LISTS: [&str; 5] = ["prefixItems", "anyOf", "oneOf", "allOf", "items"];

/// Keywords that hold one schema.
const SINGLE: [&str; 3] = ["items", "additionalItems", "additionalProperties"];

/// Checks that `compile` accepts `schema`, which stands at `path` of the request.
///
/// # Errors
/// [`RequestError::Structure`] with the path of the keyword that cannot be enforced.
pub fn check(
    path: &str,
    schema: &Value,
    compile: &dyn Fn(&Value) -> Result<(), String>,
) -> Result<(), RequestError> {
    if !matches!(schema, Value::Object(_) | Value::Bool(_)) {
        return Err(refused(path, "must be a JSON schema: an object, true or false"));
    }
    let Err(problem) = compile(schema) else { return Ok(()) };
    let mut search = Search { root: schema, compile, end: Instant::now() + SEARCH };
    let (place, problem) = search.narrow(String::new(), schema, problem);
    Err(refused(&format!("{path}{place}"), describe(&problem)))
}

struct Search<'a> {
    root: &'a Value,
    compile: &'a dyn Fn(&Value) -> Result<(), String>,
    end: Instant,
}

impl Search<'_> {
    /// The path and the problem of the innermost part of `schema`, which stands at `path` and is
    /// rejected because of `problem`.
    fn narrow(&mut self, path: String, schema: &Value, problem: String) -> (String, String) {
        for (step, part) in parts(schema) {
            if let Err(problem) = self.try_part(part) {
                return self.narrow(path + &step, part, problem);
            }
        }
        let Value::Object(keywords) = schema else { return (path, problem) };
        for keyword in keywords.keys() {
            let mut rest = keywords.clone();
            rest.shift_remove(keyword);
            if self.try_part(&Value::Object(rest)).is_ok() {
                return (format!("{path}.{keyword}"), problem);
            }
        }
        (path, problem)
    }

    /// Compiles a part of the schema, with the definitions to which it may refer.
    fn try_part(&self, part: &Value) -> Result<(), String> {
        if Instant::now() > self.end || refers_elsewhere(part) {
            return Ok(());
        }
        let Value::Object(keywords) = part else { return (self.compile)(part) };
        let mut part = keywords.clone();
        for keyword in ["$schema", "$defs", "definitions"] {
            if let Some(value) = self.root.get(keyword) {
                part.entry(keyword).or_insert_with(|| value.clone());
            }
        }
        (self.compile)(&Value::Object(part))
    }
}

/// The schemas within `schema`, each with the step of the path that leads to it.
fn parts(schema: &Value) -> Vec<(String, &Value)> {
    let Value::Object(keywords) = schema else { return Vec::new() };
    let mut parts = Vec::new();
    let maps = BY_NAME.iter().filter_map(|&key| Some((key, keywords.get(key)?.as_object()?)));
    for (key, schemas) in maps {
        parts.extend(schemas.iter().map(|(name, part)| (format!(".{key}.{name}"), part)));
    }
    let lists = LISTS.iter().filter_map(|&key| Some((key, keywords.get(key)?.as_array()?)));
    for (key, schemas) in lists {
        parts.extend(schemas.iter().enumerate().map(|(i, part)| (format!(".{key}[{i}]"), part)));
    }
    let single = SINGLE.iter().filter_map(|&key| Some((key, keywords.get(key)?)));
    parts.extend(single.map(|(key, part)| (format!(".{key}"), part)));
    parts.retain(|(_, part)| part.is_object());
    parts
}

/// Whether `schema` refers to something other than the definitions of the root, which it loses when it
/// is compiled alone.
fn refers_elsewhere(schema: &Value) -> bool {
    let is_elsewhere =
        |target: &str| !target.starts_with("#/$defs/") && !target.starts_with("#/definitions/");
    match schema {
        Value::Object(keywords) => {
            let target = keywords.get("$ref").and_then(Value::as_str);
            target.is_some_and(is_elsewhere) || keywords.values().any(refers_elsewhere)
        }
        Value::Array(values) => values.iter().any(refers_elsewhere),
        _ => false,
    }
}

/// llguidance's words for a problem, in ours.
fn describe(problem: &str) -> String {
    let what = if problem.starts_with("Unimplemented keys") {
        "this keyword is not supported".to_string()
    } else if problem.starts_with("oneOf constraints") {
        "the schemas of oneOf may overlap, which is not supported; use anyOf".to_string()
    } else {
        format!("this schema is not supported: {problem}")
    };
    format!("{what}; remove it, or validate the answer yourself")
}
