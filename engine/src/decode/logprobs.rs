//! Probabilities of sampled tokens, for clients and policies that ask for them.
//!
//! They are those of the logits after biases, penalties and the mask of the form, before temperature and
//! filters. A sequence that reports them drafts nothing, so each is of the pass that sampled its token.

use mlx_rs::ops::indexing::{TryIndexOp, take_along_axis};
use mlx_rs::ops::{argsort_axis, maximum};
use mlx_rs::{Array, Dtype};

use super::adjust::adjusted;
use super::sample::Row;
use super::sequence::Sequence;
use super::{Decoder, token_ids};
use crate::error::Result;
use crate::policy::{Candidate, DrawnToken, MAX_MARGIN, STEP_TOKENS};
use crate::request::{Event, Logprob, PromptToken, TokenLogprob};
use crate::text::{Phase, Text};

/// Rows of a prompt whose logits are computed at once: those of a whole chunk would take gigabytes.
const PROMPT_ROWS: usize = 16;

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
    /// Of the token u32 [1] sampled from `logits` [1, V], and of the `top` likeliest.
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

    /// Of the token of each row, u32 [R], after `logits` [R, V], and of the `top` likeliest.
    fn of_rows(logits: &Array, tokens: &Array, top: u32) -> Result<Self> {
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
    /// Keeps the probabilities of `token`, which is being committed, for the policies if they ask for them, and
    /// sends them if it belongs to the answer and the client asks for them. A token that was forced is certain.
    pub(super) fn report_logprobs(&mut self, token: u32, text: &Text) -> Result<()> {
        let found = self.logprobs.take();
        if let Some(found) = found.as_ref().filter(|_| self.limits.candidates > 0) {
            self.keep_drawn(token, found)?;
        }
        let is_answer = self.reply_state.reply.phase() == Phase::Answer;
        if self.request.logprobs.is_none() || !(is_answer || self.request.prompt.is_some()) {
            return Ok(());
        }
        let one = |token: u32, logprob: f32| TokenLogprob { bytes: text.bytes(token), logprob };
        let logprob = match found {
            Some(found) => {
                let (values, top) = found.read()?;
                let (own, rest) =
                    values.split_first().map_or((0.0, &[][..]), |(own, rest)| (*own, rest));
                let top = top.into_iter().zip(rest).map(|(token, value)| one(token, *value));
                let top = top.take(self.request.logprobs.unwrap_or(0) as usize);
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
        self.progress.reported_end = self.tokens.len() + 1;
        Ok(())
    }

    /// Keeps what the policies see of `token`, which the model drew.
    fn keep_drawn(&mut self, token: u32, found: &Logprobs) -> Result<()> {
        let (values, top) = found.read()?;
        let entropy = match &found.entropy {
            Some(entropy) => entropy.try_as_slice::<f32>()?.first().copied().unwrap_or(0.0),
            None => 0.0,
        };
        let mut likeliest = values[1..].iter().copied();
        let margin = match (likeliest.next(), likeliest.next()) {
            (Some(first), Some(second)) => (first - second).min(MAX_MARGIN),
            _ => MAX_MARGIN,
        };
        let candidates = top.into_iter().zip(&values[1..]).take(self.limits.candidates as usize);
        let candidates = candidates.filter(|(_, logprob)| logprob.is_finite());
        let candidate = |(token, &logprob): (u32, &f32)| Candidate { token, logprob };
        let index = self.reply_len() as u32;
        let drawn = &mut self.progress.drawn;
        if drawn.len() >= 2 * STEP_TOKENS {
            drawn.drain(..STEP_TOKENS);
        }
        let candidates = candidates.map(candidate).collect();
        // No number that JSON lacks: traces replay.
        let entropy = entropy.max(0.0);
        drawn.push(DrawnToken { index, token, entropy, margin, candidates });
        Ok(())
    }
}

impl Decoder {
    /// Sends the probabilities of the tokens of the prompt of `sequence` that come after the rows whose
    /// `hidden` states [1, R, D] are the newest of its cache, and that the client does not have yet.
    pub(super) fn report_prompt(&self, sequence: &mut Sequence, hidden: &Array) -> Result<()> {
        let top = sequence.request.prompt_logprobs.unwrap_or(0);
        let one =
            |token: u32, logprob: f32| TokenLogprob { bytes: self.text.bytes(token), logprob };
        // Fails if the client has disconnected; the next step checks that.
        let send = |token| drop(sequence.events.send(Event::PromptToken(token)));
        if sequence.reported == 0 {
            let bytes = self.text.bytes(sequence.tokens[0]);
            send(PromptToken { bytes, logprob: None, top: Vec::new() });
            sequence.reported = 1;
        }
        let end = sequence.cache.position;
        let start = end - hidden.dim(1) as usize;
        // Row `r` predicts token `start + r + 1`.
        let mut next = sequence.reported.max(start + 1);
        while next < sequence.prompt.min(end + 1) {
            let until = sequence.prompt.min(end + 1).min(next + PROMPT_ROWS);
            let (first, last) = (next - 1 - start, until - 1 - start);
            let rows = hidden.try_index((.., first as i32..last as i32))?;
            let logits = self.logits(&rows)?.squeeze_axes(&[0])?;
            let tokens = &sequence.tokens[next..until];
            let (values, likeliest) =
                Logprobs::of_rows(&logits, &token_ids(tokens), top)?.read()?;
            let width = values.len() / tokens.len();
            for (row, &token) in tokens.iter().enumerate() {
                let values = &values[row * width..(row + 1) * width];
                let likeliest = &likeliest[row * (width - 1)..(row + 1) * (width - 1)];
                let top = likeliest.iter().zip(&values[1..]);
                send(PromptToken {
                    bytes: self.text.bytes(token),
                    logprob: Some(values[0]),
                    top: top.map(|(&token, &logprob)| one(token, logprob)).collect(),
                });
            }
            next = until;
            sequence.reported = until;
        }
        Ok(())
    }
}
