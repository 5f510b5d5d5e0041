//! Prefix prefetch: computes, while the engine is idle, prefixes that requests will begin with.
//!
//! These are a profile's system text and tools (`profiles.NAME.warm`) and, after a turn, the
//! conversation as the template will render it when the client sends the reply back, without its
//! reasoning. An arriving request takes precedence and waits for at most one chunk.

use std::collections::VecDeque;
use std::path::Path;

use mlx_rs::transforms::eval;
use serde::Deserialize;
use serde_json::Value;

use super::sequence::Sequence;
use super::{Decoder, token_ids};
use crate::cache::{Cache, Span};
use crate::error::{ConfigError, Error, Result};
use crate::prefix::Retention;
use crate::request::{Message, Request};

/// Tokens of a chunk, for which a request waits at most.
const CHUNK: usize = 64;

/// Most waiting conversations; the oldest are dropped.
const WAITING: usize = 64;

/// The prefixes to compute.
#[derive(Default)]
pub struct Prefetch {
    waiting: VecDeque<Expected>,
    running: Option<Running>,
}

/// A conversation whose next message will have the role `role`.
struct Expected {
    request: Request,
    reasoning: Option<bool>,
    role: &'static str,
    retention: Retention,
}

struct Running {
    expected: Expected,
    tokens: Vec<u32>,
    cache: Cache,
}

/// A file named by `warm`: the beginning of a chat request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Beginning {
    messages: Vec<Message>,
    #[serde(default)]
    tools: Vec<Value>,
}

impl Prefetch {
    /// Frees the cache of the running prefetch so that a request can run; it starts again later, from
    /// the state saved last.
    pub fn interrupt(&mut self) {
        if let Some(running) = self.running.take() {
            self.add(running.expected);
        }
    }

    /// Adds the prefix in a file of `profile`.
    ///
    /// # Errors
    /// [`Error::Warm`] when the file cannot be read or parsed.
    pub fn add_file(&mut self, profile: &str, path: &Path) -> Result<()> {
        let failed = |problem: String| {
            Error::Config(ConfigError::Warm { profile: profile.into(), path: path.into(), problem })
        };
        let text = std::fs::read(path).map_err(|e| failed(e.to_string()))?;
        let Beginning { messages, tools } =
            serde_json::from_slice(&text).map_err(|e| failed(e.to_string()))?;
        let request = Request { profile: profile.into(), messages, tools, ..Request::default() };
        self.add(Expected {
            request,
            reasoning: None,
            role: "user",
            retention: Retention::default(),
        });
        Ok(())
    }

    /// Adds the conversation of a finished turn.
    pub fn add_turn(&mut self, sequence: &Sequence, retention: Retention) {
        let mut request = sequence.request.clone();
        let reply = sequence.reply_message();
        let role = if reply.tool_calls.is_empty() { "user" } else { "tool" };
        request.messages.push(reply);
        self.add(Expected { request, reasoning: sequence.reasoning, role, retention });
    }

    fn add(&mut self, expected: Expected) {
        if self.waiting.len() == WAITING {
            self.waiting.pop_front();
        }
        self.waiting.push_back(expected);
    }
}

impl Decoder {
    /// Computes one chunk; false if there is nothing to prefetch.
    pub(super) fn prefetch_chunk(&mut self) -> bool {
        let running = match self.prefetch.running.take() {
            Some(running) => Ok(running),
            // The newest conversation is the most likely to continue.
            None => match self.prefetch.waiting.pop_back() {
                Some(expected) => self.begin(expected),
                None => return false,
            },
        };
        let result = running.and_then(|mut running| {
            self.run_prefetch(&mut running)?;
            Ok(running)
        });
        match result {
            Ok(running) if running.cache.position < running.tokens.len() => {
                self.prefetch.running = Some(running);
            }
            Ok(_) => {}
            // Most likely the template refuses such a conversation.
            Err(error) => tracing::debug!(%error, "prefix prefetch failed"),
        }
        true
    }

    fn begin(&mut self, expected: Expected) -> Result<Running> {
        let Expected { request, reasoning, role, .. } = &expected;
        let reasoning = reasoning.or(self.text.supports_reasoning().then_some(true));
        let mut tokens = self.shared_prefix(request, request.messages.len(), reasoning, role)?;
        if tokens.len() < self.store_min_tokens || tokens.len() >= self.context {
            tokens.clear();
        }
        // Resuming leaves the last token to run; a request will have at least one more than the prefix.
        let (cache, _) = self.prefixes.resume(&[&tokens[..], &[0]].concat())?;
        Ok(Running { expected, tokens, cache })
    }

    /// Runs one chunk, and saves the state at the end of the prefix and at regular positions before.
    fn run_prefetch(&mut self, running: &mut Running) -> Result<()> {
        let Running { expected, tokens, cache } = running;
        let start = cache.position;
        if start >= tokens.len() {
            return self.prefixes.retain(tokens, expected.retention);
        }
        let every = self.prefixes.save_interval().unwrap_or(usize::MAX);
        let stop = (start / every + 1).saturating_mul(every);
        let end = tokens.len().min(start + CHUNK).min(stop);
        let ids = token_ids(&tokens[start..end]);
        self.model.forward(&ids, &mut [Span { rows: ids.dim(0), cache }], self.pass())?;
        eval(&cache.arrays()?)?;
        self.prefixes.reporter().count(|counts| counts.ahead_tokens += (end - start) as u64);
        if end == tokens.len() {
            self.prefixes.save(cache, tokens, expected.retention)?;
        } else if end == stop {
            // Limits the work lost when a request interrupts.
            self.prefixes.save(cache, &tokens[..end], Retention::default())?;
        }
        Ok(())
    }
}
