//! What the engine answers with: events, token counts, and reasons of the end.

use super::{CallDelta, ToolCall};
use crate::error::Error;
use crate::policy::Labels;

/// The probability of a token of the answer, from the logits after biases, penalties and the mask of the
/// form, before temperature and filters.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprob {
    /// The committed token.
    pub token: TokenLogprob,
    /// The likeliest tokens, likeliest first.
    pub top: Vec<TokenLogprob>,
}

/// A token of the prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptToken {
    /// Its text, which need not be whole characters.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability after the tokens before it; `None` for the first.
    pub logprob: Option<f32>,
    /// The likeliest tokens in its place, likeliest first.
    pub top: Vec<TokenLogprob>,
}

/// A token with its logarithmic probability.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    /// Its text, which need not be whole characters.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// Progress of a request, in this order: `Started`, pieces of the reply, then one `Finished` or
/// `Failed`; or `Failed` alone.
#[derive(Debug)]
pub enum Event {
    /// The request was admitted.
    Started {
        /// Hex digest over weights, numeric format and policies: equal fingerprints mean equal
        /// replies to equal requests.
        fingerprint: String,
        /// [`Usage::prompt_tokens`]
        prompt_tokens: u32,
        /// [`Usage::cached_tokens`]
        cached_tokens: u32,
        /// Most tokens of the reply: the smallest limit of client, plan, profile and engine.
        max_tokens: u32,
        /// Most tokens of answer and tool calls, if they are limited apart from the reasoning.
        max_answer_tokens: Option<u32>,
    },
    /// The prompt's tokens as they were counted, which `Started` could not say: an upstream counts them while it replies.
    PromptCounted {
        /// [`Usage::prompt_tokens`]
        prompt_tokens: u32,
        /// [`Usage::cached_tokens`]
        cached_tokens: u32,
    },
    /// A policy has routed the request to another model or profile, or its upstream could not answer and a fallback does. This event precedes `Started`. No model
    /// sends it: the follower of [`RequestError::Routed`](crate::RequestError::Routed) does.
    Routed {
        /// Name of the model.
        model: String,
        /// The profile.
        profile: String,
    },
    /// The next token of the prompt; only with
    /// [`Request::prompt_logprobs`](super::Request::prompt_logprobs), and never from a choice beside the first, whose
    /// prompt does not run.
    PromptToken(PromptToken),
    /// The embedding of the prompt, of length 1; only with [`Request::embedding`](super::Request::embedding).
    Embedding(Vec<f32>),
    /// The next piece of the reasoning.
    Reasoning(String),
    /// The next token of the answer, before the piece of which it is a part; only with
    /// [`Request::logprobs`](super::Request::logprobs). After a raw prompt, reasoning is part of the answer.
    Logprob(Logprob),
    /// The next piece of the answer.
    Answer(String),
    /// A policy rewound the reply: the client must drop this much of the text sent so far.
    Rewound {
        /// Bytes to drop from the end of the reasoning.
        reasoning: usize,
        /// Bytes to drop from the end of the answer; 0 unless [`Request::revisable`](super::Request::revisable).
        answer: usize,
    },
    /// The next piece of a tool call that is being written; only with
    /// [`Request::streams_calls`](super::Request::streams_calls).
    CallDelta(CallDelta),
    /// A complete tool call, after its pieces if there were any. A call that a limit cut off, or that became
    /// malformed, has pieces only, which are no JSON; the reason of the end is then [`FinishReason::Length`].
    ToolCall(ToolCall),
    /// What was done to the reply, for operators: an action of a policy, in words.
    Note {
        /// Tokens of the reply before it.
        tokens: u32,
        /// Also one of [`Finished::notes`].
        note: String,
    },
    /// The request succeeded; nothing follows.
    Finished(Finished),
    /// The request failed; nothing follows.
    Failed(Error),
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    /// Why the reply ended.
    pub reason: FinishReason,
    /// Token counts.
    pub usage: Usage,
    /// What policies did, in words, oldest first; also in the log.
    pub notes: Vec<String>,
    /// What policies tell the client: names, each once, and values.
    pub labels: Labels,
}

/// Why a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended its turn.
    Stop,
    /// This stop string was found.
    StopString(String),
    /// The reply reached `max_tokens`, or the context is full.
    Length,
    /// The turn ended with tool calls.
    ToolCalls,
    /// A policy ended the request, for this reason.
    Policy(String),
}

/// Token counts of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the rendered prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens restored from saved state instead of computed.
    pub cached_tokens: u32,
    /// Reasoning tokens, including markers and injected text.
    pub reasoning_tokens: u32,
    /// Tokens of the answer and of tool calls, including injected text.
    pub answer_tokens: u32,
    /// Drafted tokens.
    pub drafted_tokens: u32,
    /// Drafted tokens that were accepted; they also count as reasoning or answer tokens.
    pub accepted_tokens: u32,
    /// Tokens that the form of the reply left no choice about, and that were not sampled; they also
    /// count as answer tokens.
    pub forced_tokens: u32,
    /// Layers whose feed-forward block every pass skipped, as `engine.skip_kl` allows.
    pub skipped_layers: u32,
}

impl Usage {
    /// Tokens of the reply.
    pub fn reply_tokens(&self) -> u32 {
        self.reasoning_tokens + self.answer_tokens
    }
}

impl std::ops::Add for Usage {
    type Output = Self;

    /// The counts of two requests together.
    fn add(self, other: Self) -> Self {
        Self {
            prompt_tokens: self.prompt_tokens.saturating_add(other.prompt_tokens),
            cached_tokens: self.cached_tokens.saturating_add(other.cached_tokens),
            reasoning_tokens: self.reasoning_tokens.saturating_add(other.reasoning_tokens),
            answer_tokens: self.answer_tokens.saturating_add(other.answer_tokens),
            drafted_tokens: self.drafted_tokens.saturating_add(other.drafted_tokens),
            accepted_tokens: self.accepted_tokens.saturating_add(other.accepted_tokens),
            forced_tokens: self.forced_tokens.saturating_add(other.forced_tokens),
            skipped_layers: self.skipped_layers.max(other.skipped_layers),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An upstream may send any counts, in each round of a reply: their sums overflowed.
    #[test]
    fn counts_of_many_requests_have_an_end() {
        let most = Usage { prompt_tokens: u32::MAX / 2, answer_tokens: 7, ..Usage::default() };
        let all = (0..9).fold(Usage::default(), |all, _| all + most);
        assert_eq!((all.prompt_tokens, all.answer_tokens), (u32::MAX, 63));
    }
}
