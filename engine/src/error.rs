//! The engine's errors, sorted by what the caller can do about them.

use std::path::PathBuf;

use crate::store::StoreError;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong in the engine.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The prompt does not fit: shorten it.
    #[error("the prompt is {tokens} tokens, the model's context holds {limit}")]
    ContextTooLong {
        /// Tokens of the rendered prompt.
        tokens: usize,
        /// Tokens that fit.
        limit: usize,
    },
    /// The prompt is longer than its profile allows: shorten it.
    #[error(
        "the prompt is {tokens} tokens, the profile `{profile}` allows {limit} \
         (limits.prompt_tokens)"
    )]
    PromptTooLong {
        /// Tokens of the rendered prompt.
        tokens: usize,
        /// Tokens that are allowed.
        limit: usize,
        /// The profile.
        profile: String,
    },
    /// The queue is full: try again later.
    #[error("{limit} requests are waiting already; try again later")]
    QueueFull {
        /// Bound of the queue.
        limit: usize,
    },
    /// The engine thread has ended: restart the server.
    #[error("the engine has stopped")]
    Stopped,
    /// The conversation cannot be rendered by the model's chat template: change the messages.
    #[error("the chat template refuses these messages: {0}")]
    Template(String),
    /// Something in the request is off: change it.
    #[error("{field}: {problem}")]
    Invalid {
        /// Name of the offending field.
        field: &'static str,
        /// What is wrong with it and what would be right.
        problem: String,
    },
    /// A file of the model is missing, damaged or of an unknown kind.
    #[error("{path}: {problem}")]
    Model {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong with it and what to do.
        problem: String,
    },
    /// A policy failed where its profile says that this ends the request (`on_failure = "closed"`),
    /// or could not be loaded.
    #[error("policy `{policy}`: {problem}")]
    Policy {
        /// Name of the policy.
        policy: String,
        /// What happened, in which hook.
        problem: String,
    },
    /// A policy took longer in a hook than `policy.deadline_ms` allows, where its profile fails closed.
    /// Fuel bounds what it computes, so that the machine had other work is as likely a cause.
    #[error("policy `{policy}`: {hook}: exceeded its deadline of {deadline_ms} ms")]
    PolicyLate {
        /// Name of the policy.
        policy: String,
        /// The hook, `on-step`, or `start`.
        hook: String,
        /// The deadline.
        deadline_ms: u64,
    },
    /// A file that a profile's `warm` names cannot be used.
    #[error("profiles.{profile}.warm: {path}: {problem}")]
    Warm {
        /// The profile.
        profile: String,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The prefix store cannot be used. Never ends a request: losing it costs time only.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Saved state has other tensors than this model's caches. Never ends a request.
    #[error("saved state does not fit this model: {0}")]
    SavedState(String),
    /// MLX rejected an operation: a bug, or memory ran out.
    #[error("MLX: {0}")]
    Array(String),
}
