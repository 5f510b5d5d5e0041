//! Masks texts and tokens in records. Masked strings and token lists are empty; `masked` of the record
//! has their lengths (bytes or numbers of tokens) by path: `input.text`, `input.params.hint`,
//! `answer[0].Inject`.
//!
//! Every string is masked unless its field is in [`VISIBLE`], so a new field of the contract is masked
//! by default. Visible are names (of request, profile, model, tools and parameters), digests and
//! decisions. Masked are texts of users, the system and the model, and all texts of the policy, since it
//! may repeat them: injected text, replacements, notes, reasons, parameters, the message of a failure,
//! and arguments and results of imports.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::contract::ImportCall;
use crate::error::{Cause, Failure};

/// Fields whose strings remain.
const VISIBLE: &[&str] = &[
    "at", "calls", "digest", "earlier", "family", "id", "key", "model", "name", "phase", "profile",
    "reason", "role", "tools",
];

/// Fields whose lists of tokens are emptied.
const TOKENS: &[&str] = &["drawn", "on_tokens", "tokens", "watch"];

type Lengths = Map<String, Value>;

/// A masked call or answer.
pub fn value(path: &str, of: &impl Serialize, lengths: &mut Lengths) -> Value {
    let mut value = to_value(of);
    // An answer that is a string is a case without text: `"Accept"`.
    if !value.is_string() {
        mask(path, "", &mut value, lengths);
    }
    value
}

/// Masked uses of imports; only their names are visible.
pub fn imports(calls: &[ImportCall], lengths: &mut Lengths) -> Value {
    let mut value = to_value(&calls);
    for (i, call) in value.as_array_mut().into_iter().flatten().enumerate() {
        for field in ["arguments", "answer"] {
            mask(&format!("imports[{i}].{field}"), field, &mut call[field], lengths);
        }
    }
    value
}

/// The text of a failure without the message of the policy.
pub fn failure(failure: &Failure, lengths: &mut Lengths) -> String {
    match &failure.cause {
        Cause::Message(message) => {
            set("error", message.len(), lengths);
            format!("policy `{}`: {}: failed", failure.policy, failure.hook)
        }
        _ => failure.to_string(),
    }
}

fn mask(path: &str, field: &str, value: &mut Value, lengths: &mut Lengths) {
    match value {
        _ if VISIBLE.contains(&field) => {}
        Value::String(text) => {
            set(path, text.len(), lengths);
            text.clear();
        }
        Value::Array(list) if TOKENS.contains(&field) => {
            set(path, list.len(), lengths);
            list.clear();
        }
        // What the model would draw next is of the text, too.
        Value::Object(_) if field == "outlook" => {
            set(path, 1, lengths);
            *value = Value::Null;
        }
        Value::Array(pairs) if field == "params" => {
            for pair in pairs {
                if let Some([Value::String(name), Value::String(text)]) =
                    pair.as_array_mut().map(Vec::as_mut_slice)
                {
                    set(&format!("{path}.{name}"), text.len(), lengths);
                    text.clear();
                }
            }
        }
        Value::Array(list) => {
            for (i, item) in list.iter_mut().enumerate() {
                mask(&format!("{path}[{i}]"), field, item, lengths);
            }
        }
        Value::Object(fields) => {
            for (name, value) in fields {
                mask(&format!("{path}.{name}"), name, value, lengths);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn set(path: &str, length: usize, lengths: &mut Lengths) {
    if length > 0 {
        lengths.insert(path.into(), length.into());
    }
}

fn to_value(of: &impl Serialize) -> Value {
    serde_json::to_value(of).expect("records have string keys only")
}
