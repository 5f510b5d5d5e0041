//! Logs and counts each request for replies once, when it ends. Never logs the text of messages.

use std::sync::Arc;
use std::time::Instant;

use steersman_engine::request::{Event, FinishReason, RequestSpan, Usage};
use tokio::sync::OwnedSemaphorePermit;
use tracing::{Span, error_span, field, info};

use super::error::ApiError;
use super::metrics::Metrics;
use super::register::Tracked;
use crate::models::Lease;

/// A running request. Dropping it before it ends logs and counts it as cancelled by the client.
pub struct RequestLog {
    /// Id of the reply and of the engine's request.
    pub id: String,
    /// Id of the HTTP request.
    request_id: String,
    span: Span,
    metrics: Arc<Metrics>,
    started: Instant,
    first_event_ms: Option<u64>,
    ended: bool,
    /// What operators see of it.
    pub tracked: Tracked,
    /// Counts against the limit of the profile until the request has ended.
    pub permit: Option<OwnedSemaphorePermit>,
    /// Counts the bytes of the body against `server.body_budget_bytes` until the request has ended.
    pub share: Option<OwnedSemaphorePermit>,
    /// Keeps the model loaded until the request has ended.
    pub lease: Option<Arc<Lease>>,
}

impl RequestLog {
    /// Starts the clock. `request_id` is that of the HTTP request.
    pub fn new(id: String, request_id: &str, metrics: Arc<Metrics>, tracked: Tracked) -> Self {
        let (profile, stream) = (field::Empty, field::Empty);
        // Enabled wherever a line of the log is, which gets the ids.
        let span = error_span!("request", id, request_id, profile, stream);
        let started = Instant::now();
        let (first_event_ms, ended, permit, share, lease) = (None, false, None, None, None);
        let request_id = request_id.into();
        Self {
            id,
            request_id,
            span,
            metrics,
            started,
            first_event_ms,
            ended,
            tracked,
            permit,
            share,
            lease,
        }
    }

    pub fn admitted(&mut self, profile: &str, stream: bool) {
        self.span.record("profile", profile);
        self.span.record("stream", stream);
        self.tracked.admitted(profile, stream);
    }

    /// The span of the request, for the engine.
    pub fn span(&self) -> RequestSpan {
        RequestSpan(self.span.clone())
    }

    /// Records the time of the first event after `Started`, notes aside.
    pub fn event(&mut self, event: &Event) {
        if matches!(event, Event::Started { .. } | Event::Routed { .. } | Event::Note { .. }) {
            return;
        }
        let elapsed = self.elapsed_ms();
        self.first_event_ms.get_or_insert(elapsed);
    }

    /// The request succeeded; `reason` is why its first reply ended.
    pub fn finished(&mut self, reason: Option<&FinishReason>, usage: Usage) {
        self.ended = true;
        self.metrics.finished(&usage);
        self.tracked.finished(self.elapsed_ms(), reason, usage);
        self.span.in_scope(|| {
            info!(
                reason = ?reason,
                prompt_tokens = usage.prompt_tokens,
                cached_tokens = usage.cached_tokens,
                reasoning_tokens = usage.reasoning_tokens,
                answer_tokens = usage.answer_tokens,
                first_event_ms = self.first_event_ms,
                total_ms = self.elapsed_ms(),
                "request finished"
            );
        });
    }

    /// The request was rejected or failed; returns the error for the client.
    pub fn failed(&mut self, error: impl Into<ApiError>) -> ApiError {
        self.ended = true;
        let error: ApiError = error.into();
        self.tracked.failed(self.elapsed_ms(), error.status.as_u16(), error.code);
        self.span.in_scope(|| {
            let error = ApiError { request_id: self.request_id.clone(), ..error };
            self.metrics.failed(error.status);
            info!(
                status = error.status.as_u16(),
                code = error.code,
                param = error.param,
                total_ms = self.elapsed_ms(),
                "request failed"
            );
            error
        })
    }

    /// Nanoseconds since the request arrived.
    pub fn elapsed_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Milliseconds since the request arrived.
    pub fn elapsed_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        self.metrics.cancelled();
        self.tracked.cancelled(self.elapsed_ms());
        self.span.in_scope(|| {
            info!(
                first_event_ms = self.first_event_ms,
                total_ms = self.elapsed_ms(),
                "request cancelled by the client"
            );
        });
    }
}
