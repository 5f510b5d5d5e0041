//! A reply of an upstream that has begun: its events as pieces, in whichever protocol they come.

use std::time::Duration;

use http::header::CONTENT_TYPE;
use steersman_request::UpstreamFault;
use tokio::time::{Instant, timeout};

use crate::client::{Client, late};
use crate::fault::Fault;
use crate::piece::Piece;
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
        // Counts alone may come long before the reply.
        while stream.first.iter().all(|piece| matches!(piece, Piece::Counts(_))) {
            let before = std::mem::take(&mut stream.first);
            let left = within.saturating_sub(began.elapsed());
            let next = stream.next(client, left).await?;
            let Some(next) = next else {
                stream.first = before;
                return Ok(stream);
            };
            stream.first = before.into_iter().chain(next).collect();
        }
        Ok(stream)
    }

    /// The next pieces; `None` at the end. Waits at most `within` this time.
    ///
    /// # Errors
    /// If the connection breaks, is too slow, or brings what is no reply.
    pub async fn next(
        &mut self,
        client: &Client,
        within: Duration,
    ) -> Result<Option<Vec<Piece>>, Fault> {
        if !self.first.is_empty() {
            return Ok(Some(std::mem::take(&mut self.first)));
        }
        let Some(events) = &mut self.events else { return Ok(None) };
        loop {
            let data = events.next(client, within).await?;
            let is_done = data.as_ref().is_some_and(|data| data.trim() == openai::DONE);
            let Some(data) = data.filter(|_| !is_done) else {
                if is_done && let Some(events) = self.events.take() {
                    events.finish();
                }
                return match self.reader.has_ended() {
                    true => Ok(None),
                    false => Err(Fault::new(
                        UpstreamFault::Unavailable,
                        "ended its stream before the reply had ended",
                    )),
                };
            };
            let mut pieces = Vec::new();
            self.reader.read(&data, &mut pieces)?;
            if !pieces.is_empty() {
                return Ok(Some(pieces));
            }
        }
    }
}
