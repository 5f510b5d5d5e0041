//! Probabilities of sampled tokens, for clients and policies that ask for them.
//!
//! They are those of the logits after biases, penalties and the mask of the form, before temperature and
//! filters. A sequence that reports them drafts nothing, so each is of the pass that sampled its token.

use mlx_rs::ops::indexing::{TryIndexOp, take_along_axis};
use mlx_rs::ops::{argsort_axis, maximum};
use mlx_rs::{Array, Dtype};

use super::adjust::adjusted;
use super::row::Row;
use crate::error::Result;

/// Logarithmic probabilities of a token for each row, and of the likeliest ones; possibly still being
/// computed.
#[derive(Debug)]
pub struct Logprobs {
    /// f32 [R, 1 + k]: of the token, then of `top`.
    values: Array,
    /// u32 [R, k], likeliest first; `None` for none.
    top: Option<Array>,
    /// f32 [R, 1], in nats, if it is wanted.
    entropy: Option<Array>,
}

/// Logarithm of a probability that counts as 0: the product of both is 0.
const IMPOSSIBLE: f32 = -1e4;

impl Logprobs {
    /// Probabilities of the token u32 [1] sampled from `logits` [1, V], and of the `top` likeliest.
    pub fn of(
        logits: &Array,
        rows: &[Row],
        token: &Array,
        top: u32,
        with_entropy: bool,
    ) -> Result<Self> {
        let logits = adjusted(logits, rows)?;
        let found = Self::of_rows(&logits, token, top)?;
        if !with_entropy {
            return Ok(found);
        }
        let logits = logits.as_dtype(Dtype::Float32)?;
        let logprobs = logits.subtract(logits.logsumexp_axis(-1, true)?)?;
        let logprobs = maximum(&logprobs, Array::from_f32(IMPOSSIBLE))?;
        let entropy = logprobs.exp()?.multiply(&logprobs)?.sum_axis(-1, true)?.negative()?;
        Ok(Self { entropy: Some(entropy), ..found })
    }

    /// Probabilities of the token of each row, u32 [R], after `logits` [R, V], and of the `top` likeliest.
    pub fn of_rows(logits: &Array, tokens: &Array, top: u32) -> Result<Self> {
        let logits = logits.as_dtype(Dtype::Float32)?;
        let logprobs = logits.subtract(logits.logsumexp_axis(-1, true)?)?;
        let token = tokens.reshape(&[-1, 1])?;
        let count = i32::try_from(top).unwrap_or(i32::MAX).min(logits.dim(1));
        if count == 0 {
            let values = take_along_axis(&logprobs, &token, -1)?;
            return Ok(Self { values, top: None, entropy: None });
        }
        let order = argsort_axis(logprobs.negative()?, -1)?.try_index((.., ..count))?;
        // Part of each row: the host reads whole ones.
        let order = order.as_dtype(Dtype::Uint32)?.contiguous()?;
        let places = mlx_rs::ops::concatenate(&[&token, &order], -1)?;
        let values = take_along_axis(&logprobs, &places, -1)?;
        Ok(Self { values, top: Some(order), entropy: None })
    }

    /// All arrays, to evaluate them.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        [&self.values].into_iter().chain(&self.top).chain(&self.entropy)
    }

    /// Waits for the entropy in nats; 0 if it was not wanted.
    pub fn entropy(&self) -> Result<f32> {
        let Some(entropy) = &self.entropy else { return Ok(0.0) };
        Ok(entropy.try_as_slice::<f32>()?.first().copied().unwrap_or(0.0))
    }

    /// Waits for the probabilities.
    pub fn read(&self) -> Result<(Vec<f32>, Vec<u32>)> {
        mlx_rs::transforms::eval(self.arrays())?;
        let top = match &self.top {
            Some(top) => top.try_as_slice::<u32>()?.to_vec(),
            None => Vec::new(),
        };
        Ok((self.values.try_as_slice::<f32>()?.to_vec(), top))
    }
}
