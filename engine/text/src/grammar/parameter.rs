//! What a strict tool allows as a parameter that stands bare or in quotes of its own, apart: the strings,
//! which a grammar writes as the format does, and all other values, which are JSON.
//!
//! A schema is followed through references and combinations. What it demands of strings is enforced as a whole,
//! or refused with its path: strings are free, or some of a list.

use serde_json::{Map, Value, json};

use super::refused;
use steersman_request::error::RequestError;

/// Schemas that one parameter may consist of.
const PARTS: usize = 1000;

/// Keywords that hold for strings.
const OF_STRINGS: [&str; 4] = ["pattern", "format", "minLength", "maxLength"];

/// Keywords that hold for other values, by their type.
const OF_OTHERS: [(&str, &[&str]); 3] = [
    ("number", &["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]),
    ("array", &["items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"]),
    (
        "object",
        &[
            "properties",
            "patternProperties",
            "additionalProperties",
            "required",
            "minProperties",
            "maxProperties",
        ],
    ),
];

/// The types of JSON other than strings.
const OTHERS: [&str; 5] = ["number", "boolean", "null", "array", "object"];

/// What is allowed as a parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    pub strings: Strings,
    /// A schema of the other values; `None` if there are none.
    pub others: Option<Value>,
}

/// The strings that are allowed.
#[derive(Debug, Clone, PartialEq)]
pub enum Strings {
    /// All of them.
    Free,
    /// These; there may be none.
    Listed(Vec<String>),
}

impl Strings {
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Free, other) | (other, Self::Free) => other,
            (Self::Listed(mut all), Self::Listed(other)) => {
                all.retain(|text| other.contains(text));
                Self::Listed(all)
            }
        }
    }

    fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Listed(mut all), Self::Listed(other)) => {
                let new: Vec<_> = other.into_iter().filter(|text| !all.contains(text)).collect();
                all.extend(new);
                Self::Listed(all)
            }
            _ => Self::Free,
        }
    }

    fn overlaps(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Listed(all), Self::Listed(other)) => all.iter().any(|text| other.contains(text)),
            (Self::Listed(all), Self::Free) | (Self::Free, Self::Listed(all)) => !all.is_empty(),
            (Self::Free, Self::Free) => true,
        }
    }
}

impl Parameter {
    /// What `schema` allows, which stands at `path`; `root` at `root_path` has the definitions.
    ///
    /// # Errors
    /// [`RequestError::Structure`] with the path of a keyword that is not enforced for strings in these formats.
    pub fn of(
        path: &str,
        schema: &Value,
        root_path: &str,
        root: &Value,
    ) -> Result<Self, RequestError> {
        Splitter { root, root_path, left: PARTS, following: Vec::new() }.split(path, schema)
    }

    /// Whether nothing is allowed.
    pub fn is_empty(&self) -> bool {
        self.others.is_none() && self.strings == Strings::Listed(Vec::new())
    }

    /// Whether a bare text that is read by its type may be another value than the grammar allows: a string that
    /// looks like a number is the number.
    pub fn is_ambiguous(&self) -> bool {
        self.strings == Strings::Free
            && self.others.as_ref().is_some_and(|others| !is_plain(others))
    }
}

struct Splitter<'a> {
    root: &'a Value,
    root_path: &'a str,
    /// Parts that may still be looked at.
    left: usize,
    /// References on the way to the part.
    following: Vec<&'a str>,
}

impl<'a> Splitter<'a> {
    fn split(&mut self, path: &str, schema: &'a Value) -> Result<Parameter, RequestError> {
        let Some(left) = self.left.checked_sub(1) else {
            let problem = format!("consists of more than {PARTS} schemas; simplify it");
            return Err(refused(path, problem));
        };
        self.left = left;
        let keywords = match schema {
            Value::Bool(false) => {
                return Ok(Parameter { strings: Strings::Listed(Vec::new()), others: None });
            }
            Value::Object(keywords) => keywords,
            _ => return Ok(own(&Map::new())),
        };
        let mut whole = own(keywords);
        if let Some(target) = keywords.get("$ref").and_then(Value::as_str) {
            let step = format!("{path}.$ref");
            let pointer = target.strip_prefix('#');
            let Some(found) = pointer.and_then(|pointer| self.root.pointer(pointer)) else {
                return Err(refused(&step, format!("refers to `{target}`, which is not there")));
            };
            if self.following.contains(&target) {
                return Err(refused(&step, "refers to itself"));
            }
            self.following.push(target);
            let at = format!("{}{}", self.root_path, pointer.unwrap_or_default().replace('/', "."));
            let part = self.split(&at, found);
            self.following.pop();
            whole = whole.and(part?);
        }
        for key in ["anyOf", "oneOf"] {
            let Some(parts) = keywords.get(key).and_then(Value::as_array) else { continue };
            let mut any = Parameter { strings: Strings::Listed(Vec::new()), others: None };
            let mut others = Vec::new();
            for (i, part) in parts.iter().enumerate() {
                let step = format!("{path}.{key}[{i}]");
                let part = self.split(&step, part)?;
                if key == "oneOf" && any.strings.overlaps(&part.strings) {
                    return Err(refused(&step, "a string may be of several of these; use anyOf"));
                }
                any.strings = any.strings.or(part.strings);
                others.extend(part.others);
            }
            any.others = match others.len() {
                0 | 1 => others.pop(),
                _ => Some(json!({key: others})),
            };
            whole = whole.and(any);
        }
        for (i, part) in
            keywords.get("allOf").and_then(Value::as_array).into_iter().flatten().enumerate()
        {
            whole = whole.and(self.split(&format!("{path}.allOf[{i}]"), part)?);
        }
        self.check_strings(path, keywords, &mut whole)?;
        Ok(whole)
    }

    /// Applies the keywords of strings to those that are left.
    fn check_strings(
        &self,
        path: &str,
        keywords: &Map<String, Value>,
        whole: &mut Parameter,
    ) -> Result<(), RequestError> {
        let length = |key: &str| keywords.get(key).and_then(Value::as_u64);
        let (least, most) = (length("minLength"), length("maxLength"));
        match &mut whole.strings {
            Strings::Listed(all) if all.is_empty() => return Ok(()),
            Strings::Listed(all) => all.retain(|text| {
                let count = text.chars().count() as u64;
                least.is_none_or(|least| count >= least) && most.is_none_or(|most| count <= most)
            }),
            Strings::Free => {}
        }
        let enforced = |key: &&str| match whole.strings {
            Strings::Free => false,
            Strings::Listed(_) => key.ends_with("Length"),
        };
        let found = OF_STRINGS.iter().find(|key| keywords.contains_key(**key) && !enforced(key));
        let Some(keyword) = found else { return Ok(()) };
        let problem = "this keyword of a string is not enforced in the format in which this model writes \
                       calls; remove it, or `strict`";
        Err(refused(&format!("{path}.{keyword}"), problem))
    }
}

impl Parameter {
    /// Both.
    fn and(self, other: Self) -> Self {
        let others = match (self.others, other.others) {
            (Some(one), Some(other)) if one == other || is_any(&other) => Some(one),
            (Some(one), Some(other)) if is_any(&one) => Some(other),
            (Some(one), Some(other)) => Some(json!({"allOf": [one, other]})),
            _ => None,
        };
        Self { strings: self.strings.and(other.strings), others }
    }
}

/// What the keywords allow that neither refer nor combine.
fn own(keywords: &Map<String, Value>) -> Parameter {
    let kinds: Vec<&str> = match keywords.get("type") {
        Some(Value::String(kind)) => vec![kind],
        Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => ["string"].into_iter().chain(OTHERS).collect(),
    };
    let may_be_text = kinds.contains(&"string");
    let kinds: Vec<&str> = kinds.into_iter().filter(|kind| *kind != "string").collect();
    let listed = match (keywords.get("const"), keywords.get("enum").and_then(Value::as_array)) {
        (Some(one), Some(all)) => Some(all.iter().filter(|other| *other == one).collect()),
        (Some(one), None) => Some(vec![one]),
        (None, all) => all.map(|all| all.iter().collect::<Vec<_>>()),
    };
    let (texts, values): (Vec<&Value>, Vec<&Value>) =
        listed.iter().flatten().partition(|value| value.is_string());
    let texts: Vec<String> =
        texts.iter().filter_map(|text| text.as_str().map(str::to_string)).collect();
    let strings = match listed {
        _ if !may_be_text => Strings::Listed(Vec::new()),
        Some(_) => Strings::Listed(texts),
        None => Strings::Free,
    };
    let has_others = !kinds.is_empty() && (listed.is_none() || !values.is_empty());
    let others = has_others.then(|| {
        let mut others = Map::from_iter([("type".to_string(), json!(kinds))]);
        if listed.is_some() {
            others.insert("enum".into(), json!(values));
        }
        for (_, keys) in OF_OTHERS {
            let here =
                keys.iter().filter_map(|key| Some((key.to_string(), keywords.get(*key)?.clone())));
            others.extend(here);
        }
        others.into()
    });
    Parameter { strings, others }
}

/// Whether `schema` allows all values that are no strings.
fn is_any(schema: &Value) -> bool {
    *schema == json!({"type": OTHERS})
}

/// Whether `schema` names types only.
fn is_plain(schema: &Value) -> bool {
    let Value::Object(keywords) = schema else { return false };
    keywords.iter().all(|(key, value)| match key.as_str() {
        "type" => true,
        "anyOf" => value.as_array().is_some_and(|all| all.iter().all(is_plain)),
        _ => false,
    })
}
