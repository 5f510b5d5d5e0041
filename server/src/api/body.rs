//! Reads the bodies of requests within limits on size, time and memory, and parses them where that
//! delays no other request.
//!
//! Small bodies are parsed at once. Larger ones count against a budget for as long as their request
//! is in memory, share a rate, and are parsed on a thread of their own, one at a time.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::header::CONTENT_ENCODING;
use axum::http::{HeaderMap, HeaderValue};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use parking_lot::Mutex;
use serde_json::{Map, Value};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until};

use super::blocking::blocking;
use super::error::ApiError;
use super::json;
use crate::config::ServerConfig;
use crate::media_type::is_type;

/// Bytes of a body that count against no budget, so that large requests cannot keep small ones out.
const SMALL: usize = 64 << 10;

/// Bytes of larger bodies that are read in a second, of all together: a client on this machine could
/// otherwise keep the cores busy that decode replies.
const BYTES_PER_SECOND: u32 = 64 << 20;

/// Larger bodies that are parsed at the same time: parsing takes a core and several times the memory
/// of the body.
const PARSERS: usize = 1;

/// Limits on all bodies.
pub struct Bodies {
    /// One permit for each byte of the larger bodies.
    budget: Arc<Semaphore>,
    /// When the bytes that were read so far are due, at [`BYTES_PER_SECOND`].
    read_until: Mutex<Option<Instant>>,
    parsers: Arc<Semaphore>,
    timeout_s: u64,
}

/// Maximum size of a body.
pub struct Limit {
    pub bytes: usize,
    /// The configuration key that sets it.
    pub set_by: &'static str,
    /// Whether the body counts against the budget.
    pub has_budget: bool,
}

/// A body in memory, and its share of the budget.
#[derive(Default)]
pub struct ReadBody {
    pub bytes: Vec<u8>,
    pub share: Option<OwnedSemaphorePermit>,
}

impl Bodies {
    pub fn new(config: &ServerConfig) -> Self {
        Self {
            budget: Arc::new(Semaphore::new(config.body_budget_bytes)),
            read_until: Mutex::default(),
            parsers: Arc::new(Semaphore::new(PARSERS)),
            timeout_s: config.body_timeout_s,
        }
    }

    /// Reads a body of `content_type`, or of any if there is none.
    ///
    /// # Errors
    /// 415, 413, 408, 400 if the connection breaks, and 503 if the budget is used up.
    pub async fn read(
        &self,
        headers: &HeaderMap,
        body: Body,
        content_type: Option<&str>,
        limit: Limit,
    ) -> Result<ReadBody, ApiError> {
        if let Some(expected) = content_type.filter(|expected| !is_type(headers, expected)) {
            return Err(ApiError::not_of_type(expected));
        }
        let is_plain = |coding: &HeaderValue| coding.as_bytes().eq_ignore_ascii_case(b"identity");
        if !headers.get_all(CONTENT_ENCODING).iter().all(is_plain) {
            return Err(ApiError::encoded());
        }
        let time = Duration::from_secs(self.timeout_s);
        match tokio::time::timeout(time, self.collect(body, limit)).await {
            Ok(read) => read,
            Err(_elapsed) => Err(ApiError::too_slow(self.timeout_s)),
        }
    }

    async fn collect(&self, body: Body, limit: Limit) -> Result<ReadBody, ApiError> {
        let mut body = Limited::new(body, limit.bytes);
        let mut read = ReadBody::default();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| {
                if error.is::<LengthLimitError>() {
                    return ApiError::too_large(limit.bytes, limit.set_by);
                }
                let message = format!("the body is incomplete: {error}");
                ApiError::invalid("invalid_body", "", message)
            })?;
            let Ok(data) = frame.into_data() else { continue };
            let over = (read.bytes.len() + data.len()).saturating_sub(SMALL);
            if over > 0 {
                self.pace(data.len()).await;
            }
            let share = read.share.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
            if limit.has_budget && over > share {
                let more = u32::try_from(over - share).unwrap_or(u32::MAX);
                let more = self.budget.clone().try_acquire_many_owned(more);
                let more = more.map_err(|_| ApiError::over_budget())?;
                match &mut read.share {
                    Some(share) => share.merge(more),
                    none => *none = Some(more),
                }
            }
            if data.len() > read.bytes.capacity() - read.bytes.len() {
                // Doubling would take up to twice the budget.
                read.bytes.reserve_exact(data.len() + read.bytes.len() / 4);
            }
            read.bytes.extend_from_slice(&data);
        }
        Ok(read)
    }

    /// Waits until `bytes` more bytes are due.
    async fn pace(&self, bytes: usize) {
        let time = Duration::from_secs_f64(bytes as f64 / f64::from(BYTES_PER_SECOND));
        let due = {
            let mut last = self.read_until.lock();
            let now = Instant::now();
            let due = last.map_or(now, |last| last.max(now)) + time;
            *last.insert(due)
        };
        sleep_until(due).await;
    }

    /// Parses a JSON body with `parse`.
    ///
    /// # Errors
    /// As [`json::object`] and `parse`.
    pub async fn parse<T: Send + 'static>(
        &self,
        bytes: Vec<u8>,
        parse: fn(Map<String, Value>) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        if bytes.len() <= SMALL {
            return parse(json::object(&bytes)?);
        }
        self.work(move || json::object(&bytes).and_then(parse)).await?
    }

    /// Does `work`, which takes long, on a thread of its own; there are [`PARSERS`].
    ///
    /// # Errors
    /// 500 if it panics.
    pub async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let parsers = self.parsers.clone();
        let permit = parsers.acquire_owned().await.expect("the semaphore is never closed");
        // The thread has the permit: it goes on if the client hangs up.
        blocking(move || {
            let done = work();
            drop(permit);
            done
        })
        .await
    }
}
