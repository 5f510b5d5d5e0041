//! The engine's errors, by who can act on them: the client ([`RequestError`]), the operator
//! ([`ConfigError`], [`StoreError`]), the author of a policy ([`steersman_policy_host::Error`]).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use steersman_gguf::files::on_disk;
use steersman_policy_host as policy;

pub use crate::store_error::StoreError;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of the engine.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request is invalid or cannot be accepted now.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The configuration or a file of the model is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A policy cannot be loaded, or failed in a profile that fails closed.
    #[error(transparent)]
    Policy(#[from] policy::Error),
    /// The prefix store cannot be used. Never ends a request: losing it costs time only.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Saved state has other tensors than this model's caches. Never ends a request.
    #[error("saved state does not fit this model: {0}")]
    SavedState(String),
    /// The engine thread has ended: restart the server.
    #[error("the engine has stopped")]
    Stopped,
    /// A bug ended the request; the engine goes on.
    #[error("panic while the request was {stage}: {message}")]
    Panic {
        /// What was done for the request then, as in [`RequestError::Deadline`].
        stage: &'static str,
        /// The panic's message.
        message: String,
    },
    /// MLX rejected an operation, because of a bug or for lack of memory.
    #[error("MLX: {0}")]
    Array(String),
}

/// A request that the client must change or repeat.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RequestError {
    /// The prompt does not fit into the context.
    #[error("the prompt has {tokens} tokens, the model's context holds {limit}")]
    ContextTooLong {
        /// Tokens of the rendered prompt.
        tokens: usize,
        /// Tokens that fit.
        limit: usize,
    },
    /// The prompt is longer than its profile allows.
    #[error(
        "the prompt has {tokens} tokens, the profile `{profile}` allows {limit} \
         (limits.prompt_tokens)"
    )]
    PromptTooLong {
        /// Tokens of the rendered prompt.
        tokens: usize,
        /// Tokens that the profile allows.
        limit: usize,
        /// The profile.
        profile: String,
    },
    /// The queue is full; the request may be repeated later.
    #[error("the queue is full, its limit is {limit} (engine.queue); try again later")]
    QueueFull {
        /// Length of the queue.
        limit: usize,
    },
    /// The client has disconnected, so that nobody gets this error.
    #[error("the client has disconnected")]
    Cancelled,
    /// The request did not end before its deadline.
    #[error(
        "the request was {stage} when its time was over; repeat it later, ask for a shorter reply, \
         or raise its timeout"
    )]
    Deadline {
        /// What was done for the request then: `waiting`, `being prepared`, `being decoded`.
        stage: &'static str,
    },
    /// The texts of the request are longer than prompts may be, before they are tokenized.
    #[error("the request has {bytes} bytes of text, the limit is {limit} (engine.prompt_bytes)")]
    PromptBytes {
        /// Bytes of messages, tools and template variables.
        bytes: usize,
        /// Bytes that are allowed.
        limit: usize,
    },
    /// The request needs more memory than there is; it may be repeated later.
    #[error(
        "the request needs {needed} bytes of memory, {available} are available of the \
         {limit} that the engine may use (engine.memory_limit_bytes)"
    )]
    Memory {
        /// Bytes that it takes at most.
        needed: u64,
        /// Bytes that are free after the prefix cache was evicted.
        available: u64,
        /// Most bytes of weights, requests and prefix cache together.
        limit: u64,
    },
    /// The model's chat template rejects the conversation.
    #[error("the chat template rejects the conversation: {0}")]
    Template(String),
    /// The prompt has no tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// A prompt of token ids has one that the model does not have.
    #[error("token {token} of the prompt is not one of the model's {size} tokens")]
    UnknownToken {
        /// The id.
        token: u32,
        /// The number of tokens of the model.
        size: usize,
    },
    /// The tokenizer cannot encode a text.
    #[error("the model's tokenizer cannot encode this text: {0}")]
    Tokenizer(String),
    /// The form that the request demands of the reply cannot be enforced.
    #[error("{path}: {problem}")]
    Structure {
        /// Where in the request, as `response_format.json_schema.schema.properties.a.not`.
        path: String,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// A policy refuses the request.
    #[error("{message}")]
    Refused {
        /// HTTP status, 400 to 499.
        status: u16,
        /// What the policy tells the client.
        message: String,
        /// Seconds after which the client may repeat the request; `None` if the policy does not say.
        retry_after_s: Option<u32>,
    },
    /// A policy routes the request: it is to be sent to this model or profile instead.
    #[error("a policy routes the request to `{route}`, which this place cannot follow")]
    Routed {
        /// One of `routes` of the profile.
        route: String,
    },
    /// The destination to which a policy routes the request cannot take it.
    #[error("a policy routes the request to `{route}`, which cannot take it: {problem}")]
    RouteClosed {
        /// One of `routes` of the profile.
        route: String,
        /// Why not.
        problem: String,
    },
    /// The client adds to the logit of a token that the model does not have.
    #[error("logit_bias.{token}: the model has {size} tokens, with the ids from 0 on")]
    UnknownBias {
        /// The id.
        token: u32,
        /// The number of tokens of the model.
        size: usize,
    },
    /// A field is invalid.
    #[error("{field}: {problem}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// An upstream refuses the request: its words, without its key.
    #[error("the upstream `{upstream}` refuses the request: {message}")]
    UpstreamRefused {
        /// Name of the upstream.
        upstream: String,
        /// HTTP status, 400 to 499.
        status: u16,
        /// The message of the upstream.
        message: String,
    },
    /// An upstream cannot answer, or not now.
    #[error("the upstream `{upstream}` {problem}")]
    Upstream {
        /// Name of the upstream.
        upstream: String,
        /// Who is to do what.
        fault: UpstreamFault,
        /// What is wrong, without its key.
        problem: String,
        /// Seconds after which it may be asked again, if that is known.
        retry_after_s: Option<u64>,
    },
}

/// Why an upstream did not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpstreamFault {
    /// It, or its limits in the configuration, take no more requests now.
    Busy,
    /// It cannot be reached, is overloaded, or has failed so often that it is not asked.
    Unavailable,
    /// It sent something else than a reply.
    Failed,
    /// It took too long.
    TimedOut,
}

impl RequestError {
    /// Returns true if another model may answer the request instead.
    pub fn is_of_upstream(&self) -> bool {
        matches!(self, Self::Upstream { .. })
    }
}

/// A problem that the operator can solve.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A key of the configuration is out of range or does not fit the model.
    #[error("{field}: {problem}")]
    Key {
        /// The key.
        field: &'static str,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// A profile has a name or values that cannot be used.
    #[error("profiles.{}{key}: {problem}", profile.escape_debug())]
    Profile {
        /// The profile.
        profile: String,
        /// The key in the profile, with a dot before it; empty for the profile itself.
        key: &'static str,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// A file of the model is missing, damaged or of an unknown kind.
    #[error("{}: {problem}", on_disk(path).display())]
    Model {
        /// The file or folder. Below a GGUF file it is one that the file stands for, and that no user knows.
        path: PathBuf,
        /// What is wrong and what to do.
        problem: String,
    },
    /// A file in a profile's `warm` cannot be used.
    #[error("profiles.{profile}.warm: {path}: {problem}")]
    Warm {
        /// The profile.
        profile: String,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

impl Error {
    /// This error of several requests, for one of them.
    #[must_use]
    pub fn shared(&self) -> Self {
        match self {
            Self::Panic { stage, message } => Self::Panic { stage, message: message.clone() },
            Self::Array(problem) => Self::Array(problem.clone()),
            Self::Request(error) => Self::Request(error.clone()),
            Self::Stopped => Self::Stopped,
            error => Self::Array(error.to_string()),
        }
    }
}

/// Does `work` for a request; a panic becomes [`Error::Panic`]. What `work` changes may be left
/// halfway: the caller drops it.
///
/// # Errors
/// As `work`, and if it panics.
pub fn catch_panic<T>(stage: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_string());
        let message = text.or_else(|| panic.downcast_ref().cloned());
        Err(Error::Panic { stage, message: message.unwrap_or_else(|| "no message".into()) })
    })
}

impl From<steersman_jinja::RenderError> for Error {
    fn from(error: steersman_jinja::RenderError) -> Self {
        RequestError::Template(error.0).into()
    }
}

impl From<policy::Failure> for Error {
    fn from(failure: policy::Failure) -> Self {
        Self::Policy(failure.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The user of `x.gguf` read of `x.gguf/config.json`, which is nowhere.
    #[test]
    fn a_problem_of_a_model_names_the_file_that_the_user_has() {
        let folder = tempfile::tempdir().unwrap();
        let gguf = folder.path().join("x.gguf");
        std::fs::write(&gguf, "GGUF").unwrap();
        for (path, shown) in [
            (gguf.join("config.json"), &gguf),
            (gguf.join("chat_template.jinja"), &folder.path().join("x.jinja")),
            (gguf.clone(), &gguf),
            (folder.path().join("config.json"), &folder.path().join("config.json")),
        ] {
            let error = ConfigError::Model { path, problem: "has no layers".into() };
            assert_eq!(error.to_string(), format!("{}: has no layers", shown.display()));
        }
    }
}
