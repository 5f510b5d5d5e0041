//! Spans of a request, for log lines and traces: its own, which the server makes, and below it `prefill` and `decode`,
//! one after the other, and a `hook` for each call of its policies.
//!
//! Spans below the request's have the level debug: without traces there are none, and calls of policies are within the
//! request's. They never have text of a prompt or a reply.

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
    pub fn prefill(&self, prompt_tokens: usize, cached_tokens: usize) -> Span {
        // Traces have whole numbers with a sign; others become texts.
        let number = |tokens| i64::try_from(tokens).unwrap_or(i64::MAX);
        let (prompt_tokens, cached_tokens) = (number(prompt_tokens), number(cached_tokens));
        tracing::debug_span!(parent: &self.0, "prefill", prompt_tokens, cached_tokens)
    }

    /// The span of a reply.
    pub fn decode(&self) -> Span {
        tracing::debug_span!(parent: &self.0, "decode")
    }

    /// Calls the policies within a span of the call.
    pub fn ask<T: HookInput>(
        &self,
        policies: &mut Session,
        input: &T,
    ) -> Result<T::Answer, Failure> {
        self.hook(input.call().hook().name()).in_scope(|| policies.ask(input))
    }

    /// The span of a call of the policies; without traces that of the request, whose fields log lines then have.
    pub fn hook(&self, hook: &'static str) -> Span {
        let span = tracing::debug_span!(parent: &self.0, "hook", hook);
        if span.is_disabled() { self.0.clone() } else { span }
    }
}

#[cfg(test)]
mod tests {
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Level, Metadata, Subscriber};

    use super::*;

    /// Enables what the log does without traces.
    struct OnlyInfo;

    impl Subscriber for OnlyInfo {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            *metadata.level() <= Level::INFO
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(7)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, _: &Event<'_>) {}

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    /// The log line of a failure in `on-step` named no request: the span of the hook is disabled without traces, and
    /// that of the request was not entered.
    #[test]
    fn a_call_of_policies_is_within_the_span_of_its_request_without_traces() {
        tracing::subscriber::with_default(OnlyInfo, || {
            let request = RequestSpan(tracing::error_span!("request"));
            let hook = request.hook("on-step");
            assert!(hook.id().is_some());
            assert_eq!(hook.id(), request.0.id());
        });
    }
}
