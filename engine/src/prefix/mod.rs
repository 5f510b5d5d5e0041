//! Prefixes: what earlier requests computed, for those that begin with the same tokens.
//!
//! Two tiers. In memory, a [`tree`] of live arrays; on disk, [`crate::store`], which outlives the
//! process and holds more. A request resumes from the longest prefix that either has; what comes
//! from disk is in memory from then on. Both keep keys and values once for all prefixes that share
//! them, and what exists at one position alone (recurrent states, sliding windows) where
//! `decode` chose to save.
//!
//! Losing any of it costs time, never correctness. Runs on the engine's thread, but for the store's
//! writer; [`Reporter`] can be asked from anywhere.

mod bytes;
mod report;
pub mod tree;

use std::time::{SystemTime, UNIX_EPOCH};

use mlx_rs::Array;
use mlx_rs::transforms::eval;

pub use self::report::{Counts, Report, Reporter};
use self::tree::Tree;
use crate::cache::{Cache, KeyValues, owned};
use crate::error::{Error, Result};
use crate::store::{BLOCK_TOKENS, Key, Keys, Kind, Part, RedbStore, state_key};

/// What exists at one position, two arrays a layer.
struct Fixed(Vec<Array>);

impl tree::State for Fixed {
    fn bytes(&self) -> u64 {
        self.0.iter().map(|array| array.nbytes() as u64).sum()
    }
}

impl tree::Rows for KeyValues {
    fn split(self, at: usize) -> Result<(Self, Self)> {
        let count = self.count();
        Ok((self.part(0, at)?.owned()?, self.part(at, count)?.owned()?))
    }

    fn first(&self, count: usize) -> Result<Self> {
        if count == self.count() { Ok(self.clone()) } else { self.part(0, count) }
    }

    fn bytes(&self) -> u64 {
        self.arrays().map(|array| array.nbytes() as u64).sum()
    }
}

/// Both tiers.
pub struct Prefixes {
    tree: Tree<KeyValues, Fixed>,
    memory_bytes: u64,
    disk: Option<RedbStore>,
    rows_on_disk: bytes::Rows,
    /// A cache that has seen nothing: what is restored goes into a copy of it.
    empty: Cache,
    needs_state: bool,
    reporter: Reporter,
}

/// How long a prefix is kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Keep {
    /// Seconds for which it is not evicted; 0 leaves it to what is used.
    pub seconds: u32,
}

impl Prefixes {
    /// Keeps state of caches like `empty` in at most `memory_bytes`, and on `disk` where there is one,
    /// its rows in `kv_bits` bits (8, or 0 for as they are).
    ///
    /// # Errors
    /// [`Error::Invalid`] when rows of this model cannot be kept in 8 bits.
    pub fn new(
        empty: Cache,
        memory_bytes: u64,
        disk: Option<RedbStore>,
        kv_bits: u32,
    ) -> Result<Self> {
        if kv_bits > 0 && !empty.head_dim_is_multiple_of(bytes::GROUP) {
            let problem = "cannot be used with this model: its attention heads have a number of \
                           dimensions that is no multiple of 32"
                .into();
            return Err(Error::Invalid { field: "store.kv_bits", problem });
        }
        let needs_state = !empty.is_truncatable();
        let reporter = Reporter::new(memory_bytes, disk.as_ref().map(RedbStore::reporter));
        let rows_on_disk = if kv_bits == 8 { bytes::Rows::Bits8 } else { bytes::Rows::Exact };
        let tree = Tree::new(needs_state);
        Ok(Self { tree, memory_bytes, disk, rows_on_disk, empty, needs_state, reporter })
    }

    /// Asks for counters and sizes from any thread.
    pub fn reporter(&self) -> Reporter {
        self.reporter.clone()
    }

    /// A cache that has seen nothing.
    pub fn empty(&self) -> Cache {
        self.empty.clone()
    }

    /// Tokens between the states that a long prompt leaves on its way, so that those of a prompt of
    /// 8,192 tokens take at most an eighth of the memory; none where a request can resume anywhere.
    pub fn every(&self) -> Option<usize> {
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

    /// A cache that stands at the longest saved prefix of `prompt`, and its length. At least one
    /// token is left to run, as its logits draw what follows.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX cannot put the arrays together.
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

    /// [`Prefixes::restore`], for prompts that nobody asked for.
    ///
    /// # Errors
    /// The same.
    pub fn resume(&mut self, prompt: &[u32]) -> Result<(Cache, usize)> {
        let limit = prompt.len() - 1;
        let mut length = self.tree.find(prompt, limit).resume;
        // A damaged part is dropped where it is met, and something shorter may be whole.
        while let Some(disk) = &self.disk
            && let Some(saved) = disk.longest(prompt, limit, self.needs_state)
            && saved > length
        {
            match self.read(&prompt[..saved]) {
                Ok(true) => length = saved,
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(%error, tokens = saved, "saved state does not fit this model");
                    break;
                }
            }
        }
        let mut cache = self.empty.clone();
        if length > 0 {
            let (rows, fixed) = self.tree.get(&prompt[..length])?;
            let fixed = fixed.map_or(&[][..], |fixed| &fixed.0);
            cache.restore(&rows, fixed, length)?;
        }
        self.shrink();
        Ok((cache, length))
    }

    /// Brings a prefix from disk to memory; false where a part of it is damaged or gone.
    fn read(&mut self, prefix: &[u32]) -> Result<bool> {
        let Some(disk) = &self.disk else { return Ok(false) };
        let known = self.tree.find(prefix, prefix.len()).rows;
        let keys = keys(disk, prefix, self.needs_state);
        let blocks = prefix.len().div_ceil(BLOCK_TOKENS);
        // Of the block in which the rows in memory end the others are wanted.
        let first = if known == prefix.len() { blocks } else { known / BLOCK_TOKENS };
        let Some(parts) = disk.load(&keys[first..]) else { return Ok(false) };
        disk.touch(&keys);
        let (saved_rows, saved_state) = parts.split_at(blocks - first);
        let mut rows = Vec::new();
        for (i, tensors) in saved_rows.iter().enumerate() {
            let from = (first + i) * BLOCK_TOKENS;
            let to = (from + BLOCK_TOKENS).min(prefix.len());
            let arrays = self.rows_on_disk.to_arrays(tensors)?;
            let block = self.empty.key_values_from(arrays, from, to)?;
            rows.push(if from < known { block.part(known - from, to - from)? } else { block });
        }
        let rows = if rows.is_empty() { None } else { Some(KeyValues::join(&rows)?) };
        let state = match saved_state {
            [tensors] => Some(Fixed(bytes::to_arrays(tensors)?)),
            _ => None,
        };
        let fixed = state.iter().flat_map(|fixed| &fixed.0);
        eval(rows.iter().flat_map(KeyValues::arrays).chain(fixed))?;
        self.tree.put(prefix, rows, state)?;
        self.reporter.count(|counts| counts.read_tokens += prefix.len() as u64);
        Ok(true)
    }

    /// Keeps what `cache` remembers, which has seen exactly `tokens`.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX cannot compute or copy it.
    pub fn save(&mut self, cache: &Cache, tokens: &[u32], keep: Keep) -> Result<()> {
        debug_assert_eq!(cache.position, tokens.len());
        let length = tokens.len();
        let known = self.tree.find(tokens, length);
        if known.resume < length || known.rows < length {
            let rows = (known.rows < length)
                .then(|| cache.key_values(known.rows, length).and_then(KeyValues::owned));
            let fixed = self.needs_state.then(|| owned(&cache.recurrent_state()?).map(Fixed));
            self.tree.put(tokens, rows.transpose()?, fixed.transpose()?)?;
            self.reporter.count(|counts| counts.saves += 1);
        }
        self.write(cache, tokens)?;
        self.keep(tokens, keep)?;
        self.shrink();
        Ok(())
    }

    /// Keeps a prefix that is saved for as long as `keep` says, as far as half of each tier allows; one
    /// that is gone stays so.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX cannot part it from what it is saved with.
    pub fn keep(&mut self, tokens: &[u32], keep: Keep) -> Result<()> {
        if keep.seconds == 0 || tokens.is_empty() {
            return Ok(());
        }
        let now = now();
        let until = now + u64::from(keep.seconds);
        let most = self.memory_bytes / 2;
        if !self.tree.pin(tokens, until, now, most)? {
            tracing::warn!(tokens = tokens.len(), most, "not pinned in memory");
        }
        if let Some(disk) = &self.disk
            && !disk.pin(&keys(disk, tokens, self.needs_state), until)
        {
            tracing::warn!(tokens = tokens.len(), "not pinned on disk");
        }
        Ok(())
    }

    /// Queues for the disk what of a prefix is not there.
    fn write(&self, cache: &Cache, tokens: &[u32]) -> Result<()> {
        let Some(disk) = &self.disk else { return Ok(()) };
        let keys = keys(disk, tokens, self.needs_state);
        let mut parts = Vec::new();
        for (i, chunk) in tokens.chunks(BLOCK_TOKENS).enumerate() {
            let (key, from) = (keys[i], i * BLOCK_TOKENS);
            let end = from + chunk.len();
            if !disk.contains(&key) {
                let rows = cache.key_values(from, end)?;
                let tensors = self.rows_on_disk.to_tensors(rows.arrays())?;
                parts.push(Part { key, kind: Kind::Rows, end, tensors });
            }
        }
        if self.needs_state
            && let Some(&key) = keys.last()
            && !disk.contains(&key)
        {
            let tensors = bytes::to_tensors(&cache.recurrent_state()?)?;
            parts.push(Part { key, kind: Kind::State, end: tokens.len(), tensors });
        }
        if !parts.is_empty() {
            disk.save(parts);
        }
        disk.touch(&keys);
        Ok(())
    }

    fn shrink(&mut self) {
        let gone = self.tree.shrink(self.memory_bytes, now());
        let size = self.tree.size();
        self.reporter.count(|counts| counts.evictions += gone as u64);
        self.reporter.resize(size);
    }

    /// Waits until everything that was saved is on disk.
    ///
    /// # Errors
    /// [`crate::Error::Store`] when saving has been turned off after a failure.
    pub fn flush(&self) -> Result<()> {
        self.disk.as_ref().map_or(Ok(()), RedbStore::flush)
    }
}

/// Keys of the rows of a prefix, first to last, and of its state where there is one.
fn keys(disk: &RedbStore, tokens: &[u32], needs_state: bool) -> Vec<Key> {
    let mut keys = Keys::of_blocks(disk.fingerprint(), tokens);
    if needs_state && let Some(last) = keys.last() {
        keys.push(state_key(last));
    }
    keys
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
