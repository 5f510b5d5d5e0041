//! `GET /v1/requests/ID/trace`: recorded decisions of the policies of one request.
//!
//! A trace may have 64 MiB. It is written on a thread of its own while the client reads it, a piece at a
//! time, so that it delays no other request and is never in memory as a whole.

use std::convert::Infallible;
use std::io::{self, Write};
use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream::unfold;
use schemars::JsonSchema;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use steersman_engine::policy::Record;
use tokio::sync::mpsc;

use super::access::Caller;
use super::app::App;
use super::error::ApiError;
use crate::mcp::{Entry, Ran};

/// Bytes of a piece, and pieces that wait for the client.
const PIECE_BYTES: usize = 64 << 10;
const PIECES: usize = 4;

/// Decisions that policies made in one request; records are lines of golden files.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "Trace")]
pub struct TraceBody {
    request: String,
    #[schemars(with = "Vec<Map<String, Value>>")]
    records: Records,
    /// Calls of MCP tools.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<Map<String, Value>>")]
    tool_runs: Vec<Ran>,
}

/// Records in the pieces in which the policy host has them.
struct Records(Vec<Arc<Vec<Record>>>);

impl Serialize for Records {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().flat_map(|records| records.iter()))
    }
}

/// `GET /v1/requests/ID/trace`
pub async fn trace(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(request): Path<String>,
) -> Result<Response, ApiError> {
    let traces = app.models.policies().traces();
    let (records, tool_runs) = match app.mcp.journal.get(&request) {
        Some(Entry { profile, rounds, calls, .. }) => {
            app.access.allow(&caller, &profile)?;
            let records = rounds.iter().filter_map(|round| traces.chunks(round));
            (records.flatten().collect(), calls)
        }
        None => {
            let records = traces.chunks(&request);
            (records.ok_or_else(|| ApiError::no_trace(&request))?, Vec::new())
        }
    };
    if let Some(record) = records.iter().flat_map(|records| records.first()).next() {
        app.access.allow(&caller, &record.link.profile)?;
    }
    let permit = app.trace_readers.clone().acquire_owned().await;
    let permit = permit.expect("the semaphore is never closed");
    let body = TraceBody { request, records: Records(records), tool_runs };
    let (pieces, received) = mpsc::channel(PIECES);
    tokio::task::spawn_blocking(move || {
        let mut pieces = Pieces { pieces, piece: Vec::with_capacity(PIECE_BYTES) };
        // Fails if the client is gone.
        let _ = serde_json::to_writer(&mut pieces, &body).map(|()| pieces.flush());
        drop(permit);
    });
    let stream = unfold(received, async |mut received| {
        let piece: Bytes = received.recv().await?;
        Some((Ok::<_, Infallible>(piece), received))
    });
    let content_type = [(header::CONTENT_TYPE, "application/json")];
    Ok((content_type, Body::from_stream(stream)).into_response())
}

/// Sends what is written to it in pieces, and waits while the client is slow.
struct Pieces {
    pieces: mpsc::Sender<Bytes>,
    piece: Vec<u8>,
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.piece.extend_from_slice(bytes);
        if self.piece.len() >= PIECE_BYTES {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let piece = std::mem::replace(&mut self.piece, Vec::with_capacity(PIECE_BYTES));
        let sent = self.pieces.blocking_send(piece.into());
        sent.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A trace of 59 MB was serialized at once on a thread that serves connections.
    #[tokio::test]
    async fn a_trace_is_written_in_pieces_as_the_client_reads_it() {
        let (pieces, mut received) = mpsc::channel(PIECES);
        let text = "x".repeat(2 * PIECE_BYTES);
        let texts = vec![text; 100];
        let expected = serde_json::to_vec(&texts).unwrap();
        let written = tokio::task::spawn_blocking(move || {
            let mut pieces = Pieces { pieces, piece: Vec::new() };
            serde_json::to_writer(&mut pieces, &texts).unwrap();
            pieces.flush().unwrap();
        });
        let mut all = Vec::new();
        while let Some(piece) = received.recv().await {
            assert!(received.len() <= PIECES);
            all.extend_from_slice(&piece);
        }
        written.await.unwrap();
        assert!(all == expected);
        let (pieces, received) = mpsc::channel(PIECES);
        drop(received);
        let gone = Pieces { pieces, piece: Vec::new() };
        let ended = tokio::task::spawn_blocking(move || {
            let mut gone = gone;
            gone.write_all(&[0; PIECE_BYTES])
        });
        assert_eq!(ended.await.unwrap().unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
