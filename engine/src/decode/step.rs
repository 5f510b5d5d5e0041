//! One step: drafts are proposed, the rows of all sequences run in one pass, and tokens are committed.
//!
//! What is sampled in a step is committed in the next one, whose pass is queued before the token is
//! read, so that neither host nor device waits for the other. Where passes run on this thread
//! ([`cpu::run_at_once`]) there is nothing to overlap: the token is committed before the next pass.
//!
//! # Same tokens as alone
//! The number of rows in a pass decides how matrix products are summed, and thus the last bits of the
//! logits. In f32, a token of a pass with several sequences whose margin is a near-tie is not committed:
//! its row runs again in a pass of its own.

use std::rc::Rc;
use std::time::{Duration, Instant};

use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::Decoder;
use super::speculate::DraftedStep;
use crate::activity::StepTimes;
use crate::cache::{Checkpoint, Span};
use crate::draft::Governor;
use crate::draft::HiddenRows;
use crate::error::{Error, Result, catch_panic};
use crate::kernels::cpu::{self, queue};
use crate::nn::pick_rows;
use crate::request::{FinishReason, Sampling};
use crate::sample::rows::Row;
use crate::sample::samples::{Input, Logits, SampleOf, Samples};
use crate::schedule::memory::{Before, Section};
use crate::schedule::plan::{self, Budget, Pending};
use crate::sequence::next_token::{Computing, NextLogits, Sampled, StepInput, VerifyPass};
use crate::sequence::{STEP_ROWS, Sequence};

/// What one sequence ran in a pass.
struct Ran {
    /// Of the sequence.
    index: usize,
    /// Its first row in the pass.
    start: i32,
    /// The row after its last.
    end: i32,
    /// The step of its next token, for the sampler.
    step: u64,
    /// Its cache before the pass, if a near-tie is to run again.
    before: Option<Checkpoint>,
}

impl Ran {
    fn rows(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// Its part of the hidden states [1, R, D] of the pass.
    fn own(&self, hidden: &Array) -> HiddenRows {
        HiddenRows::of(hidden, self.start..self.end)
    }
}

/// Waits for the tokens that are committed after a pass: those sampled in the last step, `pending`, and those of drafts.
fn wait_for_tokens(running: &[Sequence], pending: &[Option<Sampled>]) {
    for (sequence, sampled) in running.iter().zip(pending) {
        let pass = sequence.draft.as_ref().and_then(|draft| draft.pass.as_ref());
        // An error ends the sequence when its token is committed.
        match (pass, sampled) {
            (Some(pass), _) => drop(pass.first.token()),
            (None, Some(sampled)) => drop(sampled.wait()),
            (None, None) => {}
        }
    }
}

impl Decoder {
    /// Runs the rows of all sequences, and commits the tokens sampled in the previous step or accepted
    /// in this one.
    ///
    /// # Errors
    /// [`Error::Array`]. The failure of a single sequence ends that sequence, without an error here.
    pub(crate) fn advance(&mut self, mut running: &mut [Sequence]) -> Result<()> {
        self.mask_time = Duration::ZERO;
        for sequence in running.iter_mut().filter(|sequence| sequence.hooks.is_back()) {
            let steered = catch_panic(sequence.stage(), || self.take_answer(sequence));
            sequence.check(steered);
        }
        if let Some(i) = running.iter().position(|sequence| sequence.runs_alone) {
            running = &mut running[i..=i];
            running[0].runs_alone = false;
        }
        let start = Instant::now();
        let drafted = self.propose_drafts(running);
        let proposed = start.elapsed();
        let pending: Vec<Option<Sampled>> = running.iter().map(|s| s.sampled.clone()).collect();
        let prompt_rows = self.forward(running)?;
        let ran = start.elapsed() - proposed;
        wait_for_tokens(running, &pending);
        let waited = start.elapsed() - proposed - ran;
        let streams = running.iter().filter(|sequence| sequence.decodes()).count();
        let mut pending: Vec<_> = pending.into_iter().enumerate().collect();
        // Masks that have waited longest come first.
        let waiting = |sequence: &Sequence| (sequence.awaits_mask.is_none(), sequence.awaits_mask);
        pending.sort_by_key(|&(index, _)| waiting(&running[index]));
        for (index, sampled) in pending {
            let sequence = &mut running[index];
            if sequence.has_ended() || sequence.hooks.is_away() {
                continue;
            }
            let committed = catch_panic(sequence.stage(), || self.commit(sequence, sampled));
            sequence.check(committed);
        }
        running.iter().for_each(Sequence::report_progress);
        if self.runs_at_once {
            // Where an input is not computed, the rest of the next pass would be queued.
            let rewound = running.iter().filter(|sequence| sequence.decodes());
            let states: Vec<&Array> = rewound.flat_map(|s| s.cache.uncomputed()).collect();
            if !states.is_empty() {
                eval(states)?;
            }
        }
        if let (Some(costs), Some(0)) = (&mut self.costs, prompt_rows) {
            // The tokens just read are from a plain step after another one. A step that rewound is not typical.
            let is_plain = |s: &Sequence| s.plain_steps > 2 && s.is_caught_up();
            let seconds = start.elapsed().as_secs_f32();
            let plain = costs.plain(streams);
            let has_just_drafted = |s: &Sequence| {
                s.decodes() && s.governor.as_ref().is_some_and(Governor::has_just_drafted)
            };
            match &drafted {
                Some(step) => step.learn(costs, &mut self.trial_time, running, seconds),
                None if streams == 0 => {}
                None if running.iter().any(has_just_drafted) => {
                    self.trial_time.spend(seconds, plain, streams, 0);
                }
                None => {
                    self.trial_time.earn(seconds, plain);
                    if running.iter().all(is_plain) {
                        costs.learn_plain(streams, seconds);
                    }
                }
            }
        }
        let elapsed = start.elapsed();
        let commit = elapsed - proposed - ran - waited;
        let times = StepTimes { draft: proposed, pass: ran, wait: waited, commit };
        let drafted = drafted.as_ref().map_or(0, DraftedStep::drafted_rows);
        tracing::trace!(streams, prompt_rows, drafted, ?times, "step");
        self.activity.add_step(times);
        if let Some(rows) = prompt_rows {
            let seconds = elapsed.as_secs_f32();
            self.debt.count(&self.pass_costs, rows, seconds, streams > 0);
            self.pass_costs.learn(rows, seconds);
        }
        if elapsed > self.stall {
            let (prompt_rows, costs) = (prompt_rows.unwrap_or(0), self.pass_costs);
            tracing::debug!(
                sequences = running.len(),
                prompt_rows,
                ?elapsed,
                ?times,
                ?costs,
                "step took longer than engine.stall_ms"
            );
        }
        Ok(())
    }

    /// Commits the tokens of one sequence that are known after a pass.
    fn commit(&mut self, sequence: &mut Sequence, sampled: Option<Sampled>) -> Result<()> {
        self.save_at_save_point(sequence);
        if sequence.begin_decode() {
            self.share_prefix(sequence);
        }
        if sequence.limits.reply == 0 && sequence.is_caught_up() {
            // The client wants the probabilities of its prompt only.
            sequence.sampled = None;
            sequence.end(FinishReason::Length);
            return Ok(());
        }
        if let Some(draft) = sequence.draft.take() {
            self.accept_draft(sequence, draft)?;
        } else if let Some(sampled) = sampled {
            self.commit_unless_near_tie(sequence, sampled)?;
        }
        if sequence.samples_late() {
            self.settle(sequence)?;
        }
        sequence.take_checkpoint()
    }

    /// Goes on with a sequence whose policy has answered on a thread.
    fn take_answer(&mut self, sequence: &mut Sequence) -> Result<()> {
        sequence.plain_steps = 0;
        sequence.steer(&self.text)?;
        self.settle(sequence)?;
        sequence.take_checkpoint()
    }

    /// Commits a sampled token. A near-tie in a pass with other sequences is computed again in a pass
    /// of its own instead, and false is returned: the token does not depend on who else is there.
    pub(crate) fn commit_unless_near_tie(
        &mut self,
        sequence: &mut Sequence,
        sampled: Sampled,
    ) -> Result<bool> {
        let token = match sampled {
            Sampled::Read(token) => token,
            Sampled::Computing(computing) => {
                let token = computing.sample.token()?;
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

    /// Joins the rows of all sequences, runs them, and samples a token for each that has caught up, and
    /// after each row of a draft. Returns the number of rows of prompt among them; `None` if no row ran.
    fn forward(&mut self, running: &mut [Sequence]) -> Result<Option<usize>> {
        let (mut inputs, mut end) = (Vec::new(), 0);
        let mut ran = Vec::new();
        let mut spans = Vec::new();
        // Rounding depends on the number of rows in a pass. In 16 bits near-ties are frequent, and the
        // rounding of the cache decides them as well.
        let precise = self.dtype == Dtype::Float32 && self.kv_bits == 0;
        let several = running.len() > 1;
        let checks = self.speculation.exact && precise && several;
        let planned = self.plan_prefill(running);
        let prompt_rows = planned.iter().sum();
        let expected = (prompt_rows > 0).then(|| self.expect_step(running, &planned));
        for (index, (sequence, planned)) in running.iter_mut().zip(planned).enumerate() {
            let waits = planned == 0 && sequence.prompt_rows() > 0;
            sequence.passed_over = if waits { sequence.passed_over + 1 } else { 0 };
            // A near-tie that was found before the pass runs again alone.
            let near_tie = sequence.runs_alone && several;
            if waits || near_tie || sequence.hooks.is_away() || sequence.awaits_mask.is_some() {
                continue;
            }
            let mut step = sequence.sampler.steps();
            let start = end;
            match sequence.next_input(planned.max(STEP_ROWS))? {
                StepInput::Tokens(tokens) => {
                    let is_plain =
                        self.runs_at_once && tokens.len() == 1 && !sequence.samples_late();
                    sequence.plain_steps = if is_plain { sequence.plain_steps + 1 } else { 0 };
                    Input::push_known(&mut inputs, &tokens);
                }
                StepInput::Draft(draft) => {
                    sequence.plain_steps = 0;
                    Input::push_known(&mut inputs, &sequence.tokens[sequence.cache.position..]);
                    Input::push_draft(&mut inputs, &draft);
                }
                StepInput::Sampled(sample) => {
                    sequence.plain_steps += 1;
                    // The input is sampled but not committed yet.
                    step += 1;
                    Input::push_sample(&mut inputs, sample);
                }
                StepInput::Nothing => {
                    sequence.sampled = None;
                    continue;
                }
            }
            end = inputs.iter().map(Input::rows).sum();
            // The margins of a draft are checked when it is accepted.
            let before =
                (checks && sequence.draft.is_none()).then(|| sequence.cache.brief_checkpoint());
            spans.push(Span { rows: end - start, cache: &mut sequence.cache });
            ran.push(Ran { index, start, end, step, before });
        }
        if ran.is_empty() {
            return Ok(None);
        }
        let section = Section::begin(None);
        let before =
            expected.map(|expected| Ok::<_, Error>((Before::now()?, expected))).transpose()?;
        let joined = Input::join(inputs)?;
        let rows = joined.dim(0) as usize;
        self.set_threads(rows);
        self.activity.add_pass(rows);
        let hidden = self.model.forward(&joined, &mut spans, self.pass())?;
        self.runs_at_once |= cpu::is_available(&hidden);
        let prefilled = self.sample_after(running, ran, &hidden)?;
        if !prefilled.is_empty() {
            eval(&prefilled)?;
            if let Some((before, expected)) = before
                && section.is_alone()
            {
                self.memory.learn(&before, expected)?;
            }
        }
        Ok(Some(prompt_rows))
    }

    /// Samples the next token of each sequence that has caught up, and a token after each row of a draft,
    /// from the hidden states [1, R, D] of a pass, in one graph. Returns the caches of the other
    /// sequences.
    fn sample_after(
        &self,
        running: &mut [Sequence],
        ran: Vec<Ran>,
        hidden: &Array,
    ) -> Result<Vec<Array>> {
        let shared = ran.len() > 1;
        let (mut prefilled, mut sampling) = (Vec::new(), Vec::new());
        // The rows of the pass after which tokens are sampled, and how.
        let (mut places, mut rows): (Vec<i32>, Vec<Row>) = (Vec::new(), Vec::new());
        let mut with_margins = false;
        for mut ran in ran {
            let sequence = &mut running[ran.index];
            let position = sequence.cache.position;
            if sequence.request.prompt_logprobs.is_some() {
                self.report_prompt(sequence, &ran.own(hidden).array()?)?;
            }
            if let Some(wish) = sequence.request.embedding {
                let pooled = self.pool(sequence, wish, &ran.own(hidden).array()?);
                sequence.check(pooled);
            }
            if let Some(draft) = &sequence.draft {
                places.extend(ran.start..ran.end);
                rows.extend(sequence.sampler.rows(ran.rows(), draft.position + 1));
                with_margins |= self.speculation.exact;
            } else if sequence.is_caught_up() {
                if !sequence.drafters.is_empty() {
                    sequence.observe(&ran.own(hidden), position - ran.rows());
                }
                sequence.governor.iter_mut().for_each(Governor::count_step);
                places.push(ran.end - 1);
                // A row that is sampled later costs one search for the largest logit here.
                rows.push(match sequence.samples_late() {
                    true => Row::new(Sampling::default(), 0),
                    false => sequence.sampler.row(ran.step, position),
                });
                ran.before = ran.before.filter(|_| shared);
                with_margins |= ran.before.is_some();
            } else {
                // Evaluated by the caller: the graphs of all chunks would pile up, and the client could
                // not cancel.
                prefilled.extend(sequence.cache.arrays()?);
                continue;
            }
            sampling.push(ran);
        }
        if places.is_empty() {
            return Ok(prefilled);
        }
        // One product with the head, the largest matrix of most models.
        let _at_once = self.runs_at_once.then(|| cpu::run_at_once(hidden)).transpose()?;
        let all = places.len() == hidden.dim(1) as usize;
        let chosen = if all { hidden.clone() } else { pick_rows(hidden, &places)? };
        let logits = self.model.logits(&chosen)?;
        let logits = cpu::reshape(&logits, &[logits.dim(1), logits.dim(2)])?;
        let logits = Logits::new(logits, self.vocabulary);
        let samples = Samples::after(&logits, 0, &rows, with_margins)?;
        if !samples.is_read() {
            // MLX is lazy: the next step must be queued before these tokens are read, or the device idles for
            // one round trip a token.
            queue(samples.arrays())?;
        }
        let samples = Rc::new(samples);
        let mut row = 0;
        for ran in sampling {
            let sequence = &mut running[ran.index];
            let sample = SampleOf::new(samples.clone(), row);
            if let Some(draft) = &mut sequence.draft {
                draft.pass = Some(VerifyPass { hidden: ran.own(hidden), first: sample });
                row += ran.rows();
            } else {
                let (position, before) = (sequence.cache.position, ran.before);
                let logits = logits.clone();
                sequence.next_logits =
                    Some(NextLogits { position, logits, row, before: before.clone() });
                let sampled = Sampled::Computing(Computing { sample, before });
                sequence.sampled = (!sequence.samples_late()).then_some(sampled);
                row += 1;
            }
        }
        Ok(prefilled)
    }

    /// The rows of prompt that each sequence runs in this step.
    pub(crate) fn plan_prefill(&self, running: &[Sequence]) -> Vec<usize> {
        let profile = |sequence: &Sequence| {
            let is_of = |other: &Sequence| other.request.profile == sequence.request.profile;
            running.iter().position(is_of).unwrap_or_default()
        };
        let pending = |sequence: &Sequence| Pending {
            // Others wait for a part of the prompt only.
            rows: sequence.prompt_rows().min(self.awaited_rows(sequence).unwrap_or(usize::MAX)),
            decodes: sequence.decodes(),
            passed_over: sequence.passed_over,
            profile: profile(sequence),
        };
        let pending: Vec<Pending> = running.iter().map(pending).collect();
        let (stall, chunk) = (self.stall, self.prefill_chunk);
        let budget = Budget { stall, chunk, owed: self.debt.is_owed() };
        plan::prefill_rows(&pending, &self.pass_costs, budget)
    }
}
