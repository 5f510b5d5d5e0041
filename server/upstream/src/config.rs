//! `[upstreams.NAME]`: a server that computes models.

use std::path::PathBuf;
use std::time::Duration;

use http::Uri;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use crate::capability::{CapabilityConfig, Kind};

/// Longest name of an upstream.
const NAME_BYTES: usize = 32;

/// Most bytes of a key.
const KEY_BYTES: u64 = 4096;

/// Most requests that run or wait.
const REQUESTS: u64 = 4096;

/// Longest time limit, in seconds.
const TIME_S: u64 = 24 * 3600;

/// Most repetitions of a request.
const RETRIES: u64 = 10;

/// What an upstream speaks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// OpenAI's chat completions.
    #[default]
    OpenAi,
    /// Anthropic's messages.
    Anthropic,
}

impl Protocol {
    /// Its name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::OpenAi => "openai",
            Self::Anthropic => "anthropic",
        }
    }
}

/// What becomes of an action that changes what was written, of an upstream that cannot continue a message.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WithoutContinuation {
    /// A profile whose policies may ask for one cannot use the upstream: the server does not start.
    #[default]
    Refuse,
    /// The reply ends there.
    End,
    /// It has no effect but a note.
    Ignore,
}

/// `[upstreams.NAME]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct UpstreamConfig {
    /// Its address: `https://HOST/v1`.
    pub url: String,
    /// What it speaks.
    pub protocol: Protocol,
    /// The variable of the environment that has its key; empty for none.
    pub key_env: String,
    /// The file that has its key; empty for none.
    pub key_file: PathBuf,
    /// Its models; empty asks it at the start.
    pub models: Vec<String>,
    /// Models that answer a request which it cannot: `NAME/MODEL`, or a local one.
    pub fallback: Vec<String>,
    /// Most requests that run at a time.
    pub concurrency: usize,
    /// Most requests that wait until others have ended.
    pub queue: usize,
    /// Seconds in which a connection must be opened.
    pub connect_timeout_s: u64,
    /// Seconds in which a reply must begin.
    pub first_piece_timeout_s: u64,
    /// Seconds between two pieces of a reply; `first_piece_timeout_s`, if that is longer, while pings or counts come.
    pub piece_timeout_s: u64,
    /// How often a request is repeated of whose reply nothing has come.
    pub retries: u32,
    /// Most tokens of prompts and replies in one day (UTC); 0 for no limit. A restart counts anew.
    pub tokens_per_day: u64,
    /// Tokens of prompt and reply together; 0 asks it.
    pub context: u32,
    /// Most tokens of a reply whose request sets no limit.
    pub max_tokens: u32,
    /// What becomes of an action that changes what was written, if it cannot continue a message.
    pub without_continuation: WithoutContinuation,
    /// What it can, where that is not what was found.
    pub capabilities: CapabilityConfig,
}

impl Default for UpstreamConfig {
    fn default() -> Self {
        Self {
            url: String::new(),
            protocol: Protocol::OpenAi,
            key_env: String::new(),
            key_file: PathBuf::new(),
            models: Vec::new(),
            fallback: Vec::new(),
            concurrency: 64,
            queue: 256,
            connect_timeout_s: 10,
            first_piece_timeout_s: 300,
            piece_timeout_s: 120,
            retries: 2,
            tokens_per_day: 0,
            context: 0,
            max_tokens: 8192,
            without_continuation: WithoutContinuation::Refuse,
            capabilities: CapabilityConfig::default(),
        }
    }
}

impl UpstreamConfig {
    /// Values of the upstream `name` that cannot be used, by key. Reads no key.
    pub fn problems(&self, name: &str) -> Vec<String> {
        let key = format!("upstreams.{}", name.escape_debug());
        let mut problems = Vec::new();
        if !is_name(name) {
            problems.push(format!(
                "{key}: the name of an upstream has 1 to {NAME_BYTES} letters, digits, `-` or `_`, because its \
                 models are named NAME/MODEL"
            ));
        }
        if self.url.is_empty() {
            problems.push(format!("{key}.url: is missing; write it as https://HOST/v1"));
        } else if self.uri().is_none() {
            problems.push(format!(
                "{key}.url: must begin with http:// or https://, name a host, and have neither a password nor a query"
            ));
        }
        if !self.key_env.is_empty() && !self.key_file.as_os_str().is_empty() {
            problems.push(format!("{key}: has both `key_env` and `key_file`; drop one"));
        }
        if self.key_env.contains(['=', '\0']) || self.key_env.trim() != self.key_env {
            problems.push(format!("{key}.key_env: must be the name of a variable"));
        }
        let is_model = |model: &&String| {
            !model.is_empty() && !model.contains(char::is_whitespace) && !model.contains('@')
        };
        if let Some(model) = self.models.iter().find(|model| !is_model(model)) {
            problems.push(format!(
                "{key}.models: `{}` cannot be the name of a model here: it must have no space and no `@`, which \
                 begins a profile",
                model.escape_debug()
            ));
        }
        let ranges = [
            ("concurrency", self.concurrency as u64, 1, REQUESTS),
            ("queue", self.queue as u64, 0, REQUESTS),
            ("connect_timeout_s", self.connect_timeout_s, 1, TIME_S),
            ("first_piece_timeout_s", self.first_piece_timeout_s, 1, TIME_S),
            ("piece_timeout_s", self.piece_timeout_s, 1, TIME_S),
            ("retries", self.retries.into(), 0, RETRIES),
            ("max_tokens", self.max_tokens.into(), 1, u64::from(u32::MAX / 4)),
            ("context", self.context.into(), 0, u64::from(u32::MAX / 4)),
        ];
        for (field, value, least, most) in ranges {
            if !(least..=most).contains(&value) {
                problems.push(format!("{key}.{field}: is {value}, must be from {least} to {most}"));
            }
        }
        let kind = self.capabilities.kind.unwrap_or_default();
        let is_anthropic = self.protocol == Protocol::Anthropic;
        if self.capabilities.kind.is_some() && is_anthropic != (kind == Kind::Anthropic) {
            problems.push(format!(
                "{key}.capabilities.kind: a server of this kind does not speak `{}`",
                self.protocol.name()
            ));
        }
        problems
    }

    /// The address, if it is one.
    pub(crate) fn uri(&self) -> Option<Uri> {
        let uri: Uri = self.url.parse().ok()?;
        let is_http = matches!(uri.scheme_str(), Some("http" | "https"));
        let authority = uri.authority()?.as_str();
        let is_plain = !authority.contains('@') && uri.query().is_none();
        (is_http && is_plain && uri.host().is_some_and(|host| !host.is_empty())).then_some(uri)
    }

    /// The key of the upstream `name`; `None` if it has none.
    ///
    /// # Errors
    /// Names the key of the configuration. Quotes nothing of the key.
    pub fn key(&self, name: &str) -> Result<Option<SecretString>, String> {
        let at = format!("upstreams.{name}");
        let (field, text) = if !self.key_env.is_empty() {
            let text = std::env::var(&self.key_env).map_err(|_| {
                format!("{at}.key_env: the variable `{}` is not set, or no text", self.key_env)
            })?;
            ("key_env", text)
        } else if !self.key_file.as_os_str().is_empty() {
            let text = steersman_files::read_text(&self.key_file, KEY_BYTES)
                .map_err(|error| format!("{at}.key_file: {}: {error}", self.key_file.display()))?;
            ("key_file", text)
        } else {
            return Ok(None);
        };
        let key = SecretString::from(text.trim().to_string());
        let is_header = |key: &str| !key.is_empty() && key.bytes().all(|b| (33..127).contains(&b));
        if !is_header(key.expose_secret()) {
            return Err(format!(
                "{at}.{field}: has no key, or one with other characters than a header may have"
            ));
        }
        Ok(Some(key))
    }

    pub(crate) fn connect_timeout(&self) -> Duration {
        Duration::from_secs(self.connect_timeout_s)
    }

    pub(crate) fn first_piece_timeout(&self) -> Duration {
        Duration::from_secs(self.first_piece_timeout_s)
    }

    pub(crate) fn piece_timeout(&self) -> Duration {
        Duration::from_secs(self.piece_timeout_s)
    }
}

fn is_name(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    (1..=NAME_BYTES).contains(&name.len()) && name.chars().all(is_part)
}

/// The upstream and the model of a name `NAME/MODEL`, if `is_known` knows the upstream.
pub fn is_upstream_of(name: &str, is_known: impl Fn(&str) -> bool) -> Option<(&str, &str)> {
    let (upstream, model) = name.split_once('/')?;
    let is_model = !model.is_empty() && !model.contains('@');
    (is_known(upstream) && is_model).then_some((upstream, model))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> UpstreamConfig {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn unusable_upstreams_are_named_by_key() {
        for (text, words) in [
            ("", "upstreams.a.url: is missing"),
            ("url = 'ftp://h'", "upstreams.a.url: must begin"),
            ("url = 'https://user:secret@h'", "upstreams.a.url: must begin"),
            ("url = 'https://h/?key=secret'", "upstreams.a.url: must begin"),
            ("url = 'http://h'\nkey_env = 'A'\nkey_file = 'b'", "drop one"),
            ("url = 'http://h'\nkey_env = 'A=b'", "upstreams.a.key_env"),
            ("url = 'http://h'\nmodels = ['a b']", "upstreams.a.models"),
            ("url = 'http://h'\nmodels = ['a@b']", "upstreams.a.models"),
            ("url = 'http://h'\nconcurrency = 0", "upstreams.a.concurrency: is 0, must be from 1"),
            ("url = 'http://h'\npiece_timeout_s = 0", "upstreams.a.piece_timeout_s"),
            ("url = 'http://h'\nretries = 99", "upstreams.a.retries"),
            (
                "url = 'http://h'\nprotocol = 'anthropic'\ncapabilities.kind = 'vllm'",
                "kind: a server",
            ),
        ] {
            let problems = parse(text).problems("a");
            assert_eq!(problems.len(), 1, "{text}: {problems:?}");
            assert!(problems[0].contains(words), "{text}: {problems:?}");
            assert!(!problems[0].contains("secret"), "{problems:?}");
        }
        assert_eq!(parse("url = 'http://h'").problems("a/b").len(), 1);
        assert_eq!(parse("url = 'https://h:1/v1'\nmodels = ['o/m:1']").problems("a"), [""; 0]);
    }

    #[test]
    fn a_key_comes_from_a_file_or_a_variable_and_is_never_quoted() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        std::fs::write(&file, "sk-1234\n").unwrap();
        let config = UpstreamConfig { key_file: file.clone(), ..UpstreamConfig::default() };
        assert_eq!(config.key("a").unwrap().unwrap().expose_secret(), "sk-1234");
        std::fs::write(&file, "sk 5678\u{1}").unwrap();
        let error = config.key("a").unwrap_err();
        assert!(error.starts_with("upstreams.a.key_file") && !error.contains("5678"), "{error}");
        let config =
            UpstreamConfig { key_env: "STEERSMAN_NO_SUCH".into(), ..UpstreamConfig::default() };
        assert!(config.key("a").unwrap_err().contains("STEERSMAN_NO_SUCH"));
        assert!(UpstreamConfig::default().key("a").unwrap().is_none());
    }

    #[test]
    fn models_of_upstreams_are_named_after_them() {
        let known = |name: &str| name == "work";
        assert_eq!(is_upstream_of("work/owner/model", known), Some(("work", "owner/model")));
        assert_eq!(is_upstream_of("owner/model", known), None);
        assert_eq!(is_upstream_of("work/", known), None);
        assert_eq!(is_upstream_of("work/model@profile", known), None);
    }
}
