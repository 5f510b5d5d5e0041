//! Names of what is stored: a hash of a fingerprint and a token prefix.
//!
//! Pure arithmetic; knows neither what is stored nor where.

use sha2::{Digest, Sha256};

use super::Fingerprint;

/// Names a token prefix under a fingerprint.
pub type Key = [u8; 32];

/// Token ids in one link of the chain that [`Keys`] computes.
pub const BLOCK_TOKENS: usize = 64;

/// Changes whenever the derivation below does, so that no key of another derivation matches.
const KEY_DOMAIN: &[u8] = b"steersman prefix 1";
/// Parts the keys of states from those of rows.
const STATE_DOMAIN: &[u8] = b"steersman state 1";

/// The keys of all prefixes of a token sequence, computed while walking it once.
///
/// With blocks of [`BLOCK_TOKENS`] ids, `chain[0] = SHA-256(domain, fingerprint)` and
/// `chain[i + 1] = SHA-256(chain[i], ids of block i)`. A prefix that ends with a block has the
/// key `chain[i]`; one that ends within block i has `SHA-256(chain[i], its ids of that block)`.
///
/// # Why
/// A block's key depends on everything before it, as its keys and values do, and on nothing after.
/// So its rows are stored once and shared by all prefixes that contain it.
#[derive(Clone)]
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

    /// Tokens walked so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing has been walked.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Key of the prefix walked so far: the one of the rows of the block that ends here, whole or
    /// not.
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

    /// Keys of the rows of all blocks of `tokens`, first to last; the last one may be short.
    pub fn of_blocks(fingerprint: &Fingerprint, tokens: &[u32]) -> Vec<Key> {
        let mut keys = Self::new(fingerprint);
        let block = |ids: &[u32]| {
            keys.extend(ids);
            keys.key()
        };
        tokens.chunks(BLOCK_TOKENS).map(block).collect()
    }
}

/// Key of the state at the end of a prefix, of which `key` is the key of the rows.
pub fn state_key(key: &Key) -> Key {
    Sha256::new().chain_update(STATE_DOMAIN).chain_update(key).finalize().into()
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
                    let key = Keys::of(&fingerprint, &tokens[..length]);
                    assert!(seen.insert(key) && seen.insert(state_key(&key)));
                }
            }
            assert!(seen.insert(Keys::of(&fingerprint, &[])));
        }
    }

    #[test]
    fn a_block_has_one_key_in_all_prefixes_that_contain_it() {
        let tokens: Vec<u32> = (0..200).collect();
        let long = Keys::of_blocks(&[1; 32], &tokens);
        assert_eq!(long.len(), 4);
        let short = Keys::of_blocks(&[1; 32], &tokens[..150]);
        assert_eq!((short.len(), &short[..2]), (3, &long[..2]));
        assert_eq!(short[2], Keys::of(&[1; 32], &tokens[..150]));
        assert!(Keys::of_blocks(&[1; 32], &[]).is_empty());
    }
}
