//! Spans of a request, for log lines and traces: its own, which the server makes, and below it `prefill` and `decode`,
//! one after the other, and a `hook` for each call of its policies.
//!
//! Spans below the request's have the level debug: without traces they cost nothing. They never have text of a prompt
//! or a reply.

use tracing::Span;

use crate::policy::{Failure, HookInput, Session};

/// The span of one request; none unless the server has made one.
#[derive(Debug, Clone)]
pub struct RequestSpan(pub Span);

impl Default for RequestSpan {
    fn default() -> Self {
        Self(Span::none())
    }
}

impl RequestSpan {
    /// Does `work` within the span, so that log lines have its fields.
    pub fn log<T>(&self, work: impl FnOnce() -> T) -> T {
        self.0.in_scope(work)
    }

    /// The span of a prompt that runs.
    pub(crate) fn prefill(&self, prompt_tokens: usize, cached_tokens: usize) -> Span {
        tracing::debug_span!(parent: &self.0, "prefill", prompt_tokens, cached_tokens)
    }

    /// The span of a reply.
    pub(crate) fn decode(&self) -> Span {
        tracing::debug_span!(parent: &self.0, "decode")
    }

    /// Calls the policies within a span of the call.
    pub(crate) fn ask<T: HookInput>(
        &self,
        policies: &mut Session,
        input: &T,
    ) -> Result<T::Answer, Failure> {
        self.hook(input.call().hook().name()).in_scope(|| policies.ask(input))
    }

    /// The span of a call of the policies.
    pub(crate) fn hook(&self, hook: &'static str) -> Span {
        tracing::debug_span!(parent: &self.0, "hook", hook)
    }
}
