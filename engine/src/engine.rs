//! The handle to the engine thread: requests in, events out. Cheap to clone; holds no arrays.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::activity::ActivityReporter;
use crate::error::{RequestError, Result};
use crate::policy::Policies;
use crate::prefix;
use crate::queue::Queue;
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
    /// Most bytes of text in a request.
    pub prompt_bytes: usize,
    /// Device and number format, for display: `CPU, f32`.
    pub numbers: String,
    /// Hex digest over weights, number format, tokenizer and template. The fingerprint in a reply also
    /// covers its policies.
    pub fingerprint: String,
    /// Names of the profiles.
    pub profiles: Vec<String>,
    /// Reports the contents and the use of the prefix cache.
    pub prefixes: prefix::PrefixReporter,
    /// Reports what runs.
    pub activity: ActivityReporter,
    /// Load time of the model, in seconds since 1970.
    pub loaded: u64,
}

/// Handle to the engine thread.
#[derive(Clone)]
pub struct Engine(Arc<Handle>);

struct Handle {
    queue: Arc<Queue>,
    info: Info,
    policies: Arc<Policies>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.queue.close();
    }
}

impl Engine {
    /// A handle that adds to `queue`, which the engine thread, or its substitute in a test, takes from.
    pub fn new(queue: Arc<Queue>, info: Info, policies: Arc<Policies>) -> Self {
        Self(Arc::new(Handle { queue, info, policies }))
    }

    /// The policies of all profiles.
    pub fn policies(&self) -> &Arc<Policies> {
        &self.0.policies
    }

    /// Facts about the loaded model.
    pub fn info(&self) -> &Info {
        &self.0.info
    }

    /// Number of requests in the queue, without those whose clients have disconnected.
    pub fn waiting(&self) -> usize {
        self.0.queue.waiting()
    }

    /// Whether the engine thread has ended.
    pub fn has_stopped(&self) -> bool {
        *self.0.queue.ended().borrow()
    }

    /// Waits until the engine thread has ended. It ends before [`Engine::stop`] is called, or the last
    /// handle is dropped, only if it cannot go on; then the process should end.
    pub fn ended(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut ended = self.0.queue.ended();
        async move {
            // Fails if the queue is gone, and the engine thread with it.
            let _ = ended.wait_for(|ended| *ended).await;
        }
    }

    /// Ends all requests with [`Error::Stopped`](crate::Error::Stopped), running ones after their
    /// current step, and then the engine thread.
    pub fn stop(&self) {
        self.0.queue.stop();
    }

    /// Queues a request. Dropping the receiver cancels it.
    ///
    /// # Errors
    /// At once: [`RequestError::PromptBytes`] if the request has too much text;
    /// [`RequestError::QueueFull`] if the queue is full; [`Error::Stopped`](crate::Error::Stopped) if
    /// the engine thread ends or has ended.
    pub fn submit(&self, request: Request) -> Result<mpsc::UnboundedReceiver<Event>> {
        let (bytes, limit) = (request.text_bytes(), self.0.info.prompt_bytes);
        if bytes > limit {
            return Err(RequestError::PromptBytes { bytes, limit }.into());
        }
        self.0.queue.add(request)
    }
}
