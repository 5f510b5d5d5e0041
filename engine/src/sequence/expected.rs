//! Prefixes that requests are expected to begin with: those that the configuration names, and conversations after a turn.
//!
//! `decode/prefetch.rs` computes them while the engine is idle.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::Sequence;
use super::prepare::Preparer;
use crate::error::{ConfigError, Error, Result};
use crate::prefix::Retention;
use crate::request::{Message, PrefixName, Request};

/// A conversation whose next message will have the role `role`.
pub struct Expected {
    request: Request,
    reasoning: Option<bool>,
    role: &'static str,
    retention: Retention,
}

/// The tokens that a request will begin with.
pub struct Prefix {
    pub tokens: Vec<u32>,
    pub retention: Retention,
    /// The conversation that it belongs to.
    pub name: Option<PrefixName>,
}

/// A file named by `warm`: the beginning of a chat request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Beginning {
    messages: Vec<Message>,
    #[serde(default)]
    tools: Vec<Value>,
}

impl Expected {
    /// The prefix in a file of `profile`.
    ///
    /// # Errors
    /// [`ConfigError::Warm`] when the file cannot be read or parsed.
    pub fn read(profile: &str, path: &Path) -> Result<Self> {
        let failed = |problem: String| {
            Error::Config(ConfigError::Warm { profile: profile.into(), path: path.into(), problem })
        };
        let text = steersman_gguf::files::read_at(path).map_err(|e| failed(e.to_string()))?;
        let Beginning { messages, tools } =
            serde_json::from_slice(&text).map_err(|e| failed(e.to_string()))?;
        let request = Request { profile: profile.into(), messages, tools, ..Request::default() };
        Ok(Self { request, reasoning: None, role: "user", retention: Retention::default() })
    }

    /// The conversation of a finished turn.
    pub fn after(sequence: &Sequence, retention: Retention) -> Self {
        let mut request = sequence.request().clone();
        let reply = sequence.reply().message();
        let role = if reply.tool_calls.is_empty() { "user" } else { "tool" };
        request.messages.push(reply);
        Self { request, reasoning: sequence.reasoning(), role, retention }
    }
}

impl Preparer {
    /// The prefix of a conversation; an error if the template refuses it.
    pub fn prefix(&self, expected: &Expected) -> Result<Prefix> {
        let Expected { request, reasoning, role, retention } = expected;
        let reasoning = reasoning.or(self.text.supports_reasoning().then_some(true));
        let tokens = self.shared_prefix(request, request.messages.len(), reasoning, role)?;
        Ok(Prefix { tokens, retention: *retention, name: request.prefix_name })
    }
}
