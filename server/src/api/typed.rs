//! Deserializes JSON values into types, with errors in the words of JSON: clients know lists and objects, not the
//! types of this program.
//!
//! Stricter than `serde_json`: a list is not taken for an object whose fields have an order.

use std::fmt::{self, Display};

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{self, Deserializer, Expected, IntoDeserializer, Unexpected, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::Value;

/// Most characters of a client's text that an error quotes.
const QUOTED: usize = 80;

/// From here on, numbers are written with an exponent.
const LONG: f64 = 1e15;

/// What an `i64` is.
const WHOLE: &str = "a whole number";

/// The same, where a number is too far from 0.
const BELOW: &str = "a whole number of at most 9223372036854775807, on either side of 0";

/// A value to deserialize.
#[derive(Clone, Copy)]
pub struct Typed<'a>(pub &'a Value);

/// What is wrong with a value: `is 3, expected a string`.
#[derive(Debug)]
pub struct Problem(String);

impl Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Problem {}

impl de::Error for Problem {
    fn custom<T: Display>(message: T) -> Self {
        Self(message.to_string())
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let words = match (&found, expected_words(expected)) {
            // It may be whole, but is too far from 0.
            (Unexpected::Unsigned(_), words) if words == WHOLE => BELOW.into(),
            (Unexpected::Float(value), words) if words == WHOLE && value.fract() == 0.0 => {
                BELOW.into()
            }
            (_, words) => words,
        };
        Self(format!("is {}, expected {words}", found_words(found)))
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::invalid_type(found, expected)
    }

    fn invalid_length(length: usize, expected: &dyn Expected) -> Self {
        Self(format!("has {length} elements, expected {}", expected_words(expected)))
    }

    fn unknown_variant(found: &str, expected: &'static [&'static str]) -> Self {
        Self(format!("is {}, expected {}", quoted(found), one_of(expected)))
    }

    fn missing_field(name: &'static str) -> Self {
        Self(format!("`{name}` is missing"))
    }
}

/// `"a", "b" or "c"`
pub fn one_of(names: &[&str]) -> String {
    let names: Vec<_> = names.iter().map(|name| format!("\"{name}\"")).collect();
    match names.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => "left out".into(),
    }
}

/// `text` in quotes, cut.
fn quoted(text: &str) -> String {
    match text.char_indices().nth(QUOTED) {
        Some((end, _)) => format!("\"{}…\"", &text[..end]),
        None => format!("\"{text}\""),
    }
}

fn found_words(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Bool(value) => value.to_string(),
        Unexpected::Unsigned(value) => value.to_string(),
        Unexpected::Signed(value) => value.to_string(),
        Unexpected::Float(value) if value.abs() >= LONG => format!("{value:e}"),
        Unexpected::Float(value) => value.to_string(),
        Unexpected::Str(text) => quoted(text),
        Unexpected::Unit | Unexpected::Option => "null".into(),
        Unexpected::Seq => "a list".into(),
        Unexpected::Map => "an object".into(),
        other => other.to_string(),
    }
}

/// What serde calls a type, in the words of JSON.
fn expected_words(expected: &dyn Expected) -> String {
    let words = expected.to_string();
    let known = match words.as_str() {
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" => "a whole number, not below 0",
        "i64" => WHOLE,
        "f32" | "f64" | "a JSON number" => "a number",
        "a map" => "an object",
        "unit" => "null",
        words if words.starts_with("variant ") => "a string",
        words if words.starts_with("struct ") => "an object",
        words if words.contains("enum ") => "an object with a `type`",
        words => words,
    };
    known.into()
}

impl<'de> IntoDeserializer<'de, Problem> for Typed<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Typed<'de> {
    type Error = Problem;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        match self.0 {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Number(number) => match (number.as_u64(), number.as_i64()) {
                (Some(number), _) => visitor.visit_u64(number),
                (None, Some(number)) => visitor.visit_i64(number),
                (None, None) => visitor.visit_f64(number.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(text) => visitor.visit_borrowed_str(text),
            Value::Array(values) => {
                let mut values = SeqDeserializer::new(values.iter().map(Typed));
                let value = visitor.visit_seq(&mut values)?;
                values.end()?;
                Ok(value)
            }
            Value::Object(fields) => {
                let fields = fields.iter().map(|(name, value)| (name.as_str(), Typed(value)));
                let mut fields = MapDeserializer::new(fields);
                let value = visitor.visit_map(&mut fields)?;
                fields.end()?;
                Ok(value)
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        if self.0.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Problem> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Problem> {
        match self.0 {
            Value::Array(_) => Err(de::Error::invalid_type(Unexpected::Seq, &visitor)),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Problem> {
        let found = match self.0 {
            Value::String(name) => return visitor.visit_enum(name.as_str().into_deserializer()),
            Value::Null => Unexpected::Unit,
            Value::Bool(value) => Unexpected::Bool(*value),
            Value::Number(number) => Unexpected::Float(number.as_f64().unwrap_or(f64::NAN)),
            Value::Array(_) => Unexpected::Seq,
            Value::Object(_) => Unexpected::Map,
        };
        Err(Problem(format!("is {}, expected {}", found_words(found), one_of(names))))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map identifier ignored_any
    }
}
