//! Schemas of the kinds that JSONSchemaBench collects: function calls, configuration files, Kubernetes
//! resources, event formats. Made from parameters, not copied.

use serde_json::{Value, json};
use steersman_test_support::Random;

/// A schema, and the paths of the keywords of which one is named when it is refused; none if it is
/// supported.
pub struct Case {
    pub schema: Value,
    pub refused: Vec<String>,
}

const NAMES: [&str; 12] = [
    "id",
    "name",
    "kind",
    "spec",
    "tags",
    "count",
    "enabled",
    "url",
    "createdAt",
    "größe",
    "a b",
    "$ref-like",
];

/// What llguidance does not enforce, with a type that gives the keyword a meaning.
fn unsupported(random: &mut Random) -> (Value, &'static str) {
    let cases = [
        (
            json!({"type": "array", "items": {"type": "integer"}, "uniqueItems": true}),
            "uniqueItems",
        ),
        (json!({"type": "string", "not": {"const": "no"}}), "not"),
        (json!({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}), "if"),
        (json!({"type": "array", "contains": {"type": "integer"}}), "contains"),
        (json!({"type": "object", "dependentRequired": {"a": ["b"]}}), "dependentRequired"),
        (json!({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}), "propertyNames"),
        (json!({"type": "object", "unevaluatedProperties": false}), "unevaluatedProperties"),
        (json!({"type": "string", "format": "no-such-format"}), "format"),
        (
            json!({"oneOf": [{"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 5}]}),
            "oneOf",
        ),
    ];
    cases[random.below(cases.len())].clone()
}

fn scalar(random: &mut Random) -> Value {
    let low = random.below(50) as i64 - 20;
    let high = low + random.below(500) as i64;
    match random.below(22) {
        0 => json!({"type": "string"}),
        1 => {
            json!({"type": "string", "minLength": low.unsigned_abs() % 5, "maxLength": 5 + low.unsigned_abs()})
        }
        2 => json!({"type": "string", "pattern": "^[a-z][a-z0-9-]{0,12}$"}),
        3 => json!({"type": "string", "pattern": "[0-9]{3}"}),
        4 => json!({"type": "string", "format": "date-time"}),
        5 => {
            json!({"type": "string", "format": random.of(&["date", "time", "uuid", "ipv4", "email"])})
        }
        6 => json!({"type": "integer"}),
        7 => json!({"type": "integer", "minimum": low, "maximum": high}),
        8 => json!({"type": "integer", "exclusiveMinimum": low, "multipleOf": 5}),
        9 => json!({"type": "number"}),
        10 => json!({"type": "number", "minimum": low as f64 + 0.25, "maximum": high as f64 + 0.5}),
        11 => json!({"type": "boolean"}),
        12 => json!({"type": "null"}),
        13 => json!({"enum": ["red", "green", 3, null, true, {"a": [1]}]}),
        14 => json!({"type": "string", "enum": ["on", "off", "on\"quoted\"", "größer"]}),
        15 => json!({"const": random.of(&["fixed", "v1", "ünïcode \\ text"])}),
        16 => json!({"type": ["string", "null"], "description": "Optional text."}),
        17 => json!({"type": ["integer", "string"], "title": "IntOrString", "default": 1}),
        18 => {
            json!({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "maxLength": 3}]})
        }
        19 => json!({"type": "number", "multipleOf": 0.5, "minimum": 0}),
        20 => json!({"allOf": [{"type": "integer", "minimum": low}, {"maximum": high}]}),
        _ => json!({"type": "integer", "enum": [1, 2, 4, 8], "examples": [1], "deprecated": true}),
    }
}

/// A schema of parts within parts.
fn nested(random: &mut Random, depth: usize) -> Value {
    if depth == 0 {
        return scalar(random);
    }
    match random.below(9) {
        0 => {
            json!({"type": "array", "items": nested(random, depth - 1), "minItems": random.below(2), "maxItems": 1 + random.below(3)})
        }
        1 => {
            json!({"type": "array", "prefixItems": [nested(random, depth - 1), scalar(random)], "items": false, "minItems": 2})
        }
        2 => json!({"anyOf": [nested(random, depth - 1), {"type": "null"}]}),
        3 => {
            json!({"type": "object", "additionalProperties": nested(random, depth - 1), "maxProperties": 3})
        }
        4 => {
            json!({"type": "object", "patternProperties": {"^x_[a-z]{1,4}$": nested(random, depth - 1)}, "additionalProperties": false})
        }
        5 => json!({"oneOf": [
            {"type": "object", "properties": {"type": {"const": "a"}, "value": nested(random, depth - 1)}, "required": ["type", "value"], "additionalProperties": false},
            {"type": "object", "properties": {"type": {"const": "b"}}, "required": ["type"], "additionalProperties": false},
        ]}),
        _ => object(random, depth),
    }
}

fn object(random: &mut Random, depth: usize) -> Value {
    let mut properties = serde_json::Map::new();
    let mut required = Vec::new();
    for _ in 0..1 + random.below(5) {
        let name = NAMES[random.below(NAMES.len())];
        if random.below(2) == 0 && !required.contains(&name) {
            required.push(name);
        }
        properties.insert(name.into(), nested(random, depth - 1));
    }
    json!({
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": random.below(3) == 0,
    })
}

/// The case of this number. Every eighth has a keyword that is not supported.
pub fn case(number: usize) -> Case {
    let random = &mut Random(number as u64 + 1);
    let depth = random.below(4);
    let mut schema = match number % 4 {
        0 => object(random, 1 + depth.min(1)),
        _ => nested(random, depth),
    };
    if number % 8 != 7 {
        match random.below(6) {
            // A definition, and one that refers to itself.
            0 => {
                schema = json!({
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    "type": "object",
                    "properties": {"first": {"$ref": "#/$defs/part"}, "rest": {"$ref": "#/$defs/list"}},
                    "required": ["first", "rest"],
                    "additionalProperties": false,
                    "$defs": {
                        "part": schema,
                        "list": {"anyOf": [{"type": "null"}, {
                            "type": "object",
                            "properties": {"next": {"$ref": "#/$defs/list"}},
                            "required": ["next"],
                            "additionalProperties": false,
                        }]},
                    },
                });
            }
            1 => {
                schema = json!({
                    "$schema": "http://json-schema.org/draft-07/schema#",
                    "definitions": {"part": schema},
                    "type": "array",
                    "items": {"$ref": "#/definitions/part"},
                    "minItems": 1,
                    "maxItems": 2,
                });
                // A tuple of draft 2020-12 means nothing in draft 7.
                if schema.to_string().contains("prefixItems") {
                    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema".into();
                }
            }
            _ => {}
        }
        return Case { schema, refused: Vec::new() };
    }
    let (part, keyword) = unsupported(random);
    let mut paths = vec![format!(".{keyword}")];
    if keyword == "if" {
        paths.push(".then".into());
    }
    let (schema, step) = match random.below(5) {
        0 => (part, String::new()),
        1 => (
            json!({"type": "object", "properties": {"ok": schema, "bad": part}}),
            ".properties.bad".into(),
        ),
        2 => (json!({"type": "array", "items": part}), ".items".into()),
        3 => {
            (json!({"anyOf": [schema, {"type": "array", "items": part}]}), ".anyOf[1].items".into())
        }
        _ => (
            json!({"$defs": {"x": part}, "type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]}),
            ".$defs.x".into(),
        ),
    };
    Case { schema, refused: paths.iter().map(|path| format!("{step}{path}")).collect() }
}
