//! A request with the channel for its events, on its way from the handle to a sequence.

use std::time::Instant;

use tokio::sync::mpsc;

use crate::error::{Error, RequestError, Result};
use crate::request::{Choice, Event, Request};

/// A request and the channel for its events.
pub struct Job {
    /// The request.
    pub request: Request,
    /// Dropping its receiver cancels the request. Unbounded, so that a slow reader cannot block the
    /// engine: it holds at most one reply, which `max_tokens` limits.
    pub events: mpsc::UnboundedSender<Event>,
}

impl Job {
    /// Whether the request is still wanted, before more is done for it.
    ///
    /// # Errors
    /// [`RequestError::Cancelled`] if its client has disconnected, [`RequestError::Deadline`] if its
    /// time is over.
    pub fn check(&self, stage: &'static str) -> Result<()> {
        if self.events.is_closed() {
            return Err(RequestError::Cancelled.into());
        }
        match self.request.deadline {
            Some(deadline) if Instant::now() >= deadline => {
                Err(RequestError::Deadline { stage }.into())
            }
            _ => Ok(()),
        }
    }
}

/// A choice of a request beside the first, and the channel for its events.
pub struct OtherChoice {
    /// How it differs from the first.
    pub choice: Choice,
    /// As [`Job::events`].
    pub events: mpsc::UnboundedSender<Event>,
}

impl OtherChoice {
    /// The choice as a request of its own, whose first choice is `first`.
    pub fn of(self, first: &Request) -> Job {
        Job { request: self.choice.of(first), events: self.events }
    }
}

/// Ends the choices of a request with `error`, the first of them first.
pub(crate) fn fail_all(channels: Vec<mpsc::UnboundedSender<Event>>, error: Error) {
    let copies: Vec<Error> = channels.iter().skip(1).map(|_| error.shared()).collect();
    for (events, error) in channels.into_iter().zip(std::iter::once(error).chain(copies)) {
        // Fails if the client has disconnected.
        let _ = events.send(Event::Failed(error));
    }
}
