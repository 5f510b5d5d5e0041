//! The parsed reply up to a token, with the counts that limits and rewinds need.

use crate::text::{Phase, Piece, Reply};

/// Most tokens of the empty line after reasoning; further white space is part of the answer.
const GAP_TOKENS: u32 = 4;

/// The parsed reply up to a token.
#[derive(Debug, Clone)]
pub struct ReplyState {
    /// Parses tokens into reasoning, answer and tool calls.
    pub reply: Reply,
    /// Tokens of the reasoning, of the markers around it, and of the empty line after it.
    pub reasoning_tokens: u32,
    /// Tokens of answer and tool calls.
    pub answer_tokens: u32,
    /// Tokens of the empty line after the reasoning.
    gap_tokens: u32,
    /// Bytes of the reasoning, as clients see it.
    pub(super) reasoning_bytes: usize,
    /// Bytes of the answer, as clients see it.
    pub(super) answer_bytes: usize,
}

impl ReplyState {
    /// The state before the first token.
    pub fn new(reply: Reply) -> Self {
        Self {
            reply,
            reasoning_tokens: 0,
            answer_tokens: 0,
            gap_tokens: 0,
            reasoning_bytes: 0,
            answer_bytes: 0,
        }
    }

    /// Tokens of the reply.
    pub fn tokens(&self) -> u32 {
        self.reasoning_tokens + self.answer_tokens
    }

    /// Adds a token; returns the pieces that it completes.
    pub fn push(&mut self, token: u32) -> Vec<Piece> {
        let (before, length) = (self.reply.phase(), self.reply.untaken_text().len());
        let pieces = self.reply.push(token);
        let is_gap = self.is_gap(length);
        self.gap_tokens += u32::from(is_gap);
        // A client that limits its answer may not know of the reasoning, so nothing around that
        // costs the answer.
        let is_reasoning = before == Phase::Reasoning || self.reply.phase() == Phase::Reasoning;
        match is_reasoning || is_gap {
            true => self.reasoning_tokens += 1,
            false => self.answer_tokens += 1,
        }
        for piece in &pieces {
            match piece {
                Piece::Reasoning(text) => self.reasoning_bytes += text.len(),
                Piece::Answer(text) => self.answer_bytes += text.len(),
                Piece::CallDelta(_) | Piece::ToolCall(_) | Piece::Note(_) => {}
            }
        }
        pieces
    }

    /// Returns true if the last token belongs to the empty line between reasoning and answer;
    /// `length` is that of the untaken text before it.
    fn is_gap(&self, length: usize) -> bool {
        let text = self.reply.untaken_text().get(length..).unwrap_or_default();
        let is_blank = !text.is_empty() && text.trim().is_empty();
        let is_before_answer = self.reasoning_tokens > 0 && self.answer_tokens == 0;
        is_blank
            && is_before_answer
            && self.gap_tokens < GAP_TOKENS
            && self.reply.phase() == Phase::Answer
    }
}
