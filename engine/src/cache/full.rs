//! Keys and values of every position of one attention layer.
//!
//! Source: mlx-lm `models/cache.py`, `KVCache`.

use mlx_rs::Array;

use super::kv_buffer::KvBuffer;
use super::shared::LayerKv;
use super::{column, expect_rows};
use crate::error::Result;

/// Keys and values, each [1, H_kv, len, D].
#[derive(Debug, Clone)]
pub struct Full {
    heads: i32,
    head_dim: i32,
    len: i32,
    keys: KvBuffer,
    values: KvBuffer,
}

impl Full {
    /// An empty cache for `heads` key-value heads of `head_dim`.
    pub fn new(heads: i32, head_dim: i32) -> Self {
        Self { heads, head_dim, len: 0, keys: KvBuffer::default(), values: KvBuffer::default() }
    }

    /// Number of key-value heads and their dimension.
    pub fn shape(&self) -> [i32; 2] {
        [self.heads, self.head_dim]
    }

    /// Number of cached positions.
    pub fn len(&self) -> i32 {
        self.len
    }

    /// Whether no position is cached.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends `k`, `v` [1, H_kv, T, D].
    pub fn append(&mut self, k: &Array, v: &Array) -> Result<()> {
        self.keys.append(k, self.len)?;
        self.values.append(v, self.len)?;
        self.len += k.dim(2);
        Ok(())
    }

    /// Keys and values of all positions, [1, H_kv, len, D] each.
    pub fn view(&self) -> Result<(Array, Array)> {
        Ok((self.keys.view(0, self.len)?, self.values.view(0, self.len)?))
    }

    /// The buffers of keys and values, [1, H_kv, capacity, D] each, of which the first [`Full::len`] positions are
    /// filled.
    ///
    /// # Panics
    /// If no position is cached.
    pub fn buffers(&self) -> [Array; 2] {
        [self.keys.buffer().clone(), self.values.buffer().clone()]
    }

    /// Drops positions `len..`.
    pub fn truncate(&mut self, len: i32) {
        self.len = self.len.min(len);
    }

    /// The filled keys and values; nothing if the cache is empty.
    pub fn arrays(&self) -> Result<Vec<Array>> {
        if self.is_empty() {
            return Ok(Vec::new());
        }
        let (keys, values) = self.view()?;
        Ok(vec![keys, values])
    }

    /// Keys and values of positions `from..to`.
    pub(super) fn key_values(&self, from: i32, to: i32) -> Result<LayerKv> {
        Ok(vec![self.keys.view(from, to)?, self.values.view(from, to)?])
    }

    /// Replaces the content with `parts`, which hold `len` positions together.
    ///
    /// The buffers get the capacity that they would have without the interruption, so later steps
    /// run the same kernels on the same layout.
    ///
    /// # Errors
    /// [`crate::Error::SavedState`] if a shape does not fit this layer.
    pub(super) fn restore(&mut self, parts: &[&LayerKv], len: i32) -> Result<()> {
        let buffer = |i: usize| -> Result<KvBuffer> {
            let parts = column(parts, i)?;
            expect_rows(&parts, [self.heads, self.head_dim], len)?;
            KvBuffer::fill(&parts)
        };
        (self.keys, self.values, self.len) = (buffer(0)?, buffer(1)?, len);
        Ok(())
    }
}
