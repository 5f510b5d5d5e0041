//! A part of a reply, in whichever protocol it came.

use serde_json::Value;
use steersman_request::{FinishReason, Logprob};

/// A part of a reply.
#[derive(Debug, Clone, PartialEq)]
pub enum Piece {
    /// Text of the reasoning.
    Reasoning(String),
    /// Text of the answer.
    Answer(String),
    /// A call begins. Its arguments follow.
    CallStart {
        /// Empty if the upstream gives none.
        id: String,
        /// Name of the function.
        name: String,
        /// What the upstream wants to have back with this call.
        extra: Option<Value>,
    },
    /// The next text of the arguments of the newest call.
    CallArguments(String),
    /// The probability of a token of the answer.
    Logprob(Logprob),
    /// A block that the upstream wants to have back before the calls of this reply.
    Block(Value),
    /// Tokens so far; what is `None` is not known.
    Counts(Counts),
    /// Something that the client should know.
    Note(String),
    /// The reply has ended for this reason. Counts may follow.
    End(FinishReason),
}

impl Piece {
    /// Returns true for counts, which say nothing of how far the reply is.
    pub fn is_counts(&self) -> bool {
        matches!(self, Self::Counts(_))
    }
}

/// Tokens of one request to an upstream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tokens of the prompt.
    pub prompt: Option<u32>,
    /// Tokens of the prompt that were saved at the upstream.
    pub cached: Option<u32>,
    /// Tokens of the reply, reasoning included.
    pub reply: Option<u32>,
    /// Tokens of the reasoning.
    pub reasoning: Option<u32>,
}

impl Counts {
    /// These counts, and those of `newer` where it has them.
    #[must_use]
    pub fn with(self, newer: Self) -> Self {
        Self {
            prompt: newer.prompt.or(self.prompt),
            cached: newer.cached.or(self.cached),
            reply: newer.reply.or(self.reply),
            reasoning: newer.reasoning.or(self.reasoning),
        }
    }
}

/// A number of tokens, capped.
pub fn tokens(value: &Value) -> Option<u32> {
    value.as_u64().map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX).min(u32::MAX / 8))
}

/// A text that is not empty.
pub fn text(value: &Value) -> Option<String> {
    value.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
}
