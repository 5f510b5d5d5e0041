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

use super::memory::REPLY_TOKENS;
use super::{Resources, Schedule};
use crate::sequence::limits::Limits;
use crate::sequence::prepare::Prepared;
use crate::sequence::{STEP_ROWS, Sequence};

/// Tokens of a prompt and of the reply to it for which there must be room. `reasons`: whether the reply may have more
/// than an answer.
fn expected_length(prompt: usize, limits: &Limits, reasons: bool) -> usize {
    let reply = if reasons { limits.reply } else { limits.answer };
    (prompt + REPLY_TOKENS.min(reply as usize)).min(limits.context)
}

/// Tokens for which there must be room when a sequence runs.
fn sequence_length(sequence: &Sequence) -> usize {
    let (timeline, reasons) = (sequence.timeline(), sequence.reasoning() == Some(true));
    expected_length(timeline.prompt(), sequence.limits(), reasons).max(timeline.len())
}

/// Returns true if all tokens of a sequence run again when it resumes: the prompt was not reported whole.
pub fn resumes_whole(sequence: &Sequence) -> bool {
    sequence.request().needs_whole_prompt() && sequence.reported() < sequence.timeline().prompt()
}

impl Schedule {
    /// Returns true if there is room for a prepared request beside the running ones. Always if none runs:
    /// admission then refuses what does not fit at all.
    pub(super) fn has_room_for(&self, prepared: &Prepared, resources: Resources<'_>) -> bool {
        let Prepared { prompt, limits, request, reasoning, .. } = prepared;
        let length = expected_length(prompt.len(), limits, *reasoning == Some(true));
        self.has_room_for_another(prompt, request.needs_whole_prompt(), length, resources)
    }

    /// Returns true if there is room for a preempted sequence beside the running ones.
    pub(super) fn has_room_to_resume(&self, sequence: &Sequence, resources: Resources<'_>) -> bool {
        let (whole, length) = (resumes_whole(sequence), sequence_length(sequence));
        self.has_room_for_another(sequence.timeline().tokens(), whole, length, resources)
    }

    /// Returns true if there is room for a sequence of `tokens` that grows to `length`. If it `is_whole`, it shares none.
    fn has_room_for_another(
        &self,
        tokens: &[u32],
        is_whole: bool,
        length: usize,
        Resources { saved, bytes, .. }: Resources<'_>,
    ) -> bool {
        if self.running.is_empty() {
            return true;
        }
        let memory = saved.memory();
        let Ok(free) = memory.free() else { return false };
        let running = self.running.iter().map(|s| (s.timeline().cache(), sequence_length(s)));
        let (empty, shared) = (saved.empty(), saved.shared_rows(tokens, is_whole));
        let grown: u64 = running.clone().map(|(cache, length)| memory.growth(cache, length)).sum();
        let grown = grown + memory.growth_behind(&empty, shared, length);
        // The running sequences keep decoding in the passes that prefill this prompt.
        let step = memory.of_step(bytes, running.map(|(cache, _)| (cache, STEP_ROWS)));
        let chunk = bytes.of_chunk(self.chunk.min(tokens.len()), tokens.len());
        grown + step + chunk <= free + saved.prefixes().bytes()
    }
}
