//! Deserializes TOML values into types, with errors in the words of TOML, and with units: where a number is
//! expected, a text with the unit of its key is one as well ([`Unit`]).

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{Deserializer, Error as _, IntoDeserializer, Unexpected, Visitor};
use serde::forward_to_deserialize_any;
use toml::de::{DeInteger, DeValue};

use super::unit::Unit;
use crate::words::{self, Toml};

/// What is wrong with a value.
pub type Problem = words::Problem<Toml>;

/// Keys of lists and tables of secrets, which no error may quote.
const SECRET: [&str; 4] = ["api_keys", "admin_keys", "env", "headers"];

/// A value, and the key that it is under.
#[derive(Clone, Copy)]
pub struct Entry<'a> {
    /// The last part of the key; empty for the element of a list.
    pub key: &'a str,
    /// The value.
    pub value: &'a DeValue<'a>,
}

impl<'de> Entry<'de> {
    fn found(self) -> Unexpected<'de> {
        match self.value {
            DeValue::String(_) if SECRET.contains(&self.key) => Unexpected::Other("a text"),
            DeValue::String(text) => Unexpected::Str(text),
            DeValue::Integer(number) => match whole(number) {
                Some(number) => {
                    u64::try_from(number).map_or(Unexpected::Signed(number), Unexpected::Unsigned)
                }
                None => Unexpected::Other("a number of more than 64 bits"),
            },
            DeValue::Float(number) => Unexpected::Float(float(number.as_str())),
            DeValue::Boolean(value) => Unexpected::Bool(*value),
            DeValue::Datetime(_) => Unexpected::Other("a date or a time"),
            DeValue::Array(_) => Unexpected::Seq,
            DeValue::Table(_) => Unexpected::Map,
        }
    }

    /// Reads a whole number, or a size or duration with its unit.
    fn number<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        match (self.value, Unit::of(self.key)) {
            (_, None) => self.deserialize_any(visitor),
            (DeValue::Integer(number), _) if whole(number).is_some_and(|number| number >= 0) => {
                self.deserialize_any(visitor)
            }
            (DeValue::String(text), Some(unit)) => match unit.number(text) {
                Some(number) => visitor.visit_u64(number),
                None => Err(Problem::other(self.found(), unit.expected())),
            },
            (_, Some(unit)) => Err(Problem::other(self.found(), unit.expected())),
        }
    }
}

/// The number, if it has 64 bits.
fn whole(number: &DeInteger<'_>) -> Option<i64> {
    i64::from_str_radix(number.as_str(), number.radix()).ok()
}

/// The number that the parser of TOML found in `text`.
fn float(text: &str) -> f64 {
    text.parse().unwrap_or(f64::NAN)
}

impl<'de> IntoDeserializer<'de, Problem> for Entry<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Entry<'de> {
    type Error = Problem;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        match self.value {
            DeValue::String(_) if SECRET.contains(&self.key) => {
                Err(Problem::invalid_type(self.found(), &visitor))
            }
            DeValue::String(text) => visitor.visit_borrowed_str(text),
            DeValue::Integer(number) => match whole(number) {
                Some(number) => match u64::try_from(number) {
                    Ok(number) => visitor.visit_u64(number),
                    Err(_) => visitor.visit_i64(number),
                },
                None => Err(Problem::invalid_type(self.found(), &visitor)),
            },
            DeValue::Float(number) => visitor.visit_f64(float(number.as_str())),
            DeValue::Boolean(value) => visitor.visit_bool(*value),
            DeValue::Datetime(_) => Err(Problem::invalid_type(self.found(), &visitor)),
            DeValue::Array(values) => {
                let values = values.iter().map(|value| Entry { key: "", value: value.get_ref() });
                let mut values = SeqDeserializer::new(values);
                let list = visitor.visit_seq(&mut values)?;
                values.end()?;
                Ok(list)
            }
            DeValue::Table(entries) => {
                let entries = entries.iter().map(|(key, value)| {
                    let key: &str = key.get_ref();
                    (key, Entry { key, value: value.get_ref() })
                });
                let mut entries = MapDeserializer::new(entries);
                let table = visitor.visit_map(&mut entries)?;
                entries.end()?;
                Ok(table)
            }
        }
    }

    fn deserialize_u8<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        self.number(visitor)
    }

    fn deserialize_u16<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        self.number(visitor)
    }

    fn deserialize_u32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        self.number(visitor)
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        self.number(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        visitor.visit_some(self)
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
        match self.value {
            // A list is not taken for a table whose keys have an order.
            DeValue::Array(_) => Err(Problem::invalid_type(self.found(), &visitor)),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Problem> {
        match self.value {
            DeValue::String(name) => visitor.visit_enum(name.as_ref().into_deserializer()),
            _ => Err(Problem::no_variant(self.found(), names)),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq
        tuple tuple_struct map identifier ignored_any
    }
}
