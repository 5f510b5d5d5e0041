//! JSON as Python writes it.

use serde_json::Value;

/// Parses JSON as Python writes it: numbers that are not finite (`Infinity`, `NaN`, and since transformers 5
/// `{"__float__": "Infinity"}`) become `null`.
pub fn json(bytes: &[u8]) -> serde_json::Result<Value> {
    let mut value = serde_json::from_slice(bytes).or_else(|error| match finite(bytes) {
        Some(bytes) => serde_json::from_slice(&bytes),
        None => Err(error),
    })?;
    drop_marked(&mut value);
    Ok(value)
}

/// The text with `null` in place of each number that is not finite; `None` if there is none.
fn finite(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(bytes.len());
    let (mut rest, mut in_text, mut found) = (bytes, false, false);
    while let Some((&byte, after)) = rest.split_first() {
        let names: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
        let name = names.into_iter().find(|name| !in_text && rest.starts_with(name));
        if let Some(name) = name {
            out.extend_from_slice(b"null");
            (rest, found) = (&rest[name.len()..], true);
            continue;
        }
        out.push(byte);
        rest = after;
        match byte {
            b'"' => in_text = !in_text,
            b'\\' if in_text => {
                out.extend(rest.first());
                rest = rest.get(1..).unwrap_or_default();
            }
            _ => {}
        }
    }
    found.then_some(out)
}

fn drop_marked(value: &mut Value) {
    match value {
        Value::Object(keys) if keys.len() == 1 && keys.contains_key("__float__") => {
            *value = Value::Null;
        }
        Value::Object(keys) => keys.values_mut().for_each(drop_marked),
        Value::Array(items) => items.iter_mut().for_each(drop_marked),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_that_are_not_finite_are_null() {
        let text = br#"{"a\"Infinity": [0.0, Infinity, -Infinity], "b": NaN, "c": "NaN \\"}"#;
        let expected = json!({"a\"Infinity": [0.0, null, null], "b": null, "c": "NaN \\"});
        assert_eq!(json(text).unwrap(), expected);
        let marked = br#"{"time_step_limit": [0.0, {"__float__": "Infinity"}]}"#;
        assert_eq!(json(marked).unwrap(), json!({"time_step_limit": [0.0, null]}));
        json(br#"{"a": Infinite}"#).unwrap_err();
    }
}
