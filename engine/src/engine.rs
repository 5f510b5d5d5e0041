//! The handle to the engine thread: requests in, events out. Cheap to clone; holds no arrays.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::error::{Error, RequestError, Result};
use crate::policy::Policies;
use crate::prefix;
use crate::request::{Event, Request};

/// Facts about the loaded model, for the server.
#[derive(Debug, Clone)]
pub struct Info {
    /// Name by which clients select it.
    pub model: String,
    /// `model_type` of its `config.json`.
    pub family: String,
    /// Limit on the tokens of prompt and reply together.
    pub context: usize,
    /// Device and number format, for display: `CPU, f32`.
    pub numbers: String,
    /// Hex digest over weights, number format, tokenizer and template. The fingerprint in a reply also
    /// covers its policies.
    pub fingerprint: String,
    /// Names of the profiles.
    pub profiles: Vec<String>,
    /// Reports the contents and the use of the prefix cache.
    pub prefixes: prefix::PrefixReporter,
    /// Load time of the model, in seconds since 1970.
    pub loaded: u64,
}

/// A request and the channel for its events.
pub struct Job {
    /// The request.
    pub request: Request,
    /// Dropping its receiver cancels the request. Unbounded, so that a slow reader cannot block the
    /// engine: it holds at most one reply, which `max_tokens` limits.
    pub events: mpsc::UnboundedSender<Event>,
}

/// Handle to the engine thread.
#[derive(Clone)]
pub struct Engine {
    jobs: mpsc::Sender<Job>,
    info: Arc<Info>,
    policies: Arc<Policies>,
}

impl Engine {
    /// A handle that sends to `jobs`; the receiver is the engine thread, or its substitute in a test.
    pub fn new(jobs: mpsc::Sender<Job>, info: Info, policies: Arc<Policies>) -> Self {
        Self { jobs, info: Arc::new(info), policies }
    }

    /// The policies of all profiles.
    pub fn policies(&self) -> &Arc<Policies> {
        &self.policies
    }

    /// Facts about the loaded model.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Number of requests in the queue.
    pub fn waiting(&self) -> usize {
        self.jobs.max_capacity() - self.jobs.capacity()
    }

    /// Whether the engine thread has ended.
    pub fn has_stopped(&self) -> bool {
        self.jobs.is_closed()
    }

    /// Queues a request. Dropping the receiver cancels it.
    ///
    /// # Errors
    /// [`Error::QueueFull`], at once, when the queue is full; [`Error::Stopped`] when the engine
    /// thread has ended.
    pub fn submit(&self, request: Request) -> Result<mpsc::UnboundedReceiver<Event>> {
        let (events, receiver) = mpsc::unbounded_channel();
        match self.jobs.try_send(Job { request, events }) {
            Ok(()) => Ok(receiver),
            Err(mpsc::error::TrySendError::Full(_)) => {
                Err(Error::Request(RequestError::QueueFull { limit: self.jobs.max_capacity() }))
            }
            Err(mpsc::error::TrySendError::Closed(_)) => Err(Error::Stopped),
        }
    }
}
