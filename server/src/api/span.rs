//! The span of a request for replies: what its log lines have in common, and what a collector of traces gets of it.
//!
//! The fields of the span are ids and names, which the log shows. What only traces get are attributes of OpenTelemetry's
//! conventions for HTTP servers and for generative AI: they cost nothing without a collector. Neither has text of a
//! prompt or a reply.
//!
//! Source: OpenTelemetry's semantic conventions, "HTTP spans" and "Generative AI client spans", whose attributes
//! servers use as well; W3C Trace Context for the header `traceparent`.

use axum::http::HeaderMap;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::{Array, StringValue, Value};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use steersman_engine::request::{RequestSpan, Usage};
use tracing::{Span, error_span, field};
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// The header with the trace that a request belongs to.
const TRACE_PARENT: &str = "traceparent";

/// What is known of a request when it arrives.
#[derive(Debug, Clone, Copy)]
pub struct Arrival<'a> {
    /// Id of the reply.
    pub id: &'a str,
    /// Id of the HTTP request.
    pub request_id: &'a str,
    /// The route as documented, with `/v1`.
    pub route: &'a str,
    /// Name of the operation in OpenTelemetry's conventions: `chat`.
    pub operation: &'static str,
    pub headers: &'a HeaderMap,
}

/// The span of one request.
pub struct TracedRequest(Span);

impl TracedRequest {
    /// Begins the span, below that of the client's trace if the request names one.
    pub fn begin(arrival: Arrival<'_>) -> Self {
        let Arrival { id, request_id, route, operation, headers } = arrival;
        let (model, profile, stream) = (field::Empty, field::Empty, field::Empty);
        // Enabled wherever a line of the log is, which gets the fields.
        let span = error_span!(
            "request",
            id,
            request_id,
            route,
            model,
            profile,
            stream,
            otel.kind = "server",
            otel.name = format!("POST {route}"),
            otel.status_code = field::Empty,
        );
        if headers.contains_key(TRACE_PARENT) {
            let parent = TraceContextPropagator::new().extract(&HeaderExtractor(headers));
            // Fails if there are no traces.
            let _ = span.set_parent(parent);
        }
        let traced = Self(span);
        traced.set("http.request.method", "POST");
        traced.set("http.route", route.to_owned());
        traced.set("gen_ai.operation.name", operation);
        traced.set("gen_ai.provider.name", "steersman");
        traced.set("gen_ai.response.id", id.to_owned());
        traced
    }

    /// The request goes to this model and profile. `requested` is the model in the client's words, if it named one.
    pub fn admitted(&self, model: &str, profile: &str, requested: Option<&str>, stream: bool) {
        self.0.record("stream", stream);
        self.set("gen_ai.request.model", requested.unwrap_or(model).to_owned());
        self.goes_to(model, profile);
    }

    /// A policy has routed the request, or it is admitted.
    pub fn goes_to(&self, model: &str, profile: &str) {
        self.0.record("model", model);
        self.0.record("profile", profile);
        self.set("gen_ai.response.model", model.to_owned());
    }

    /// The request succeeded. `reasons` are why its replies ended.
    pub fn finished(&self, reasons: &[&'static str], usage: Usage) {
        self.set("http.response.status_code", 200);
        self.set("gen_ai.usage.input_tokens", i64::from(usage.prompt_tokens));
        self.set("gen_ai.usage.output_tokens", i64::from(usage.reply_tokens()));
        self.set("gen_ai.usage.cache_read.input_tokens", i64::from(usage.cached_tokens));
        let reasons = reasons.iter().map(|reason| StringValue::from(*reason)).collect();
        self.set("gen_ai.response.finish_reasons", Value::Array(Array::String(reasons)));
    }

    /// The request was rejected or failed.
    pub fn failed(&self, status: u16, code: &'static str) {
        self.set("http.response.status_code", i64::from(status));
        self.set("error.type", code);
        // A client's mistake is no error of a server.
        if status >= 500 {
            self.0.record("otel.status_code", "ERROR");
        }
    }

    /// The client has disconnected.
    pub fn cancelled(&self) {
        self.set("error.type", "cancelled");
    }

    /// The span, for the engine.
    pub fn for_engine(&self) -> RequestSpan {
        RequestSpan(self.0.clone())
    }

    /// Logs within the span.
    pub fn log<T>(&self, work: impl FnOnce() -> T) -> T {
        self.0.in_scope(work)
    }

    fn set(&self, name: &'static str, value: impl Into<Value>) {
        self.0.set_attribute(name, value);
    }
}
