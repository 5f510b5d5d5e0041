//! The parameters that a policy has: names, types, defaults and descriptions, in TOML.
//!
//! ```toml
//! [reasoning_budget]
//! type = "integer"             # text, integer, number or boolean
//! default = "2048"             # what the policy does without it; for people
//! min = 0                      # of an integer or a number
//! description = "reasoning tokens of a request"
//!
//! [mode]
//! type = "text"
//! values = ["strict", "loose"]
//! ```

use std::collections::BTreeMap;

use serde::Deserialize;

/// The parameters of a policy.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Schema {
    /// By name.
    pub params: BTreeMap<String, ParamSchema>,
    /// The file.
    pub text: String,
}

/// A parameter.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParamSchema {
    /// What its text must be.
    #[serde(rename = "type")]
    pub kind: Kind,
    /// What the policy does without it, as text.
    pub default: Option<String>,
    /// Least value of a number.
    pub min: Option<f64>,
    /// Largest value of a number.
    pub max: Option<f64>,
    /// All values of a text; empty for any.
    #[serde(default)]
    pub values: Vec<String>,
    /// What it is for.
    #[serde(default)]
    pub description: String,
}

/// The type of a parameter. Policies receive texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Any text.
    Text,
    /// A whole number.
    Integer,
    /// A number.
    Number,
    /// `true` or `false`.
    Boolean,
}

impl Kind {
    /// Its name in a schema.
    pub fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Integer => "integer",
            Self::Number => "number",
            Self::Boolean => "boolean",
        }
    }
}

impl Schema {
    /// Parses a schema.
    ///
    /// # Errors
    /// The mistake, with its line or its parameter.
    pub fn parse(text: &str) -> Result<Self, String> {
        let params: BTreeMap<String, ParamSchema> =
            toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())?;
        for (name, param) in &params {
            let is_number = matches!(param.kind, Kind::Integer | Kind::Number);
            let problem = match param {
                _ if name.is_empty() || name.contains('.') => {
                    "its name is empty or has a `.`".into()
                }
                _ if !is_number && (param.min.is_some() || param.max.is_some()) => {
                    "only an integer or a number has `min` and `max`".into()
                }
                _ if param.kind != Kind::Text && !param.values.is_empty() => {
                    "only a text has `values`".into()
                }
                ParamSchema { default: Some(default), .. } => match param.check(default) {
                    Ok(()) => continue,
                    Err(problem) => format!("its default {problem}"),
                },
                _ => continue,
            };
            return Err(format!("[{name}]: {problem}"));
        }
        Ok(Self { params, text: text.into() })
    }

    /// Checks the text of a parameter.
    ///
    /// # Errors
    /// The problem, to be read after the name of the parameter.
    pub fn check(&self, name: &str, text: &str) -> Result<(), String> {
        self.params.get(name).map_or(Ok(()), |param| param.check(text))
    }

    /// Names of the parameters.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.params.keys().map(String::as_str)
    }
}

/// The schemas of the policies of a profile, in the order of its chain.
pub type Schemas = Vec<(String, Option<Schema>)>;

/// Checks the parameters of a profile against the schemas of its policies.
///
/// # Errors
/// All parameters with [`problems`].
pub fn conform(schemas: &Schemas, params: &[(String, String)]) -> Result<(), String> {
    let problems = problems(schemas, params);
    let line = |(param, problem): &(String, String)| format!("params `{param}`: {problem}");
    match problems.iter().map(line).collect::<Vec<_>>() {
        lines if lines.is_empty() => Ok(()),
        lines => Err(lines.join("; ")),
    }
}

/// The parameters of a profile that do not fit the schemas of its policies, each with the problem and the nearest name.
///
/// A parameter of one policy, `POLICY.NAME`, must be in its schema. One for all must be in one of
/// them, unless a policy has no schema and may know it.
pub fn problems(schemas: &Schemas, params: &[(String, String)]) -> Vec<(String, String)> {
    let mut problems = Vec::new();
    for (param, text) in params {
        let mut is_known = false;
        let mut names = Vec::new();
        for (policy, schema) in schemas {
            let own = param.strip_prefix(policy).and_then(|own| own.strip_prefix('.'));
            let is_overridden =
                || own.is_none() && params.iter().any(|(p, _)| *p == format!("{policy}.{param}"));
            let name = match own {
                None if param.contains('.') => continue,
                own => own.unwrap_or(param),
            };
            match schema {
                None => is_known = true,
                Some(schema) if schema.params.contains_key(name) => {
                    is_known = true;
                    if !is_overridden()
                        && let Err(problem) = schema.check(name, text)
                    {
                        problems.push((param.clone(), problem));
                    }
                }
                Some(schema) => {
                    let prefix = if own.is_some() { format!("{policy}.") } else { String::new() };
                    names.extend(schema.names().map(|name| format!("{prefix}{name}")));
                }
            }
        }
        if !is_known {
            let policies: Vec<_> = schemas.iter().map(|(policy, _)| policy.as_str()).collect();
            let policies = policies.join(", ");
            let hint = match nearest(param, names.iter().map(String::as_str)) {
                Some(near) => format!("did you mean `{near}`?"),
                None if names.is_empty() => "they have no parameters".into(),
                None => format!("they have {}", names.join(", ")),
            };
            let problem = format!("is in no schema of its policies ({policies}); {hint}");
            problems.push((param.clone(), problem));
        }
    }
    problems
}

impl ParamSchema {
    fn check(&self, text: &str) -> Result<(), String> {
        let trimmed = text.trim();
        let number = match self.kind {
            Kind::Text => None,
            Kind::Boolean if ["true", "false"].contains(&trimmed) => None,
            Kind::Boolean => return Err(format!("is {}, must be true or false", quoted(text))),
            Kind::Integer => match trimmed.parse::<i64>() {
                Ok(number) => Some(number as f64),
                Err(_) => return Err(format!("is {}, must be a whole number", quoted(text))),
            },
            Kind::Number => match trimmed.parse::<f64>() {
                Ok(number) if number.is_finite() => Some(number),
                _ => return Err(format!("is {}, must be a number", quoted(text))),
            },
        };
        if let (Some(number), Some(min)) = (number, self.min)
            && number < min
        {
            return Err(format!("is {trimmed}, must be at least {min}"));
        }
        if let (Some(number), Some(max)) = (number, self.max)
            && number > max
        {
            return Err(format!("is {trimmed}, must be at most {max}"));
        }
        if !self.values.is_empty() && !self.values.iter().any(|value| value == text) {
            return Err(format!("is {}, must be one of {}", quoted(text), self.values.join(", ")));
        }
        Ok(())
    }
}

/// A text for a message: its beginning, if it is long.
fn quoted(text: &str) -> String {
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{:?}..", &text[..end]),
        None => format!("{text:?}"),
    }
}

/// Most bytes of a name that others are compared with: the comparison takes as long as the product of two lengths, and a
/// client may send a name of megabytes.
const LONGEST_NAME: usize = 128;

/// The name that is spelt most like `name`, if one is. A longer one than [`LONGEST_NAME`] is like none.
pub fn nearest<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if name.len() > LONGEST_NAME {
        return None;
    }
    let distance = |other: &&str| strsim::damerau_levenshtein(name, other);
    let is_short = |other: &&str| other.len() <= LONGEST_NAME;
    let found = names.into_iter().filter(is_short).min_by_key(distance)?;
    (distance(&found) <= (name.chars().count() / 3).max(1)).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: &str = r#"
        [budget]
        type = "integer"
        default = "100"
        min = 1
        max = 1000
        description = "tokens"
        [share]
        type = "number"
        [strict]
        type = "boolean"
        [mode]
        type = "text"
        values = ["a", "b"]
        [free]
        type = "text"
    "#;

    #[test]
    fn texts_are_checked_by_type_bounds_and_values() {
        let schema = Schema::parse(BUDGET).unwrap();
        let check = |name: &str, text: &str| schema.check(name, text).err().unwrap_or_default();
        let cases = [
            ("budget", "5", ""),
            ("budget", " 1000 ", ""),
            ("budget", "five", "is \"five\", must be a whole number"),
            ("budget", "1.5", "is \"1.5\", must be a whole number"),
            ("budget", "0", "is 0, must be at least 1"),
            ("budget", "1001", "is 1001, must be at most 1000"),
            ("share", "0.5", ""),
            ("share", "NaN", "is \"NaN\", must be a number"),
            ("strict", "true", ""),
            ("strict", "yes", "is \"yes\", must be true or false"),
            ("mode", "b", ""),
            ("mode", "c", "is \"c\", must be one of a, b"),
            ("free", "any\nthing", ""),
        ];
        for (name, text, problem) in cases {
            assert_eq!(check(name, text), problem, "{name} = {text:?}");
        }
        assert!(check("budget", &"x".repeat(50)).starts_with("is \"xxxxxxxx"));
    }

    #[test]
    fn a_mistake_in_a_schema_is_named() {
        for (text, problem) in [
            ("[a]\ntype = 'int'", "line 2"),
            ("[a]\ntype = 'text'\ndefalt = 'x'", "unknown field `defalt`"),
            ("[a]", "missing field `type`"),
            ("[a]\ntype = 'text'\nmin = 1", "[a]: only an integer or a number has `min` and `max`"),
            ("[a]\ntype = 'integer'\nvalues = ['1']", "[a]: only a text has `values`"),
            ("[a]\ntype = 'integer'\ndefault = 'x'", "[a]: its default is \"x\", must be a whole"),
            ("['a.b']\ntype = 'text'", "[a.b]: its name is empty or has a `.`"),
        ] {
            let found = Schema::parse(text).unwrap_err();
            assert!(found.contains(problem), "{text}: {found}");
        }
        assert_eq!(Schema::parse("").unwrap().params.len(), 0);
    }

    #[test]
    fn the_nearest_name_is_found_unless_all_are_far() {
        let names = ["budget", "mode", "reasoning_budget"];
        assert_eq!(nearest("budgte", names), Some("budget"));
        assert_eq!(nearest("reasonig_budgt", names), Some("reasoning_budget"));
        assert_eq!(nearest("mod", names), Some("mode"));
        assert_eq!(nearest("temperature", names), None);
        assert_eq!(nearest("x", []), None);
        let long = "x".repeat(LONGEST_NAME);
        assert_eq!(nearest(&long, [&*long]), Some(&*long));
        assert_eq!(nearest(&(long.clone() + "x"), [&*long]), None);
    }
}
