//! The log on stderr: `RUST_LOG` filters it, `STEERSMAN_LOG=json` writes objects.

mod line;

use std::io::IsTerminal;

use tracing_subscriber::layer::{Identity, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use self::line::{Form, SpanFields};

/// The default filter. The lines of rmcp repeat what servers send, as often as they send it: the server logs why a
/// connection was lost.
const LOG: &str = "info,wasmtime=warn,cranelift=warn,rmcp=off,ureq=warn";

/// The default filter of commands whose output is for people. Beside a running server they have no database of policies,
/// which none of them needs.
const WARNINGS: &str = "warn,rmcp=off,steersman_policy_host::database=error";

/// Logs to stderr.
pub fn to_stderr() {
    init(LOG, None::<Identity>);
}

/// Logs warnings to stderr.
pub fn warnings_to_stderr() {
    init(WARNINGS, None::<Identity>);
}

/// Logs to stderr, and passes all spans and events to `layer`.
pub fn to_stderr_and(layer: impl Layer<Registry> + Send + Sync) {
    init(LOG, Some(layer));
}

/// Logs with RUST_LOG or, without it, the given filter.
fn init(filter: &str, layer: Option<impl Layer<Registry> + Send + Sync>) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(filter));
    let wanted = std::env::var("STEERSMAN_LOG").unwrap_or_default();
    let form = if wanted == "json" { Form::Json } else { Form::Text };
    let log = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(form == Form::Text && std::io::stderr().is_terminal())
        .event_format(form)
        .fmt_fields(SpanFields);
    tracing_subscriber::registry().with(layer).with(log.with_filter(filter)).init();
    if !["", "text", "json"].contains(&wanted.as_str()) {
        tracing::warn!(form = wanted, "STEERSMAN_LOG must be text or json; the log is text");
    }
}
