//! Keys and values of every position of one attention layer.
//!
//! Both lie in one buffer, values after keys as further heads: a step then writes once to it.
//!
//! Source: mlx-lm `models/cache.py`, `KVCache`.

use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::{concatenate, zeros_dtype};
use mlx_rs::{Array, Dtype};

use super::kv_buffer::KvBuffer;
use super::shared::LayerKv;
use super::{column, expect_rows};
use crate::error::Result;
use crate::kernels::cpu::queue;

/// Keys and values, each [1, H_kv, len, D].
#[derive(Debug, Clone)]
pub struct Full {
    heads: i32,
    head_dim: i32,
    len: i32,
    /// [1, 2 H_kv, capacity, D]
    kv: KvBuffer,
    /// Computed by the kernel that wrote the newest rows in place: evaluating it writes them.
    written_with: Option<Array>,
}

impl Full {
    /// An empty cache for `heads` key-value heads of `head_dim`.
    pub fn new(heads: i32, head_dim: i32) -> Self {
        Self { heads, head_dim, len: 0, kv: KvBuffer::default(), written_with: None }
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

    /// Appends keys and values `kv` [1, 2 H_kv, T, D].
    pub fn append(&mut self, kv: &Array) -> Result<()> {
        self.queue_writes()?;
        self.kv.append(kv, self.len)?;
        self.len += kv.dim(2);
        self.written_with = None;
        Ok(())
    }

    /// The buffer, with room for `rows` rows of `dtype` that a kernel writes in place; [`Full::wrote`] counts them. The
    /// array that the newest rows are written with must be evaluated before the kernel.
    pub fn reserve(&mut self, rows: i32, dtype: Dtype) -> Result<(&Array, Option<&Array>)> {
        if !self.kv.has_own_room(self.len, rows) {
            self.queue_writes()?;
            let like = zeros_dtype(&[1, 2 * self.heads, 1, self.head_dim], dtype)?;
            self.kv.reserve(&like, self.len, rows)?;
        }
        Ok((self.kv.buffer(), self.written_with.as_ref()))
    }

    /// Counts `rows` rows that the kernel writes which computes `with`.
    pub fn wrote(&mut self, rows: i32, with: Array) {
        self.len += rows;
        self.written_with = Some(with);
    }

    /// Queues what a kernel writes in place before what is made from the buffer next: MLX does not know that the one
    /// depends on the other, and runs what is queued in order.
    fn queue_writes(&self) -> Result<()> {
        match &self.written_with {
            Some(with) => queue([with]),
            None => Ok(()),
        }
    }

    /// Keys and values of all positions, [1, H_kv, len, D] each.
    pub fn view(&self) -> Result<(Array, Array)> {
        self.range(0, self.len)
    }

    /// Keys and values of positions `from..to`.
    fn range(&self, from: i32, to: i32) -> Result<(Array, Array)> {
        self.queue_writes()?;
        let kv = self.kv.buffer();
        let keys = kv.try_index((.., ..self.heads, from..to, ..))?;
        Ok((keys, kv.try_index((.., self.heads.., from..to, ..))?))
    }

    /// The buffer [1, 2 H_kv, capacity, D] of keys and then values, of which the first [`Full::len`] positions are
    /// filled.
    ///
    /// # Panics
    /// If no position is cached.
    pub fn buffer(&self) -> &Array {
        self.kv.buffer()
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
        let (keys, values) = self.range(from, to)?;
        Ok(vec![keys, values])
    }

    /// Replaces the content with `parts`, which hold `len` positions together.
    ///
    /// The buffers get the capacity that they would have without the interruption, so later steps
    /// run the same kernels on the same layout.
    ///
    /// # Errors
    /// [`crate::Error::SavedState`] if a shape does not fit this layer.
    pub(super) fn restore(&mut self, parts: &[&LayerKv], len: i32) -> Result<()> {
        let side = |i: usize| -> Result<KvBuffer> {
            let parts = column(parts, i)?;
            expect_rows(&parts, [self.heads, self.head_dim], len)?;
            KvBuffer::fill(&parts)
        };
        let (keys, values) = (side(0)?, side(1)?);
        let kv = if len == 0 {
            KvBuffer::default()
        } else {
            KvBuffer::from(concatenate(&[keys.buffer(), values.buffer()], 1)?)
        };
        (self.kv, self.len, self.written_with) = (kv, len, None);
        Ok(())
    }
}
