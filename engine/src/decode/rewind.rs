//! Takes tokens of a reply back, as a policy asks: the text first, then what the model remembers.
//!
//! What was said up to a token is what all tokens up to there say, so it is said again in silence
//! from where the phase began; what the client has beyond it is taken back. The cache goes back to
//! the newest snapshot that is early enough, or to what is saved of the tokens that are left, and the
//! rest runs again: a rewind costs time and changes no number.

use mlx_rs::Array;
use mlx_rs::transforms::async_eval;

use super::Decoder;
use super::loops::Detector;
use super::sequence::{Drawn, Sequence};
use crate::cache::Checkpoint;
use crate::error::Result;
use crate::request::{Event, FinishReason};
use crate::text::{Phase, Piece, Reply};

/// Most tokens that policies may rewind in one request: a policy that rewinds at every step would
/// otherwise never let it end.
pub const REWOUND_TOKENS: usize = 16 * 1024;

/// Snapshots of a sequence's cache that are kept.
const SNAPSHOTS: usize = 4;

/// What the tokens of a reply say.
#[derive(Debug, Clone)]
pub struct ReplyState {
    /// Turns tokens into thoughts, answer and tool calls.
    pub reply: Reply,
    /// Thought tokens.
    pub reasoning_tokens: u32,
    /// Answer tokens.
    pub answer_tokens: u32,
    /// Bytes of the thought, as clients see it.
    reasoning_bytes: usize,
    /// Bytes of the answer, as clients see it.
    answer_bytes: usize,
}

impl ReplyState {
    /// Nothing yet.
    pub fn new(reply: Reply) -> Self {
        Self { reply, reasoning_tokens: 0, answer_tokens: 0, reasoning_bytes: 0, answer_bytes: 0 }
    }

    /// Adds a token; returns what can now be shown.
    pub fn push(&mut self, token: u32) -> Vec<Piece> {
        match self.reply.phase() {
            Phase::Reasoning => self.reasoning_tokens += 1,
            Phase::Answer | Phase::ToolCall => self.answer_tokens += 1,
        }
        let pieces = self.reply.push(token);
        for piece in &pieces {
            match piece {
                Piece::Reasoning(text) => self.reasoning_bytes += text.len(),
                Piece::Answer(text) => self.answer_bytes += text.len(),
                Piece::ToolCall(_) => {}
            }
        }
        pieces
    }
}

/// Where the phase of a reply began.
#[derive(Debug, Clone)]
pub struct Floor {
    /// Tokens before, prompt included.
    pub at: usize,
    /// What they say.
    pub reply_state: ReplyState,
}

/// A cache's snapshot, and the logits [1, V] that draw the next token where they are known.
pub struct Standing {
    snapshot: Checkpoint,
    row: Option<Array>,
}

impl Standing {
    fn at(&self) -> usize {
        self.snapshot.position()
    }
}

impl Sequence {
    /// From here on the reply is rewound no further than to here.
    pub(super) fn set_floor(&mut self) {
        self.floor = Floor { at: self.tokens.len(), reply_state: self.reply_state.clone() };
        self.kept = self.tokens.len();
    }

    /// Forgets the last `count` tokens, or those of the phase if they are fewer.
    pub(super) fn rewind_by(&mut self, count: usize, why: &str) -> Result<()> {
        // A call is forgotten with its tag, which is all that the client has not got.
        let began = match (self.reply_state.reply.phase(), self.reply_state.reply.call_start()) {
            (Phase::ToolCall, Some(from)) => self.prompt + from,
            _ => self.floor.at,
        };
        let least = began.max(self.kept);
        let to = self.tokens.len().saturating_sub(count).max(least);
        let (count, at) = (self.tokens.len() - to, self.replied());
        if count == 0 {
            return Ok(());
        }
        if !self.rewind(to)? {
            let has = "the client has that text already";
            self.note(format!("not rewound after {at} tokens, on {why}: {has}"));
        } else if !self.has_ended() {
            self.note(format!("rewound {count} tokens after {at} tokens, on {why}"));
        }
        Ok(())
    }

    /// Forgets the tokens from `to` on, which is not before the floor; false, and nothing is
    /// changed, where the client has text of the answer that cannot be taken back.
    pub(super) fn rewind(&mut self, to: usize) -> Result<bool> {
        let mut said = self.floor.reply_state.clone();
        for at in self.floor.at..to {
            if at == self.progress.seen {
                said.reply.take_text();
            }
            said.push(self.tokens[at]);
        }
        if to <= self.progress.seen {
            said.reply.take_text();
        }
        let reasoning = self.progress.reasoning.saturating_sub(said.reasoning_bytes);
        let answer = self.progress.answer.len().saturating_sub(said.answer_bytes);
        if answer > 0 && !self.request.revisable {
            return Ok(false);
        }
        self.progress.rewound += self.tokens.len() - to;
        if self.progress.rewound > REWOUND_TOKENS {
            let reason = format!("the policy rewound more than {REWOUND_TOKENS} tokens");
            self.note(reason.clone());
            self.end(FinishReason::Policy(reason));
            // The cache may have seen a token that is not committed.
            self.stale = Some(self.tokens.len());
            return Ok(true);
        }
        self.reply_state = said;
        self.tokens.truncate(to);
        self.progress.seen = self.progress.seen.min(to);
        self.progress.reasoning -= reasoning;
        self.progress.answer.truncate(self.progress.answer.len() - answer);
        if reasoning + answer > 0 {
            let _ = self.events.send(Event::Rewound { reasoning, answer });
        }
        self.detector.iter_mut().for_each(Detector::reset);
        self.drafts.iter_mut().try_for_each(|draft| draft.rewind(&self.tokens))?;
        self.stale = Some(self.stale.map_or(to, |stale| stale.min(to)));
        self.drawn = None;
        Ok(true)
    }

    /// Whether the way back needs snapshots, and the policy wants them.
    pub(super) fn takes_snapshots(&self) -> bool {
        self.limits.checkpoint_every > 0 && !self.cache.is_truncatable()
    }

    /// Takes a snapshot of the cache where the phase begins, and every so many tokens.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects a slice.
    pub(super) fn take_snapshot(&mut self) -> Result<()> {
        let (at, floor) = (self.cache.position, self.floor.at);
        let newest = self.standings.last().map(Standing::at);
        let due = newest.is_none_or(|newest| {
            newest < floor || at.saturating_sub(newest) >= self.limits.checkpoint_every
        });
        let here = (floor..=self.tokens.len()).contains(&at) && newest.is_none_or(|n| n < at);
        if !(due && here && self.takes_snapshots()) || self.has_ended() {
            return Ok(());
        }
        let snapshot = self.cache.checkpoint()?;
        // Otherwise it would hold on to all that it is to be computed from.
        async_eval(snapshot.arrays())?;
        let row = self.row.as_ref().filter(|(position, _)| *position == at);
        let row = row.map(|(_, row)| row.clone());
        self.standings.push(Standing { snapshot, row });
        // Of those before the phase the newest alone is of use, and only if none stands at its
        // beginning.
        let of_use = self.standings.iter().rposition(|standing| standing.at() <= floor);
        self.standings.drain(..of_use.unwrap_or(0));
        if self.standings.len() > SNAPSHOTS {
            self.standings.remove(superfluous(&self.standings));
        }
        Ok(())
    }
}

/// The one to do without: neither the first nor the last, and of the others the one whose absence
/// makes the way back longest the least, as a share of the way. So they lie the denser the newer.
fn superfluous(standings: &[Standing]) -> usize {
    let newest = standings.last().map_or(0, Standing::at);
    let cost = |i: usize| {
        let (before, after) = (standings[i - 1].at(), standings[i + 1].at());
        (after - before) as f64 / (newest - before) as f64
    };
    (1..standings.len() - 1).min_by(|&a, &b| cost(a).total_cmp(&cost(b))).unwrap_or(0)
}

impl Decoder {
    /// Commits a token that was drawn, and settles what follows of it.
    ///
    /// # Errors
    /// [`crate::Error::Array`]
    pub(super) fn commit(&mut self, sequence: &mut Sequence, token: u32) -> Result<()> {
        sequence.commit_drawn(token, &self.text);
        self.settle(sequence)
    }

    /// Brings the cache of `sequence` back to its tokens, where these were rewound, and draws the
    /// next one again where it was dropped.
    ///
    /// # Errors
    /// [`crate::Error::Array`]
    pub(super) fn settle(&mut self, sequence: &mut Sequence) -> Result<()> {
        if let Some(to) = sequence.stale.take() {
            sequence.standings.retain(|standing| standing.at() <= to);
            if sequence.row.as_ref().is_some_and(|(position, _)| *position > to) {
                sequence.row = None;
            }
            if !stands(sequence, to) {
                self.go_back(sequence, to)?;
            }
        }
        if sequence.drawn.is_some() || !sequence.is_caught_up() || sequence.has_ended() {
            return Ok(());
        }
        if !stands(sequence, sequence.tokens.len()) {
            return self.go_back(sequence, sequence.tokens.len());
        }
        let Some((position, row)) = &sequence.row else { return Ok(()) };
        let draw = sequence.adjust.draws();
        let token = sequence.adjust.sample(row, draw, sequence.seed, *position as u64)?;
        async_eval([&token])?;
        sequence.drawn = Some(Drawn::Computing(token));
        Ok(())
    }

    /// Puts the cache of `sequence` where the next token can be drawn from, at `to` tokens or before.
    fn go_back(&mut self, sequence: &mut Sequence, to: usize) -> Result<()> {
        let length = sequence.tokens.len();
        if sequence.cache.is_truncatable() {
            // The last row runs again for its logits.
            sequence.cache.truncate(to.min(length - 1));
            return Ok(());
        }
        let of_use = |standing: &&Standing| {
            let at = standing.at();
            at <= to && at <= sequence.cache.position && (at < length || standing.row.is_some())
        };
        if let Some(standing) = sequence.standings.iter().rev().find(of_use) {
            sequence.cache.rewind_to(&standing.snapshot)?;
            sequence.row = standing.row.clone().map(|row| (standing.at(), row));
            return Ok(());
        }
        (sequence.cache, _) = self.prefixes.resume(&sequence.tokens)?;
        Ok(())
    }
}

/// Whether the cache has seen no more than `to` tokens, and the next one can be drawn.
fn stands(sequence: &Sequence, to: usize) -> bool {
    let at = sequence.cache.position;
    let known = sequence.row.as_ref().is_some_and(|(position, _)| *position == at);
    at <= to && (at < sequence.tokens.len() || known || sequence.has_ended())
}
