//! Errors of deserializers in the words of the format that users write: JSON in requests, TOML in the
//! configuration. Users know lists, objects and tables, not the types of this program.

use std::fmt::{self, Debug, Display};
use std::marker::PhantomData;

use serde::de::{self, Expected, Unexpected};
use steersman_engine::policy::nearest;

/// Most characters of a user's text that an error quotes.
const QUOTED: usize = 80;

/// From here on, numbers are written with an exponent.
const LONG: f64 = 1e15;

/// What an `i64` is.
const WHOLE: &str = "a whole number";

/// The same, where a number is too far from 0.
const BELOW: &str = "a whole number of at most 9223372036854775807, on either side of 0";

/// The words of a format.
pub trait Format: Debug {
    /// A map.
    const MAP: &str;
    /// A map of which one element names the variant of an enum.
    const TAGGED: &str;
    /// An element of a map.
    const FIELD: &str;
}

/// JSON.
#[derive(Debug)]
pub struct Json;

/// TOML.
#[derive(Debug)]
pub struct Toml;

impl Format for Json {
    const MAP: &str = "an object";
    const TAGGED: &str = "an object with a `type`";
    const FIELD: &str = "field";
}

impl Format for Toml {
    const MAP: &str = "a table";
    const TAGGED: &str = "a table with a `type`";
    const FIELD: &str = "key";
}

/// What is wrong with a value: `is 3, expected a string`.
#[derive(Debug)]
pub struct Problem<F>(String, PhantomData<F>);

impl<F: Format> Display for Problem<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<F: Format> std::error::Error for Problem<F> {}

impl<F: Format> Problem<F> {
    /// A value of a kind that has names, which is `found` instead.
    pub fn no_variant(found: Unexpected<'_>, names: &[&str]) -> Self {
        let near = match found {
            Unexpected::Str(name) => nearest(name, names.iter().copied()),
            _ => None,
        };
        let near = near.map(|near| format!("; did you mean \"{near}\"?")).unwrap_or_default();
        let found = found_words::<F>(found);
        de::Error::custom(format!("is {found}, expected {}{near}", one_of(names)))
    }

    /// A value that is `found`, where `expected` was.
    pub fn other(found: Unexpected<'_>, expected: &str) -> Self {
        de::Error::custom(format!("is {}, expected {expected}", found_words::<F>(found)))
    }
}

impl<F: Format> de::Error for Problem<F> {
    fn custom<T: Display>(message: T) -> Self {
        Self(message.to_string(), PhantomData)
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let words = match (&found, expected_words::<F>(expected)) {
            // It may be whole, but is too far from 0.
            (Unexpected::Unsigned(_), words) if words == WHOLE => BELOW.into(),
            (Unexpected::Float(value), words) if words == WHOLE && value.fract() == 0.0 => {
                BELOW.into()
            }
            (_, words) => words,
        };
        Self::other(found, &words)
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::invalid_type(found, expected)
    }

    fn invalid_length(length: usize, expected: &dyn Expected) -> Self {
        let expected = expected_words::<F>(expected);
        Self::custom(format!("has {length} elements, expected {expected}"))
    }

    fn unknown_variant(found: &str, expected: &'static [&'static str]) -> Self {
        Self::no_variant(Unexpected::Str(found), expected)
    }

    fn unknown_field(found: &str, expected: &'static [&'static str]) -> Self {
        let hint = match nearest(found, expected.iter().copied()) {
            Some(near) => format!("did you mean `{near}`?"),
            None if expected.is_empty() => "there are none here".into(),
            None => format!("expected one of `{}`", expected.join("`, `")),
        };
        let found = found.chars().take(QUOTED).collect::<String>();
        Self::custom(format!("unknown {} `{found}`; {hint}", F::FIELD))
    }

    fn missing_field(name: &'static str) -> Self {
        Self::custom(format!("`{name}` is missing"))
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

/// `; did you mean ..?` with the one of `names` that is spelt most like `name`; empty if none is.
pub fn suggestion<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    nearest(name, names).map(|near| format!("; did you mean `{near}`?")).unwrap_or_default()
}

/// `text` in quotes, cut.
fn quoted(text: &str) -> String {
    match text.char_indices().nth(QUOTED) {
        Some((end, _)) => format!("\"{}…\"", &text[..end]),
        None => format!("\"{text}\""),
    }
}

fn found_words<F: Format>(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Bool(value) => value.to_string(),
        Unexpected::Unsigned(value) => value.to_string(),
        Unexpected::Signed(value) => value.to_string(),
        // As a number with a point: `1e3` is none without.
        Unexpected::Float(value) if value.fract() == 0.0 && value.abs() < LONG => {
            format!("{value:.1}")
        }
        Unexpected::Float(value) => number(value),
        Unexpected::Str(text) => quoted(text),
        Unexpected::Unit | Unexpected::Option => "null".into(),
        Unexpected::Seq => "a list".into(),
        Unexpected::Map => F::MAP.into(),
        other => other.to_string(),
    }
}

/// A number in an error, with an exponent from [`LONG`] on.
pub fn number(value: f64) -> String {
    if value.abs() >= LONG { format!("{value:e}") } else { value.to_string() }
}

/// What serde calls a type, in the words of the format.
fn expected_words<F: Format>(expected: &dyn Expected) -> String {
    let words = expected.to_string();
    let known = match words.as_str() {
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" => "a whole number, not below 0",
        "i64" => WHOLE,
        "f32" | "f64" | "a JSON number" => "a number",
        "a map" => F::MAP,
        "a sequence" => "a list",
        "path string" => "a string",
        "unit" => "null",
        words if words.starts_with("variant ") => "a string",
        words if words.starts_with("struct ") => F::MAP,
        words if words.contains("enum ") => F::TAGGED,
        words => words,
    };
    known.into()
}
