//! A reply of an upstream that has begun: its events as pieces, in whichever protocol they come.

use std::time::Duration;

use http::header::CONTENT_TYPE;
use steersman_request::UpstreamFault;
use tokio::time::{Instant, timeout, timeout_at};

use crate::client::{Client, late};
use crate::config::UpstreamConfig;
use crate::fault::Fault;
use crate::piece::{Counts, Piece};
use crate::sse::Events;
use crate::{anthropic, openai};

/// A reply of the upstream that has begun.
pub struct Stream {
    /// `None` if the upstream does not stream.
    events: Option<Events>,
    reader: Reader,
    /// Pieces that were read with the first.
    pub first: Vec<Piece>,
}

/// Reads the events of a protocol.
pub enum Reader {
    OpenAi(openai::Reader),
    Anthropic(anthropic::Reader),
}

impl Reader {
    /// Reads the data of an event.
    ///
    /// # Errors
    /// If it is an error, or no JSON of the protocol.
    pub fn read(&mut self, data: &str, out: &mut Vec<Piece>) -> Result<(), Fault> {
        let json = serde_json::from_str(data)
            .map_err(|error| Fault::protocol(format!("sent what is no JSON: {error}")))?;
        self.read_json(&json, out)
    }

    /// Reads the JSON of an event, or of a reply that is not streamed.
    ///
    /// # Errors
    /// If it is an error, or none of the protocol.
    pub fn read_json(
        &mut self,
        json: &serde_json::Value,
        out: &mut Vec<Piece>,
    ) -> Result<(), Fault> {
        match self {
            Self::OpenAi(reader) => reader.read(json, out),
            Self::Anthropic(reader) => reader.read(json, out),
        }
    }

    /// Whether the reason of the end was read.
    pub fn has_ended(&self) -> bool {
        match self {
            Self::OpenAi(reader) => reader.has_ended(),
            Self::Anthropic(reader) => reader.has_ended(),
        }
    }
}

/// How long the next pieces are waited for.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// Time until the next event of any kind.
    event: Duration,
    /// Time until the next piece, whatever other events come: an upstream that sends pings only is not waited for
    /// without end.
    piece: Duration,
    /// The end of that time.
    end: Instant,
}

impl Patience {
    /// The time limits of `config` for the piece after `newest`: while other events come, such as pings during
    /// reasoning that is not sent, it may take as long as the first one.
    pub fn after(newest: Instant, config: &UpstreamConfig) -> Self {
        let event = config.piece_timeout();
        let piece = event.max(config.first_piece_timeout());
        Self { event, piece, end: newest + piece }
    }

    /// The time from now on `within` which the next piece comes.
    fn within(piece: Duration) -> Self {
        Self { event: piece, piece, end: Instant::now() + piece }
    }

    /// The time until `end`.
    pub fn until(end: Instant) -> Self {
        Self::within(end.saturating_duration_since(Instant::now()))
    }
}

impl Stream {
    /// Sends `body` to the route `path`, and reads up to the first piece, which must come `within` this time.
    ///
    /// # Errors
    /// If the upstream cannot be reached, is too late, refuses, or sends what is no reply.
    pub async fn begin(
        client: &Client,
        path: &str,
        body: String,
        reader: Reader,
        within: Duration,
    ) -> Result<Self, Fault> {
        let began = Instant::now();
        let response = client.post(path, body, within).await?;
        let kind = response.headers().get(CONTENT_TYPE);
        let is_json = kind
            .and_then(|kind| kind.to_str().ok())
            .is_some_and(|kind| kind.trim_start().starts_with("application/json"));
        let left = within.saturating_sub(began.elapsed());
        let mut stream = Self { events: None, reader, first: Vec::new() };
        if is_json {
            // It does not stream.
            let json = timeout(left, client.json(response)).await;
            let json = json.map_err(|_| late("no reply came", within))??;
            stream.reader.read_json(&json, &mut stream.first)?;
            if !stream.reader.has_ended() {
                return Err(Fault::protocol("sent what is no reply"));
            }
            return Ok(stream);
        }
        stream.events = Some(Events::new(response));
        let first = timeout(left, stream.first_pieces(client, within)).await;
        stream.first = first.map_err(|_| late("no piece came", within))??;
        Ok(stream)
    }

    /// The first pieces that are no counts, after all counts as one: these alone may come long before the reply.
    async fn first_pieces(
        &mut self,
        client: &Client,
        within: Duration,
    ) -> Result<Vec<Piece>, Fault> {
        let mut counts: Option<Counts> = None;
        let pieces = loop {
            let Some(pieces) = self.next(client, Patience::within(within)).await? else {
                break Vec::new();
            };
            if !pieces.iter().all(Piece::is_counts) {
                break pieces;
            }
            for piece in pieces {
                if let Piece::Counts(newer) = piece {
                    counts = Some(counts.unwrap_or_default().with(newer));
                }
            }
        };
        Ok(counts.map(Piece::Counts).into_iter().chain(pieces).collect())
    }

    /// The next pieces; `None` at the end.
    ///
    /// # Errors
    /// If the connection breaks, is too slow, or brings what is no reply.
    pub async fn next(
        &mut self,
        client: &Client,
        patience: Patience,
    ) -> Result<Option<Vec<Piece>>, Fault> {
        if !self.first.is_empty() {
            return Ok(Some(std::mem::take(&mut self.first)));
        }
        let Self { events: Some(events), reader, .. } = self else { return Ok(None) };
        let read = async {
            loop {
                let data = events.next(client, patience.event).await?;
                let is_done = data.as_ref().is_some_and(|data| data.trim() == openai::DONE);
                let Some(data) = data.filter(|_| !is_done) else {
                    return match reader.has_ended() {
                        true => Ok((None, is_done)),
                        false => Err(Fault::new(
                            UpstreamFault::Unavailable,
                            "ended its stream before the reply had ended",
                        )),
                    };
                };
                let mut pieces = Vec::new();
                reader.read(&data, &mut pieces)?;
                if !pieces.is_empty() {
                    return Ok((Some(pieces), false));
                }
            }
        };
        let read = timeout_at(patience.end, read).await;
        let (pieces, is_done) = read.map_err(|_| late("no piece came", patience.piece))??;
        if is_done && let Some(events) = self.events.take() {
            events.finish();
        }
        Ok(pieces)
    }
}
