//! Rows of KV that the caches of several requests share: the prefix that their prompts have in common.
//!
//! A cache's first rows lie in a buffer that nothing writes any more, and its own rows in another one. Kernels
//! of our own read both where they lie; MLX's operations need them in one array, which is made for a pass. The
//! rows live as long as a cache has them.

use std::rc::Rc;

use mlx_rs::Array;

use crate::ranks::Mirror;

/// Shared rows come in blocks of this size, so that the keys which a kernel reads at a time lie in one buffer.
pub const BLOCK: i32 = 64;

/// Rows 0.. of every layer of full attention.
#[derive(Debug)]
pub struct SharedRows {
    /// Number of rows, a multiple of [`BLOCK`].
    pub(super) rows: i32,
    /// For each layer, keys and then values: [1, 2 H_kv, capacity, D].
    pub(super) layers: Vec<Rc<Array>>,
    /// The number under which other ranks have theirs.
    pub(super) mirror: Mirror,
}

impl SharedRows {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        usize::try_from(self.rows).expect("a number of rows")
    }

    /// A number of rows, rounded down to whole blocks.
    pub fn whole_blocks(rows: usize) -> usize {
        rows - rows % BLOCK as usize
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> u64 {
        self.layers.iter().map(|buffer| buffer.nbytes() as u64).sum()
    }
}

/// The shared rows of one layer, as many of them as a cache has.
#[derive(Debug, Clone)]
pub struct SharedKv {
    /// Keys and then values, [1, 2 H_kv, capacity, D]: the same `Rc` in all caches that share them.
    pub buffer: Rc<Array>,
    /// Number of rows, a multiple of [`BLOCK`].
    pub rows: i32,
}

/// A number of rows, rounded down to whole blocks.
pub fn whole_blocks(rows: i32) -> i32 {
    rows / BLOCK * BLOCK
}
