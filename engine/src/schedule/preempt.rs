//! Preemption: a sequence gives up its memory when the next step of all does not fit, and resumes later.
//!
//! Before each step the prefix cache is evicted to make room. When that is not enough, a sequence is
//! preempted: its cache and everything made from it are dropped; tokens, policy and parsed reply stay. It
//! waits before all requests of its profile. In the profile's turn, once it fits again, its cache is restored
//! from saved state as far as there is any, and the remaining tokens run again, as after a rewind: that costs
//! time and changes no token. `turns.rs` preempts in the same way for requests of other profiles.
//!
//! A request is admitted, and a preempted one resumed, if its tokens and the first [`REPLY_TOKENS`] of its
//! reply fit beside what the running sequences may still take by the same measure. One sequence always
//! runs.

use mlx_rs::transforms::eval;

use super::memory::{Expected, REPLY_TOKENS};
use super::plan;
use crate::decode::Decoder;
use crate::error::{Result, catch_panic};
use crate::live::Stage;
use crate::sequence::limits::Limits;
use crate::sequence::prepare::Prepared;
use crate::sequence::{STEP_ROWS, Sequence};

/// Most bytes that are copied to the store when a sequence is preempted, while all others wait.
const SAVED_BYTES: u64 = 64 << 20;

/// Tokens of a prompt and of the reply to it for which there must be room. `reasons`: whether the reply may have more
/// than an answer.
fn expected_length(prompt: usize, limits: &Limits, reasons: bool) -> usize {
    let reply = if reasons { limits.reply } else { limits.answer };
    (prompt + REPLY_TOKENS.min(reply as usize)).min(limits.context)
}

impl Sequence {
    fn expected_length(&self) -> usize {
        expected_length(self.prompt, &self.limits, self.reasoning == Some(true))
            .max(self.tokens.len())
    }

    /// Whether all of its tokens run again when it resumes: the prompt was not reported whole.
    fn resumes_whole(&self) -> bool {
        self.request.needs_whole_prompt() && self.reported < self.prompt
    }
}

impl Decoder {
    /// Whether there is room for a prepared request beside the running ones. Always if none runs:
    /// admission then refuses what does not fit at all.
    pub(crate) fn has_room_for(&self, prepared: &Prepared) -> bool {
        let Prepared { prompt, limits, request, reasoning, .. } = prepared;
        let length = expected_length(prompt.len(), limits, *reasoning == Some(true));
        self.has_room_for_another(prompt, request.needs_whole_prompt(), length)
    }

    /// Whether there is room for a preempted sequence beside the running ones.
    pub(crate) fn has_room_to_resume(&self, sequence: &Sequence) -> bool {
        let (whole, length) = (sequence.resumes_whole(), sequence.expected_length());
        self.has_room_for_another(&sequence.tokens, whole, length)
    }

    /// Whether there is room for a sequence of `tokens` that grows to `length`. If it `is_whole`, it shares none.
    fn has_room_for_another(&self, tokens: &[u32], is_whole: bool, length: usize) -> bool {
        if self.sequences.is_empty() {
            return true;
        }
        let Ok(free) = self.memory.free() else { return false };
        let memory = &self.memory;
        let running = self.sequences.iter().map(|s| (&s.cache, s.expected_length()));
        let (empty, shared) = (self.prefixes.empty(), self.shared_rows(tokens, is_whole));
        let grown: u64 = running.clone().map(|(cache, length)| memory.growth(cache, length)).sum();
        let grown = grown + memory.growth_behind(&empty, shared, length);
        // Their steps go on beside its prompt.
        let step = memory.of_step(running.map(|(cache, _)| (cache, STEP_ROWS)));
        let chunk = memory.of_chunk(self.prefill_chunk.min(tokens.len()), tokens.len());
        grown + step + chunk <= free + self.prefixes.bytes()
    }

    /// Rows that a sequence of `tokens` shares with running ones.
    fn shared_rows(&self, tokens: &[u32], is_whole: bool) -> usize {
        if is_whole { 0 } else { self.prefixes.shared_rows(tokens) }
    }

    /// Evicts saved state until there is room for a prompt of `tokens`.
    pub(crate) fn make_room_for(&mut self, tokens: &[u32], is_whole: bool) -> Result<()> {
        let (empty, shared) = (self.prefixes.empty(), self.shared_rows(tokens, is_whole));
        let needed = self.memory.of_prompt(&empty, shared, tokens.len(), self.prefill_chunk);
        self.make_room(needed)
    }

    /// Evicts saved state until `needed` bytes are free.
    ///
    /// # Errors
    /// [`RequestError::Memory`](crate::RequestError::Memory) if all of it would not be enough; then
    /// nothing is evicted.
    pub(crate) fn make_room(&mut self, needed: u64) -> Result<()> {
        let free = self.memory.free()?;
        if needed <= free {
            return Ok(());
        }
        let available = free + self.prefixes.bytes();
        if needed > available {
            return Err(self.memory.refuse(needed, available));
        }
        self.prefixes.make_room(needed - free);
        self.memory.check(needed)
    }

    /// Makes room for the next step of all sequences: evicts saved state, then preempts sequences. The
    /// last one fails if its step does not fit.
    pub(crate) fn make_room_for_step(&mut self) {
        loop {
            let planned = self.plan_prefill(&self.sequences);
            let needed = self.expect_step(&self.sequences, &planned).bytes;
            self.activity.update(|activity| activity.bytes.step = needed);
            let Err(error) = self.make_room(needed) else { return };
            match plan::victim(&self.victims()) {
                Some(victim) => {
                    let mut sequence = self.sequences.remove(victim);
                    // It comes first when its profile has a turn.
                    sequence.since = 0;
                    self.preempt(sequence);
                }
                None => {
                    if let Some(mut last) = self.sequences.pop() {
                        self.fail(&mut last, error);
                    }
                    return;
                }
            }
        }
    }

    /// What the next step of these sequences takes, with these rows of prompt.
    pub(crate) fn expect_step(&self, sequences: &[Sequence], planned: &[usize]) -> Expected {
        let rows = |(sequence, planned): (&Sequence, usize)| match sequence.prompt_rows() {
            0 => STEP_ROWS,
            _ => planned,
        };
        let spans = sequences.iter().zip(planned.iter().copied());
        let spans = spans.map(|(sequence, planned)| (&sequence.cache, rows((sequence, planned))));
        self.memory.expect(spans.filter(|&(_, rows)| rows > 0))
    }

    /// Preempts a sequence, unless that ends it.
    pub(crate) fn preempt(&mut self, mut sequence: Sequence) {
        if let Err(error) = catch_panic("being preempted", || self.drop_state(&mut sequence)) {
            return self.fail(&mut sequence, error);
        }
        if let Some(mut sequence) = self.unless_ended(sequence) {
            if sequence.has_ended() {
                // The verdict on its last call is away. Its state is not saved.
                sequence.reply_retention = None;
                self.drop_arrays(&mut sequence);
            }
            let (tokens, request_id) = (sequence.tokens.len(), &sequence.request.id);
            tracing::debug!(request_id, tokens, "request preempted");
            self.activity.update(|activity| activity.preemptions += 1);
            sequence.request.live.set_stage(Stage::Preempted);
            self.preempted.push_back(sequence);
        }
    }

    /// Saves the state of a sequence in the store, if there is one and little is to be copied. In memory
    /// it would take as much as before.
    fn save_on_disk(&self, sequence: &Sequence) -> Result<()> {
        let (cache, position) = (&sequence.cache, sequence.cache.position);
        // While its policy is called on a thread, the cache may hold tokens that were rewound.
        if sequence.stale_from.is_some() {
            return Ok(());
        }
        let Some(tokens) = sequence.tokens.get(..position) else { return Ok(()) };
        let Some(unsaved) = self.prefixes.tokens_to_write(tokens) else { return Ok(()) };
        let bytes = self.memory.of_saved(cache, unsaved);
        let is_cheap = bytes <= SAVED_BYTES && self.memory.check(bytes).is_ok();
        if tokens.len() < self.store_min_tokens || !is_cheap {
            return Ok(());
        }
        self.prefixes.save_on_disk(cache, tokens)
    }

    /// Commits the sampled token, so that there is one to run after the saved state, and drops the arrays
    /// of the sequence. A call of its policy that is away goes on.
    pub(crate) fn drop_state(&mut self, sequence: &mut Sequence) -> Result<()> {
        // It is not committed before the policy has answered, but sampled again.
        let sampled = sequence.sampled.take().filter(|_| !sequence.hooks.is_away());
        if let Some(sampled) = sampled {
            self.commit_unless_near_tie(sequence, sampled)?;
        }
        if sequence.has_ended() {
            return Ok(());
        }
        // Arrays that are still being computed would not be freed.
        eval(&sequence.cache.arrays()?)?;
        if let Err(error) = self.save_on_disk(sequence) {
            let request_id = &sequence.request.id;
            let span = &sequence.request.span;
            span.log(|| tracing::warn!(request_id, %error, "saving a preempted request failed"));
        }
        self.keep_learned_stats(sequence);
        self.drop_arrays(sequence);
        sequence.preempted += 1;
        Ok(())
    }

    fn drop_arrays(&self, sequence: &mut Sequence) {
        sequence.cache = self.prefixes.empty();
        sequence.checkpoints.clear();
        sequence.drafters.clear();
        (sequence.sampled, sequence.next_logits) = (None, None);
        (sequence.draft, sequence.stale_from) = (None, None);
        (sequence.runs_alone, sequence.plain_steps, sequence.awaits_mask) = (false, 0, None);
    }

    /// Resumes a preempted sequence.
    pub(crate) fn resume(&mut self, mut sequence: Sequence) {
        if sequence.has_ended() {
            // It waits for a verdict only.
            return self.sequences.push(sequence);
        }
        match catch_panic("being resumed", || self.restore_state(&mut sequence)) {
            Ok(()) => self.sequences.push(sequence),
            Err(error) => self.fail(&mut sequence, error),
        }
    }

    /// Restores the cache of a preempted sequence from saved state, so that its other tokens run again.
    pub(crate) fn restore_state(&mut self, sequence: &mut Sequence) -> Result<()> {
        let (tokens, is_whole) = (&sequence.tokens, sequence.resumes_whole());
        self.make_room_for(tokens, is_whole)?;
        let cached;
        (sequence.cache, cached) = match is_whole {
            true => (self.prefixes.empty(), 0),
            false => self.prefixes.resume(tokens)?,
        };
        sequence.pooled = None;
        // Another request may have saved more of the prompt than had run.
        sequence.save_points.retain(|&(at, _)| at > cached);
        if sequence.governor.is_some() {
            sequence.drafters = self.new_drafters(tokens)?;
        }
        let request_id = &sequence.request.id;
        tracing::debug!(request_id, tokens = tokens.len(), cached, "request resumed");
        Ok(())
    }
}
