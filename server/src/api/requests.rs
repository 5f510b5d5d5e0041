//! `GET /v1/requests` and `GET /v1/requests/{id}/events`: the requests that run, the newest ones that have
//! ended, and one of them as it runs.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::response::sse::{self, Sse};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures_util::stream::unfold;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::access::Caller;
use super::app::App;
use super::blocking::blocking;
use super::error::ApiError;
use super::query::Query;
use super::register::{Entry, Frame, ListedRequest, Watched};

/// Most bytes of a text that is searched.
const SEARCH_BYTES: usize = 256;

/// Time between two reports of how far a watched request is.
const REPORT_EVERY: Duration = Duration::from_millis(500);

/// Requests that run, and the newest ones that have ended.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct RequestList {
    requests: Vec<ListedRequest>,
}

/// `GET /v1/requests`. Other callers than operators see the requests of their profiles, without ids: an id opens
/// a trace. With `search`, those that have this text.
pub async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Extension(query): Extension<Query>,
) -> Result<Json<RequestList>, ApiError> {
    let searched = query.get("search").unwrap_or_default().trim().to_lowercase();
    if searched.len() > SEARCH_BYTES {
        let message = format!("`search` of the query has more than {SEARCH_BYTES} bytes");
        return Err(ApiError::value("search", message));
    }
    let is_operator = caller == Caller::Operator;
    let list = move || {
        let sees = |entry: &Entry| {
            is_operator
                || entry
                    .profile()
                    .is_some_and(|profile| app.access.allow(&caller, &profile).is_ok())
        };
        let entries = app.register.entries();
        let seen = entries.iter().filter(|entry| sees(entry));
        let found = seen.filter(|entry| searched.is_empty() || entry.has(&searched, is_operator));
        found.map(|entry| entry.describe(is_operator)).collect()
    };
    // The notes of all requests may be megabytes.
    Ok(Json(RequestList { requests: blocking(list).await? }))
}

/// `GET /v1/requests/{id}/events`, for operators.
pub async fn events(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    app.access.operator(&caller).inspect_err(|_| app.metrics.unauthorized())?;
    let entry = app.register.get(&id).ok_or_else(|| ApiError::no_request(&id))?;
    let permit = app.register.watchers.clone().try_acquire_owned().map_err(|_| {
        ApiError::busy("too many clients watch requests; close one, or try again later")
    })?;
    let watched = entry.watch()?;
    let mut reports = interval(REPORT_EVERY);
    reports.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let watch = Watch {
        entry,
        watched,
        reports,
        ready: Vec::new(),
        has_pieces: false,
        ended: false,
        _permit: permit,
    };
    let frames = unfold(watch, async |mut watch| {
        let frame = watch.next().await?;
        let event = sse::Event::default().event(frame.event).data(frame.data);
        Some((Ok::<_, Infallible>(event), watch))
    });
    // Reports keep an idle stream open.
    Ok(Sse::new(Box::pin(frames)).into_response())
}

/// One client that watches a request.
struct Watch {
    entry: Arc<Entry>,
    watched: Watched,
    reports: Interval,
    /// Frames to send first, last one first.
    ready: Vec<Frame>,
    /// Whether it has got the reply.
    has_pieces: bool,
    ended: bool,
    /// Counts against the limit on all watchers.
    _permit: OwnedSemaphorePermit,
}

impl Watch {
    async fn next(&mut self) -> Option<Frame> {
        if let Some(frame) = self.ready.pop() {
            return Some(frame);
        }
        if self.ended {
            return None;
        }
        let describe = |event| Frame::request(event, &self.entry.describe(true));
        tokio::select! {
            frame = self.watched.received.recv() => match frame {
                Some(frame) => {
                    self.has_pieces = true;
                    Some(frame)
                }
                None if self.watched.is_late() => {
                    self.ended = true;
                    Some(Frame { event: "late", data: "{}".into() })
                }
                None => {
                    self.ended = true;
                    self.ready.push(describe("end"));
                    if !self.has_pieces {
                        // It had ended before: its text is gone, its notes are not.
                        self.ready.extend(self.entry.notes().into_iter().rev());
                    }
                    self.ready.pop()
                }
            },
            _ = self.reports.tick() => Some(describe("request")),
        }
    }
}
