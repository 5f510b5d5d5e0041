//! `GET /v1/log`: the newest lines of the log, for operators.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Serialize;

use super::access::Caller;
use super::app::App;
use super::error::ApiError;
use super::openapi::LINES;
use super::query::Query;
use steersman_log::Line;

/// Most lines of a reply, and about the most bytes of them: who wants more asks again.
const PAGE_LINES: usize = 500;
const PAGE_BYTES: usize = 256 << 10;

/// A line of the log.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct LogLine {
    /// Numbers follow each other; those of a later process are larger.
    number: u64,
    #[schemars(extend("enum" = ["ERROR", "WARN", "INFO", "DEBUG", "TRACE"]))]
    level: &'static str,
    /// The line as on stderr.
    line: String,
}

impl From<Line> for LogLine {
    fn from(Line { number, level, text }: Line) -> Self {
        Self { number, level, line: text.to_string() }
    }
}

/// `GET /v1/log`: the lines after the number `after`, oldest first.
pub async fn get(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Extension(query): Extension<Query>,
) -> Result<Response, ApiError> {
    app.access.operator(&caller).inspect_err(|_| app.metrics.unauthorized())?;
    let after = query.number("after")?.unwrap_or_default();
    let lines = app.log.after(after, PAGE_LINES, PAGE_BYTES);
    let text: String = lines
        .into_iter()
        .map(|line| {
            let line = serde_json::to_string(&LogLine::from(line));
            line.expect("a line has string keys only") + "\n"
        })
        .collect();
    Ok(([(header::CONTENT_TYPE, LINES)], text).into_response())
}
