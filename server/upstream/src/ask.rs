//! What a request asks an upstream for, which each protocol writes as a body.

use steersman_policy_host::SamplingPatch;
use steersman_request::{Continued, Request};

use crate::capability::Capabilities;
use crate::memory::Memory;

/// What a request asks an upstream for.
#[derive(Clone, Copy)]
pub struct Ask<'a> {
    /// The upstream's name of the model.
    pub model: &'a str,
    /// The request, after its policies.
    pub request: &'a Request,
    /// What the upstream can.
    pub capabilities: &'a Capabilities,
    /// Whether to reason; `None` leaves it to the upstream.
    pub reasoning: Option<bool>,
    /// Most reasoning tokens, if somebody limits them.
    pub budget: Option<u32>,
    /// Sampling parameters; those that are not set are the upstream's.
    pub sampling: SamplingPatch,
    /// Most tokens of the reply.
    pub max_tokens: u32,
    /// The message that it continues.
    pub continuation: Option<&'a Continuation>,
    /// What the upstream wants back with calls of earlier replies.
    pub memory: &'a Memory,
}

impl Ask<'_> {
    /// Returns true if the reasoning before a call of the current turn is not known any more.
    pub fn lacks_blocks(&self) -> bool {
        let turn = self.request.messages.iter().rev().take_while(|one| one.role != "user");
        let mut calls = turn.filter_map(|message| message.tool_calls.first());
        calls.any(|call| self.memory.before_call(&call.id).is_empty())
    }
}

/// A message of the assistant that the upstream is to continue.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Continuation {
    /// Its reasoning.
    pub reasoning: String,
    /// Whether the reasoning goes on.
    pub is_open: bool,
    /// Its answer so far.
    pub answer: String,
}

impl Continuation {
    /// The message that the client wants continued.
    pub fn of_client(request: &Request) -> Option<Self> {
        let (message, part) = (request.messages.last()?, request.continues?);
        Some(Self {
            reasoning: message.reasoning_content.clone().unwrap_or_default(),
            is_open: part == Continued::Reasoning,
            answer: message.content.clone(),
        })
    }

    /// This message after what the client had of it.
    #[must_use]
    pub fn after(self, before: Option<Self>) -> Self {
        match before {
            None => self,
            Some(before) => Self {
                reasoning: before.reasoning + &self.reasoning,
                is_open: self.is_open,
                answer: before.answer + &self.answer,
            },
        }
    }
}
