//! Deserializes JSON values into types, with errors in the words of JSON: clients know lists and objects, not the
//! types of this program.
//!
//! Stricter than `serde_json`: a list is not taken for an object whose fields have an order.

use std::cell::RefCell;

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{self, Deserializer, IntoDeserializer, Unexpected, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::Value;

pub use crate::words::one_of;
use crate::words::{self, Json};

/// What is wrong with a value.
type Problem = words::Problem<Json>;

/// The fields of the objects that are being deserialized, the innermost last.
pub type Known = RefCell<Vec<&'static [&'static str]>>;

/// A value to deserialize.
#[derive(Clone, Copy)]
pub struct Typed<'a> {
    /// The value.
    pub value: &'a Value,
    /// What is known while it is deserialized.
    pub known: &'a Known,
}

impl<'a> Typed<'a> {
    /// Another value, inside this one.
    fn inner(self, value: &'a Value) -> Self {
        Self { value, ..self }
    }
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
        match self.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Number(number) => match (number.as_u64(), number.as_i64()) {
                (Some(number), _) => visitor.visit_u64(number),
                (None, Some(number)) => visitor.visit_i64(number),
                (None, None) => visitor.visit_f64(number.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(text) => visitor.visit_borrowed_str(text),
            Value::Array(values) => {
                let mut values = SeqDeserializer::new(values.iter().map(|value| self.inner(value)));
                let value = visitor.visit_seq(&mut values)?;
                values.end()?;
                Ok(value)
            }
            Value::Object(fields) => {
                let fields = fields.iter().map(|(name, value)| (name.as_str(), self.inner(value)));
                let mut fields = MapDeserializer::new(fields);
                let value = visitor.visit_map(&mut fields)?;
                fields.end()?;
                Ok(value)
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        if self.value.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
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
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Problem> {
        if self.value.is_array() {
            return Err(de::Error::invalid_type(Unexpected::Seq, &visitor));
        }
        self.known.borrow_mut().push(fields);
        let object = self.deserialize_any(visitor);
        self.known.borrow_mut().pop();
        object
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Problem> {
        let found = match self.value {
            Value::String(name) => return visitor.visit_enum(name.as_str().into_deserializer()),
            Value::Null => Unexpected::Unit,
            Value::Bool(value) => Unexpected::Bool(*value),
            Value::Number(number) => Unexpected::Float(number.as_f64().unwrap_or(f64::NAN)),
            Value::Array(_) => Unexpected::Seq,
            Value::Object(_) => Unexpected::Map,
        };
        Err(Problem::no_variant(found, names))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map identifier ignored_any
    }
}
