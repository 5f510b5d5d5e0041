//! Closes the objects of a schema that list their properties.
//!
//! A schema that says nothing of other properties allows any, and small models invent some. OpenAI's strict mode,
//! Ollama, vLLM and llama.cpp write the listed ones only, and clients expect it. What a closed object allows, the
//! schema allows too; `additionalProperties` with `true` or a schema keeps an object open.
//!
//! # Which objects stay open
//! An object stays open if it may need a property that it does not list: beside `allOf`, `anyOf`, `$ref` and the like,
//! or as a part of one with others that hold for the same object; within a property that another schema describes too;
//! with a `required` property that is not listed; with keywords that are about further properties. Options of `oneOf`
//! are closed if their schemas exclude each other as they were written: a reply that fits the closed one of two options
//! may fit the other, which is open in the client's schema.

use std::collections::HashSet;
use std::ptr;

use serde_json::{Map, Value};

/// Keywords with schemas that hold for the same value as the schema that has the keyword.
const IN_PLACE: [&str; 8] =
    ["allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"];

/// Keywords that refer to such a schema.
const REFERENCES: [&str; 3] = ["$ref", "$dynamicRef", "$recursiveRef"];

/// Keywords with schemas that hold for parts of the value.
const PARTS: [&str; 9] = [
    "properties",
    "patternProperties",
    "additionalProperties",
    "unevaluatedProperties",
    "items",
    "prefixItems",
    "additionalItems",
    "unevaluatedItems",
    "contains",
];

/// Keywords that name or demand properties besides those of `properties`.
const OF_OTHERS: [&str; 9] = [
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "dependentRequired",
    "dependencies",
    "const",
    "enum",
];

/// References that are followed from an option of `oneOf`.
const DEPTH: usize = 8;

/// Properties that may tell the options of `oneOf` apart.
const TELLING: usize = 16;

/// The schema whose objects have the properties only that they list, where nothing may need another.
pub fn closed(schema: &Value) -> Value {
    let alone = alone(schema).unwrap_or_default();
    copied(schema, &alone)
}

/// The addresses of the schemas within `root` that are the only ones for their values, as far as properties are
/// concerned. `None` if a reference leads to where no pointer does.
fn alone(root: &Value) -> Option<HashSet<*const Value>> {
    let (mut alone, mut combined) = (HashSet::new(), HashSet::new());
    let mut todo = vec![(root, true)];
    while let Some((schema, is_alone)) = todo.pop() {
        let seen = if is_alone { &mut alone } else { &mut combined };
        if !seen.insert(ptr::from_ref(schema)) {
            continue;
        }
        let Value::Object(keywords) = schema else { continue };
        // References within it begin there.
        if keywords.contains_key("$id") && !ptr::eq(schema, root) {
            return None;
        }
        // What else holds for this value may hold for the same parts of it.
        let are_alone = is_alone && !has_shared_parts(keywords);
        todo.extend(schemas(keywords, &PARTS).map(|part| (part, are_alone)));
        let is_alone = is_alone && leaves_all_to_one(keywords, root);
        todo.extend(schemas(keywords, &IN_PLACE).map(|part| (part, is_alone)));
        for reference in REFERENCES.iter().filter_map(|key| keywords.get(*key)) {
            todo.push((target(reference, root)?, is_alone));
        }
    }
    // A definition may be referred to from both.
    alone.retain(|schema| !combined.contains(schema));
    Some(alone)
}

/// Whether two schemas may hold for one part of a value: that of a keyword, and one in place or of another keyword.
fn has_shared_parts(keywords: &Map<String, Value>) -> bool {
    let has = |key: &&str| keywords.contains_key(*key);
    let has_in_place = IN_PLACE.iter().chain(&REFERENCES).any(has);
    let patterns = keywords.get("patternProperties").and_then(Value::as_object);
    let has_patterns = patterns.is_some_and(|patterns| {
        patterns.len() > 1 || !patterns.is_empty() && keywords.contains_key("properties")
    });
    has_in_place || has_patterns || keywords.contains_key("contains")
}

/// The schemas of some keywords: one, a list, or one for each name.
fn schemas<'a>(
    keywords: &'a Map<String, Value>,
    of: &'static [&'static str],
) -> impl Iterator<Item = &'a Value> {
    of.iter().filter_map(move |key| Some((*key, keywords.get(*key)?))).flat_map(|(key, value)| {
        let has_names = ["properties", "patternProperties", "dependentSchemas"].contains(&key);
        let all: Vec<&Value> = match value {
            Value::Object(named) if has_names => named.values().collect(),
            Value::Array(list) => list.iter().collect(),
            one => vec![one],
        };
        all
    })
}

/// What a reference leads to.
fn target<'a>(reference: &Value, root: &'a Value) -> Option<&'a Value> {
    root.pointer(reference.as_str()?.strip_prefix('#')?)
}

/// Whether one schema holds for each object: the only one in place, which its parent adds no properties to.
fn leaves_all_to_one(keywords: &Map<String, Value>, root: &Value) -> bool {
    let in_place: Vec<&str> = IN_PLACE
        .iter()
        .chain(&REFERENCES)
        .copied()
        .filter(|key| keywords.contains_key(*key))
        .collect();
    let [key] = in_place[..] else { return false };
    let own = OF_OTHERS.iter().chain(&["properties", "required"]);
    let list = || keywords[key].as_array().map(Vec::as_slice).unwrap_or_default();
    let is_one = match key {
        "$ref" | "anyOf" => true,
        "allOf" => list().len() == 1,
        "oneOf" => exclude_each_other(list(), root),
        _ => false,
    };
    is_one && own.copied().all(|key| !keywords.contains_key(key))
}

/// Whether no object is in two of these schemas, because at most one allows objects, or because each requires a
/// property with values that no other allows.
fn exclude_each_other(options: &[Value], root: &Value) -> bool {
    let options: Option<Vec<_>> = options.iter().map(|option| resolved(option, root)).collect();
    let Some(mut options) = options else { return false };
    options.retain(|keywords| match keywords.get("type") {
        Some(Value::String(kind)) => kind == "object",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "object"),
        _ => true,
    });
    let [first, _, ..] = options[..] else { return true };
    let mut telling = required(first).filter(|name| values(first, name).is_some()).take(TELLING);
    telling.any(|name| {
        let mut seen = HashSet::new();
        options.iter().all(|option| {
            let new = values(option, name);
            new.is_some_and(|new| new.iter().all(|value| seen.insert(*value)))
                && required(option).any(|other| other == name)
        })
    })
}

/// The keywords of a schema, through references without siblings.
fn resolved<'a>(mut schema: &'a Value, root: &'a Value) -> Option<&'a Map<String, Value>> {
    for _ in 0..DEPTH {
        let keywords = schema.as_object()?;
        match keywords.get("$ref") {
            Some(reference) => schema = target(reference, root)?,
            None => return Some(keywords),
        }
    }
    None
}

/// The names of the properties that a schema requires.
fn required(keywords: &Map<String, Value>) -> impl Iterator<Item = &str> {
    let names = keywords.get("required").and_then(Value::as_array).into_iter().flatten();
    names.filter_map(Value::as_str)
}

/// The texts that a property may have if it allows nothing else.
fn values<'a>(keywords: &'a Map<String, Value>, name: &str) -> Option<Vec<&'a str>> {
    let property = keywords.get("properties")?.get(name)?;
    let values = match property.get("const") {
        Some(value) => std::slice::from_ref(value),
        None => property.get("enum")?.as_array()?.as_slice(),
    };
    values.iter().map(Value::as_str).collect()
}

/// A copy of `value` in which schemas are closed that are `alone` and list all their properties.
fn copied(value: &Value, alone: &HashSet<*const Value>) -> Value {
    match value {
        Value::Array(parts) => parts.iter().map(|part| copied(part, alone)).collect(),
        Value::Object(parts) => {
            let copy = parts.iter().map(|(key, part)| (key.clone(), copied(part, alone)));
            let mut copy: Map<String, Value> = copy.collect();
            if alone.contains(&ptr::from_ref(value)) && lists_all(parts) {
                copy.insert("additionalProperties".into(), Value::Bool(false));
            }
            Value::Object(copy)
        }
        other => other.clone(),
    }
}

/// Whether an object has a list of properties and no keyword that may need another.
fn lists_all(keywords: &Map<String, Value>) -> bool {
    let Some(Value::Object(listed)) = keywords.get("properties") else { return false };
    let mut others = IN_PLACE.iter().chain(&REFERENCES).chain(&OF_OTHERS);
    others.all(|key| !keywords.contains_key(*key))
        && required(keywords).all(|name| listed.contains_key(name))
}
