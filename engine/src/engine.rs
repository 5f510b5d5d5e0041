//! The handle to the engine thread: requests in, events out. Cheap to clone; holds no arrays.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use crate::activity::ActivityReporter;
use crate::error::{RequestError, Result};
use crate::policy::Policies;
use crate::prefix;
use crate::request::{Choices, Event, Request};
use crate::schedule::queue::Queue;
use crate::text::{Text, Variables};

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
    /// Whether the configuration enables the prefix store, also if it could not be opened.
    pub store_enabled: bool,
    /// Tokenizer and chat template.
    pub text: Text,
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

    /// How long the request has been prepared whose preparation has taken longest; `None` if none is.
    pub fn preparing_for(&self) -> Option<Duration> {
        self.0.queue.preparing_for()
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

    /// The prompt of `request` as text, before its policies change it. Blocks while it renders.
    ///
    /// # Errors
    /// The errors of the chat template; [`RequestError::PromptBytes`] if the request has too much text.
    pub fn render(&self, request: &Request) -> Result<String> {
        self.check_bytes(request)?;
        self.0.info.text.render(&Variables::of(request, self.reasoning(request)))
    }

    /// The prompt of `request` as tokens, before its policies change it. Blocks while it renders and
    /// encodes.
    ///
    /// # Errors
    /// The errors of the chat template and the tokenizer; [`RequestError::PromptBytes`] if the request has
    /// too much text.
    pub fn tokenize(&self, request: &Request) -> Result<Vec<u32>> {
        self.check_bytes(request)?;
        let text = &self.0.info.text;
        match &request.prompt {
            Some(prompt) => text.raw_prompt(prompt),
            None => text.prompt(&Variables::of(request, self.reasoning(request))),
        }
    }

    /// The text of `tokens`, which the client sent as `field`, with special tokens.
    ///
    /// # Errors
    /// [`RequestError::Field`] if one is not in the vocabulary.
    pub fn detokenize(&self, field: &'static str, tokens: &[u32]) -> Result<String> {
        let text = &self.0.info.text;
        if let Some(token) = text.unknown_token(tokens) {
            let size = text.vocab_size();
            let problem = format!("token {token} is not one of the model's {size} tokens");
            return Err(RequestError::Field { field, problem }.into());
        }
        Ok(text.decode_all(tokens))
    }

    /// Whether the prompt of `request` is rendered for reasoning, unless a policy decides otherwise.
    fn reasoning(&self, request: &Request) -> Option<bool> {
        let can_reason = self.0.info.text.supports_reasoning();
        can_reason.then_some(request.reasoning.unwrap_or(true)).or(request.reasoning)
    }

    /// Queues a request. Dropping the receiver cancels it.
    ///
    /// # Errors
    /// At once: [`RequestError::PromptBytes`] if the request has too much text;
    /// [`RequestError::UnknownBias`] if it biases a token that the model does not have;
    /// [`RequestError::QueueFull`] if the queue is full; [`Error::Stopped`](crate::Error::Stopped) if
    /// the engine thread ends or has ended.
    pub fn submit(&self, request: Request) -> Result<mpsc::UnboundedReceiver<Event>> {
        self.check(&request)?;
        self.0.queue.add(request)
    }

    /// Queues the requests of a body, each with its choices, whose prompt is computed once. They hold one
    /// place in the queue, and each takes a turn of their profile. Returns a receiver for each choice, request
    /// by request. Dropping a receiver cancels its choice; before the prompt has run, dropping that of the
    /// first cancels all choices of the request.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn submit_all(&self, body: Vec<Choices>) -> Result<Vec<mpsc::UnboundedReceiver<Event>>> {
        body.iter().try_for_each(|choices| self.check(&choices.request))?;
        self.0.queue.add_all(body)
    }

    /// Checks what [`Engine::submit`] checks at once.
    ///
    /// # Errors
    /// [`RequestError::PromptBytes`] and [`RequestError::UnknownBias`].
    pub fn check(&self, request: &Request) -> Result<()> {
        self.check_bytes(request)?;
        let size = self.0.info.text.vocab_size();
        match request.biases.iter().find(|bias| bias.token as usize >= size) {
            Some(bias) => Err(RequestError::UnknownBias { token: bias.token, size }.into()),
            None => Ok(()),
        }
    }

    fn check_bytes(&self, request: &Request) -> Result<()> {
        let (bytes, limit) = (request.text_bytes(), self.0.info.prompt_bytes);
        if bytes > limit {
            return Err(RequestError::PromptBytes { bytes, limit }.into());
        }
        Ok(())
    }
}
