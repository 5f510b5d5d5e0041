//! One step: drafts are proposed, the rows of all sequences run in one pass, and tokens are committed.
//!
//! What is sampled in a step is committed in the next one, whose pass is queued before the token is
//! read, so that neither host nor device waits for the other.
//!
//! # Same tokens as alone
//! The number of rows in a pass decides how matrix products are summed, and thus the last bits of the
//! logits. In f32, a token of a pass with several sequences whose margin is a near-tie is not committed:
//! its row runs again in a pass of its own.

use std::time::Instant;

use mlx_rs::ops::concatenate;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::transforms::{async_eval, eval};
use mlx_rs::{Array, Dtype};

use super::governor::Governor;
use super::memory::Before;
use super::plan::{self, Budget, Pending};
use super::sequence::{NextLogits, STEP_ROWS, Sampled, Sequence, StepInput};
use super::{Decoder, token_ids};
use crate::cache::{Checkpoint, Span};
use crate::error::{Result, catch_panic};

impl Decoder {
    /// Runs the rows of all sequences, and commits the tokens sampled in the previous step or accepted
    /// in this one.
    ///
    /// # Errors
    /// [`Error::Array`]. The failure of a single sequence ends that sequence, without an error here.
    pub(super) fn advance(&mut self, mut running: &mut [Sequence]) -> Result<()> {
        if let Some(i) = running.iter().position(|sequence| sequence.runs_alone) {
            running = &mut running[i..=i];
            running[0].runs_alone = false;
        }
        let start = Instant::now();
        let alone = running.len() == 1;
        for sequence in &mut *running {
            // The costs of drafting are those of one sequence.
            let proposed = catch_panic(sequence.stage(), || self.propose_draft(sequence, alone));
            sequence.check(proposed);
        }
        let pending: Vec<Option<Sampled>> = running.iter().map(|s| s.sampled.clone()).collect();
        let prompt_rows = self.forward(running)?;
        for (sequence, sampled) in running.iter_mut().zip(pending) {
            if sequence.has_ended() {
                continue;
            }
            let committed = catch_panic(sequence.stage(), || self.commit(sequence, sampled));
            sequence.check(committed);
            // The token just read is from a plain step queued after another one. A step that rewound is
            // not typical.
            let plain = alone && sequence.queued_steps > 2 && sequence.is_caught_up();
            if let (Some(costs), true) = (&mut self.costs, plain) {
                costs.learn_plain(start.elapsed().as_secs_f32());
            }
        }
        self.pass_costs.learn(prompt_rows, start.elapsed().as_secs_f32());
        Ok(())
    }

    /// Commits the tokens of one sequence that are known after a pass.
    fn commit(&mut self, sequence: &mut Sequence, sampled: Option<Sampled>) -> Result<()> {
        self.save_at_save_point(sequence);
        if let Some(draft) = sequence.draft.take() {
            self.accept_draft(sequence, draft)?;
        } else if let Some(sampled) = sampled {
            self.commit_unless_near_tie(sequence, sampled)?;
        }
        sequence.take_checkpoint()
    }

    /// Commits a sampled token. A near-tie in a pass with other sequences is computed again in a pass
    /// of its own instead, and false is returned: the token does not depend on who else is there.
    pub(super) fn commit_unless_near_tie(
        &mut self,
        sequence: &mut Sequence,
        sampled: Sampled,
    ) -> Result<bool> {
        let token = match sampled {
            Sampled::Read(token) => token,
            Sampled::Computing(computing) => {
                let token = computing.read()?;
                if let Some(before) = computing.near_tie(self.near_tie_margin)? {
                    sequence.run_again(&before)?;
                    return Ok(false);
                }
                token
            }
        };
        self.commit_and_settle(sequence, token)?;
        Ok(true)
    }

    /// Joins the rows of all sequences, runs them, and samples a token for each that has caught up.
    /// Returns the number of rows of prompt among them.
    fn forward(&mut self, running: &mut [Sequence]) -> Result<usize> {
        let mut ids = Vec::new();
        let mut ran = Vec::new();
        let mut spans = Vec::new();
        // Rounding depends on the number of rows in a pass. In 16 bits near-ties are frequent, and the
        // rounding of the cache decides them as well.
        let precise = self.dtype == Dtype::Float32 && self.kv_bits == 0;
        let checks = self.speculation.exact && precise && running.len() > 1;
        let planned = self.plan_prefill(running);
        let prompt_rows = planned.iter().sum();
        for (i, (sequence, planned)) in running.iter_mut().zip(planned).enumerate() {
            let waits = planned == 0 && sequence.prompt_rows() > 0;
            sequence.passed_over = if waits { sequence.passed_over + 1 } else { 0 };
            if waits {
                continue;
            }
            let mut step = sequence.sampler.steps();
            let rows = match sequence.next_input(planned.max(STEP_ROWS))? {
                StepInput::Tokens(tokens) => {
                    sequence.queued_steps = 0;
                    token_ids(&tokens)
                }
                StepInput::Draft(rows) => {
                    sequence.queued_steps = 0;
                    rows
                }
                StepInput::Sampled(rows) => {
                    sequence.queued_steps += 1;
                    // The input is sampled but not committed yet.
                    step += 1;
                    rows
                }
                StepInput::Nothing => {
                    sequence.sampled = None;
                    continue;
                }
            };
            let before = checks.then(|| sequence.cache.checkpoint()).transpose()?;
            spans.push(Span { rows: rows.dim(0), cache: &mut sequence.cache });
            ids.push(rows);
            ran.push((i, step, before));
        }
        if ids.is_empty() {
            return Ok(0);
        }
        let before = Before::now()?;
        let joined = if ids.len() == 1 { ids[0].clone() } else { concatenate(&ids, 0)? };
        if let Some(threads) = &mut self.threads {
            threads.set_for(joined.dim(0) as usize);
        }
        self.activity.add_pass(joined.dim(0) as usize);
        let hidden = self.model.forward(&joined, &mut spans, self.pass())?;

        let mut end = 0;
        let (mut prefilled, mut sampling, mut last_rows) = (Vec::new(), Vec::new(), Vec::new());
        for ((i, step, before), rows) in ran.into_iter().zip(&ids) {
            let rows = rows.dim(0);
            end += rows;
            let sequence = &mut running[i];
            let own = hidden.try_index((.., end - rows..end))?;
            if sequence.draft.is_some() {
                self.sample_draft_rows(sequence, own)?;
                continue;
            }
            if !sequence.is_caught_up() {
                // Evaluated below: the graphs of all chunks would pile up, and the client could not cancel.
                prefilled.extend(sequence.cache.arrays()?);
                continue;
            }
            sequence.observe(&own, sequence.cache.position - rows as usize)?;
            sequence.governor.iter_mut().for_each(Governor::count_step);
            sampling.push((i, step, before.filter(|_| ids.len() > 1)));
            last_rows.push(own.try_index((.., rows - 1..))?);
        }
        self.sample_next(running, &last_rows, sampling)?;
        if !prefilled.is_empty() {
            eval(&prefilled)?;
            let length = running.iter().map(|s| s.cache.position).max().unwrap_or(0);
            self.memory.learn(&before, joined.dim(0) as usize, length)?;
        }
        Ok(prompt_rows)
    }

    /// Samples the next token of each sequence in `sampling` (its index, its step, and its cache before
    /// the pass, if others' rows ran in it) after its last row [1, 1, D] in `hidden`.
    fn sample_next(
        &self,
        running: &mut [Sequence],
        hidden: &[Array],
        sampling: Vec<(usize, u64, Option<Checkpoint>)>,
    ) -> Result<()> {
        let hidden = match hidden {
            [] => return Ok(()),
            [row] => row.clone(),
            rows => concatenate(rows, 1)?,
        };
        // One product with the head, the largest matrix of most models.
        let logits = self.logits(&hidden)?;
        let mut evaluated = Vec::with_capacity(sampling.len());
        for (row, (i, step, before)) in (0i32..).zip(sampling) {
            let sequence = &mut running[i];
            let logits = logits.try_index((.., row..row + 1))?.squeeze_axes(&[1])?;
            let position = sequence.cache.position;
            sequence.next_logits = Some(NextLogits { position, logits, before });
            evaluated.extend(sequence.sample_next(step)?);
        }
        // MLX is lazy: the next step must be queued before these tokens are read, or the device idles for
        // one round trip a token.
        async_eval(&evaluated)?;
        Ok(())
    }

    /// The rows of prompt that each sequence runs in this step.
    pub(super) fn plan_prefill(&self, running: &[Sequence]) -> Vec<usize> {
        let pending = |sequence: &Sequence| Pending {
            rows: sequence.prompt_rows(),
            passed_over: sequence.passed_over,
        };
        let pending: Vec<Pending> = running.iter().map(pending).collect();
        let budget = Budget { stall: self.stall, chunk: self.prefill_chunk };
        plan::prefill_rows(&pending, &self.pass_costs, budget)
    }
}
