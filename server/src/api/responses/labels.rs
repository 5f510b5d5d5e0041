//! Limits of what a response repeats and stores, and no model reads: labels of the client and ids of items.
//!
//! Pages of items and events of streams repeat them, so that without a limit each byte of a body would be stored and sent
//! several times.

use serde_json::{Map, Value};

use crate::api::error::ApiError;

/// Fields of a body that label it.
const LABELS: [&str; 4] = ["prompt_cache_key", "safety_identifier", "service_tier", "user"];

/// Most bytes of a label, and of an id of an item.
const BYTES: usize = 512;

/// Most pairs of `metadata`, as OpenAI documents.
const PAIRS: usize = 16;

/// Most characters of a key of `metadata`, as OpenAI documents.
const KEY: usize = 64;

/// Most characters of a value of `metadata`, as OpenAI documents.
const VALUE: usize = 512;

/// Checks the labels of a body.
///
/// # Errors
/// 400 naming the field.
pub fn check(fields: &Map<String, Value>) -> Result<(), ApiError> {
    for name in LABELS {
        check_bytes(name, fields.get(name))?;
    }
    let pairs = match fields.get("metadata") {
        None | Some(Value::Null) => return Ok(()),
        Some(Value::Object(pairs)) => pairs,
        Some(_) => {
            let message = "metadata: must be an object of strings";
            return Err(ApiError::invalid("invalid_type", "metadata", message));
        }
    };
    if pairs.len() > PAIRS {
        let message = format!("metadata: has {} pairs, at most {PAIRS} are allowed", pairs.len());
        return Err(ApiError::value("metadata", message));
    }
    for (key, value) in pairs {
        let characters = key.chars().count();
        if characters > KEY {
            let message = format!(
                "metadata: has a key of {characters} characters, at most {KEY} are allowed"
            );
            return Err(ApiError::value("metadata", message));
        }
        let param = format!("metadata.{key}");
        let Value::String(text) = value else {
            let message = format!("{param}: must be a string");
            return Err(ApiError::invalid("invalid_type", param, message));
        };
        let characters = text.chars().count();
        if characters > VALUE {
            let message =
                format!("{param}: has {characters} characters, at most {VALUE} are allowed");
            return Err(ApiError::value(param, message));
        }
    }
    Ok(())
}

/// Checks the ids of an item, which is the field `path` of the body.
///
/// # Errors
/// 400 naming the field.
pub fn check_ids(path: &str, item: &Value) -> Result<(), ApiError> {
    ["id", "call_id"]
        .into_iter()
        .try_for_each(|name| check_bytes(&format!("{path}.{name}"), item.get(name)))
}

fn check_bytes(param: &str, value: Option<&Value>) -> Result<(), ApiError> {
    match value.and_then(Value::as_str) {
        Some(text) if text.len() > BYTES => {
            let message = format!("{param}: has {} bytes, at most {BYTES} are allowed", text.len());
            Err(ApiError::value(param, message))
        }
        _ => Ok(()),
    }
}
