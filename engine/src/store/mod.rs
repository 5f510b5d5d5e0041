//! Keeps what requests remember, across restarts: bytes keyed by fingerprint and token prefix.
//!
//! [`RedbStore`] keeps them on disk, [`MemoryStore`] until the process ends. Both find a snapshot
//! by the [`Keys`] of its tokens and forget the least recently used ones to stay within a budget.
//!
//! The store knows neither models nor arrays. Losing it costs time, never correctness: a damaged,
//! foreign or half-written entry is a miss with a warning.

mod format;
mod index;
mod memory;
mod redb;

use sha2::{Digest, Sha256};

pub use self::memory::MemoryStore;
pub use self::redb::RedbStore;
use crate::error::Result;

/// Everything a request remembers after `tokens`, as bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// The token ids whose state this is, from the start of the prompt.
    pub tokens: Vec<u32>,
    /// The tensors, in the cache's own order.
    pub tensors: Vec<Tensor>,
}

impl Snapshot {
    /// Bytes of the token ids and of all tensors' elements: what it takes in memory.
    pub fn bytes(&self) -> u64 {
        let tensors: usize = self.tensors.iter().map(|tensor| tensor.bytes.len()).sum();
        (size_of_val(self.tokens.as_slice()) + tensors) as u64
    }
}

/// One tensor of a snapshot.
///
/// The store returns what it was given and does not compare `shape` with the length of `bytes`:
/// who makes an array of them does.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Element type in safetensors' spelling: `F32`, `BF16`, `F16`, `U32` ...
    pub dtype: String,
    /// Extent of each axis.
    pub shape: Vec<i32>,
    /// Row-major elements, little-endian.
    pub bytes: Vec<u8>,
}

/// What a fingerprint must tell apart: weights, tokenizer, numeric format, and how the caller
/// lays its cache out in tensors.
pub type Fingerprint = [u8; 32];

/// Snapshots by token prefix. One store serves one fingerprint at a time, given when it is opened.
pub trait Store: Send {
    /// Position of the longest saved prefix of `tokens` that is at most `limit` long, or `None`.
    /// Cheap: reads no tensor, and hashes `tokens` once. Does not count as a use.
    fn longest(&self, tokens: &[u32], limit: usize) -> Option<usize>;

    /// The snapshot at `tokens` (the whole slice), or `None` where there is none or it is damaged
    /// (which is logged, and the entry dropped). Counts as a use.
    fn load(&self, tokens: &[u32]) -> Option<Snapshot>;

    /// Keeps a snapshot, which can be found from now on, and forgets the least recently used ones
    /// beyond the budget. Returns at once: writing happens behind, so it may be lost when the
    /// process is killed. A full queue, or a budget too small for this one, drops it with a
    /// warning. One that is kept already counts as used and is not written again.
    fn save(&self, snapshot: Snapshot);

    /// Bytes of the budget that keeping `snapshot` takes.
    fn cost(&self, snapshot: &Snapshot) -> u64;

    /// Waits until everything that was saved is on disk.
    ///
    /// # Errors
    /// [`crate::Error::Store`] when saving has been turned off after a failure.
    fn flush(&self) -> Result<()>;
}

/// Names a token prefix under a fingerprint.
pub type Key = [u8; 32];

/// Token ids in one link of the chain that [`Keys`] computes.
pub const BLOCK_TOKENS: usize = 64;

/// Changes whenever the derivation below does, so that no key of another derivation matches.
const KEY_DOMAIN: &[u8] = b"steersman prefix 1";

/// The keys of all prefixes of a token sequence, computed while walking it once.
///
/// With blocks of [`BLOCK_TOKENS`] ids, `chain[0] = SHA-256(domain, fingerprint)` and
/// `chain[i + 1] = SHA-256(chain[i], ids of block i)`. A prefix that ends with a block has the
/// key `chain[i]`; one that ends within block i has `SHA-256(chain[i], its ids of that block)`.
///
/// # Why
/// Plain SHA-256 over all ids would do for whole snapshots. The chain makes a block's key depend
/// on everything before it and on nothing after, so blocks of attention KV can later be stored
/// once and shared by all prefixes that contain them, under the keys computed here.
pub struct Keys {
    chain: Key,
    hasher: Sha256,
    len: usize,
}

impl Keys {
    /// At the empty prefix.
    pub fn new(fingerprint: &Fingerprint) -> Self {
        let chain = Sha256::new().chain_update(KEY_DOMAIN).chain_update(fingerprint).finalize();
        Self { chain: chain.into(), hasher: Sha256::new_with_prefix(chain), len: 0 }
    }

    /// Walks over `tokens`.
    pub fn extend(&mut self, tokens: &[u32]) {
        for token in tokens {
            self.hasher.update(token.to_le_bytes());
            self.len += 1;
            if self.len.is_multiple_of(BLOCK_TOKENS) {
                self.chain = self.hasher.finalize_reset().into();
                self.hasher.update(self.chain);
            }
        }
    }

    /// Key of the prefix walked so far.
    pub fn key(&self) -> Key {
        if self.len.is_multiple_of(BLOCK_TOKENS) {
            return self.chain;
        }
        self.hasher.clone().finalize().into()
    }

    /// Key of all of `tokens`.
    pub fn of(fingerprint: &Fingerprint, tokens: &[u32]) -> Key {
        let mut keys = Self::new(fingerprint);
        keys.extend(tokens);
        keys.key()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn keys_of_a_walk_equal_keys_of_its_prefixes() {
        let tokens: Vec<u32> = (0..3 * BLOCK_TOKENS as u32 + 5).map(|i| i * 7919).collect();
        let mut keys = Keys::new(&[7; 32]);
        for length in 0..=tokens.len() {
            assert_eq!(keys.key(), Keys::of(&[7; 32], &tokens[..length]), "at {length}");
            keys.extend(&tokens[length..tokens.len().min(length + 1)]);
        }
    }

    #[test]
    fn every_prefix_and_fingerprint_has_its_own_key() {
        let mut seen = HashSet::new();
        for fingerprint in [[0; 32], [1; 32]] {
            for first in 0..2 {
                let mut tokens = vec![9; 2 * BLOCK_TOKENS + 2];
                tokens[0] = first;
                for length in 1..tokens.len() {
                    assert!(seen.insert(Keys::of(&fingerprint, &tokens[..length])));
                }
            }
            assert!(seen.insert(Keys::of(&fingerprint, &[])));
        }
    }
}
