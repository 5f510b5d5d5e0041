//! Keeps what requests remember, on disk, across restarts: parts, as bytes under keys.
//!
//! What a request remembers after some tokens is stored in two kinds of [`Part`]s. *Rows* are what
//! each token leaves for good (attention's keys and values): stored once for each block of
//! [`BLOCK_TOKENS`] and shared by all prefixes that contain it. *State* has a fixed size and
//! changes with every token (recurrent state, convolution tails, sliding windows), so it is stored
//! whole, at checkpoints. [`Keys`] names both by the tokens before. A model that has no rows stores
//! parts without tensors for them; one that has no state stores none.
//!
//! The store knows neither models nor arrays, and which parts make a cache is the caller's
//! business. Losing a part costs time, never correctness: a damaged, foreign or half-written one is
//! a miss with a warning. Least recently used parts go first, so the order in which parts are said
//! to be used decides what of a prefix goes first: name its blocks from the start on, then its
//! state, and what is left of it is always something that can be resumed from.
//!
//! ```text
//! keys.rs      names of parts
//! record.rs    what is known of a part, and what it costs
//! format.rs    a part's tensors as bytes
//! index.rs     which parts there are; what to forget
//! report.rs    counters and sizes
//! redb.rs      RedbStore: threads, queue, budget
//! redb/        database.rs: transactions; reader.rs: reading parts; maintain.rs: what the command
//!              line does with a file; portable.rs: a file that can be carried elsewhere
//! ```
//!
//! # Why
//! There is one implementation, so there is no trait: what is kept in memory is live arrays, which
//! is another interface altogether.

mod format;
mod index;
mod keys;
mod record;
mod redb;
mod report;

pub use self::keys::{BLOCK_TOKENS, Key, Keys, state_key};
pub use self::record::Kind;
pub use self::redb::{Imported, Prefix, RedbStore, Sizes, StoreFile, Verified};
pub use self::report::{Counts, Report, Reporter, Size};

/// One thing that is stored.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// Its name: [`Keys::key`] at `end` for rows, [`state_key`] of that for state.
    pub key: Key,
    /// What it is.
    pub kind: Kind,
    /// Tokens of the prefix at whose end it stands: position behind its last token.
    pub end: usize,
    /// The tensors, in the caller's own order.
    pub tensors: Vec<Tensor>,
}

impl Part {
    /// Bytes of all tensors' elements: what it takes in memory.
    pub fn bytes(&self) -> u64 {
        elements(&self.tensors)
    }
}

/// Bytes of all tensors' elements.
fn elements(tensors: &[Tensor]) -> u64 {
    tensors.iter().map(|tensor| tensor.bytes.len() as u64).sum()
}

/// One tensor of a part.
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
