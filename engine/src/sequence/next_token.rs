//! The next token of a sequence until it is committed: its logits, the sampled token, and the rows that run for it.

use std::rc::Rc;

use mlx_rs::Array;

use super::Sequence;
use super::constrain::Constraint;
use crate::cache::Checkpoint;
use crate::draft::{DraftTokens, HiddenRows};
use crate::error::Result;
use crate::lazy::submit;
use crate::sample::logprobs::Logprobs;
use crate::sample::samples::{Logits, SampleOf, Samples};

/// Logits of the next token.
#[derive(Debug, Clone)]
pub struct NextLogits {
    /// Position of the token.
    pub position: usize,
    /// Of a pass.
    pub logits: Logits,
    /// Its row in `logits`.
    pub row: usize,
    /// The cache before the rows of their pass, if rows of other sequences ran in it.
    pub before: Option<Checkpoint>,
}

impl NextLogits {
    /// The logits of the token alone, [1, V].
    pub fn own(&self) -> Result<Array> {
        // A pass has fewer than 2^31 rows.
        let row = self.row as i32;
        self.logits.rows(row..row + 1)
    }
}

/// A sampled token.
#[derive(Debug, Clone)]
pub enum Sampled {
    /// Possibly still being computed.
    Computing(Computing),
    /// On the host already, as after the verification of a draft.
    Read(u32),
}

impl Sampled {
    /// Whether the token is on the host.
    pub fn is_read(&self) -> bool {
        match self {
            Self::Computing(next) => next.sample.is_read(),
            Self::Read(_) => true,
        }
    }

    /// Waits for the token.
    pub fn wait(&self) -> Result<()> {
        match self {
            Self::Computing(next) => next.sample.token().map(drop),
            Self::Read(_) => Ok(()),
        }
    }
}

/// A token that may still be computed.
#[derive(Debug, Clone)]
pub struct Computing {
    pub sample: SampleOf,
    /// After a pass with other sequences: the cache before the pass, to which a near-tie rewinds.
    pub before: Option<Checkpoint>,
}

impl Computing {
    /// The cache before the pass, if its rounding may have decided the token.
    pub fn near_tie(self, least_margin: f32) -> Result<Option<Checkpoint>> {
        let Some(before) = self.before else { return Ok(None) };
        Ok((self.sample.margin()? < least_margin).then_some(before))
    }
}

/// Drafted tokens, from proposal to verification.
pub struct Draft {
    /// Index of the drafter that proposed them.
    pub drafter: usize,
    pub tokens: DraftTokens,
    /// Position of the row before them, that of the last committed token.
    pub position: usize,
    pub pass: Option<VerifyPass>,
}

/// Result of the pass over the last committed token and the drafted tokens.
pub struct VerifyPass {
    /// Hidden states of the m + 1 rows of the draft.
    pub hidden: HiddenRows,
    /// The token sampled after the first row. Those of the other rows follow it.
    pub first: SampleOf,
}

/// The rows of a sequence in the next step.
pub enum StepInput {
    /// A chunk of the prompt, or injected text.
    Tokens(Vec<u32>),
    /// The token sampled last.
    Sampled(SampleOf),
    /// The last committed token, and this draft after it.
    Draft(DraftTokens),
    /// Nothing: the sampled token ends the reply in any case.
    Nothing,
}

impl Sequence {
    /// The input of the next step, at most `chunk` rows.
    pub fn next_input(&self, chunk: usize) -> Result<StepInput> {
        let position = self.cache.position;
        if self.has_ended() {
            return Ok(StepInput::Nothing);
        }
        if let Some(draft) = &self.draft {
            return Ok(StepInput::Draft(draft.tokens.clone()));
        }
        if position < self.tokens.len() {
            let mut end = self.tokens.len().min(position + chunk);
            if let Some(&(save_point, _)) = self.save_points.front() {
                end = end.min(save_point);
            }
            if self.takes_checkpoints() && position < self.phase_start.position {
                end = end.min(self.phase_start.position);
            }
            return Ok(StepInput::Tokens(self.tokens[position..end].to_vec()));
        }
        match &self.sampled {
            Some(Sampled::Computing(next)) if !self.next_token_is_last() => {
                Ok(StepInput::Sampled(next.sample.clone()))
            }
            _ => Ok(StepInput::Nothing),
        }
    }

    /// Samples the next token from its logits again, with the parameters of the next step.
    pub fn sample_again(&mut self) -> Result<()> {
        let Some(next) = &self.next_logits else { return Ok(()) };
        let mut row = self.sampler.row(self.sampler.steps(), next.position);
        row.mask = self.constraint.as_ref().and_then(Constraint::mask);
        if !self.request.penalties.is_empty() {
            row.penalties = self.request.penalties.of(&self.tokens, self.prompt);
        }
        let rows = [row];
        let with_margins = next.before.is_some();
        let samples = Rc::new(Samples::after(&next.logits, next.row, &rows, with_margins)?);
        // The margin is that of the second.
        let of_policies = (self.limits.candidates > 0).then(|| self.limits.candidates.max(2));
        self.logprobs = match self.request.logprobs.max(of_policies) {
            Some(top) => Some(samples.logprobs(&next.own()?, &rows, top, of_policies.is_some())?),
            None => None,
        };
        if !samples.is_read() || self.logprobs.is_some() {
            submit(samples.arrays().chain(self.logprobs.iter().flat_map(Logprobs::arrays)))?;
        }
        let before = next.before.clone();
        self.sampled =
            Some(Sampled::Computing(Computing { sample: SampleOf::new(samples, 0), before }));
        Ok(())
    }

    /// Rewinds the cache by the pass that ended in a near-tie, which runs again alone.
    pub fn run_again(&mut self, before: &Checkpoint) -> Result<()> {
        self.cache.rewind_to(before)?;
        (self.sampled, self.next_logits, self.runs_alone) = (None, None, true);
        Ok(())
    }
}
