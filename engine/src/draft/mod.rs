//! Drafters: cheap sources of the next tokens, which the model verifies in one pass.
//!
//! A drafter never decides what the reply is. The model runs the drafted rows together and samples
//! a token after each, with the noise that belongs to that position anyway ([`crate::sample::rows`]); the
//! drafted tokens that equal the sampled ones are accepted, up to the first that differs. Greedy or
//! not, the reply is that of plain decoding. Which drafter runs, and how deep, is decided by
//! [`governor`], by the costs on this machine (`costs.rs`) and what drafts have lost (`trial_time.rs`).
//!
//! | file | source of its drafts |
//! |---|---|
//! | `ngram.rs` | what followed the same tokens earlier in prompt or reply |
//! | `mtp.rs` | the model's multi-token-prediction layer |
//! | `model.rs` | a smaller model with the same vocabulary |
//! | `exit.rs` | the model's own first layers and its head |
//!
//! `run.rs` runs them, those of several sequences together.
//!
//! # Why drafts are sampled tokens, not distributions
//! Speculative sampling (arXiv:2211.17192) accepts with a coin of its own and samples rejected
//! positions from the residual distribution. Here drafter and model sample with the same noise for
//! the same position (Gumbel coupling, arXiv:2408.07978), and a draft is accepted if both sampled
//! the same token. Both leave the model's distribution unchanged; the coupling also makes the same
//! seed give the same reply with and without drafts, and stores no distribution until verification.

mod costs;
mod exit;
pub mod governor;
mod model;
mod mtp;
mod ngram;
mod run;
mod trial_time;

pub use costs::{Costs, Drafted, ROWS, greedy_pass, probe_tokens};
pub use exit::EarlyExitDrafter;
pub use governor::{Choice, Governor, Mode, Offer};
pub use model::ModelDrafter;
pub use mtp::MtpDrafter;
pub use ngram::NgramDrafter;
pub use run::{Member, Networks, propose};
pub use trial_time::{Permit, TrialTime};

use std::ops::Range;

use mlx_rs::Array;

use crate::cache::Cache;
use crate::config::{DEPTH, DraftKind};
use crate::error::Result;
use crate::model::Model;
use crate::nn::rows_of;
pub use crate::sample::samples::DraftTokens;

/// Most rows that a lagging drafter runs before it drafts. Running all rows that it missed would cost more
/// than one trial can gain; a drafter in use does not lag.
pub const CATCH_UP: usize = 32;

/// A source of drafts, with its state for one request.
pub trait Drafter {
    fn kind(&self) -> DraftKind;

    /// Acceptance rate of each of the next drafted tokens, given that those before it are accepted.
    /// All zero if there is nothing to draft.
    fn acceptance_rates(&self) -> [f32; DEPTH];

    /// The rates learned so far; the drafter of the next request starts with them.
    fn learned_rates(&mut self) -> &mut [MovingRate];

    /// Begins a draft of at most `depth` tokens to follow `tokens`. `cache` is that of `model`, which has
    /// run all of `tokens` but the last.
    fn start(
        &mut self,
        model: &dyn Model,
        cache: &mut Cache,
        tokens: &[u32],
        depth: usize,
    ) -> Result<Start>;

    /// The cache of its network: its own, or that of the model that verifies.
    fn cache<'a>(&'a mut self, of_model: &'a mut Cache) -> &'a mut Cache {
        of_model
    }

    /// The network has run the first rows; the rows from now on are of drafted tokens.
    fn begin(&mut self, _of_model: &mut Cache) {}

    /// The network has run all drafted tokens but the last.
    fn end(&mut self, _of_model: &mut Cache) -> Result<()> {
        Ok(())
    }

    /// The first `judged` tokens of the last draft were compared with sampled ones, and the first
    /// `accepted` of these were committed. The rest stays unjudged if the reply ended or was changed
    /// before it.
    fn learn(&mut self, judged: usize, accepted: usize) -> Result<()>;

    /// A token was committed: the last of `tokens`.
    fn read(&mut self, _tokens: &[u32]) {}

    /// The sequence was rewound to `tokens`; state of later tokens is invalid.
    fn rewind(&mut self, _tokens: &[u32]) -> Result<()> {
        Ok(())
    }

    /// The model ran the rows from `position` on, with these hidden states. Rejected rows are left out.
    fn observe(&mut self, _hidden: &HiddenRows, _position: usize) {}
}

/// Hidden states of some rows of a pass. They are cut out when they are needed, which is seldom.
#[derive(Debug, Clone)]
pub struct HiddenRows {
    /// [1, R, D], of all rows.
    pub pass: Array,
    rows: Range<i32>,
}

impl HiddenRows {
    /// The hidden states of `rows` of a pass with hidden states [1, R, D].
    pub fn of(pass: &Array, rows: Range<i32>) -> Self {
        Self { pass: pass.clone(), rows }
    }

    /// All those of a pass.
    pub fn all(pass: &Array) -> Self {
        Self::of(pass, 0..pass.dim(1))
    }

    /// The number of rows.
    pub fn count(&self) -> i32 {
        self.rows.end - self.rows.start
    }

    /// The first `count` of them.
    pub fn first(&self, count: i32) -> Self {
        Self { pass: self.pass.clone(), rows: self.rows.start..self.rows.start + count }
    }

    /// The last `count` of them.
    pub fn last(&self, count: i32) -> Self {
        Self { pass: self.pass.clone(), rows: self.rows.end - count..self.rows.end }
    }

    /// The states, [1, count, D].
    pub fn array(&self) -> Result<Array> {
        rows_of(&self.pass, self.rows.clone())
    }
}

/// The beginning of a draft.
pub enum Start {
    /// There is nothing to draft.
    Nothing,
    /// The whole draft.
    Tokens(Vec<u32>),
    /// The drafter's network must run, these rows first.
    Network(FirstRows),
}

/// Rows that a network runs before it drafts.
pub struct FirstRows {
    /// One token or more.
    pub tokens: Vec<u32>,
    /// [1, R, D], the model's hidden states before them, for the prediction layer.
    pub hidden: Option<Array>,
}

/// Marks the rates of `drafter` as old, so that the next observations weigh more.
pub fn discount_rates(drafter: &mut dyn Drafter) {
    for rate in drafter.learned_rates() {
        rate.observations = rate.observations.min(MovingRate::OLD);
    }
}

/// How often an event happened lately: a mean in which later observations weigh more.
#[derive(Debug, Clone, Copy)]
pub struct MovingRate {
    value: f32,
    observations: u16,
}

impl MovingRate {
    /// Weight of the newest of many observations; half of the total weight is on the last 11.
    const NEWEST: f32 = 1.0 / 16.0;

    /// Number of observations that an old rate counts for.
    const OLD: u16 = 3;

    /// An expected value, before any observation.
    pub const fn prior(value: f32) -> Self {
        Self { value, observations: 1 }
    }

    pub fn value(self) -> f32 {
        self.value
    }

    pub fn learn(&mut self, happened: bool) {
        self.observations = self.observations.saturating_add(1);
        let weight = (1.0 / f32::from(self.observations)).max(Self::NEWEST);
        self.value += weight * (f32::from(u8::from(happened)) - self.value);
    }
}

/// Acceptance rates by depth, for drafters that sample one token after the other.
#[derive(Debug, Clone, Copy)]
struct RateByDepth([MovingRate; DEPTH]);

impl RateByDepth {
    /// `first` for the first token, and less for each further one.
    fn prior(first: f32) -> Self {
        Self(std::array::from_fn(|i| MovingRate::prior(first * 0.9f32.powi(i as i32))))
    }

    fn values(&self) -> [f32; DEPTH] {
        self.0.map(MovingRate::value)
    }

    fn learn(&mut self, judged: usize, accepted: usize) {
        for (i, rate) in self.0.iter_mut().enumerate().take(judged) {
            rate.learn(i < accepted);
        }
    }
}
