//! Saved state: the prefix cache, and the memory that it shares with running sequences.
//!
//! State is saved at save points of a prompt, at the end of a reply and when a sequence is preempted. It gives way to running
//! sequences: [`SavedState::make_room`] evicts it.

use mlx_rs::transforms::eval;

use super::memory::{Expected, Memory, PassBytes};
use crate::cache::Cache;
use crate::error::{Error, Result, catch_panic};
use crate::prefix::{Prefixes, Retention, SHORTEST_SHARED};
use crate::sequence::{STEP_ROWS, Sequence};

/// Most bytes that are copied to the store when a sequence is preempted, while all others wait.
const SAVED_BYTES: u64 = 64 << 20;

/// The prefix cache, and the memory that it shares with running sequences.
pub struct SavedState {
    prefixes: Prefixes,
    memory: Memory,
    /// Fewest tokens of a prefix that is saved.
    min_tokens: usize,
}

impl SavedState {
    /// Saves prefixes of at least `min_tokens` tokens in `prefixes`.
    pub fn new(prefixes: Prefixes, memory: Memory, min_tokens: usize) -> Self {
        Self { prefixes, memory, min_tokens }
    }

    /// The prefix cache.
    pub fn prefixes(&self) -> &Prefixes {
        &self.prefixes
    }

    /// The prefix cache, to be changed.
    pub fn prefixes_mut(&mut self) -> &mut Prefixes {
        &mut self.prefixes
    }

    /// The limit on memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Sets the limit on arrays, in bytes.
    pub fn set_limit(&mut self, limit: u64) -> Result<()> {
        self.memory.set_limit(limit, &self.prefixes.empty())
    }

    /// Fewest tokens of a prefix that is saved.
    pub fn min_tokens(&self) -> usize {
        self.min_tokens
    }

    /// An empty cache.
    pub fn empty(&self) -> Cache {
        self.prefixes.empty()
    }

    /// Rows that a sequence of `tokens` shares with running ones. If it `is_whole`, it shares none.
    pub fn shared_rows(&self, tokens: &[u32], is_whole: bool) -> usize {
        if is_whole { 0 } else { self.prefixes.shared_rows(tokens) }
    }

    /// Evicts saved state until there is room for a prompt of `tokens`, which runs in chunks of `chunk`.
    pub fn make_room_for(
        &mut self,
        tokens: &[u32],
        is_whole: bool,
        chunk: usize,
        bytes: &PassBytes,
    ) -> Result<()> {
        let (empty, shared) = (self.prefixes.empty(), self.shared_rows(tokens, is_whole));
        let needed = self.memory.of_prompt(&empty, shared, tokens.len());
        self.make_room(needed + bytes.of_prompt(tokens.len(), chunk))
    }

    /// Evicts saved state until `needed` bytes are free.
    ///
    /// # Errors
    /// [`RequestError::Memory`](crate::RequestError::Memory) if all of it would not be enough; then
    /// nothing is evicted.
    pub fn make_room(&mut self, needed: u64) -> Result<()> {
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

    /// What the next step of these sequences takes, with these rows of prompt.
    pub fn expect_step(
        &self,
        sequences: &[Sequence],
        planned: &[usize],
        bytes: &PassBytes,
    ) -> Expected {
        let rows = |(sequence, planned): (&Sequence, usize)| match sequence.prompt_rows() {
            0 => STEP_ROWS,
            _ => planned,
        };
        let spans = sequences.iter().zip(planned.iter().copied());
        let spans = spans
            .map(|(sequence, planned)| (sequence.timeline().cache(), rows((sequence, planned))));
        self.memory.expect(bytes, spans.filter(|&(_, rows)| rows > 0))
    }

    /// Saves the state of the prompt if the cache is at its next save point.
    pub fn save_at_save_point(&mut self, sequence: &mut Sequence) {
        if let Some(retention) = sequence.timeline_mut().take_save_point() {
            self.save(sequence, retention);
        }
    }

    /// Saves the state of the tokens that have run. A failure costs time later, nothing else.
    pub fn save(&mut self, sequence: &Sequence, retention: Retention) {
        let cache = sequence.timeline().cache();
        let tokens = &sequence.timeline().tokens()[..cache.position];
        if tokens.len() < self.min_tokens {
            return;
        }
        let name = sequence.request().prefix_name;
        let plan = self.prefixes.plan_save(cache, tokens, retention).named(name);
        let bytes = |rows| self.memory.of_saved(cache, rows);
        // The store has a copy of its own until it is written.
        let room = self.make_room(bytes(tokens.len()) + plan.to_write.map_or(0, bytes));
        let saved = room.and_then(|()| self.prefixes.save(cache, tokens, &plan));
        if let Err(error) = saved {
            let (id, span) = (&sequence.request().id, &sequence.request().span);
            span.log(|| tracing::warn!(id, %error, "saving state failed"));
        }
    }

    /// Saves the state of a sequence in the store, if there is one and little is to be copied. In memory
    /// it would take as much as before.
    pub fn save_on_disk(&self, sequence: &Sequence) -> Result<()> {
        let cache = sequence.timeline().cache();
        // While its policy is called on a thread, the cache may hold tokens that were rewound.
        if sequence.timeline().is_stale() {
            return Ok(());
        }
        let Some(tokens) = sequence.timeline().tokens().get(..cache.position) else {
            return Ok(());
        };
        let Some(unsaved) = self.prefixes.tokens_to_write(tokens) else { return Ok(()) };
        let bytes = self.memory.of_saved(cache, unsaved);
        let is_cheap = bytes <= SAVED_BYTES && self.memory.check(bytes).is_ok();
        if tokens.len() < self.min_tokens || !is_cheap {
            return Ok(());
        }
        self.prefixes.save_on_disk(cache, tokens)
    }

    /// Returns true if a request with this prompt gains by waiting until the sequence of `cache` has computed the first
    /// `tokens` tokens of it.
    pub fn is_worth_awaiting(&self, prompt: &[u32], cache: &Cache, tokens: usize) -> bool {
        // Before the store is asked, which takes longer.
        if tokens < self.min_tokens.max(SHORTEST_SHARED) {
            return false;
        }
        let known = self.prefixes.known_tokens(prompt);
        tokens >= known + SHORTEST_SHARED
            && self.prefixes.will_know(cache, tokens, self.memory.float_bytes())
    }

    /// Lets other requests share the KV of the tokens of the prompt that have run. A failure costs memory, nothing else.
    pub fn share_prefix(&mut self, sequence: &mut Sequence) {
        let position = sequence.timeline().position();
        if position > sequence.timeline().prompt() {
            // It holds what may be rewound. A further choice shares the rows of the first.
            return;
        }
        // If it shares some already, all rows are copied.
        let cache = sequence.timeline().cache();
        let is_copied = cache.shared_count() > 0;
        let copied = cache.shareable_bytes(position, self.memory.float_bytes());
        if !self.prefixes.will_share(cache, position)
            || is_copied && self.make_room(copied).is_err()
        {
            return;
        }
        let share = || sequence.timeline_mut().share(&mut self.prefixes);
        if let Err(error) = catch_panic("being shared", share) {
            let (id, span) = (&sequence.request().id, &sequence.request().span);
            span.log(|| tracing::warn!(id, %error, "prefix not shared"));
        }
    }

    /// Empties the prefix cache after a panic, which may have left it halfway through a change.
    pub fn recover_from(&mut self, error: &Error) {
        if let Error::Panic { .. } = error {
            self.prefixes.clear_memory();
        }
    }

    /// A copy of `cache` that shares no buffer that is written in place.
    pub fn copy(&mut self, cache: &Cache) -> Result<Cache> {
        let mut copy = self.prefixes.empty();
        let (position, shared) = (cache.position, cache.shared_count());
        self.make_room(self.memory.growth_behind(&copy, shared, position))?;
        let kv = (shared < position).then(|| cache.key_values(shared, position)).transpose()?;
        copy.restore(cache.shared(), kv.as_slice(), &cache.recurrent_state()?, position)?;
        eval(&copy.arrays()?)?;
        Ok(copy)
    }
}

#[cfg(test)]
impl SavedState {
    /// Replaces the fewest tokens of a prefix that is saved.
    pub fn set_min_tokens(&mut self, tokens: usize) {
        self.min_tokens = tokens;
    }
}
