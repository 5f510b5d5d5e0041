//! The prefix store: saved state on disk, across restarts, as bytes under keys.
//!
//! The state after some tokens is stored in two kinds of [`Part`]s. *KV* parts hold keys and values
//! of attention: one part for each block of [`BLOCK_TOKENS`], shared by all prefixes that contain
//! the block. *State* parts hold recurrent state, which changes with every token and is stored whole
//! at save points. [`KeyChain`] names both by the tokens before them. A model without KV stores KV
//! parts without tensors; a model without recurrent state stores no state parts.
//!
//! The store knows neither models nor arrays; the caller decides which parts make a cache. Losing a
//! part costs time, never correctness: a damaged, foreign or half-written part is a miss with a
//! warning. Least recently used parts are evicted first, so callers name the blocks of a prefix from
//! its start, then its state: whatever eviction leaves can still be resumed from.
//!
//! ```text
//! keys.rs      names of parts
//! record.rs    what the store knows of a part without reading it, and what the part costs
//! format.rs    a part's tensors as bytes
//! index.rs     all parts; which one to evict
//! queued.rs    a part that waits to be written, perhaps to be read first
//! lru.rs       eviction order, shared with the prefix cache
//! report.rs    counters and sizes
//! env.rs       clock and storage, replaced by tests
//! redb.rs      RedbStore: threads, saving, loading, recovery
//! redb/        state.rs: queue and budget; database.rs: transactions; reader.rs: reading parts;
//!              file.rs: which files are the store's; aside.rs: damaged ones; maintain.rs: `steersman
//!              cache`; portable.rs: export and import
//! ```
//!
//! # Why
//! There is no trait: the prefix cache holds live arrays, which is a different interface.

mod env;
mod format;
mod index;
mod keys;
mod lru;
mod queued;
mod record;
mod redb;
mod report;

pub use self::env::{StoreEnv, WallClock};
pub use self::format::Layout;
pub use self::keys::{BLOCK_TOKENS, Key, KeyChain, state_key};
pub(crate) use self::lru::{Lru, Recency};
pub use self::queued::QueuedPart;
pub use self::record::PartKind;
pub use self::redb::{
    ImportReport, KindSize, RedbStore, StoreFile, StoreReporter, StoredPrefix, VerifyReport,
};
pub use self::report::{StoreCounts, StoreReport, StoredSize};
pub use crate::error::StoreError;

/// One entry of the store.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// [`KeyChain::key`] at `end` for KV, [`state_key`] of that for state.
    pub key: Key,
    /// What it holds.
    pub kind: PartKind,
    /// Length in tokens of the prefix that ends with this part.
    pub end: usize,
    /// The tensors, in the caller's own order.
    pub tensors: Vec<Tensor>,
}

impl Part {
    /// Bytes of all tensors' elements: what the part takes in memory.
    pub fn bytes(&self) -> u64 {
        element_bytes(&self.tensors)
    }
}

fn element_bytes(tensors: &[Tensor]) -> u64 {
    tensors.iter().map(|tensor| tensor.bytes.len() as u64).sum()
}

/// One tensor of a part.
///
/// The store does not compare `shape` with the length of `bytes`; whoever makes an array of them
/// does.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Element type in safetensors' spelling: `F32`, `BF16`, `F16`, `U32` ...
    pub dtype: String,
    /// Extent of each axis.
    pub shape: Vec<i32>,
    /// Row-major elements, little-endian.
    pub bytes: Vec<u8>,
}

/// A saved prefix that [`RedbStore::longest`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedPrefix {
    /// Its length.
    pub tokens: usize,
    /// Keys of its KV parts, first to last, and of its state if that was asked for.
    pub keys: Vec<Key>,
}

/// Digest over everything that saved state depends on: weights, tokenizer, numeric format, and how
/// the caller lays its cache out in tensors.
pub type Fingerprint = [u8; 32];
