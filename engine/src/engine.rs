//! The handle to the engine thread: requests in, events out. Cheap to clone, free of arrays.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::error::{Error, Result};
use crate::policy::Policies;
use crate::prefix;
use crate::request::{Event, Request};

/// What the server may know of the loaded model.
#[derive(Debug, Clone)]
pub struct Info {
    /// Name under which clients ask for it.
    pub model: String,
    /// `model_type` of its `config.json`.
    pub family: String,
    /// Tokens of prompt, thought and answer together.
    pub context: usize,
    /// Device and type of the numbers, for people: `CPU, f32`.
    pub numbers: String,
    /// Hex digest over weights, numeric format and text: that of replies has their policies as well.
    pub fingerprint: String,
    /// Names of the profiles.
    pub profiles: Vec<String>,
    /// Tells what is saved of earlier requests, and of what use it was.
    pub prefixes: prefix::PrefixReporter,
    /// When the model was loaded, in seconds since 1970.
    pub loaded: u64,
}

/// A request with the channel that its events go to.
pub struct Job {
    /// What is asked.
    pub request: Request,
    /// Where the answer goes; when its receiver is dropped, the request is cancelled.
    /// Unbounded, so that a slow reader cannot hold up the engine: it fills with one answer, which
    /// `max_tokens` bounds.
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
    /// A handle over `jobs`, whose receiver is the engine thread (or a test's stand-in).
    pub fn new(jobs: mpsc::Sender<Job>, info: Info, policies: Arc<Policies>) -> Self {
        Self { jobs, info: Arc::new(info), policies }
    }

    /// The policies in force, and what they decided.
    pub fn policies(&self) -> &Arc<Policies> {
        &self.policies
    }

    /// What is served.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Requests that wait in the queue now.
    pub fn waiting(&self) -> usize {
        self.jobs.max_capacity() - self.jobs.capacity()
    }

    /// Whether the engine thread has ended, so that nothing is served any more.
    pub fn has_stopped(&self) -> bool {
        self.jobs.is_closed()
    }

    /// Queues a request. Dropping the receiver cancels it.
    ///
    /// # Errors
    /// [`Error::QueueFull`] at once when the bounded queue is full; [`Error::Stopped`] when the
    /// thread has ended.
    pub fn submit(&self, request: Request) -> Result<mpsc::UnboundedReceiver<Event>> {
        let (events, receiver) = mpsc::unbounded_channel();
        match self.jobs.try_send(Job { request, events }) {
            Ok(()) => Ok(receiver),
            Err(mpsc::error::TrySendError::Full(_)) => {
                Err(Error::QueueFull { limit: self.jobs.max_capacity() })
            }
            Err(mpsc::error::TrySendError::Closed(_)) => Err(Error::Stopped),
        }
    }
}
