//! One line of the log, as text or as a JSON object: the event first, then its fields, then those of its spans.
//!
//! Each field occurs once: a field of the event takes precedence over that of a span, and that of an inner span over
//! that of an outer one. Fields of OpenTelemetry (`otel.kind`) are for traces and left out. Control characters are
//! escaped, so that no text in a field makes a second line.

use std::fmt;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::span::Record;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

/// The fields that only traces get.
const OF_TRACES: &str = "otel.";

/// What the crate `log` adds to its records.
const OF_LOG: &str = "log.";

/// Form of the lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Text,
    Json,
}

/// Keeps the fields of a span for its lines: `NAME JSON`, one below the other.
pub struct SpanFields;

impl<'writer> FormatFields<'writer> for SpanFields {
    fn format_fields<R: RecordFields>(&self, mut out: Writer<'writer>, fields: R) -> fmt::Result {
        let mut read = Fields::default();
        fields.record(&mut read);
        read.fields.iter().try_for_each(|(name, value)| writeln!(out, "{name} {value}"))
    }

    fn add_fields(
        &self,
        current: &'writer mut FormattedFields<Self>,
        fields: &Record<'_>,
    ) -> fmt::Result {
        self.format_fields(current.as_writer(), fields)
    }
}

/// The fields that [`SpanFields`] kept; of two with one name, the later.
fn kept(lines: &str) -> Map<String, Value> {
    let field = |line: &str| {
        let (name, value) = line.split_once(' ')?;
        Some((name.to_owned(), serde_json::from_str(value).ok()?))
    };
    lines.lines().filter_map(field).collect()
}

/// The fields of an event or a span.
#[derive(Default)]
struct Fields {
    message: String,
    /// The target of a record of the crate `log`.
    target: Option<String>,
    fields: Map<String, Value>,
}

impl Fields {
    fn set(&mut self, field: &Field, value: Value) {
        let name = field.name();
        if name == "log.target" {
            self.target = value.as_str().map(str::to_owned);
        } else if !name.starts_with(OF_TRACES) && !name.starts_with(OF_LOG) {
            self.fields.insert(name.into(), value);
        }
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.message = value.into(),
            _ => self.set(field, value.into()),
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(field, value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &without_numbers_of_errors(&format!("{value:?}")));
    }
}

/// `text` without the numbers that the standard library adds to the system's words for an error.
pub fn without_numbers_of_errors(text: &str) -> String {
    let mut parts = text.split(" (os error ");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| match part.split_once(')') {
        Some((number, rest)) if number.parse::<i32>().is_ok() => text + rest,
        _ => text + " (os error " + part,
    })
}

impl<S, N> FormatEvent<S, N> for Form
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'writer> FormatFields<'writer> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        out: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut read = Fields::default();
        event.record(&mut read);
        // From the innermost span to the outermost.
        for span in context.event_scope().into_iter().flatten() {
            if let Some(lines) = span.extensions().get::<FormattedFields<N>>() {
                for (name, value) in kept(&lines.fields) {
                    read.fields.entry(name).or_insert(value);
                }
            }
        }
        let level = *event.metadata().level();
        let target = read.target.take();
        let target = target.as_deref().unwrap_or(event.metadata().target());
        match self {
            Self::Text => text(out, level, target, &read),
            Self::Json => json(out, level, target, read),
        }
    }
}

/// `TIME LEVEL target: message name=value`
fn text(mut out: Writer<'_>, level: Level, target: &str, read: &Fields) -> fmt::Result {
    SystemTime.format_time(&mut out)?;
    match out.has_ansi_escapes() {
        true => write!(out, " \x1b[{}m{level:>5}\x1b[0m {target}: ", color(level))?,
        false => write!(out, " {level:>5} {target}: ")?,
    }
    // Not the quotes of `{:?}`.
    read.message.chars().try_for_each(|char| match char.is_control() {
        true => write!(out, "{}", char.escape_default()),
        false => out.write_char(char),
    })?;
    for (name, value) in &read.fields {
        match value {
            Value::String(text) if is_word(text) => write!(out, " {name}={text}")?,
            Value::String(text) => write!(out, " {name}={text:?}")?,
            value => write!(out, " {name}={value}")?,
        }
    }
    writeln!(out)
}

/// Whether a value needs no quotes.
fn is_word(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || "-_./:@+,%~".contains(c))
}

/// The number of a color of terminals.
fn color(level: Level) -> u8 {
    match level {
        Level::ERROR => 31,
        Level::WARN => 33,
        Level::INFO => 32,
        Level::DEBUG => 34,
        Level::TRACE => 35,
    }
}

/// `{"timestamp": .., "level": .., "target": .., "message": .., "name": value}`
fn json(mut out: Writer<'_>, level: Level, target: &str, read: Fields) -> fmt::Result {
    let mut time = String::new();
    SystemTime.format_time(&mut Writer::new(&mut time))?;
    let mut line = Map::new();
    line.insert("timestamp".into(), time.into());
    line.insert("level".into(), level.as_str().into());
    line.insert("target".into(), target.into());
    line.insert("message".into(), read.message.into());
    for (name, value) in read.fields {
        line.entry(name).or_insert(value);
    }
    writeln!(out, "{}", Value::Object(line))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn numbers_of_errors_are_left_out() {
        let full = "writing a: No space left on device (os error 28); b: gone (os error 2)";
        let expected = "writing a: No space left on device; b: gone";
        assert_eq!(without_numbers_of_errors(full), expected);
        for text in ["", "(os error 2", "a (os error x)"] {
            assert_eq!(without_numbers_of_errors(text), text);
        }
        let lines = logged(Form::Text, || {
            let error = std::io::Error::from_raw_os_error(28);
            tracing::warn!(%error, "not saved");
        });
        assert!(!lines[0].contains("os error"), "{lines:?}");
    }

    /// What `work` logs, line by line.
    fn logged(form: Form, work: impl FnOnce()) -> Vec<String> {
        let log = Log::default();
        let out = log.clone();
        let layer = tracing_subscriber::fmt::layer()
            .with_writer(move || out.clone())
            .with_ansi(false)
            .event_format(form)
            .fmt_fields(SpanFields);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), work);
        let text = String::from_utf8(log.0.lock().clone()).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    fn request() {
        let profile = tracing::field::Empty;
        let span = tracing::error_span!("request", id = "chat-1", profile, otel.kind = "server");
        span.record("profile", "two words");
        let missing: Option<u64> = None;
        span.in_scope(|| {
            let hook = tracing::error_span!("hook", hook = "on-step");
            let _entered = hook.enter();
            tracing::info!(status = 200, missing, rate = 2.5, "request finished");
            tracing::warn!(id = "other", path = %"/tmp/a b", "own\nline {}", "x");
        });
    }

    #[test]
    fn a_line_of_text_has_each_field_once_and_nothing_of_traces() {
        let lines = logged(Form::Text, request);
        let after_time = |line: &str| line.split_once(' ').unwrap().1.trim_start().to_owned();
        let lines: Vec<String> = lines.iter().map(|line| after_time(line)).collect();
        let target = module_path!();
        assert_eq!(
            lines,
            [
                format!(
                    "INFO {target}: request finished status=200 rate=2.5 hook=on-step id=chat-1 \
                     profile=\"two words\""
                ),
                format!(
                    "WARN {target}: own\\nline x id=other path=\"/tmp/a b\" hook=on-step \
                     profile=\"two words\""
                ),
            ]
        );
    }

    #[test]
    fn a_json_line_is_flat_and_its_numbers_are_numbers() {
        let lines = logged(Form::Json, request);
        let lines: Vec<Value> = lines.iter().map(|line| line.parse().unwrap()).collect();
        let mut first = lines[0].clone();
        let time = first.as_object_mut().unwrap().shift_remove("timestamp");
        assert!(time.unwrap().as_str().unwrap().ends_with('Z'));
        assert_eq!(
            first,
            serde_json::json!({
                "level": "INFO", "target": module_path!(), "message": "request finished",
                "status": 200, "rate": 2.5, "hook": "on-step", "id": "chat-1", "profile": "two words",
            })
        );
        assert_eq!(
            (&lines[1]["id"], &lines[1]["message"]),
            (&"other".into(), &"own\nline x".into())
        );
    }
}
