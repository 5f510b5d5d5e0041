//! One step: drafts are proposed, the rows of all sequences run in one pass, and tokens are committed.
//!
//! What is sampled in a step is committed in the next one, whose pass is queued before the token is
//! read, so that neither host nor device waits for the other. Where passes run on this thread
//! ([`crate::lazy::run_at_once`]) there is nothing to overlap: the token is committed before the next pass.
//!
//! # Same tokens as alone
//! The number of rows in a pass decides how matrix products are summed, and thus the last bits of the
//! logits. In f32, a token of a pass with several sequences whose margin is a near-tie is not committed:
//! its row runs again in a pass of its own.

use std::rc::Rc;
use std::time::Instant;

use mlx_rs::Array;
use mlx_rs::transforms::eval;

use super::embed::pool;
use super::network::Network;
use super::prompt_logprobs::report_prompt;
use super::speculate::DraftedStep;
use super::{Decoder, settle};
use crate::activity::StepTimes;
use crate::cache::Checkpoint;
use crate::draft::HiddenRows;
use crate::error::{Error, Result, catch_panic};
use crate::lazy::{reshape, submit};
use crate::nn::pick_rows;
use crate::request::Sampling;
use crate::sample::row::Row;
use crate::sample::samples::{Input, Logits, SampleOf, Samples};
use crate::schedule::memory::{Before, Section};
use crate::sequence::next_token::{Rows, Sampled, VerifyPass};
use crate::sequence::{STEP_ROWS, Sequence};

/// What one sequence ran in a pass.
struct Ran {
    /// Index of the sequence.
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

impl Decoder {
    /// Runs the rows of all sequences, and commits the tokens sampled in the previous step or accepted
    /// in this one.
    ///
    /// # Errors
    /// [`Error::Array`]. The failure of a single sequence ends that sequence, without an error here.
    pub(crate) fn advance(&mut self, mut running: &mut [Sequence]) -> Result<()> {
        self.masks.begin_step();
        for sequence in running.iter_mut().filter(|sequence| sequence.is_back()) {
            let steered = catch_panic(sequence.stage(), || self.take_answer(sequence));
            sequence.check(steered);
        }
        if let Some(i) = running.iter().position(|sequence| sequence.timeline().runs_alone()) {
            running = &mut running[i..=i];
            running[0].timeline_mut().begin_alone();
        }
        let start = Instant::now();
        let plan = |running: &[Sequence]| self.schedule.plan_prefill(running, self.costs.passes());
        let drafted = self.speculation.propose(
            &mut self.network,
            &self.masks,
            self.saved.prefixes_mut(),
            self.costs.drafts(),
            running,
            |running| plan(running).iter().any(|&rows| rows > 0),
        );
        let is_over = |sequence: &Sequence| sequence.has_ended() && !sequence.is_away();
        let has_prompts = running.iter().any(|sequence| sequence.prompt_rows() > 0);
        if drafted.is_none() && has_prompts && running.iter().any(is_over) {
            // The client of the ended sequence does not wait for the prompts of others.
            return Ok(());
        }
        let proposed = start.elapsed();
        // What is committed before a draft may end a stream.
        let planned = plan(running);
        let prefilled = running.iter().zip(&planned).filter(|&(_, &rows)| rows > 0);
        let prompts: Vec<(String, usize)> =
            prefilled.map(|(s, &rows)| (s.request().profile.clone(), rows)).collect();
        let prompt_rows = self.forward(running, planned)?;
        let ran = start.elapsed() - proposed;
        // An error ends the sequence when its token is committed.
        running.iter().for_each(|sequence| drop(sequence.timeline().wait_for_pass()));
        let waited = start.elapsed() - proposed - ran;
        let streams = running.iter().filter(|sequence| sequence.decodes()).count();
        // Masks that have waited longest come first.
        let waiting = |sequence: &Sequence| {
            let since = sequence.awaits_mask();
            (since.is_none(), since)
        };
        let mut order: Vec<usize> = (0..running.len()).collect();
        order.sort_by_key(|&index| waiting(&running[index]));
        for index in order {
            let sequence = &mut running[index];
            let sampled = sequence.timeline_mut().take_pending();
            if sequence.has_ended() || sequence.is_away() {
                continue;
            }
            let committed = catch_panic(sequence.stage(), || self.commit(sequence, sampled));
            sequence.check(committed);
        }
        running.iter().for_each(Sequence::report_progress);
        if self.network.runs_at_once() {
            // Where an input is not computed, the rest of the next pass would be queued.
            let rewound = running.iter().filter(|sequence| sequence.decodes());
            let states: Vec<&Array> =
                rewound.flat_map(|s| s.timeline().cache().uncomputed()).collect();
            if !states.is_empty() {
                eval(states)?;
            }
        }
        if let (Some(costs), Some(0)) = (self.costs.drafts_mut(), prompt_rows) {
            let seconds = start.elapsed().as_secs_f32();
            self.speculation.learn_step(costs, drafted.as_ref(), running, streams, seconds);
        }
        let elapsed = start.elapsed();
        let commit = elapsed - proposed - ran - waited;
        let times = StepTimes { draft: proposed, pass: ran, wait: waited, commit };
        let drafted = drafted.as_ref().map_or(0, DraftedStep::drafted_rows);
        tracing::trace!(streams, prompt_rows, drafted, ?times, "step");
        self.activity.add_step(times);
        if let Some(rows) = prompt_rows {
            let seconds = elapsed.as_secs_f32();
            self.schedule.count_pass(self.costs.passes(), &prompts, seconds, streams > 0);
            self.costs.learn_pass(rows, seconds);
        }
        if elapsed > self.schedule.stall() {
            let (prompt_rows, costs) = (prompt_rows.unwrap_or(0), self.costs.passes());
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
        self.saved.save_at_save_point(sequence);
        if sequence.begin_decode() {
            self.saved.share_prefix(sequence);
        }
        if sequence.limits().reply == 0 && sequence.timeline().is_caught_up() {
            // The client wants the probabilities of its prompt only.
            sequence.end_after_prompt();
            return Ok(());
        }
        if let Some(draft) = sequence.timeline_mut().take_draft() {
            let (network, prefixes) = (&self.network, self.saved.prefixes_mut());
            self.speculation.accept_draft(network, &self.masks, prefixes, sequence, draft)?;
        } else if let Some(sampled) = sampled {
            self.commit_sampled(sequence, sampled)?;
        }
        if sequence.samples_late() {
            self.settle(sequence)?;
        }
        sequence.take_checkpoint()
    }

    /// Commits a sampled token, unless it is a near-tie, and settles the consequences.
    pub(super) fn commit_sampled(
        &mut self,
        sequence: &mut Sequence,
        sampled: Sampled,
    ) -> Result<()> {
        let prefixes = self.saved.prefixes_mut();
        settle::commit_sampled(&self.network, &self.masks, prefixes, sequence, sampled)
    }

    /// Settles a sequence whose tokens may have changed.
    pub(super) fn settle(&mut self, sequence: &mut Sequence) -> Result<()> {
        settle::settle(&self.network, &self.masks, self.saved.prefixes_mut(), sequence)
    }

    /// Continues with a sequence whose policy has answered on a thread.
    fn take_answer(&mut self, sequence: &mut Sequence) -> Result<()> {
        sequence.drafting_mut().count_plain_step(false);
        sequence.steer(self.network.text())?;
        self.settle(sequence)?;
        sequence.take_checkpoint()
    }

    /// Joins the rows of all sequences, of which `planned` are rows of prompt, runs them, and samples a token for each that
    /// has caught up, and after each row of a draft. Returns the number of rows of prompt among them; `None` if no row ran.
    fn forward(&mut self, running: &mut [Sequence], planned: Vec<usize>) -> Result<Option<usize>> {
        let (mut inputs, mut end) = (Vec::new(), 0);
        let mut ran = Vec::new();
        let mut spans = Vec::new();
        // Rounding depends on the number of rows in a pass. In 16 bits near-ties are frequent, and the
        // rounding of the cache decides them as well.
        let precise = self.network.is_precise();
        let several = running.len() > 1;
        let checks = self.speculation.is_exact() && precise && several;
        let prompt_rows = planned.iter().sum();
        let expected = (prompt_rows > 0)
            .then(|| self.saved.expect_step(running, &planned, self.costs.bytes()));
        for (index, (sequence, planned)) in running.iter_mut().zip(planned).enumerate() {
            let waits = planned == 0 && sequence.prompt_rows() > 0;
            sequence.count_wait(waits);
            // A near-tie that was found before the pass runs again alone.
            let near_tie = sequence.timeline().runs_alone() && several;
            let is_held = sequence.is_away() || sequence.awaits_mask().is_some();
            if waits || near_tie || is_held {
                continue;
            }
            let mut step = sequence.sampler().steps();
            let start = end;
            match sequence.rows(planned.max(STEP_ROWS)) {
                Rows::Tokens(tokens) => {
                    let is_plain = self.network.runs_at_once()
                        && tokens.len() == 1
                        && !sequence.samples_late();
                    sequence.drafting_mut().count_plain_step(is_plain);
                    Input::push_known(&mut inputs, &tokens);
                }
                Rows::Draft(tokens, draft) => {
                    sequence.drafting_mut().count_plain_step(false);
                    Input::push_known(&mut inputs, &tokens);
                    Input::push_draft(&mut inputs, &draft);
                }
                Rows::Sampled(sample) => {
                    sequence.drafting_mut().count_plain_step(true);
                    // The input is sampled but not committed yet.
                    step += 1;
                    Input::push_sample(&mut inputs, sample);
                }
                Rows::Nothing => continue,
            }
            end = inputs.iter().map(Input::rows).sum();
            let before = checks.then(|| sequence.timeline().before_pass()).flatten();
            spans.push(sequence.timeline_mut().span(end - start));
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
        self.network.set_threads(rows);
        self.activity.add_pass(rows);
        let hidden = self.network.forward(&joined, &mut spans)?;
        self.network.note_pass(&hidden);
        let exact = self.speculation.is_exact();
        let prefilled = sample_after(&self.network, exact, running, ran, &hidden)?;
        if !prefilled.is_empty() {
            eval(&prefilled)?;
            if let Some((before, expected)) = before
                && section.is_alone()
            {
                self.costs.learn_bytes(&before, expected)?;
            }
        }
        Ok(Some(prompt_rows))
    }
}

/// Samples the next token of each sequence that has caught up, and a token after each row of a draft,
/// from the hidden states [1, R, D] of a pass, in one graph. Returns the caches of the other
/// sequences.
fn sample_after(
    network: &Network,
    exact: bool,
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
        let position = sequence.timeline().position();
        if sequence.request().prompt_logprobs.is_some() {
            report_prompt(network, sequence, &ran.own(hidden).array()?)?;
        }
        if let Some(wish) = sequence.request().embedding {
            let pooled = pool(network.pooling(), sequence, wish, &ran.own(hidden).array()?);
            sequence.check(pooled);
        }
        if let Some(draft) = sequence.timeline().draft() {
            places.extend(ran.start..ran.end);
            let position = draft.position + 1;
            rows.extend(sequence.sampler().rows(ran.rows(), position));
            with_margins |= exact;
        } else if sequence.timeline().is_caught_up() {
            if sequence.drafting().has_drafters() {
                sequence.drafting_mut().observe(&ran.own(hidden), position - ran.rows());
            }
            sequence.drafting_mut().count_step();
            places.push(ran.end - 1);
            // A row that is sampled later costs one search for the largest logit here.
            rows.push(match sequence.samples_late() {
                true => Row::new(Sampling::default(), 0),
                false => sequence.sampler().row(ran.step, position),
            });
            ran.before = ran.before.filter(|_| shared);
            with_margins |= ran.before.is_some();
        } else {
            // Evaluated by the caller: the graphs of all chunks would pile up, and the client could
            // not cancel.
            prefilled.extend(sequence.timeline().cache().arrays()?);
            continue;
        }
        sampling.push(ran);
    }
    if places.is_empty() {
        return Ok(prefilled);
    }
    // One product with the head, the largest matrix of most models.
    let _at_once = network.run_at_once(hidden)?;
    let all = places.len() == hidden.dim(1) as usize;
    let chosen = if all { hidden.clone() } else { pick_rows(hidden, &places)? };
    let logits = network.model().logits(&chosen)?;
    let logits = reshape(&logits, &[logits.dim(1), logits.dim(2)])?;
    let logits = Logits::new(logits, network.vocabulary());
    let samples = Samples::after(&logits, 0, &rows, with_margins)?;
    if !samples.is_read() {
        // MLX is lazy: the next step must be queued before these tokens are read, or the device idles for
        // one round trip a token.
        submit(samples.arrays())?;
    }
    let samples = Rc::new(samples);
    let mut row = 0;
    for ran in sampling {
        let sequence = &mut running[ran.index];
        let sample = SampleOf::new(samples.clone(), row);
        if sequence.timeline().is_drafting() {
            let logits = (logits.clone(), row);
            let pass = VerifyPass { hidden: ran.own(hidden), first: sample, logits };
            sequence.timeline_mut().ran_draft(pass);
            row += ran.rows();
        } else {
            let sample = (!sequence.samples_late()).then_some(sample);
            sequence.timeline_mut().ran(logits.clone(), row, sample, ran.before);
            row += 1;
        }
    }
    Ok(prefilled)
}
