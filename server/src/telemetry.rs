//! Traces for OpenTelemetry: the spans of each request, sent to a collector if `OTEL_EXPORTER_OTLP_ENDPOINT` names one.
//!
//! The variables are those of OpenTelemetry, so that a collector is set up as for any other program. Spans are sent in
//! batches by a thread of their own, as JSON over HTTP; a collector that does not answer costs a warning, and no
//! request. `api/span.rs` has what the span of a request says.

use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Context, Result};
use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, Response};
use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::{EnvResourceDetector, TelemetryResourceDetector};
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::{Layer, Registry};

use crate::throttle::Throttle;

/// Variables of which each turns traces on.
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"];

/// Time in which the collector must answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Sends spans until it is dropped, and then the rest of them.
pub struct Traces(SdkTracerProvider);

impl Traces {
    /// Traces, if a collector is named.
    ///
    /// # Errors
    /// If a variable of OpenTelemetry has a wrong value.
    pub fn from_env() -> Result<Option<Self>> {
        let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        if !ENDPOINTS.into_iter().any(is_set) {
            return Ok(None);
        }
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(TIMEOUT))
            .http_status_as_error(false)
            .build()
            .into();
        let exporter = SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpJson)
            .with_http_client(Client { agent, failed: Throttle::default() })
            .build()
            .context("OTEL_EXPORTER_OTLP_ENDPOINT: traces cannot be sent")?;
        // `OTEL_RESOURCE_ATTRIBUTES` takes precedence over the defaults, and `OTEL_SERVICE_NAME` over both.
        let mut resource = Resource::builder_empty()
            .with_service_name("steersman")
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .with_detector(Box::new(TelemetryResourceDetector))
            .with_detector(Box::new(EnvResourceDetector::new()));
        if let Some(name) = std::env::var("OTEL_SERVICE_NAME").ok().filter(|name| !name.is_empty())
        {
            resource = resource.with_service_name(name);
        }
        let resource = resource.build();
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource)
            .build();
        Ok(Some(Self(provider)))
    }

    /// The layer that gets the spans of this program's crates.
    pub fn layer(&self) -> impl Layer<Registry> + Send + Sync + use<> {
        let tracer = self.0.tracer("steersman");
        // Spans have the attributes of conventions, none of how this program is built.
        let layer = tracing_opentelemetry::layer()
            .with_tracer(tracer)
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_level(false)
            .with_tracked_inactivity(false);
        // Log lines are no events of spans: a collector of traces is not a second log.
        layer.with_filter(filter_fn(|of| of.is_span() && of.target().starts_with("steersman")))
    }
}

impl Drop for Traces {
    fn drop(&mut self) {
        if let Err(error) = self.0.shutdown() {
            tracing::warn!(%error, "last traces not sent");
        }
    }
}

/// Sends spans with the HTTP client that this program has. Blocks: it is called on the exporter's thread.
#[derive(Debug)]
struct Client {
    agent: ureq::Agent,
    failed: Throttle,
}

#[async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let collector = request.uri().clone();
        let sent = self.send(request);
        let problem = match &sent {
            Ok(response) if response.status().is_success() => return sent,
            Ok(response) => response.status().to_string(),
            Err(error) => error.to_string(),
        };
        // The exporter says so to nobody.
        if let Some(suppressed) = self.failed.pass() {
            tracing::warn!(%collector, problem, suppressed, "traces are lost: the collector does not take them");
        }
        sent
    }
}

impl Client {
    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (parts, body) = request.into_parts();
        let response = self.agent.run(Request::from_parts(parts, body.to_vec()))?;
        let (parts, mut body) = response.into_parts();
        Ok(Response::from_parts(parts, body.read_to_vec()?.into()))
    }
}
