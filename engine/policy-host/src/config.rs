//! Configuration of policies: `[policy]`, and the policy part of `[profiles.NAME]`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize};

use crate::error::Error;
use crate::trust::Trust;

/// `[policy]`: limits of every guest, and the paths of policies and traces.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyConfig {
    /// Fuel of one call, about one unit a Wasm instruction. Deterministic.
    pub fuel: u64,
    /// Wall-clock limit of one call, for work that fuel does not count.
    pub deadline_ms: u64,
    /// Linear memory of one instance. Untouched pages take no memory. JavaScript needs 9.5 MB at
    /// least, Python 12.9 MB.
    pub memory_bytes: usize,
    /// Bytes of text in one answer; more is a failure of the policy.
    pub output_bytes: usize,
    /// Bytes that one policy may store with `kv`, in one profile.
    pub kv_bytes: usize,
    /// Folder with `NAME.wasm` for the policy `NAME`; they take precedence over shipped policies.
    /// Empty for none.
    pub folder: PathBuf,
    /// Whether files of policies are reloaded when they change.
    pub watch: bool,
    /// Number of requests whose traces are held in memory.
    pub trace_requests: usize,
    /// File to which traces are appended, one JSON object a line; empty for none.
    pub trace_file: PathBuf,
    /// Bytes of the trace file. One that reaches them is renamed to `NAME.1`, in place of the one before it,
    /// and a new one is begun. 0 for no limit.
    pub trace_file_bytes: u64,
    /// Public keys, as minisign writes them, whose owners may sign policies. With any, a policy that is not
    /// signed by one of them is refused.
    pub trusted_keys: Vec<String>,
    /// Whether unsigned policies are accepted in spite of `trusted_keys`.
    pub allow_unsigned: bool,
    /// Program that compiles components in a process of its own, within limits of time and memory: one
    /// whose `main` begins with [`crate::compile_if_asked`], usually [`crate::this_program`]. No key of the
    /// configuration. `None` compiles in this process, without limits.
    #[serde(skip)]
    pub compiler: Option<PathBuf>,
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self {
            fuel: 10_000_000,
            deadline_ms: 50,
            memory_bytes: 32 << 20,
            output_bytes: 16 << 10,
            kv_bytes: 1 << 20,
            folder: PathBuf::new(),
            watch: true,
            trace_requests: 256,
            trace_file: PathBuf::new(),
            trace_file_bytes: 256 << 20,
            trusted_keys: Vec::new(),
            allow_unsigned: false,
            compiler: None,
        }
    }
}

/// What WebAssembly can address.
const MOST_MEMORY_BYTES: usize = 4 << 30;

impl PolicyConfig {
    /// Whose policies are accepted.
    ///
    /// # Errors
    /// As [`Trust::new`].
    pub fn trust(&self) -> Result<Trust, Error> {
        Trust::new(&self.trusted_keys, self.allow_unsigned)
    }

    /// Checks the bounds of all keys, and [`Self::trust`].
    ///
    /// # Errors
    /// [`Error::Config`] names the first key that is out of range.
    pub fn check(&self) -> Result<(), Error> {
        self.problems().into_iter().next().map_or(Ok(()), Err)
    }

    /// All keys that are out of range, and that of [`Self::trust`].
    pub fn problems(&self) -> Vec<Error> {
        let bounds = [
            ("policy.fuel", self.fuel, 1),
            ("policy.deadline_ms", self.deadline_ms, 1),
            ("policy.memory_bytes", self.memory_bytes as u64, 1 << 16),
            ("policy.output_bytes", self.output_bytes as u64, 1),
            ("policy.trace_requests", self.trace_requests as u64, 1),
        ];
        let mut problems = Vec::new();
        if self.memory_bytes > MOST_MEMORY_BYTES {
            let problem = format!("is {}, must be at most {MOST_MEMORY_BYTES}", self.memory_bytes);
            problems.push(Error::Config { field: "policy.memory_bytes", problem });
        }
        problems.extend(self.trust().err());
        let too_low = bounds.into_iter().filter(|(_, value, least)| value < least);
        problems.extend(too_low.map(|(field, value, least)| {
            let problem = format!("is {value}, must be at least {least}");
            Error::Config { field, problem }
        }));
        problems
    }
}

/// The policies of a profile, and how they run.
#[derive(Debug, Clone, PartialEq)]
pub struct ProfilePolicies {
    /// The chain: names of policies (`default`, `NAME` in `policy.folder`) or paths of components. A
    /// later policy cannot loosen what an earlier one decides.
    pub policies: Vec<String>,
    /// Policies that see the same calls and whose answers are traced but not applied.
    pub shadow: Vec<String>,
    /// What happens when a policy fails.
    pub on_failure: OnFailure,
    /// Interfaces that the policies may import.
    pub grants: Vec<Grant>,
    /// Parameters of the policies. `POLICY.NAME` is the parameter `NAME` of that policy only.
    pub params: BTreeMap<String, Param>,
    /// Whether traces contain texts and tokens. Otherwise they contain lengths, and a replay is not
    /// exact.
    pub trace_text: bool,
}

impl Default for ProfilePolicies {
    fn default() -> Self {
        Self {
            policies: vec!["default".into()],
            shadow: Vec::new(),
            on_failure: OnFailure::Open,
            grants: Vec::new(),
            params: BTreeMap::new(),
            trace_text: false,
        }
    }
}

/// Most policies of one profile, including shadows.
pub const CHAIN_LENGTH: usize = 8;

impl ProfilePolicies {
    /// Checks the name of the profile and the number of its policies.
    ///
    /// # Errors
    /// The problem, to be read after the name of the profile.
    pub fn check(&self, name: &str) -> Result<(), String> {
        if name.is_empty()
            || name.trim() != name
            || name.contains(|c: char| c == '@' || c.is_control())
        {
            return Err(
                "has a name that requests cannot use; it must not be empty, and have no `@`, \
                        no control characters and no white space at its ends"
                    .into(),
            );
        }
        if self.policies.is_empty() {
            return Err("names no policy; `policies = [\"passthrough\"]` decides nothing".into());
        }
        if self.policies.len() + self.shadow.len() > CHAIN_LENGTH {
            return Err(format!("names more than {CHAIN_LENGTH} policies, including shadows"));
        }
        Ok(())
    }
}

/// An interface that a policy may import if its profile grants it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Grant {
    /// Lines in the log.
    Log,
    /// A small map that outlives requests.
    Kv,
    /// The model's tokenizer.
    Tokenizer,
    /// Counters at `GET /metrics`.
    Counters,
}

impl Grant {
    /// All grants.
    pub const ALL: [Self; 4] = [Self::Log, Self::Kv, Self::Tokenizer, Self::Counters];

    /// Name in configurations and of the interface.
    pub fn name(self) -> &'static str {
        match self {
            Self::Log => "log",
            Self::Kv => "kv",
            Self::Tokenizer => "tokenizer",
            Self::Counters => "counters",
        }
    }
}

/// Value of a parameter: a text, or `{ file = "rules.toml" }` for the text of a file. A number and a boolean are read
/// as the text that a policy gets: `100` is `"100"`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Param {
    /// The text.
    #[serde(deserialize_with = "deserialize_text")]
    Text(String),
    /// The text of a file.
    File {
        /// Relative to the working directory.
        file: PathBuf,
    },
}

impl From<&str> for Param {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

/// Reads a text, or a number or a boolean as text.
fn deserialize_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Value {
        Text(String),
        Boolean(bool),
        Integer(i64),
        Number(f64),
    }
    Ok(match Value::deserialize(deserializer)? {
        Value::Text(text) => text,
        Value::Boolean(value) => value.to_string(),
        Value::Integer(value) => value.to_string(),
        Value::Number(value) => value.to_string(),
    })
}

/// Reads `params` of a profile: a table `POLICY` with parameters becomes `POLICY.NAME`.
///
/// # Errors
/// The errors of the deserializer.
pub fn deserialize_params<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, Param>, D::Error> {
    #[derive(Deserialize)]
    #[serde(
        untagged,
        expecting = "must be a text, a number, true, false, { file = \"PATH\" } or a table with the \
                     parameters of one policy"
    )]
    enum Entry {
        Shared(Param),
        Own(BTreeMap<String, Param>),
    }
    let mut params = BTreeMap::new();
    for (name, entry) in BTreeMap::<String, Entry>::deserialize(deserializer)? {
        match entry {
            Entry::Shared(param) => drop(params.insert(name, param)),
            Entry::Own(own) => {
                params.extend(own.into_iter().map(|(own, param)| (format!("{name}.{own}"), param)));
            }
        }
    }
    Ok(params)
}

/// What happens to a request whose policy fails.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnFailure {
    /// The native policy takes over, with a static budget and a loop guard.
    #[default]
    Open,
    /// The request ends with `policy_error`.
    Closed,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_range_are_refused_by_key() {
        for (memory_bytes, is_valid) in
            [(0, false), (1 << 16, true), (4 << 30, true), (usize::MAX, false)]
        {
            let checked = PolicyConfig { memory_bytes, ..PolicyConfig::default() }.check();
            assert_eq!(checked.is_ok(), is_valid, "{memory_bytes}");
        }
        let error = PolicyConfig { fuel: 0, ..PolicyConfig::default() }.check().unwrap_err();
        assert_eq!(error.to_string(), "policy.fuel: is 0, must be at least 1");
    }

    #[test]
    fn a_profile_has_a_name_that_clients_can_choose() {
        let check = |name: &str| ProfilePolicies::default().check(name);
        for name in ["default", "a b", "größer", "a.b", "-"] {
            assert_eq!(check(name), Ok(()), "{name}");
        }
        for name in ["", " ", "a@b", "@", "a\nb", "a\n", " a", "a\0"] {
            assert!(check(name).is_err(), "{name:?}");
        }
    }
}
