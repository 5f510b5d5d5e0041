//! Formats values exactly as Python's `str(x)` and `json.dumps(x)` do.
//!
//! A prompt that differs from the training format by one blank is another prompt, so templates get
//! Python's text: `True`, `1e+16`, `{"a": 1, "b": [2, 3]}`. minijinja 3 already writes `True`,
//! `None` and quotes inside lists as Python does; this file adds floats and JSON.
//!
//! Source: CPython 3.12 `Python/pystrtod.c` (`repr` of floats), `Lib/json/encoder.py`.

use std::borrow::Cow;
use std::fmt::Write;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use crate::{budget, taint};

/// Depth of nested values in JSON. Clients' JSON is nested 128 deep at most.
const JSON_DEPTH: usize = 200;

/// The arguments of `json.dumps`.
#[derive(Debug, Clone, Default)]
pub struct JsonStyle {
    /// Escape everything outside ASCII as `\uXXXX`.
    pub ensure_ascii: bool,
    /// Indent of each level; `None` writes one line.
    pub indent: Option<String>,
    /// Separators between items, and between key and value; `None` is `", "` (`","` with indent) and `": "`.
    pub separators: Option<(String, String)>,
    /// Sort maps by key instead of keeping their order.
    pub sort_keys: bool,
}

/// `str(value)`; an undefined value is empty. An error if the text exceeds the budget of the rendering.
pub fn str(value: &Value) -> Result<Cow<'_, str>, Error> {
    match value.as_str() {
        Some(text) => Ok(Cow::Borrowed(text)),
        None if value.kind() == ValueKind::Number && !value.is_integer() => {
            Ok(Cow::Owned(number(value, ["nan", "inf", "-inf"])))
        }
        None => {
            let mut out = budget::Bounded::new();
            write!(out, "{value}").map_err(|_| budget::too_large())?;
            Ok(Cow::Owned(out.text))
        }
    }
}

/// White space of `str.strip()`: Rust's set and the four ASCII separators.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// `json.dumps(value)`; an error for undefined values, functions and bytes.
pub fn json(value: &Value, style: &JsonStyle) -> Result<String, Error> {
    let mut out = String::new();
    write_json(&mut out, value, style, 0)?;
    Ok(out)
}

fn write_json(
    out: &mut String,
    value: &Value,
    style: &JsonStyle,
    depth: usize,
) -> Result<(), Error> {
    if out.len() > budget::left() {
        return Err(budget::too_large());
    }
    if depth > JSON_DEPTH {
        let message = format!("JSON nested more than {JSON_DEPTH} deep");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&number(value, ["NaN", "Infinity", "-Infinity"])),
        ValueKind::String => write_json_text(out, value.as_str().unwrap_or_default(), style),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            write_json_items(out, ['[', ']'], items.len(), style, depth, |out, index| {
                write_json(out, &items[index], style, depth + 1)
            })?;
        }
        ValueKind::Map => {
            let mut pairs = Vec::new();
            for key in value.try_iter()? {
                let item = value.get_item(&key)?;
                pairs.push((json_key(&key)?, item));
            }
            if style.sort_keys {
                pairs.sort_by(|a, b| taint::plain_text(&a.0).cmp(&taint::plain_text(&b.0)));
            }
            write_json_items(out, ['{', '}'], pairs.len(), style, depth, |out, index| {
                let (key, item) = &pairs[index];
                write_json_text(out, key, style);
                out.push_str(style.separators.as_ref().map_or(": ", |pair| &pair.1));
                write_json(out, item, style, depth + 1)
            })?;
        }
        other => return Err(not_serializable(&other.to_string())),
    }
    Ok(())
}

fn write_json_items(
    out: &mut String,
    brackets: [char; 2],
    count: usize,
    style: &JsonStyle,
    depth: usize,
    mut item: impl FnMut(&mut String, usize) -> Result<(), Error>,
) -> Result<(), Error> {
    let new_line = |out: &mut String, depth: usize| {
        if let Some(indent) = &style.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    };
    let comma = match &style.separators {
        Some((comma, _)) => comma,
        None if style.indent.is_some() => ",",
        None => ", ",
    };
    out.push(brackets[0]);
    for index in 0..count {
        if index > 0 {
            out.push_str(comma);
        }
        new_line(out, depth + 1);
        item(out, index)?;
    }
    if count > 0 {
        new_line(out, depth);
    }
    out.push(brackets[1]);
    Ok(())
}

fn write_json_text(out: &mut String, text: &str, style: &JsonStyle) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || (style.ensure_ascii && !taint::plain(c).is_ascii()) => {
                for unit in taint::plain(c).encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}").expect("writing to a String cannot fail");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

fn json_key(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.to_string()),
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
        ValueKind::Number => Ok(number(key, ["NaN", "Infinity", "-Infinity"])),
        other => Err(not_serializable(&other.to_string())),
    }
}

fn not_serializable(kind: &str) -> Error {
    let message = format!("a value of type {kind} cannot be written as JSON");
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Python's `repr` of a number; `names` are those of NaN and the infinities.
fn number(value: &Value, names: [&str; 3]) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => float_repr(float, names),
        _ => value.to_string(),
    }
}

/// The shortest digits that read back as `float`; an exponent outside of 1e-4 .. 1e16.
fn float_repr(float: f64, names: [&str; 3]) -> String {
    if float.is_nan() {
        return names[0].into();
    }
    if float.is_infinite() {
        return names[if float > 0.0 { 1 } else { 2 }].into();
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').expect("`{:e}` writes an exponent");
    let exponent: i32 = exponent.parse().expect("`{:e}` writes a decimal exponent");
    if (-4..16).contains(&exponent) {
        let plain = float.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_formatted_as_in_python() {
        // The right side is CPython's `repr`.
        for (float, expected) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (2.5, "2.5"),
            (0.1 + 0.2, "0.30000000000000004"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (-1e22, "-1e+22"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.25e-7, "1.25e-07"),
            (5e-324, "5e-324"),
            (123456789.125, "123456789.125"),
            (f64::NAN, "nan"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(float_repr(float, ["nan", "inf", "-inf"]), expected);
        }
    }
}
