//! Drafts: cheap guesses at the next tokens, which the model verifies in one pass.
//!
//! A draft never decides what is said. The model runs the drafted rows together and draws a token
//! behind each, with the key that this position has in any case ([`super::sample`]); drafts are
//! accepted as far as they are what was drawn. Greedy or not, the reply is the one that plain
//! decoding gives. Which draft is used and how deep is the [`super::governor`]'s business.
//!
//! | file | guesses with |
//! |---|---|
//! | `ngram.rs` | what followed the same tokens earlier in prompt or reply |
//! | `mtp.rs` | the checkpoint's multi-token-prediction layer |
//! | `model.rs` | a smaller model with the same vocabulary |
//! | `exit.rs` | the model's own first layers and its head |
//!
//! # Why drafts are drawn and not distributions
//! Speculative sampling (arXiv:2211.17192) accepts by a coin of its own and draws again from what
//! is left. Here draft and model draw with the same random numbers for the same position (Gumbel
//! coupling, arXiv:2408.07978), and a draft is accepted where both drew the same token. The
//! reply's distribution is the model's own, as there; beyond that, the same seed gives the same
//! reply whether drafts were used or not, and no distribution has to be kept until it is verified.

mod exit;
mod model;
mod mtp;
mod ngram;

pub use exit::EarlyExit;
pub use model::DraftModel;
pub use mtp::MtpDraft;
pub use ngram::Ngram;

use mlx_rs::Array;
use mlx_rs::ops::concatenate;
use mlx_rs::ops::indexing::TryIndexOp;

use super::adjust::Adjust;
use super::sample::within;
use crate::cache::Cache;
use crate::config::{DEPTH, DraftKind};
use crate::error::Result;
use crate::model::{Model, Pass};

/// Rows that a draft which fell behind reads again before it guesses. Reading all it missed would
/// cost more than one try can win; a draft that is in use falls behind no further.
pub const CATCH_UP: usize = 32;

/// A source of drafts, with what it remembers of one request.
pub trait Draft {
    /// What it is.
    fn kind(&self) -> DraftKind;

    /// How likely each of the next drafts is accepted, given that those before it are. All zero
    /// where it has no guess.
    fn chances(&self) -> [f32; DEPTH];

    /// What it has learned of how often it is right; the next request begins with it.
    fn learned(&mut self) -> &mut [Chance];

    /// Guesses at most `depth` tokens to follow `at.tokens`: u32 [m], `None` for no guess.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects an operation.
    fn propose(&mut self, at: &mut At<'_>, depth: usize) -> Result<Option<Array>>;

    /// Of the last proposal's tokens the first `judged` were judged, and the first `accepted` of
    /// these were right and committed; a right one ends unjudged where the reply took another turn.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects an operation.
    fn learn(&mut self, judged: usize, accepted: usize) -> Result<()>;

    /// A token was committed: it is the last of `tokens`.
    fn read(&mut self, _tokens: &[u32]) {}

    /// The text was cut: `tokens` is what remains. What was behind it is to be forgotten.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX cannot make a cache.
    fn rewind(&mut self, _tokens: &[u32]) -> Result<()> {
        Ok(())
    }

    /// The model ran rows from `position` on and said `hidden` [1, R, D] of them. Called for rows
    /// that stay alone.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects a slice.
    fn observe(&mut self, _hidden: &Array, _position: usize) -> Result<()> {
        Ok(())
    }
}

/// What `draft` knows is old: the next observations weigh more.
pub fn forget(draft: &mut dyn Draft) {
    for chance in draft.learned() {
        chance.seen = chance.seen.min(Chance::OLD);
    }
}

/// Where a sequence stands when a draft is asked.
pub struct At<'a> {
    /// The model that will verify.
    pub model: &'a dyn Model,
    /// Which part of it runs.
    pub part: Pass<'a>,
    /// Its cache, which has run all of `tokens` but the last.
    pub cache: &'a mut Cache,
    /// Prompt and reply, committed.
    pub tokens: &'a [u32],
    /// How tokens are drawn.
    pub adjust: &'a mut Adjust,
    /// Seed of the draws.
    pub seed: u64,
    /// Tokens there are.
    pub vocabulary: i32,
}

impl At<'_> {
    /// Draws `depth` tokens one after the other: `first` holds the logits [1, 1, V] of the first,
    /// `next` runs a drawn token (u32 [1]) and returns the logits behind it.
    ///
    /// Nothing waits for a token to be known: all of it becomes one graph with the pass that
    /// verifies.
    fn chain(
        &mut self,
        first: &Array,
        depth: usize,
        mut next: impl FnMut(&mut Self, &Array) -> Result<Array>,
    ) -> Result<Array> {
        let mut logits = first.squeeze_axes(&[1])?;
        let mut drafts: Vec<Array> = Vec::with_capacity(depth);
        loop {
            let index = (self.tokens.len() + drafts.len()) as u64;
            let known = within(logits, self.vocabulary)?;
            let draw = self.adjust.draws() + drafts.len() as u64;
            drafts.push(self.adjust.sample(&known, draw, self.seed, index)?);
            if drafts.len() == depth {
                return Ok(concatenate(&drafts, 0)?);
            }
            let drawn = drafts[drafts.len() - 1].clone();
            logits = next(self, &drawn)?.squeeze_axes(&[1])?;
        }
    }
}

/// The last row of [1, R, D] as [1, 1, D].
fn last_row(hidden: &Array) -> Result<Array> {
    Ok(hidden.try_index((.., hidden.dim(1) - 1.., ..))?)
}

/// How often something held lately: the mean of what was seen, later ones weighing more.
#[derive(Debug, Clone, Copy)]
pub struct Chance {
    value: f32,
    seen: u16,
}

impl Chance {
    /// Weight of the newest, once there are many: half of what is known is 11 observations old.
    const NEWEST: f32 = 1.0 / 16.0;

    /// Observations that old knowledge counts for.
    const OLD: u16 = 3;

    /// Before anything was seen.
    pub const fn prior(value: f32) -> Self {
        Self { value, seen: 1 }
    }

    /// What is expected.
    pub fn value(self) -> f32 {
        self.value
    }

    /// It held, or it did not.
    pub fn learn(&mut self, held: bool) {
        self.seen = self.seen.saturating_add(1);
        let weight = (1.0 / f32::from(self.seen)).max(Self::NEWEST);
        self.value += weight * (f32::from(u8::from(held)) - self.value);
    }
}

/// Chances by depth, for drafts that guess one token after the other.
#[derive(Debug, Clone, Copy)]
struct Chain([Chance; DEPTH]);

impl Chain {
    /// A first guess that is right with `value` and others that are right ever less often.
    fn prior(value: f32) -> Self {
        Self(std::array::from_fn(|i| Chance::prior(value * 0.9f32.powi(i as i32))))
    }

    fn values(&self) -> [f32; DEPTH] {
        self.0.map(Chance::value)
    }

    fn learn(&mut self, judged: usize, accepted: usize) {
        for (i, chance) in self.0.iter_mut().enumerate().take(judged) {
            chance.learn(i < accepted);
        }
    }
}
