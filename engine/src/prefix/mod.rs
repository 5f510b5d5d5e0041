//! Saved state of earlier requests, for requests that begin with the same tokens.
//!
//! Two tiers: the prefix cache, a [`tree`] of live arrays in memory, and the prefix store
//! ([`crate::store`]), which outlives the process and holds more. A request resumes from the longest
//! prefix that either tier has; what is read from disk is in memory from then on. Both tiers hold KV
//! once for all prefixes that share it, and recurrent state at the save points that `decode` chooses.
//!
//! Lost state costs time, never correctness. This module runs on the engine's thread, except the store's
//! writer and [`PrefixReporter`].

mod bytes;
mod cost;
mod report;
mod shared;
mod tree;

use std::time::Instant;

use self::bytes::KvFormat;
pub use self::cost::{ComputeCosts, ReadCosts};
pub use self::report::{PrefixCounts, PrefixReport, PrefixReporter};
pub use self::shared::SHORTEST as SHORTEST_SHARED;
use self::shared::SharedPrefixes;
pub use self::tree::{CacheSize, NamedPrefix};
use self::tree::{Footprint, KvRun, PrefixTree};
use crate::cache::{Cache, KeyValues, SharedPart, State, owned};
use crate::error::{ConfigError, Error, Result};
use crate::request::PrefixName;
use crate::store::{
    BLOCK_TOKENS, Key, KeyChain, PartKind, QueuedPart, RedbStore, SavedPrefix, WallClock, state_key,
};

impl Footprint for State {
    fn bytes(&self) -> u64 {
        self.iter().map(|array| array.nbytes() as u64).sum()
    }
}

impl Footprint for KeyValues {
    fn bytes(&self) -> u64 {
        self.arrays().map(|array| array.nbytes() as u64).sum()
    }
}

impl KvRun for KeyValues {
    fn split(self, at: usize) -> Result<(Self, Self)> {
        let count = self.count();
        Ok((self.part(0, at)?.owned()?, self.part(at, count)?.owned()?))
    }

    fn first(&self, count: usize) -> Result<Self> {
        if count == self.count() { Ok(self.clone()) } else { self.part(0, count) }
    }
}

/// Most conversations that are reported.
const NAMES: usize = 256;

/// Tokens between regular save points, for each token that a state must save at least where a prompt parts from others:
/// 16 tokens, and more if states are large beside the memory of the prefix cache.
const INTERVAL_TO_GAIN: usize = 32;

/// Bytes of an element of KV, when it is estimated what the store will read.
const KV_BYTES: u64 = 2;

/// What follows the first `count` positions of `kv`.
fn after(kv: Vec<KeyValues>, count: usize) -> Result<Vec<KeyValues>> {
    let mut left = count;
    let mut rest = Vec::new();
    for kv in kv {
        let skipped = left.min(kv.count());
        left -= skipped;
        match kv.count() - skipped {
            0 => {}
            _ if skipped == 0 => rest.push(kv),
            _ => rest.push(kv.part(skipped, kv.count())?),
        }
    }
    Ok(rest)
}

/// Number of `tokens` in blocks that the store does not have.
fn missing_tokens(disk: &RedbStore, tokens: &[u32], keys: &[Key]) -> usize {
    let blocks = tokens.chunks(BLOCK_TOKENS).zip(keys);
    blocks.filter(|(_, key)| !disk.contains(key)).map(|(block, _)| block.len()).sum()
}

/// The prefix cache and the prefix store.
pub struct Prefixes {
    tree: PrefixTree<KeyValues, State>,
    shared: SharedPrefixes,
    memory_bytes: u64,
    disk: Option<RedbStore>,
    kv_format: KvFormat,
    /// Cloned and filled by [`Prefixes::resume`].
    empty: Cache,
    needs_state: bool,
    read_costs: ReadCosts,
    clock: WallClock,
    reporter: PrefixReporter,
}

/// What saving a prefix writes to the store.
pub struct SavePlan {
    retention: Retention,
    keys: Vec<Key>,
    name: Option<PrefixName>,
    /// Number of tokens whose KV is copied for the store; `None` if nothing is written.
    pub to_write: Option<usize>,
}

impl SavePlan {
    /// This plan, for a prefix of the conversation `name`.
    #[must_use]
    pub fn named(self, name: Option<PrefixName>) -> Self {
        Self { name, ..self }
    }
}

/// How long saved state is protected from eviction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Retention {
    /// 0 for no protection.
    pub seconds: u32,
}

impl Prefixes {
    /// Saves state of caches like `empty` in at most `memory_bytes`, and on `disk` if there is one,
    /// its KV in `kv_bits` bits (8, or 0 for exact).
    ///
    /// # Errors
    /// [`Error::Config`] if KV of this model cannot be stored in 8 bits.
    pub fn new(
        empty: Cache,
        memory_bytes: u64,
        disk: Option<RedbStore>,
        kv_bits: u32,
    ) -> Result<Self> {
        if kv_bits > 0 && !empty.head_dim_is_multiple_of(bytes::GROUP) {
            let problem = "cannot be used with this model: the size of its attention heads is not \
                           a multiple of 32"
                .into();
            return Err(Error::Config(ConfigError::Key { field: "store.kv_bits", problem }));
        }
        let needs_state = !empty.is_truncatable();
        Ok(Self {
            tree: PrefixTree::new(needs_state),
            shared: SharedPrefixes::default(),
            memory_bytes,
            reporter: PrefixReporter::new(memory_bytes, disk.as_ref().map(RedbStore::reporter)),
            disk,
            kv_format: if kv_bits == 8 { KvFormat::Bits8 } else { KvFormat::Exact },
            empty,
            needs_state,
            read_costs: ReadCosts::default(),
            clock: WallClock::default(),
        })
    }

    /// Replaces the clock for retention in memory; the store has its own.
    #[must_use]
    pub fn with_clock(self, clock: WallClock) -> Self {
        Self { clock, ..self }
    }

    /// What decides whether state on disk is written and read: if reading it is faster than computing it.
    pub fn read_costs(&self) -> ReadCosts {
        self.read_costs.clone()
    }

    /// Reports from any thread.
    pub fn reporter(&self) -> PrefixReporter {
        self.reporter.clone()
    }

    /// An empty cache.
    pub fn empty(&self) -> Cache {
        self.empty.clone()
    }

    /// Tokens between the save points of a long prefill, so that the states of a prompt of 8,192
    /// tokens take at most an eighth of the memory; `None` for models that can resume anywhere.
    pub fn save_interval(&self) -> Option<usize> {
        if !self.needs_state {
            return None;
        }
        let bytes: u64 =
            self.empty.recurrent_state().ok()?.iter().map(|array| array.nbytes() as u64).sum();
        let mut every = 512;
        while 8192 / every * bytes > self.memory_bytes / 8 && every < 8192 {
            every *= 2;
        }
        Some(every as usize)
    }

    /// A cache at the end of the longest saved prefix of `prompt`, and its length. Leaves at least
    /// one token to run, for the logits of the next.
    pub fn restore(&mut self, prompt: &[u32]) -> Result<(Cache, usize)> {
        let (cache, length) = self.resume(prompt)?;
        self.reporter.count(|counts| {
            counts.hits += u64::from(length > 0);
            counts.misses += u64::from(length == 0);
            counts.prompt_tokens += prompt.len() as u64;
            counts.cached_tokens += length as u64;
        });
        Ok((cache, length))
    }

    /// [`Prefixes::restore`] without counting a request.
    pub fn resume(&mut self, prompt: &[u32]) -> Result<(Cache, usize)> {
        let limit = prompt.len() - 1;
        let mut length = self.tree.find(prompt, limit).resume;
        let shared_only = self.shared_only(prompt, length);
        let mut known = shared_only.as_ref().map_or(length, |part| part.count);
        // The store drops a damaged part when it is read; a shorter prefix may still be whole.
        while let Some(saved) = self.worth_reading(prompt, known) {
            match self.read(&prompt[..saved.tokens], &saved.keys) {
                Ok(true) => (length, known) = (saved.tokens, saved.tokens),
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(tokens = saved.tokens, %error, "saved state not restored");
                    break;
                }
            }
        }
        let mut cache = self.empty.clone();
        if let Some(shared) = shared_only.filter(|part| part.count > length) {
            length = shared.count;
            cache.restore(Some(shared), &[], &State::default(), length)?;
        } else if length > 0 {
            let prefix = &prompt[..length];
            let shared = self.shared.find(prefix);
            let (kv, state) = self.tree.get(prefix)?;
            let kv = after(kv, shared.as_ref().map_or(0, |part| part.count))?;
            cache.restore(shared, &kv, state.unwrap_or(&State::default()), length)?;
            // Nothing is copied if nothing is shared yet.
            if cache.shared_count() == 0
                && let Err(error) = self.shared.share(&mut cache, prefix)
            {
                tracing::warn!(tokens = length, %error, "prefix not shared");
            }
        }
        self.shrink();
        Ok((cache, length))
    }

    /// Shares the KV of prefixes of at least `shortest` tokens between running requests; `None` to share none.
    pub fn share_from(&mut self, shortest: Option<usize>) {
        self.shared.set_shortest(shortest);
    }

    /// Rows that running requests share, if they are more than the `saved` tokens of a prompt, and no state is needed to
    /// resume from them.
    fn shared_only(&self, prompt: &[u32], saved: usize) -> Option<SharedPart> {
        let shared = self.shared.longest(&prompt[..prompt.len().saturating_sub(1)])?;
        (!self.needs_state && shared.count > saved).then_some(shared)
    }

    /// Number of tokens after which a request with this prompt could resume.
    pub fn known_tokens(&self, prompt: &[u32]) -> usize {
        let saved = self.tree.find(prompt, prompt.len().saturating_sub(1)).resume;
        let known = self.shared_only(prompt, saved).map_or(saved, |part| part.count);
        self.worth_reading(prompt, known).map_or(known, |on_disk| on_disk.tokens)
    }

    /// Whether a request could resume after `tokens` tokens when the one with `cache` has run them: what it needs stays in
    /// memory.
    pub fn will_know(&self, cache: &Cache, tokens: usize, float_bytes: u64) -> bool {
        let is_shared = !self.needs_state && self.shared.will_share(cache, tokens);
        is_shared || self.empty.bytes(tokens, float_bytes) <= self.memory_bytes / 2
    }

    /// Whether running requests share KV.
    pub fn shares(&self) -> bool {
        self.shared.is_on()
    }

    /// Whether [`Prefixes::share`] will share rows of `cache` when it has `tokens` rows.
    pub fn will_share(&self, cache: &Cache, tokens: usize) -> bool {
        self.shared.will_share(cache, tokens)
    }

    /// The position where `prompt` parts from saved prefixes that it follows for longer than the first `resumed` tokens,
    /// from which its request resumes: a state at this position lets the next request with the same beginning resume there.
    /// `None` for models that can resume anywhere, and if the state would save too few tokens for its bytes.
    ///
    /// The first prompt with a beginning cannot know where others will part from it. The second one does, so that the third
    /// computes nothing twice.
    pub fn parting(&self, prompt: &[u32], resumed: usize) -> Option<usize> {
        let least = self.save_interval()? / INTERVAL_TO_GAIN;
        let limit = prompt.len().saturating_sub(1);
        let on_disk = self.disk.as_ref().and_then(|disk| disk.longest(prompt, limit, false));
        let known = self.tree.find(prompt, limit).kv.max(on_disk.map_or(0, |saved| saved.tokens));
        let at = known.min(limit);
        (at >= resumed + least).then_some(at)
    }

    /// Lets later requests share the rows of `cache`, which holds exactly `tokens`. Copies them if it shares some already.
    pub fn share(&mut self, cache: &mut Cache, tokens: &[u32]) -> Result<()> {
        self.shared.share(cache, tokens)
    }

    /// Number of `tokens` that a request with this prompt shares with running ones.
    pub fn shared_rows(&self, tokens: &[u32]) -> usize {
        let saved = self.tree.find(tokens, tokens.len().saturating_sub(1)).resume;
        let shared = self.shared_only(tokens, saved).or_else(|| self.shared.find(&tokens[..saved]));
        shared.map_or(0, |part| part.count)
    }

    /// Bytes of the KV that running requests share.
    pub fn shared_bytes(&self) -> u64 {
        self.shared.bytes()
    }

    /// The longest prefix of `prompt` on disk, if reading it is better than computing the tokens after the first `known`.
    fn worth_reading(&self, prompt: &[u32], known: usize) -> Option<SavedPrefix> {
        let disk = self.disk.as_ref()?;
        let saved = disk.longest(prompt, prompt.len().saturating_sub(1), self.needs_state)?;
        let is_worth = saved.tokens > known && self.is_worth_reading(disk, &saved, known);
        is_worth.then_some(saved)
    }

    /// Whether reading a prefix on disk is better than computing the tokens after the first `known`.
    fn is_worth_reading(&self, disk: &RedbStore, saved: &SavedPrefix, known: usize) -> bool {
        let bytes = disk.bytes(&saved.keys[known / BLOCK_TOKENS..]);
        self.read_costs.favours_reading(bytes, saved.tokens - known)
    }

    /// Copies a prefix with these keys from disk to memory; false if a part is damaged or gone.
    fn read(&mut self, prefix: &[u32], keys: &[Key]) -> Result<bool> {
        let Some(disk) = &self.disk else { return Ok(false) };
        let known = self.tree.find(prefix, prefix.len()).kv;
        let blocks = prefix.len().div_ceil(BLOCK_TOKENS);
        // The KV in memory may end within a block: read that block again.
        let first = if known == prefix.len() { blocks } else { known / BLOCK_TOKENS };
        let start = Instant::now();
        let Some(parts) = disk.load(&keys[first..]) else { return Ok(false) };
        disk.touch(keys);
        let (saved_kv, saved_state) = parts.split_at(blocks - first);
        let mut kv = Vec::new();
        for (i, tensors) in saved_kv.iter().enumerate() {
            let from = (first + i) * BLOCK_TOKENS;
            let to = (from + BLOCK_TOKENS).min(prefix.len());
            let arrays = self.kv_format.to_arrays(tensors)?;
            let block = self.empty.key_values_from(arrays, from, to)?;
            kv.push(if from < known { block.part(known - from, to - from)? } else { block });
        }
        let kv = if kv.is_empty() { None } else { Some(KeyValues::join(&kv)?.owned()?) };
        let state = match saved_state {
            [tensors] => Some(State::from(owned(&bytes::to_arrays(tensors)?)?)),
            _ => None,
        };
        self.tree.put(prefix, kv, state)?;
        let bytes = parts.iter().flatten().map(|tensor| tensor.bytes.len() as u64).sum();
        self.read_costs.learn(bytes, start.elapsed());
        self.reporter.count(|counts| counts.read_tokens += prefix.len() as u64);
        Ok(true)
    }

    /// Plans [`Prefixes::save`]. On disk, state is saved if it is retained, or if reading it will be better
    /// than computing what the store does not have.
    pub fn plan_save(&self, cache: &Cache, tokens: &[u32], retention: Retention) -> SavePlan {
        let keys = self.keys(tokens);
        let to_write = self.disk.as_ref().and_then(|disk| {
            let is_written = !keys.iter().all(|key| disk.contains(key))
                && (retention.seconds > 0 || self.is_worth_writing(disk, cache, tokens));
            is_written.then(|| missing_tokens(disk, tokens, &keys))
        });
        SavePlan { retention, keys, name: None, to_write }
    }

    /// Whether reading the state of `cache` will be better than computing what the store does not have.
    fn is_worth_writing(&self, disk: &RedbStore, cache: &Cache, tokens: &[u32]) -> bool {
        // To find what the store has, all tokens are hashed.
        if cost::is_small(cache.bytes(tokens.len(), KV_BYTES)) {
            return true;
        }
        let saved = disk.longest(tokens, tokens.len(), self.needs_state);
        let new = tokens.len() - saved.map_or(0, |saved| saved.tokens);
        self.read_costs.favours_reading(cache.bytes(new, KV_BYTES), new)
    }

    /// Saves the state of `cache`, which holds exactly `tokens`, for which the plan was made.
    pub fn save(&mut self, cache: &Cache, tokens: &[u32], plan: &SavePlan) -> Result<()> {
        debug_assert_eq!(cache.position, tokens.len());
        let SavePlan { retention, keys, name, to_write } = plan;
        let length = tokens.len();
        let known = self.tree.find(tokens, length);
        if known.resume < length || known.kv < length {
            let kv = (known.kv < length)
                .then(|| cache.key_values(known.kv, length).and_then(KeyValues::owned));
            let state = self.needs_state.then(|| cache.recurrent_state().and_then(State::owned));
            self.tree.put(tokens, kv.transpose()?, state.transpose()?)?;
            self.reporter.count(|counts| counts.saves += 1);
        }
        if let Some(name) = name {
            self.tree.set_name(tokens, *name);
        }
        if let Some(disk) = &self.disk {
            if to_write.is_some() {
                disk.save(self.unsaved_parts(disk, cache, tokens, keys)?);
            }
            disk.touch(keys);
        }
        if retention.seconds > 0 && length > 0 {
            self.retain_keys(tokens, keys, *retention)?;
        }
        self.shrink();
        Ok(())
    }

    /// Saves the state of `cache`, which holds exactly `tokens`, on disk only, and holds no array of it
    /// afterwards. Does nothing without a store.
    pub fn save_on_disk(&self, cache: &Cache, tokens: &[u32]) -> Result<()> {
        let Some(disk) = &self.disk else { return Ok(()) };
        let keys = self.keys(tokens);
        let parts = self.unsaved_parts(disk, cache, tokens, &keys)?;
        for part in &parts {
            part.tensors().map_err(|problem| Error::Array(problem.into()))?;
        }
        disk.save(parts);
        disk.touch(&keys);
        Ok(())
    }

    /// Number of `tokens` whose KV [`Prefixes::save_on_disk`] would copy; `None` without a store.
    pub fn tokens_to_write(&self, tokens: &[u32]) -> Option<usize> {
        let disk = self.disk.as_ref()?;
        Some(missing_tokens(disk, tokens, &self.keys(tokens)))
    }

    /// Protects a saved prefix from eviction, as far as half of each tier allows. Does nothing for a
    /// prefix that is not saved.
    pub fn retain(&mut self, tokens: &[u32], retention: Retention) -> Result<()> {
        if retention.seconds == 0 || tokens.is_empty() {
            return Ok(());
        }
        self.retain_keys(tokens, &self.keys(tokens), retention)
    }

    fn retain_keys(&mut self, tokens: &[u32], keys: &[Key], retention: Retention) -> Result<()> {
        let now = self.clock.seconds();
        let until = now + u64::from(retention.seconds);
        let most = self.memory_bytes / 2;
        if !self.tree.retain(tokens, until, now, most)? {
            tracing::warn!(tokens = tokens.len(), most, "prefix not retained in memory");
        }
        if let Some(disk) = &self.disk
            && !disk.retain(keys, until)
        {
            tracing::warn!(tokens = tokens.len(), "prefix not retained on disk");
        }
        Ok(())
    }

    /// The parts of a prefix that the store does not have.
    fn unsaved_parts(
        &self,
        disk: &RedbStore,
        cache: &Cache,
        tokens: &[u32],
        keys: &[Key],
    ) -> Result<Vec<QueuedPart>> {
        let mut parts = Vec::new();
        for (i, block) in tokens.chunks(BLOCK_TOKENS).enumerate() {
            let (key, from) = (keys[i], i * BLOCK_TOKENS);
            let end = from + block.len();
            if !disk.contains(&key) {
                let kv = cache.key_values(from, end)?;
                parts.push(self.kv_format.to_part((key, PartKind::Kv, end), kv.arrays())?);
            }
        }
        if self.needs_state
            && let Some(&key) = keys.last()
            && !disk.contains(&key)
        {
            let place = (key, PartKind::State, tokens.len());
            parts.push(bytes::to_part(place, &cache.recurrent_state()?)?);
        }
        Ok(parts)
    }

    /// Keys of a prefix in the store: its KV, first to last, then its state.
    fn keys(&self, tokens: &[u32]) -> Vec<Key> {
        let Some(disk) = &self.disk else { return Vec::new() };
        let mut keys = KeyChain::block_keys(disk.fingerprint(), tokens);
        if self.needs_state
            && let Some(last) = keys.last()
        {
            keys.push(state_key(last));
        }
        keys
    }

    fn shrink(&mut self) {
        self.shrink_to(self.memory_bytes);
    }

    fn shrink_to(&mut self, budget: u64) {
        let evicted = self.tree.shrink(budget, self.clock.seconds());
        self.reporter.count(|counts| counts.evictions += evicted as u64);
        self.report();
    }

    /// Lets other threads know what is in memory now.
    fn report(&self) {
        self.reporter.set_content(self.tree.size(), self.tree.names(NAMES));
    }

    /// Bytes of what is saved in memory.
    pub fn bytes(&self) -> u64 {
        self.tree.size().bytes
    }

    /// Evicts at least `bytes` from memory, or everything if less is cached. Retained entries are evicted
    /// last.
    pub fn make_room(&mut self, bytes: u64) {
        let budget = self.bytes().saturating_sub(bytes);
        self.shrink_to(budget);
        if self.bytes() > budget {
            self.clear_memory();
        }
    }

    /// Drops everything that is saved in memory.
    pub fn clear_memory(&mut self) {
        self.tree = PrefixTree::new(self.needs_state);
        self.report();
    }

    /// Waits until everything that was saved is on disk; an error if saving was turned off.
    pub fn flush(&self) -> Result<()> {
        Ok(self.disk.as_ref().map_or(Ok(()), RedbStore::flush)?)
    }
}
