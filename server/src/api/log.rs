//! Logs and counts each request for replies once, when it ends. Never logs the text of messages.

use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus_client::metrics::histogram::Histogram;
use steersman_engine::request::{Event, FinishReason, RequestSpan, Usage};
use tokio::sync::OwnedSemaphorePermit;
use tracing::{info, warn};

use super::error::{ApiError, REFUSED_BY_POLICY};
use super::metrics::{Metrics, ReplyMetrics};
use super::register::{MEASURABLE_S, Tracked};
use super::reply::{Head, Reply};
use super::span::{Arrival, TracedRequest};
use crate::models::Lease;

/// Most bytes of notes in the line of a request.
const NOTES_BYTES: usize = 512;

/// Status in the log of a request whose client has disconnected, which gets none: that of nginx and others.
const CANCELLED: u16 = 499;

/// A running request. Dropping it before it ends logs and counts it as cancelled by the client.
pub struct RequestLog {
    /// Id of the reply and of the engine's request.
    pub id: String,
    /// Id of the HTTP request.
    request_id: String,
    /// The route as documented, with `/v1`.
    route: String,
    traced: TracedRequest,
    metrics: Arc<Metrics>,
    /// The series of its model and profile; `None` until they are known.
    of_replies: Option<ReplyMetrics>,
    started: Instant,
    /// Time from its arrival to the start of its prompt.
    queued: Option<Duration>,
    /// Time from its arrival to the first piece of a reply.
    first_piece: Option<Duration>,
    /// When the last piece of each reply came, if the next one follows it directly.
    last_pieces: Vec<Option<Instant>>,
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
    /// Starts the clock.
    pub fn new(arrival: Arrival<'_>, metrics: Arc<Metrics>, tracked: Tracked) -> Self {
        Self {
            id: arrival.id.into(),
            request_id: arrival.request_id.into(),
            route: arrival.route.into(),
            traced: TracedRequest::begin(arrival),
            metrics,
            of_replies: None,
            started: Instant::now(),
            queued: None,
            first_piece: None,
            last_pieces: Vec::new(),
            ended: false,
            tracked,
            permit: None,
            share: None,
            lease: None,
        }
    }

    /// The request goes to this model, by its name in the configuration, and profile. `requested` is the model in
    /// the client's words, if it named one.
    pub fn admitted(&mut self, model: &str, profile: &str, requested: Option<&str>, stream: bool) {
        self.traced.admitted(model, profile, requested, stream);
        self.tracked.admitted(model, profile, stream);
        self.of_replies = Some(self.metrics.of_replies(model, profile, &self.route));
    }

    /// The span of the request, for the engine.
    pub fn span(&self) -> RequestSpan {
        self.traced.for_engine()
    }

    /// Takes the time of an event of reply `index`.
    pub fn event(&mut self, index: usize, event: &Event) {
        match event {
            Event::Started { .. } => self.prompt_starts(),
            Event::Routed { model, profile } => {
                self.traced.goes_to(model, profile);
                self.of_replies = Some(self.metrics.of_replies(model, profile, &self.route));
            }
            Event::Reasoning(_) | Event::Answer(_) | Event::CallDelta(_) => self.piece(index, true),
            // It was written piece by piece before.
            Event::ToolCall(_) => self.piece(index, false),
            Event::Embedding(_) => self.prompt_ends(),
            Event::Rewound { .. }
            | Event::PromptToken(_)
            | Event::Logprob(_)
            | Event::Note { .. }
            | Event::PromptCounted { .. }
            | Event::Finished(_)
            | Event::Failed(_) => {}
        }
    }

    fn prompt_starts(&mut self) {
        // Further choices and rounds start later.
        if self.queued.is_none() {
            let elapsed = self.started.elapsed();
            self.queued = Some(elapsed);
            self.observe(|metrics| &metrics.queue, elapsed);
        }
    }

    fn prompt_ends(&self) {
        if let Some(queued) = self.queued {
            self.observe(|metrics| &metrics.prefill, self.started.elapsed() - queued);
        }
    }

    /// A piece of a reply is sent. `follows` is false if what comes before or after it took time of its own.
    fn piece(&mut self, index: usize, follows: bool) {
        if self.first_piece.is_none() {
            let elapsed = self.started.elapsed();
            self.first_piece = Some(elapsed);
            self.metrics.first_token(elapsed);
            self.observe(|metrics| &metrics.first_token, elapsed);
            self.prompt_ends();
        }
        if self.last_pieces.len() <= index {
            self.last_pieces.resize(index + 1, None);
        }
        let now = Instant::now();
        let last = self.last_pieces[index].replace(now);
        if let Some(last) = last
            && follows
        {
            self.observe(|metrics| &metrics.gap, now - last);
        }
        if !follows {
            self.last_pieces[index] = None;
        }
    }

    fn observe(&self, histogram: impl FnOnce(&ReplyMetrics) -> &Histogram, time: Duration) {
        if let Some(metrics) = &self.of_replies {
            histogram(metrics).observe(time.as_secs_f64());
        }
    }

    /// The request succeeded, with these replies.
    pub fn finished(&mut self, head: &Head, replies: &[Reply], usage: Usage) {
        self.ended = true;
        let total = self.started.elapsed();
        self.metrics.finished(&usage);
        self.count("2xx", total);
        if let Some(metrics) = &self.of_replies {
            metrics.count(&usage);
        }
        // Embeddings have none.
        let is_reply = self.first_piece.is_some() || usage.reply_tokens() > 0;
        let reason = replies.first().map(|reply| &reply.finished.reason).filter(|_| is_reply);
        head.notes.iter().for_each(|note| self.tracked.note(0, 0, 0, note));
        self.tracked.finished(self.elapsed_ms(), reason, usage);
        let reasons: Vec<_> =
            replies.iter().map(|reply| finish_name(&reply.finished.reason)).collect();
        self.traced.finished(&reasons, usage);
        let prompt_time = self.queued.zip(self.first_piece).map(|(queued, first)| first - queued);
        let reply_time = self.first_piece.map(|first| total - first);
        let computed = usage.prompt_tokens.saturating_sub(usage.cached_tokens);
        // The first token of a reply belongs to its prompt.
        let decoded = usage.reply_tokens().saturating_sub(replies.len() as u32);
        self.traced.log(|| {
            info!(
                status = 200,
                finish = reason.map(finish_name),
                prompt_tokens = usage.prompt_tokens,
                cached_tokens = usage.cached_tokens,
                completion_tokens = usage.reply_tokens(),
                reasoning_tokens = usage.reasoning_tokens,
                queue_ms = self.queued.map(milliseconds),
                first_token_ms = self.first_piece.map(milliseconds),
                total_ms = milliseconds(total),
                prompt_tokens_per_s = rate(computed, prompt_time),
                tokens_per_s = rate(decoded, reply_time),
                notes = notes(head, replies),
                "request finished"
            );
        });
    }

    /// The request was rejected or failed; returns the error for the client.
    pub fn failed(&mut self, error: impl Into<ApiError>) -> ApiError {
        self.ended = true;
        // What the conversion logs has the id of the request.
        let error: ApiError = self.traced.log(|| error.into());
        // Until its prompt has started, it has no tokens.
        let progress = self.queued.map(|_| self.tracked.progress());
        let progress = progress.as_ref();
        if error.code == REFUSED_BY_POLICY {
            // Its words, for operators: the code does not say why.
            self.tracked.note(0, 0, 0, &format!("refused: {}", error.message));
        }
        self.tracked.failed(self.elapsed_ms(), error.status.as_u16(), error.code);
        self.traced.failed(error.status.as_u16(), error.code);
        self.count(self.metrics.failed(error.status), self.started.elapsed());
        self.traced.log(|| {
            let error = ApiError { request_id: self.request_id.clone(), ..error };
            let status = error.status.as_u16();
            // The level is part of a line's place in the code.
            macro_rules! line {
                ($level:ident) => {
                    $level!(
                        status,
                        code = error.code,
                        param = error.param,
                        prompt_tokens = progress.map(|progress| progress.prompt_tokens),
                        completion_tokens = progress.map(|progress| progress.reply_tokens),
                        queue_ms = self.queued.map(milliseconds),
                        first_token_ms = self.first_piece.map(milliseconds),
                        total_ms = self.elapsed_ms(),
                        "request failed"
                    )
                };
            }
            // A client's mistake is no failure of the server.
            if error.status.is_server_error() {
                line!(warn)
            } else {
                line!(info)
            }
            error
        })
    }

    /// Counts the end of the request with this class of status.
    fn count(&self, class: &'static str, total: Duration) {
        match &self.of_replies {
            Some(metrics) => metrics.ended(class, total),
            // It failed before its model and profile were known.
            None => self.metrics.ended_early(&self.route, class, total),
        }
    }

    /// Nanoseconds since the request arrived.
    pub fn elapsed_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Milliseconds since the request arrived.
    pub fn elapsed_ms(&self) -> u64 {
        milliseconds(self.started.elapsed())
    }
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        self.metrics.cancelled();
        self.count("cancelled", self.started.elapsed());
        self.traced.cancelled();
        let progress = self.tracked.progress();
        self.tracked.cancelled(self.elapsed_ms());
        self.traced.log(|| {
            info!(
                status = CANCELLED,
                phase = progress.phase,
                prompt_tokens = progress.prompt_tokens,
                prefilled_tokens = progress.prefilled_tokens,
                completion_tokens = progress.reply_tokens,
                queue_ms = self.queued.map(milliseconds),
                first_token_ms = self.first_piece.map(milliseconds),
                total_ms = self.elapsed_ms(),
                "request cancelled by the client"
            );
        });
    }
}

/// Name of a reason in the log and in traces.
fn finish_name(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop | FinishReason::StopString(_) => "stop",
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
        FinishReason::Policy(_) => "policy",
    }
}

fn milliseconds(time: Duration) -> u64 {
    time.as_millis() as u64
}

/// Tokens in a second, with one decimal; `None` if the time is too short to tell, as that of a reply in one piece.
fn rate(tokens: u32, time: Option<Duration>) -> Option<f64> {
    let seconds = time?.as_secs_f64();
    (tokens > 0 && seconds >= MEASURABLE_S)
        .then(|| (f64::from(tokens) / seconds * 10.0).round() / 10.0)
}

/// The notes of the replies as one text, cut at [`NOTES_BYTES`].
fn notes(head: &Head, replies: &[Reply]) -> Option<String> {
    let all = head.notes.iter().chain(replies.iter().flat_map(|reply| &reply.finished.notes));
    let mut text = String::new();
    for note in all {
        if !text.is_empty() {
            text.push_str("; ");
        }
        text.push_str(note);
        if text.len() > NOTES_BYTES {
            text.truncate(text.floor_char_boundary(NOTES_BYTES));
            text.push_str(" ...");
            break;
        }
    }
    (!text.is_empty()).then_some(text)
}
