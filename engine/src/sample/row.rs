//! The parameters of one sample.

use std::rc::Rc;

use super::penalties::Penalty;
use crate::request::Sampling;

/// Up to this temperature a row is greedy. A lower one changes nothing but near-ties, and near 0 the
/// division of logits by it overflows: all tokens were equally likely.
const GREEDY_TEMPERATURE: f32 = 1e-4;

/// How the token after one row of logits is sampled.
#[derive(Debug, Clone)]
pub struct Row {
    /// Temperature and filters.
    pub sampling: Sampling,
    /// The key of its noise: [`super::noise::mix`] of the seed and the position of the token.
    pub key: u64,
    /// Added to the logits first: tokens, each once, and finite numbers, or minus infinity to ban one.
    pub offsets: Rc<[(u32, f32)]>,
    /// Applied after the offsets; each token once.
    pub penalties: Rc<[Penalty]>,
    /// The only tokens that may be sampled: bit `id % 32` of word `id / 32`. `None` for all.
    pub mask: Option<Rc<[u32]>>,
}

impl Row {
    /// A row that changes no logits.
    pub fn new(sampling: Sampling, key: u64) -> Self {
        let (offsets, penalties, mask) = (Rc::default(), Rc::default(), None);
        Self { sampling, key, offsets, penalties, mask }
    }
}

/// Returns true if the largest logit is sampled.
pub fn is_greedy(sampling: &Sampling) -> bool {
    sampling.temperature <= GREEDY_TEMPERATURE
}
