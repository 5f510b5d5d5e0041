//! The table of all fields of a chat request.
//!
//! A field that is not supported is rejected by name, never ignored, so a reply always honours the
//! whole request. Neutral values are accepted, since many clients always send them.

use serde_json::{Map, Value};

use super::error::ApiError;

/// How a field is handled.
pub enum Rule {
    /// Handled by [`super::request`].
    Read,
    /// Accepted and ignored: it does not affect the reply.
    Ignored,
    /// Not supported, except for null and these neutral values (a JSON list), which mean the same as
    /// no field.
    Only(&'static str, Advice),
}

/// What the client can do instead.
type Advice = &'static str;

use Rule::{Ignored, Only, Read};

/// The fields of the body of `POST /v1/chat/completions`.
pub const FIELDS: &[(&str, Rule)] = &[
    ("model", Read),
    ("messages", Read),
    ("stream", Read),
    ("stream_options", Read),
    ("max_tokens", Read),
    ("max_completion_tokens", Read),
    ("temperature", Read),
    ("top_p", Read),
    ("top_k", Read),
    ("min_p", Read),
    ("seed", Read),
    ("stop", Read),
    ("tools", Read),
    // Read by `super::structure`.
    ("tool_choice", Read),
    ("parallel_tool_calls", Read),
    ("response_format", Read),
    ("structured_outputs", Read),
    ("guided_json", Read),
    ("guided_regex", Read),
    ("guided_choice", Read),
    ("guided_grammar", Read),
    ("json_schema", Read),
    ("grammar", Read),
    // Read by `super::probability`.
    ("logit_bias", Read),
    ("presence_penalty", Read),
    ("frequency_penalty", Read),
    ("repetition_penalty", Read),
    ("repetition_context_size", Read),
    ("min_tokens", Read),
    ("ignore_eos", Read),
    ("logprobs", Read),
    ("top_logprobs", Read),
    ("chat_template_kwargs", Read),
    ("reasoning_effort", Read),
    ("max_thinking_tokens", Read),
    // Labels for the operator of a service.
    ("user", Ignored),
    ("metadata", Ignored),
    ("safety_identifier", Ignored),
    // Prefixes are found by their tokens and need no key.
    ("prompt_cache_key", Ignored),
    ("functions", Only("[]", "send them as `tools`")),
    ("function_call", Only("[]", "send `tools` and `tool_choice`")),
    ("n", Only("[1]", "send one request for each choice")),
    ("best_of", Only("[1]", "send several requests")),
    ("store", Only("[false]", "replies are not stored")),
    ("service_tier", Only(r#"["auto", "default"]"#, "all requests wait in one queue")),
    ("modalities", Only(r#"[["text"]]"#, "only text is supported")),
    ("audio", Only("[]", "only text is supported")),
    ("prediction", Only("[]", "leave it out: it affects only the speed")),
    ("verbosity", Only(r#"["medium"]"#, "ask for the length in the prompt")),
    ("web_search_options", Only("[]", "provide a search tool")),
];

/// Takes the fields `names` out of a body.
pub fn take(body: &mut Map<String, Value>, names: &[&str]) -> Map<String, Value> {
    names.iter().filter_map(|name| body.shift_remove_entry(*name)).collect()
}

/// Rejects unknown and unsupported fields.
///
/// # Errors
/// 400 naming the first such field and what to do instead.
pub fn check(body: &Map<String, Value>) -> Result<(), ApiError> {
    for (name, value) in body {
        let Some((_, rule)) = FIELDS.iter().find(|(known, _)| known == name) else {
            let message = format!("`{name}` is an unknown field; leave it out");
            return Err(ApiError::invalid("unknown_parameter", name, message));
        };
        if let Only(neutral, advice) = rule
            && !is_neutral(value, neutral)
        {
            let neutral = &neutral[1..neutral.len() - 1];
            let message = match neutral {
                "" => format!("`{name}` is not supported yet: {advice}"),
                _ => format!("`{name}` is not supported yet, except for {neutral}: {advice}"),
            };
            return Err(ApiError::unsupported(name, message));
        }
    }
    Ok(())
}

/// Whether `value` is null or one of `neutral`; numbers are compared by value (0 equals 0.0).
fn is_neutral(value: &Value, neutral: &str) -> bool {
    let neutral: Vec<Value> =
        serde_json::from_str(neutral).expect("the table contains JSON lists: checked by a test");
    let equal = |other: &Value| match (value.as_f64(), other.as_f64()) {
        (Some(value), Some(other)) => value == other,
        _ => value == other,
    };
    value.is_null() || neutral.iter().any(equal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_neutral_value_in_the_table_is_accepted() {
        for (name, rule) in FIELDS {
            let Only(neutral, _) = rule else { continue };
            let values: Vec<Value> = serde_json::from_str(neutral).unwrap();
            for value in values.into_iter().chain([Value::Null]) {
                let body = Map::from_iter([(name.to_string(), value)]);
                assert_eq!(check(&body), Ok(()), "{body:?}");
            }
            let body = Map::from_iter([(name.to_string(), "an unsupported value".into())]);
            assert_eq!(check(&body).unwrap_err().param.as_deref(), Some(*name));
        }
    }

    #[test]
    fn numbers_are_compared_by_value() {
        assert!(is_neutral(&0.0.into(), "[0]"));
        assert!(is_neutral(&1.into(), "[1]"));
        assert!(!is_neutral(&0.1.into(), "[0]"));
    }
}
