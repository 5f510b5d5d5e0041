//! Finds what in a JSON schema cannot be enforced, and completes the formats that are enforced in part.
//!
//! The compiler says that it rejects a schema, and not where. The place is found by compiling parts: the
//! innermost schema that is rejected on its own, and the keyword of it without which it is accepted.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{bounds, refused};
use steersman_request::error::RequestError;

/// How long to look for the place of a problem.
const SEARCH: Duration = Duration::from_secs(1);

/// Keywords that hold schemas by name.
const BY_NAME: [&str; 2] = ["properties", "patternProperties"];

/// Keywords that hold schemas which others refer to.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// February 29 in leap years only, of which llguidance knows nothing.
const LEAP_DAY: &str = "^(?:[0-9]{4}-(?:0[13-9]|1[0-2])-[0-9]{2}|[0-9]{4}-02-(?:[01][0-9]|2[0-8])|\
    (?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)";

/// No leap second: which minutes have one is not known in advance, and llguidance allows it in all. And upper case:
/// RFC 3339 allows `t` and `z`, which many readers do not.
const TIME: &str = "[0-9]{2}:[0-9]{2}:[0-5][0-9.:Z+-]*$";

/// The part before the `@` has at most 64 characters (RFC 5321).
const SHORT_LOCAL_PART: &str = "^[^@]{1,64}@";

/// Keywords that hold a list of schemas.
const LISTS: [&str; 5] = ["prefixItems", "anyOf", "oneOf", "allOf", "items"];

/// Keywords that hold one schema.
const SINGLE: [&str; 3] = ["items", "additionalItems", "additionalProperties"];

/// Keywords that demand nothing with these values; llguidance knows the keywords not at all.
const WITHOUT_DEMAND: [(&str, &[&str]); 8] = [
    ("uniqueItems", &["false"]),
    ("not", &["false"]),
    ("propertyNames", &["true", "{}"]),
    ("unevaluatedProperties", &["true", "{}"]),
    ("unevaluatedItems", &["true", "{}"]),
    ("dependentRequired", &["{}"]),
    ("dependentSchemas", &["{}"]),
    ("dependencies", &["{}"]),
];

/// Checks what llguidance does not count of its work on `schema`, which stands at `path` of the request.
///
/// # Errors
/// [`RequestError::Structure`] with the path of the keyword that is too large.
pub fn check_bounds(path: &str, schema: &Value) -> Result<(), RequestError> {
    if !matches!(schema, Value::Object(_) | Value::Bool(_)) {
        return Err(refused(path, "must be a JSON schema: an object, true or false"));
    }
    bounds::check_schema(schema)
        .map_err(|excess| refused(&format!("{path}{}", excess.place), excess.problem))
}

/// Checks that `compile` accepts `schema`, which passed [`check_bounds`] and stands at `path` of the request.
///
/// # Errors
/// [`RequestError::Structure`] with the path of the keyword that cannot be enforced.
pub fn check(
    path: &str,
    schema: &Value,
    compile: &dyn Fn(&Value) -> Result<(), String>,
) -> Result<(), RequestError> {
    let Err(problem) = compile(schema) else { return Ok(()) };
    let end = Instant::now() + SEARCH;
    let mut search = Search { root: schema, compile, end, followed: Vec::new() };
    let (place, problem) = search.narrow(String::new(), schema, problem);
    Err(refused(&format!("{path}{place}"), describe(&problem)))
}

struct Search<'a> {
    root: &'a Value,
    compile: &'a dyn Fn(&Value) -> Result<(), String>,
    end: Instant,
    /// References that were followed: a schema may refer to itself.
    followed: Vec<&'a str>,
}

impl<'a> Search<'a> {
    /// The path and the problem of the innermost part of `schema`, which stands at `path` and is
    /// rejected because of `problem`.
    fn narrow(&mut self, path: String, schema: &'a Value, problem: String) -> (String, String) {
        for (step, part) in parts(schema) {
            if let Err(problem) = self.try_part(part) {
                return self.narrow(path + &step, part, problem);
            }
        }
        if let Some((path, definition)) = self.definition(schema)
            && let Err(problem) = self.try_part(definition)
        {
            return self.narrow(path, definition, problem);
        }
        let Value::Object(keywords) = schema else { return (path, problem) };
        // Several of them may be rejected together.
        let named = problem.strip_prefix("Unimplemented keys: [\"");
        if let Some((keyword, _)) = named.and_then(|named| named.split_once('"')) {
            return (format!("{path}.{keyword}"), problem);
        }
        for keyword in keywords.keys().take_while(|_| Instant::now() < self.end) {
            let mut rest = keywords.clone();
            rest.shift_remove(keyword);
            if self.try_part(&Value::Object(rest)).is_ok() {
                return (format!("{path}.{keyword}"), problem);
            }
        }
        (path, problem)
    }

    /// The definition to which `schema` refers, with its path, if it was not followed before.
    fn definition(&mut self, schema: &'a Value) -> Option<(String, &'a Value)> {
        let target = schema.get("$ref")?.as_str()?;
        let pointer = target.strip_prefix('#')?;
        let definition = self.root.pointer(pointer).filter(|_| !self.followed.contains(&target))?;
        self.followed.push(target);
        Some((pointer.replace('/', "."), definition))
    }

    /// Compiles a part of the schema, with the definitions to which it may refer.
    fn try_part(&self, part: &Value) -> Result<(), String> {
        if Instant::now() > self.end || refers_elsewhere(part) {
            return Ok(());
        }
        let Value::Object(keywords) = part else { return (self.compile)(part) };
        let mut part = keywords.clone();
        for keyword in ["$schema"].into_iter().chain(DEFINITIONS) {
            if let Some(value) = self.root.get(keyword) {
                part.entry(keyword).or_insert_with(|| value.clone());
            }
        }
        (self.compile)(&Value::Object(part))
    }
}

/// Adds to `schema` and its parts what llguidance leaves out of the formats of dates, times and `email`, and
/// removes keywords that demand nothing.
pub fn complete_formats(schema: &mut Value) {
    let Value::Object(keywords) = schema else { return };
    for (keyword, values) in WITHOUT_DEMAND {
        let value = keywords.get(keyword).map(Value::to_string);
        if value.is_some_and(|value| values.contains(&value.as_str())) {
            keywords.shift_remove(keyword);
        }
    }
    for key in BY_NAME.iter().chain(&DEFINITIONS) {
        if let Some(Value::Object(parts)) = keywords.get_mut(*key) {
            parts.values_mut().for_each(complete_formats);
        }
    }
    for key in LISTS {
        if let Some(Value::Array(parts)) = keywords.get_mut(key) {
            parts.iter_mut().for_each(complete_formats);
        }
    }
    for key in SINGLE {
        // Lists are parts already.
        if let Some(part @ Value::Object(_)) = keywords.get_mut(key) {
            complete_formats(part);
        }
    }
    let format = keywords.get("format").and_then(Value::as_str);
    // One pattern each: every pattern makes the intersection more expensive.
    let pattern = match format {
        Some("date-time") => format!("{LEAP_DAY}T{TIME}"),
        Some("date") => format!("{LEAP_DAY}$"),
        Some("time") => format!("^{TIME}"),
        Some("email") => SHORT_LOCAL_PART.into(),
        _ => return,
    };
    if let Value::Array(all) = keywords.entry("allOf").or_insert_with(|| json!([])) {
        all.push(json!({"pattern": pattern}));
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
