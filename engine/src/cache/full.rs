//! Keys and values of every position of one attention layer.
//!
//! Source: mlx-lm `models/cache.py`, `KVCache`.

use mlx_rs::Array;

use super::rows::Rows;
use super::shared::Piece;
use super::{column, expect_rows};
use crate::error::Result;

/// Keys and values, each [1, H_kv, len, D].
#[derive(Debug, Clone)]
pub struct Full {
    heads: i32,
    head_dim: i32,
    len: i32,
    keys: Rows,
    values: Rows,
}

impl Full {
    /// An empty cache for `heads` key-value heads of `head_dim`.
    pub fn new(heads: i32, head_dim: i32) -> Self {
        Self { heads, head_dim, len: 0, keys: Rows::default(), values: Rows::default() }
    }

    /// Key-value heads, and their dimension.
    pub fn shape(&self) -> [i32; 2] {
        [self.heads, self.head_dim]
    }

    /// Positions held.
    pub fn len(&self) -> i32 {
        self.len
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends `k`, `v` [1, H_kv, T, D].
    ///
    /// # Errors
    /// [`crate::Error::Array`] when the shapes do not fit.
    pub fn append(&mut self, k: &Array, v: &Array) -> Result<()> {
        self.keys.append(k, self.len)?;
        self.values.append(v, self.len)?;
        self.len += k.dim(2);
        Ok(())
    }

    /// Keys and values of all positions, [1, H_kv, len, D] each.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects the slice.
    pub fn view(&self) -> Result<(Array, Array)> {
        Ok((self.keys.view(0, self.len)?, self.values.view(0, self.len)?))
    }

    /// Forgets all positions from `len` on.
    pub fn rewind(&mut self, len: i32) {
        self.len = self.len.min(len);
    }

    /// Keys and values as far as they are filled.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects the slice.
    pub fn state(&self) -> Result<Vec<Array>> {
        if self.is_empty() {
            return Ok(Vec::new());
        }
        let (keys, values) = self.view()?;
        Ok(vec![keys, values])
    }

    /// Keys and values of the positions from `from` to `to`.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects the slice.
    pub(super) fn piece(&self, from: i32, to: i32) -> Result<Piece> {
        Ok(vec![self.keys.view(from, to)?, self.values.view(from, to)?])
    }

    /// Takes over the keys and values of `len` positions.
    ///
    /// The buffers get the capacity they would have had, so that what follows runs the same
    /// kernels on the same layout as it would have without the interruption.
    ///
    /// # Errors
    /// [`crate::Error::SavedState`] when a shape is not this layer's.
    pub(super) fn restore(&mut self, pieces: &[&Piece], len: i32) -> Result<()> {
        let of = |i: usize| -> Result<Rows> {
            let parts = column(pieces, i)?;
            expect_rows(&parts, [self.heads, self.head_dim], len)?;
            Rows::fill(&parts)
        };
        (self.keys, self.values, self.len) = (of(0)?, of(1)?, len);
        Ok(())
    }
}
