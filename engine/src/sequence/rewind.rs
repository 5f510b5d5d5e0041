//! Rewinds the reply when a policy asks for it: first its tokens and text, then the cache.
//!
//! The state of the reply at an earlier token is computed by pushing the tokens of the phase again,
//! without sending them; the client gets an event to drop the text after it. The cache resumes from the
//! newest checkpoint that is early enough, or from saved state, and the remaining tokens run again: a
//! rewind costs time and changes no number.

use mlx_rs::Array;

use super::Sequence;
use crate::cache::Checkpoint;
use crate::error::{Error, Result};
use crate::lazy::submit;
use crate::policy::events::Watch;
use crate::policy::loops::Detector;
use crate::request::{Event, FinishReason};
use crate::text::{Phase, Piece, Reply};

/// Most tokens that policies may rewind in one request: a policy that rewinds at every step would
/// otherwise never let it end.
pub const REWOUND_TOKENS: usize = 16 * 1024;

/// Most tokens that a request may make the model run again after rewinds and changes of sampling, or
/// twice its own tokens if that is more. A cache without checkpoints may run the whole reply again
/// for one token, and all other requests wait.
pub const RERUN_TOKENS: usize = 16 * 1024;

/// Tokens that a resumed cache counts as at least: resuming takes as long as some rows.
const LEAST_RERUN: usize = 16;

/// Most tokens of the empty line after reasoning; further white space is part of the answer.
const GAP_TOKENS: u32 = 4;

/// Most checkpoints of a sequence.
const CHECKPOINTS: usize = 4;

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
    reasoning_bytes: usize,
    /// Bytes of the answer, as clients see it.
    answer_bytes: usize,
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
        // A client that limits its answer may not know of the reasoning, so nothing around that costs the answer.
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

    /// Whether the last token belongs to the empty line between reasoning and answer; `length` is that of the untaken
    /// text before it.
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

/// The state of a reply at the start of its current phase.
#[derive(Debug, Clone)]
pub struct PhaseStart {
    /// Tokens before it, prompt included.
    pub position: usize,
    pub reply_state: ReplyState,
}

/// A checkpoint of the cache, with the logits [1, V] of the next token if they are known.
pub struct ReplyCheckpoint {
    pub cache: Checkpoint,
    pub logits: Option<Array>,
}

impl ReplyCheckpoint {
    pub fn position(&self) -> usize {
        self.cache.position()
    }
}

impl Sequence {
    /// Starts a phase here; later rewinds stop here.
    pub fn start_phase(&mut self) {
        let position = self.tokens.len();
        self.phase_start = PhaseStart { position, reply_state: self.reply_state.clone() };
        self.rewind_limit = position;
    }

    /// Rewinds by `count` tokens, or to the start of the phase if that is nearer.
    pub fn rewind_by(&mut self, count: usize, why: &str) -> Result<()> {
        // A call is rewound together with its opening tag: the client has neither.
        let reply = &self.reply_state.reply;
        let start = match (reply.phase(), reply.call_start()) {
            (Phase::ToolCall, Some(start)) => self.prompt + start,
            _ => self.phase_start.position,
        };
        let limit = start.max(self.rewind_limit);
        let to = self.tokens.len().saturating_sub(count).max(limit);
        let (count, length) = (self.tokens.len() - to, self.reply_len());
        if count == 0 {
            return Ok(());
        }
        if !self.rewind(to)? {
            let reason = "the client already has the text";
            self.note(format!("did not rewind after {length} tokens ({why}): {reason}"));
        } else if !self.has_ended() {
            self.note(format!("rewound {count} tokens after {length} tokens ({why})"));
        }
        Ok(())
    }

    /// Rewinds to `to` tokens, which must not be before the start of the phase. Returns false and
    /// changes nothing if the client has text or probabilities of the answer that it cannot drop.
    pub fn rewind(&mut self, to: usize) -> Result<bool> {
        if to < self.progress.reported_end {
            return Ok(false);
        }
        let mut reply_state = self.phase_start.reply_state.clone();
        for position in self.phase_start.position..to {
            if position == self.progress.seen {
                reply_state.reply.take_text();
            }
            reply_state.push(self.tokens[position]);
        }
        if to <= self.progress.seen {
            reply_state.reply.take_text();
        }
        let reasoning = self.progress.reasoning.saturating_sub(reply_state.reasoning_bytes);
        // Text that the policies hold back can be taken back.
        let sent = match &self.outlet {
            Some(outlet) => outlet.sent_at(reply_state.answer_bytes),
            None => reply_state.answer_bytes,
        };
        let answer = self.progress.answer.len().saturating_sub(sent);
        if answer > 0 && !self.request.revisable {
            return Ok(false);
        }
        self.progress.rewound += self.tokens.len() - to;
        if self.progress.rewound > REWOUND_TOKENS {
            let reason = format!("the policy rewound more than {REWOUND_TOKENS} tokens");
            self.note(reason.clone());
            self.end(FinishReason::Policy(reason));
            // The cache may have run a token that is not committed.
            self.stale_from = Some(self.tokens.len());
            return Ok(true);
        }
        self.outlet.iter_mut().for_each(|outlet| outlet.rewind(reply_state.answer_bytes));
        self.watch.iter_mut().for_each(Watch::clear);
        self.reply_state = reply_state;
        self.tokens.truncate(to);
        let length = self.reply_len();
        self.progress.drawn.retain(|drawn| (drawn.index as usize) < length);
        self.progress.seen = self.progress.seen.min(to);
        self.progress.reasoning -= reasoning;
        self.progress.answer.truncate(self.progress.answer.len() - answer);
        if reasoning + answer > 0 {
            let _ = self.events.send(Event::Rewound { reasoning, answer });
        }
        self.detector.iter_mut().for_each(Detector::reset);
        self.drafters.iter_mut().try_for_each(|drafter| drafter.rewind(&self.tokens))?;
        self.stale_from = Some(self.stale_from.map_or(to, |stale| stale.min(to)));
        self.sampled = None;
        Ok(true)
    }

    /// Counts the tokens that run again after the cache was rewound; too many end the request.
    pub fn count_rerun(&mut self) {
        let length = self.tokens.len();
        self.progress.rerun += length.saturating_sub(self.cache.position).max(LEAST_RERUN);
        let limit = RERUN_TOKENS.max(2 * length);
        if self.progress.rerun > limit && !self.has_ended() {
            let reason = format!("the policy made the model run more than {limit} tokens again");
            self.note(reason.clone());
            self.end(FinishReason::Policy(reason));
        }
    }

    /// Whether rewinding the cache needs checkpoints, and the plan asks for them.
    pub fn takes_checkpoints(&self) -> bool {
        self.limits.checkpoint_every > 0 && !self.cache.is_truncatable()
    }

    /// Takes a checkpoint if one is due: at the start of a phase, and every `checkpoint_every` tokens.
    pub fn take_checkpoint(&mut self) -> Result<()> {
        let (position, phase_start) = (self.cache.position, self.phase_start.position);
        let newest = self.checkpoints.last().map(ReplyCheckpoint::position);
        let due = newest.is_none_or(|newest| {
            newest < phase_start || position.saturating_sub(newest) >= self.limits.checkpoint_every
        });
        let valid = (phase_start..=self.tokens.len()).contains(&position)
            && newest.is_none_or(|newest| newest < position);
        let is_final = !self.has_ended() && !self.hooks.is_away();
        if !(due && valid && self.takes_checkpoints() && is_final) {
            return Ok(());
        }
        let cache = self.cache.checkpoint()?;
        let logits = self.next_logits.as_ref().filter(|next| next.position == position);
        // A copy: the logits of a pass are those of all sequences.
        let logits = logits.map(|next| Ok::<_, Error>(next.own()?.contiguous()?)).transpose()?;
        // An unevaluated checkpoint would keep the inputs of its graph alive.
        submit(cache.arrays().iter().chain(&logits))?;
        self.checkpoints.push(ReplyCheckpoint { cache, logits });
        // Rewinds end at the start of the phase, so one checkpoint at or before it is enough.
        let first = self.checkpoints.iter().rposition(|c| c.position() <= phase_start);
        self.checkpoints.drain(..first.unwrap_or(0));
        if self.checkpoints.len() > CHECKPOINTS {
            self.checkpoints.remove(checkpoint_to_evict(&self.checkpoints));
        }
        Ok(())
    }
}

/// Index of the checkpoint to evict: the inner one that leaves the smallest gap, relative to the age
/// of the checkpoint before it. Spacing thus grows with age.
fn checkpoint_to_evict(checkpoints: &[ReplyCheckpoint]) -> usize {
    let newest = checkpoints.last().map_or(0, ReplyCheckpoint::position);
    let relative_gap = |i: usize| {
        let (before, after) = (checkpoints[i - 1].position(), checkpoints[i + 1].position());
        (after - before) as f64 / (newest - before) as f64
    };
    (1..checkpoints.len() - 1)
        .min_by(|&a, &b| relative_gap(a).total_cmp(&relative_gap(b)))
        .unwrap_or(0)
}
