//! Probabilities of sampled tokens, for clients that ask for them.
//!
//! They are those of the logits after biases, penalties and the mask of the form, before temperature and
//! filters. A sequence that reports them drafts nothing, so each is of the pass that sampled its token.

use mlx_rs::Array;
use mlx_rs::Dtype;
use mlx_rs::ops::argsort_axis;
use mlx_rs::ops::indexing::{TryIndexOp, take_along_axis};

use super::adjust::adjusted;
use super::sample::Row;
use super::sequence::Sequence;
use crate::error::Result;
use crate::request::{Event, Logprob, TokenLogprob};
use crate::text::{Phase, Text};

/// Logarithmic probabilities of a sampled token and of the likeliest ones; possibly still being computed.
#[derive(Debug)]
pub struct Logprobs {
    /// f32 [1, 1 + k]: of the sampled token, then of `top`.
    values: Array,
    /// u32 [1, k], likeliest first; `None` for none.
    top: Option<Array>,
}

impl Logprobs {
    /// Of the token u32 [1] sampled from `logits` [1, V], and of the `top` likeliest.
    pub fn of(logits: &Array, rows: &[Row], token: &Array, top: u32) -> Result<Self> {
        let logits = adjusted(logits, rows)?.as_dtype(Dtype::Float32)?;
        let logprobs = logits.subtract(logits.logsumexp_axis(-1, true)?)?;
        let token = token.reshape(&[1, 1])?;
        let count = i32::try_from(top).unwrap_or(i32::MAX).min(logits.dim(1));
        if count == 0 {
            return Ok(Self { values: take_along_axis(&logprobs, &token, -1)?, top: None });
        }
        let order = argsort_axis(logprobs.negative()?, -1)?.try_index((.., ..count))?;
        let order = order.as_dtype(Dtype::Uint32)?;
        let places = mlx_rs::ops::concatenate(&[&token, &order], -1)?;
        Ok(Self { values: take_along_axis(&logprobs, &places, -1)?, top: Some(order) })
    }

    /// All arrays, to evaluate them.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        [&self.values].into_iter().chain(&self.top)
    }

    /// Waits for the probabilities.
    fn read(&self) -> Result<(Vec<f32>, Vec<u32>)> {
        mlx_rs::transforms::eval(self.arrays())?;
        let top = match &self.top {
            Some(top) => top.try_as_slice::<u32>()?.to_vec(),
            None => Vec::new(),
        };
        Ok((self.values.try_as_slice::<f32>()?.to_vec(), top))
    }
}

impl Sequence {
    /// Sends the probabilities of `token`, which is being committed, if it belongs to the answer and the
    /// client asks for them. A token that was forced is certain.
    pub(super) fn report_logprobs(&mut self, token: u32, text: &Text) -> Result<()> {
        let found = self.logprobs.take();
        if self.request.logprobs.is_none() || self.reply_state.reply.phase() != Phase::Answer {
            return Ok(());
        }
        let one = |token: u32, logprob: f32| TokenLogprob { bytes: text.bytes(token), logprob };
        let logprob = match found {
            Some(found) => {
                let (values, top) = found.read()?;
                let (own, rest) =
                    values.split_first().map_or((0.0, &[][..]), |(own, rest)| (*own, rest));
                let top = top.into_iter().zip(rest).map(|(token, value)| one(token, *value));
                Logprob { token: one(token, own), top: top.collect() }
            }
            None => {
                let certain = one(token, 0.0);
                let top = self.request.logprobs.is_some_and(|top| top > 0);
                Logprob {
                    top: if top { vec![certain.clone()] } else { Vec::new() },
                    token: certain,
                }
            }
        };
        // Fails if the client has disconnected; the next step checks that.
        let _ = self.events.send(Event::Logprob(logprob));
        Ok(())
    }
}
