//! Reads a stream of server-sent events within limits: bytes of an event and of the whole, and a deadline for each.

use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream};
use futures_util::{Stream, StreamExt};
use http::Response;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use sse_stream::{Sse, SseStream};
use tokio::time::timeout;

use crate::client::{Client, causes, late};
use crate::fault::Fault;

/// Most bytes of one event.
const EVENT_BYTES: usize = 4 << 20;

/// Most bytes of one reply.
const REPLY_BYTES: usize = 256 << 20;

/// Time in which a response must end after its last event, if its connection is to serve further requests.
const END_TIME: Duration = Duration::from_secs(1);

/// The events of a response.
pub struct Events {
    events: BoxStream<'static, Result<Sse, sse_stream::Error>>,
}

/// Why a stream is not read on.
#[derive(Debug)]
struct Broken(String);

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Broken {}

/// What was counted of a stream.
#[derive(Default)]
struct Counted {
    all: usize,
    of_event: usize,
    /// The last byte was the end of a line.
    ended_line: bool,
}

impl Counted {
    /// Counts bytes.
    fn add(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        self.all += bytes.len();
        for byte in bytes {
            self.of_event += 1;
            match byte {
                b'\n' if self.ended_line => self.of_event = 0,
                b'\n' => self.ended_line = true,
                b'\r' => {}
                _ => self.ended_line = false,
            }
            if self.of_event > EVENT_BYTES {
                return Err(Broken("an event of its stream is too large".into()));
            }
        }
        match self.all > REPLY_BYTES {
            true => Err(Broken("its reply is too large".into())),
            false => Ok(()),
        }
    }
}

impl Events {
    /// The events of `response`.
    pub fn new(response: Response<Incoming>) -> Self {
        let bytes = response.into_body().into_data_stream();
        Self::of(bytes.map(|bytes| bytes.map_err(|error| Broken(causes(&error)))))
    }

    fn of(bytes: impl Stream<Item = Result<Bytes, Broken>> + Send + 'static) -> Self {
        let state = (bytes.boxed(), Counted::default());
        let bounded = stream::unfold(state, async |(mut bytes, mut counted)| {
            let next = bytes.next().await?;
            let next = next.and_then(|bytes| counted.add(&bytes).map(|()| bytes));
            Some((next, (bytes, counted)))
        });
        Self { events: SseStream::from_bytes_stream(bounded.boxed()).fuse().boxed() }
    }

    /// The data of the next event, `None` at the end. Waits at most `within` this time.
    ///
    /// # Errors
    /// If the connection breaks, or is too slow, or an event is too large.
    pub async fn next(
        &mut self,
        client: &Client,
        within: Duration,
    ) -> Result<Option<String>, Fault> {
        let next = async {
            loop {
                match self.events.next().await {
                    None => return Ok(None),
                    Some(Err(error)) => return Err(client.broken(&error)),
                    // Comments and pings have none.
                    Some(Ok(event)) => match event.data {
                        Some(data) if !data.is_empty() => return Ok(Some(data)),
                        _ => {}
                    },
                }
            }
        };
        timeout(within, next).await.map_err(|_| late("no piece came", within))?
    }

    /// Reads what follows the last event in a task of its own. A response that is dropped before its end closes its
    /// connection, and the next request to the upstream would have to open another.
    pub fn finish(mut self) {
        tokio::spawn(async move {
            let rest = async { while let Some(Ok(_)) = self.events.next().await {} };
            let _ = timeout(END_TIME, rest).await;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_event_of_any_length_is_not_held() {
        let line = Bytes::from(vec![b'x'; 64 << 10]);
        let endless = stream::repeat_with(move || Ok(line.clone()));
        let client = Client::new(&crate::UpstreamConfig::default(), None);
        let next = Events::of(endless).next(&client, Duration::from_secs(60)).await;
        assert!(next.unwrap_err().problem.contains("an event of its stream is too large"));
    }

    #[tokio::test]
    async fn events_are_read_whatever_pieces_they_come_in() {
        let text =
            ": ping\n\ndata: {\"a\":1}\n\nevent: x\ndata: 2\r\n\r\ndata:\n\ndata: [DONE]\n\n";
        let bytes: Vec<_> = text.bytes().map(|byte| Ok(Bytes::from(vec![byte]))).collect();
        let client = Client::new(&crate::UpstreamConfig::default(), None);
        let mut events = Events::of(stream::iter(bytes));
        let mut read = Vec::new();
        while let Some(data) = events.next(&client, Duration::from_secs(60)).await.unwrap() {
            read.push(data);
        }
        assert_eq!(read, ["{\"a\":1}", "2", "[DONE]"]);
    }
}
