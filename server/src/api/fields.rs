//! Every field that a chat request may have, and what becomes of it, in one table.
//!
//! A field that asks for something we cannot do is refused by name, never ignored: a client that
//! gets an answer got the answer that it asked for. Values that ask for nothing are accepted, since
//! many clients always send them.

use serde_json::{Map, Value};

use super::error::ApiError;

/// What becomes of a field.
pub enum Rule {
    /// It is read by [`super::request`].
    Read,
    /// It describes the request and asks for nothing: accepted, and not used.
    Harmless,
    /// It asks for something that we cannot do, but for these values (a JSON list), which are the
    /// same as leaving it out. Null always is.
    Only(&'static str, Advice),
}

/// What to do instead.
type Advice = &'static str;

use Rule::{Harmless, Only, Read};

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
    ("chat_template_kwargs", Read),
    ("reasoning_effort", Read),
    ("max_thinking_tokens", Read),
    // Who asks, and for what: of use to whoever runs a service, not to an answer.
    ("user", Harmless),
    ("metadata", Harmless),
    ("safety_identifier", Harmless),
    // Prefixes are found by their tokens, so a key for them adds nothing.
    ("prompt_cache_key", Harmless),
    // Read as well: "none" hides the tools.
    ("tool_choice", Only(r#"["auto", "none"]"#, "leave the choice of a tool to the model")),
    ("parallel_tool_calls", Only("[true]", "take the first of several calls")),
    ("functions", Only("[]", "send them as `tools`")),
    ("function_call", Only("[]", "send `tools` and `tool_choice`")),
    ("response_format", Only(r#"[{"type": "text"}]"#, "describe the format in the prompt")),
    ("n", Only("[1]", "send as many requests as you want choices")),
    ("best_of", Only("[1]", "send several requests")),
    ("logprobs", Only("[false]", "probabilities are not reported yet")),
    ("top_logprobs", Only("[0]", "probabilities are not reported yet")),
    ("logit_bias", Only("[{}]", "a policy can ban or prefer tokens")),
    ("frequency_penalty", Only("[0]", "the policy guards against repetition")),
    ("presence_penalty", Only("[0]", "the policy guards against repetition")),
    ("repetition_penalty", Only("[1]", "the policy guards against repetition")),
    ("store", Only("[false]", "replies are not kept")),
    ("service_tier", Only(r#"["auto", "default"]"#, "all requests wait in one queue")),
    ("modalities", Only(r#"[["text"]]"#, "this server reads and writes text")),
    ("audio", Only("[]", "this server reads and writes text")),
    ("prediction", Only("[]", "leave it out: it changes the speed, not the answer")),
    ("verbosity", Only(r#"["medium"]"#, "ask for the length in the prompt")),
    ("web_search_options", Only("[]", "offer a tool that searches")),
];

/// Refuses every field of `body` that asks for something we cannot do.
///
/// # Errors
/// The first such field, by name, and what to do instead.
pub fn check(body: &Map<String, Value>) -> Result<(), ApiError> {
    for (name, value) in body {
        let Some((_, rule)) = FIELDS.iter().find(|(known, _)| known == name) else {
            let message = format!("`{name}` is not a field that this server knows; leave it out");
            return Err(ApiError::invalid("unknown_parameter", name, message));
        };
        if let Only(neutral, advice) = rule
            && !asks_for_nothing(value, neutral)
        {
            let neutral = &neutral[1..neutral.len() - 1];
            let message = match neutral {
                "" => format!("`{name}` is not supported yet: {advice}"),
                _ => format!("`{name}` is not supported yet, but for {neutral}: {advice}"),
            };
            return Err(ApiError::unsupported(name, message));
        }
    }
    Ok(())
}

/// Whether `value` is null or one of `neutral`; numbers are compared as numbers (0 is 0.0).
fn asks_for_nothing(value: &Value, neutral: &str) -> bool {
    let neutral: Vec<Value> =
        serde_json::from_str(neutral).expect("the table holds lists in JSON: a test reads it");
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
    fn every_neutral_value_of_the_table_asks_for_nothing() {
        for (name, rule) in FIELDS {
            let Only(neutral, _) = rule else { continue };
            let values: Vec<Value> = serde_json::from_str(neutral).unwrap();
            for value in values.into_iter().chain([Value::Null]) {
                let body = Map::from_iter([(name.to_string(), value)]);
                assert_eq!(check(&body), Ok(()), "{body:?}");
            }
            let body = Map::from_iter([(name.to_string(), "what we cannot do".into())]);
            assert_eq!(check(&body).unwrap_err().param.as_deref(), Some(*name));
        }
    }

    #[test]
    fn a_number_is_neutral_however_it_is_written() {
        assert!(asks_for_nothing(&0.0.into(), "[0]"));
        assert!(asks_for_nothing(&1.into(), "[1]"));
        assert!(!asks_for_nothing(&0.1.into(), "[0]"));
    }
}
