//! Keys of parts: a hash of a fingerprint and a token prefix.
//!
//! Pure arithmetic.

use sha2::{Digest, Sha256};

use super::Fingerprint;

/// Names a token prefix under a fingerprint.
pub type Key = [u8; 32];

/// Token ids in one link of a [`KeyChain`].
pub const BLOCK_TOKENS: usize = 64;

/// Changes whenever the derivation below does, so that no key of another derivation matches.
const KEY_DOMAIN: &[u8] = b"steersman prefix 1";
/// Separates the keys of state from those of KV.
const STATE_DOMAIN: &[u8] = b"steersman state 1";

/// The keys of all prefixes of a token sequence, computed while walking it once.
///
/// With blocks of [`BLOCK_TOKENS`] ids, `chain[0] = SHA-256(domain, fingerprint)` and
/// `chain[i + 1] = SHA-256(chain[i], ids of block i)`. A prefix that ends with a block has the
/// key `chain[i]`; one that ends within block i has `SHA-256(chain[i], its ids of that block)`.
///
/// # Why
/// A block's key depends on everything before it, as its keys and values do, and on nothing after
/// it. So its KV is stored once and shared by all prefixes that contain the block.
#[derive(Clone)]
pub struct KeyChain {
    chain: Key,
    hasher: Sha256,
    len: usize,
}

impl KeyChain {
    /// The chain of the empty prefix.
    pub fn new(fingerprint: &Fingerprint) -> Self {
        let chain = Sha256::new().chain_update(KEY_DOMAIN).chain_update(fingerprint).finalize();
        Self { chain: chain.into(), hasher: Sha256::new_with_prefix(chain), len: 0 }
    }

    /// Appends `tokens` to the prefix.
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

    /// Length of the prefix.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Key of the prefix: the one of the KV of its last block, complete or not.
    pub fn key(&self) -> Key {
        if self.len.is_multiple_of(BLOCK_TOKENS) {
            return self.chain;
        }
        self.hasher.clone().finalize().into()
    }

    /// Key of all of `tokens`.
    pub fn key_of(fingerprint: &Fingerprint, tokens: &[u32]) -> Key {
        let mut chain = Self::new(fingerprint);
        chain.extend(tokens);
        chain.key()
    }

    /// Keys of the KV of all blocks of `tokens`, first to last; the last block may be short.
    pub fn block_keys(fingerprint: &Fingerprint, tokens: &[u32]) -> Vec<Key> {
        let mut chain = Self::new(fingerprint);
        let block = |ids: &[u32]| {
            chain.extend(ids);
            chain.key()
        };
        tokens.chunks(BLOCK_TOKENS).map(block).collect()
    }
}

/// Key of the state at the end of the prefix with this key.
pub fn state_key(key: &Key) -> Key {
    Sha256::new().chain_update(STATE_DOMAIN).chain_update(key).finalize().into()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn extended_chain_equals_chain_of_the_whole_prefix() {
        let tokens: Vec<u32> = (0..3 * BLOCK_TOKENS as u32 + 5).map(|i| i * 7919).collect();
        let mut chain = KeyChain::new(&[7; 32]);
        for length in 0..=tokens.len() {
            assert_eq!(chain.key(), KeyChain::key_of(&[7; 32], &tokens[..length]), "at {length}");
            chain.extend(&tokens[length..tokens.len().min(length + 1)]);
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
                    let key = KeyChain::key_of(&fingerprint, &tokens[..length]);
                    assert!(seen.insert(key) && seen.insert(state_key(&key)));
                }
            }
            assert!(seen.insert(KeyChain::key_of(&fingerprint, &[])));
        }
    }

    #[test]
    fn block_has_one_key_in_all_prefixes_that_contain_it() {
        let tokens: Vec<u32> = (0..200).collect();
        let long = KeyChain::block_keys(&[1; 32], &tokens);
        assert_eq!(long.len(), 4);
        let short = KeyChain::block_keys(&[1; 32], &tokens[..150]);
        assert_eq!((short.len(), &short[..2]), (3, &long[..2]));
        assert_eq!(short[2], KeyChain::key_of(&[1; 32], &tokens[..150]));
        assert!(KeyChain::block_keys(&[1; 32], &[]).is_empty());
    }
}
