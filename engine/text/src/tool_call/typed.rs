//! Bare texts as JSON of the types that a schema gives them.

use serde_json::Value;

use super::reader::{compact, is_number};
use super::schema::{Allowed, Schemas, kind_of};

/// `raw` as JSON of the type that the schema gives `parameter` of `function`; a string if the schema
/// gives none or `raw` does not match it.
pub fn typed(schemas: &Schemas, function: &str, parameter: &str, raw: &str) -> String {
    let typed = read(&schemas.allowed(function, parameter), raw);
    typed.unwrap_or_else(|| Value::from(raw).to_string())
}

/// [`typed`], but `None` if `raw` matches no type.
pub fn typed_exactly(
    schemas: &Schemas,
    function: &str,
    parameter: &str,
    raw: &str,
) -> Option<String> {
    let allowed = schemas.allowed(function, parameter);
    let text = || allowed.may_be_text().then(|| Value::from(raw).to_string());
    read(&allowed, raw).or_else(text)
}

/// `raw` as JSON; `None` if it is not one of the allowed values, or is a string.
fn read(allowed: &Allowed<'_>, raw: &str) -> Option<String> {
    let text = raw.trim();
    let as_listed = |member: &&Value| match member {
        Value::String(listed) => (listed == raw || listed == text).then(|| member.to_string()),
        member => read_as(kind_of(member), text)
            .filter(|json| serde_json::from_str::<Value>(json).ok().as_ref() == Some(member)),
    };
    let listed = allowed.members.iter().find_map(as_listed);
    listed.or_else(|| allowed.kinds.iter().find_map(|kind| read_as(kind, text)))
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
