//! Schemas of bodies and replies, from the types that parse and write them, for `GET /openapi.json`.
//!
//! Bodies are described by the types that parse them and by the tables of [`fields`](super::fields). Replies are described
//! by the types that are serialized.

pub mod shapes;

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::fields::{Field, Rule};

/// Generates schemas; those with names are components.
pub struct Schemas {
    bodies: SchemaGenerator,
    replies: SchemaGenerator,
}

impl Default for Schemas {
    fn default() -> Self {
        Self::new()
    }
}

impl Schemas {
    /// Generators without schemas.
    pub fn new() -> Self {
        let settings = SchemaSettings::draft2020_12().with(|settings| {
            settings.definitions_path = "/components/schemas".into();
            settings.meta_schema = None;
        });
        Self {
            bodies: settings.clone().for_deserialize().into_generator(),
            replies: settings.for_serialize().into_generator(),
        }
    }

    /// The schema of a type that parses a body, or a part of one.
    pub fn of<T: JsonSchema>(&mut self) -> Schema {
        let mut schema = T::json_schema(&mut self.bodies);
        schema.remove("title");
        schema
    }

    /// The schema of a type that is sent.
    pub fn reply<T: JsonSchema>(&mut self) -> Schema {
        self.replies.subschema_for::<T>()
    }

    /// The schemas with names, which the others refer to.
    pub fn take_components(&mut self) -> Map<String, Value> {
        let mut components = self.bodies.take_definitions(true);
        components.append(&mut self.replies.take_definitions(true));
        components
    }

    /// The schema of an object with the fields of `table`, which `parts` parse.
    ///
    /// # Panics
    /// If `parts` lack a field that is read. A test generates all schemas.
    pub fn body(&self, table: &[Field], parts: &[Schema]) -> Value {
        let mut properties = Map::new();
        let mut required: Vec<Value> = Vec::new();
        for (name, rule) in table {
            let part = parts.iter().find_map(|part| {
                let property = part.get("properties")?.get(*name)?;
                Some((property.clone(), part.get("required").and_then(Value::as_array)))
            });
            let property = match rule {
                Rule::Read => {
                    let (property, needed) = part
                        .unwrap_or_else(|| panic!("`{name}` is read, but no type describes it"));
                    let is_required = needed.is_some_and(|needed| needed.contains(&json!(name)));
                    required.extend(is_required.then(|| json!(name)));
                    property
                }
                Rule::Ignored => json!({"description": "Accepted and not used."}),
                Rule::Only(neutral, advice) => {
                    let mut values: Vec<Value> = serde_json::from_str(neutral)
                        .expect("the table contains JSON lists: checked by a test");
                    values.push(Value::Null);
                    json!({"enum": values, "description": format!("Not supported: {advice}.")})
                }
            };
            properties.insert((*name).into(), property);
        }
        json!({
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": false,
        })
    }
}
