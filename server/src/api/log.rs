//! One line in the log for each chat request, however it ends, and one count. Never what it says.

use std::sync::Arc;
use std::time::Instant;

use steersman_engine::request::{Event, Finished};
use tokio::sync::OwnedSemaphorePermit;
use tracing::{Span, field, info, info_span};

use super::error::ApiError;
use super::metrics::Metrics;

/// What is known of a request while it runs; says so in the log, and counts it, when it ends.
///
/// Dropped before that, it says that the client hung up.
pub struct RequestLog {
    /// The reply's id, which is the engine's name for the request.
    pub id: String,
    span: Span,
    metrics: Arc<Metrics>,
    started: Instant,
    first_event_ms: Option<u64>,
    ended: bool,
    /// Its place among the requests of its profile, free again when it has ended.
    pub place: Option<OwnedSemaphorePermit>,
}

impl RequestLog {
    /// The clock starts now. `request_id` is the client's name for the request, or ours.
    pub fn new(id: String, request_id: &str, metrics: Arc<Metrics>) -> Self {
        let (profile, stream) = (field::Empty, field::Empty);
        let span = info_span!("chat", id, request_id, profile, stream);
        let started = Instant::now();
        Self { id, span, metrics, started, first_event_ms: None, ended: false, place: None }
    }

    /// The request was understood.
    pub fn understood(&self, profile: &str, stream: bool) {
        self.span.record("profile", profile);
        self.span.record("stream", stream);
    }

    /// An event came; notes when the first did that is more than being admitted.
    pub fn event(&mut self, event: &Event) {
        if matches!(event, Event::Started { .. }) {
            return;
        }
        let elapsed = self.elapsed_ms();
        self.first_event_ms.get_or_insert(elapsed);
    }

    /// The request ended well.
    pub fn finished(&mut self, finished: &Finished) {
        self.ended = true;
        let usage = finished.usage;
        self.metrics.finished(&usage);
        self.span.in_scope(|| {
            info!(
                reason = ?finished.reason,
                prompt_tokens = usage.prompt_tokens,
                cached_tokens = usage.cached_tokens,
                reasoning_tokens = usage.reasoning_tokens,
                answer_tokens = usage.answer_tokens,
                first_event_ms = self.first_event_ms,
                total_ms = self.elapsed_ms(),
                "answered"
            );
        });
    }

    /// The request was refused or failed; returns what the client is told.
    pub fn failed(&mut self, error: impl Into<ApiError>) -> ApiError {
        self.ended = true;
        self.span.in_scope(|| {
            let error = error.into();
            self.metrics.failed(error.status);
            info!(
                status = error.status.as_u16(),
                code = error.code,
                param = error.param,
                total_ms = self.elapsed_ms(),
                "refused or failed"
            );
            error
        })
    }

    fn elapsed_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        self.metrics.cancelled();
        self.span.in_scope(|| {
            info!(
                first_event_ms = self.first_event_ms,
                total_ms = self.elapsed_ms(),
                "cancelled: the client hung up"
            );
        });
    }
}
