//! What watchers of a request get, and how.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use tokio::sync::mpsc;

use super::ListedRequest;
use crate::mcp::Ran;

/// A part of what a watcher gets: a server-sent event.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    pub event: &'static str,
    pub data: String,
}

impl Frame {
    /// What a request is and how far it is, as an event of this type.
    pub fn request(event: &'static str, listed: &ListedRequest) -> Self {
        let data = serde_json::to_string(listed).expect("a request has string keys only");
        Self { event, data }
    }

    /// The next text of a kind: `reasoning`, `answer` or `call`.
    pub(super) fn text(choice: usize, kind: &str, text: &str) -> Self {
        let data = json!({"choice": choice, "kind": kind, "text": text}).to_string();
        Self { event: "piece", data }
    }

    pub(super) fn call(choice: usize, name: &str, arguments: &str) -> Self {
        let data = json!({"choice": choice, "kind": "call", "name": name, "text": arguments});
        Self { event: "piece", data: data.to_string() }
    }

    /// A call that this server ran.
    pub(super) fn ran(choice: usize, ran: &Ran) -> Self {
        let data = json!({"choice": choice, "kind": "ran", "name": ran.name,
            "text": ran.output, "is_error": ran.is_error});
        Self { event: "piece", data: data.to_string() }
    }
}

/// The sending side of one watcher.
pub struct Watcher {
    pub(super) frames: mpsc::Sender<Frame>,
    pub(super) is_late: Arc<AtomicBool>,
}

impl Watcher {
    /// Whether it still watches.
    pub(super) fn send(&self, frame: Frame) -> bool {
        match self.frames.try_send(frame) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Closed(_)) => false,
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.is_late.store(true, Ordering::Relaxed);
                false
            }
        }
    }
}

/// The receiving side of one watcher.
pub struct Watched {
    pub received: mpsc::Receiver<Frame>,
    pub(super) is_late: Arc<AtomicBool>,
}

impl Watched {
    /// Whether it was cut off because it had fallen behind.
    pub fn is_late(&self) -> bool {
        self.is_late.load(Ordering::Relaxed)
    }
}
