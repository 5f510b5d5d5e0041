//! Computes, while nobody asks for anything, what the next requests will begin with.
//!
//! That is known: a profile's system text and tools (`profiles.NAME.warm`), and after a turn the
//! conversation so far, as the template will render it when the client sends the reply back, without
//! its thought. A request that arrives takes precedence; it waits for one chunk at most.

use std::collections::VecDeque;
use std::path::Path;

use mlx_rs::Array;
use mlx_rs::transforms::eval;
use serde::Deserialize;
use serde_json::Value;

use super::Decoder;
use super::sequence::Sequence;
use crate::cache::{Cache, Span};
use crate::error::{Error, Result};
use crate::prefix::Retention;
use crate::request::{Message, Request};

/// Tokens computed in one go: a request waits for at most so many.
const CHUNK: usize = 64;

/// Conversations that wait, at most: the oldest are given up.
const WAITING: usize = 64;

/// What is still to be computed.
#[derive(Default)]
pub struct Ahead {
    waiting: VecDeque<Expected>,
    running: Option<Running>,
}

/// A conversation that goes on with a message of this role.
struct Expected {
    request: Request,
    thinking: Option<bool>,
    role: &'static str,
    keep: Retention,
}

struct Running {
    expected: Expected,
    tokens: Vec<u32>,
    cache: Cache,
}

/// A file that `warm` names: the beginning of a chat request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Beginning {
    messages: Vec<Message>,
    #[serde(default)]
    tools: Vec<Value>,
}

impl Ahead {
    /// Lets go of what is being computed, so that a request can run; it is begun again later.
    pub fn interrupt(&mut self) {
        if let Some(running) = self.running.take() {
            self.add(running.expected);
        }
    }

    /// Adds what a file says that requests of `profile` begin with.
    ///
    /// # Errors
    /// [`Error::Warm`] when it cannot be read or is something else.
    pub fn add_file(&mut self, profile: &str, path: &Path) -> Result<()> {
        let failed =
            |problem: String| Error::Warm { profile: profile.into(), path: path.into(), problem };
        let text = std::fs::read(path).map_err(|e| failed(e.to_string()))?;
        let Beginning { messages, tools } =
            serde_json::from_slice(&text).map_err(|e| failed(e.to_string()))?;
        let request = Request { profile: profile.into(), messages, tools, ..Request::default() };
        self.add(Expected { request, thinking: None, role: "user", keep: Retention::default() });
        Ok(())
    }

    /// Adds the conversation that a finished turn has come to; its state is kept as `keep` says.
    pub fn add_turn(&mut self, sequence: &Sequence, keep: Retention) {
        let mut request = sequence.request.clone();
        let reply = sequence.reply_message();
        let role = if reply.tool_calls.is_empty() { "user" } else { "tool" };
        request.messages.push(reply);
        self.add(Expected { request, thinking: sequence.thinking, role, keep });
    }

    fn add(&mut self, expected: Expected) {
        if self.waiting.len() == WAITING {
            self.waiting.pop_front();
        }
        self.waiting.push_back(expected);
    }
}

impl Decoder {
    /// Computes a little of what waits; false where nothing does.
    pub(super) fn work_ahead(&mut self) -> bool {
        let begun = match self.ahead.running.take() {
            Some(running) => Ok(running),
            // The newest is the one that is likeliest to be asked for next.
            None => match self.ahead.waiting.pop_back() {
                Some(expected) => self.begin(expected),
                None => return false,
            },
        };
        let went_on = begun.and_then(|mut running| {
            self.run_ahead(&mut running)?;
            Ok(running)
        });
        match went_on {
            Ok(running) if running.cache.position < running.tokens.len() => {
                self.ahead.running = Some(running);
            }
            Ok(_) => {}
            // A template that refuses such a conversation, most likely: then it is not foreseen.
            Err(error) => tracing::debug!(%error, "nothing is computed ahead"),
        }
        true
    }

    fn begin(&mut self, expected: Expected) -> Result<Running> {
        let Expected { request, thinking, role, .. } = &expected;
        let thinking = thinking.or(self.text.thinks().then_some(true));
        let mut tokens = self.beginning(request, request.messages.len(), thinking, role)?;
        if tokens.len() < self.store_min_tokens || tokens.len() >= self.context {
            tokens.clear();
        }
        // As a request would have one token more.
        let (cache, _) = self.prefixes.resume(&[&tokens[..], &[0]].concat())?;
        Ok(Running { expected, tokens, cache })
    }

    /// One chunk, and the state at its end where it is worth saving.
    fn run_ahead(&mut self, running: &mut Running) -> Result<()> {
        let Running { expected, tokens, cache } = running;
        let from = cache.position;
        if from >= tokens.len() {
            return self.prefixes.retain(tokens, expected.keep);
        }
        let every = self.prefixes.every().unwrap_or(usize::MAX);
        let stop = (from / every + 1).saturating_mul(every);
        let end = tokens.len().min(from + CHUNK).min(stop);
        let rows = (end - from) as i32;
        let ids = Array::from_slice(&tokens[from..end], &[rows]);
        self.model.forward(&ids, &mut [Span { rows, cache }], self.pass())?;
        eval(&cache.arrays()?)?;
        self.prefixes.reporter().count(|counts| counts.ahead_tokens += (end - from) as u64);
        if end == tokens.len() {
            self.prefixes.save(cache, tokens, expected.keep)?;
        } else if end == stop {
            // So that little is lost where a request interrupts.
            self.prefixes.save(cache, &tokens[..end], Retention::default())?;
        }
        Ok(())
    }
}
