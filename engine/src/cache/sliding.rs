//! Keys and values of the last positions of one attention layer that looks no further back.
//!
//! Rows lie in order in two buffers. When they are full, what the window
//! still needs moves to the front of new ones, once in [`STEP`] rows or more: no ring, whose
//! oldest row would be gone as soon as a draft writes over it, so that it could not rewind.
//! Never masks and never rotates: `nn::attention` does both.
//!
//! Source: Mistral 7B (arXiv:2310.06825, section 2); mlx-lm `models/cache.py`, `RotatingKVCache`,
//! for what a window holds.

use mlx_rs::Array;

use super::expect_shape;
use super::rows::{Rows, STEP};
use crate::error::Result;

/// Keys and values, each [1, H_kv, rows, D].
#[derive(Debug, Clone)]
pub struct Sliding {
    heads: i32,
    head_dim: i32,
    window: i32,
    /// Positions seen.
    len: i32,
    /// The last of them, those that the buffers hold.
    rows: i32,
    /// `len` at the checkpoint, if there is one: what its position sees is kept, too.
    mark: Option<i32>,
    keys: Rows,
    values: Rows,
}

impl Sliding {
    /// An empty cache for `heads` key-value heads of `head_dim`, in which a position sees itself
    /// and the `window - 1` positions before it.
    pub fn new(heads: i32, head_dim: i32, window: i32) -> Self {
        let (keys, values) = (Rows::default(), Rows::default());
        Self { heads, head_dim, window, len: 0, rows: 0, mark: None, keys, values }
    }

    /// Positions seen.
    pub fn len(&self) -> i32 {
        self.len
    }

    /// Whether nothing was seen.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Positions that one position sees, itself included.
    pub fn window(&self) -> i32 {
        self.window
    }

    /// Appends `k`, `v` [1, H_kv, T, D].
    ///
    /// # Errors
    /// [`crate::Error::Array`] when the shapes do not fit.
    pub fn append(&mut self, k: &Array, v: &Array) -> Result<()> {
        let new = k.dim(2);
        if self.rows + new > self.keys.capacity() {
            let since = self.mark.map_or(0, |mark| self.len - mark);
            let keep = self.rows.min(self.window - 1 + since);
            let more = (new + STEP).max(self.window);
            self.keys.grow(k, self.rows - keep, self.rows, more)?;
            self.values.grow(v, self.rows - keep, self.rows, more)?;
            self.rows = keep;
        }
        self.keys.append(k, self.rows)?;
        self.values.append(v, self.rows)?;
        (self.rows, self.len) = (self.rows + new, self.len + new);
        Ok(())
    }

    /// Keys and values that the last `queries` positions see between them.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects the slice.
    pub fn view(&self, queries: i32) -> Result<(Array, Array)> {
        self.last(self.window - 1 + queries)
    }

    fn last(&self, count: i32) -> Result<(Array, Array)> {
        let from = (self.rows - count).max(0);
        Ok((self.keys.view(from, self.rows)?, self.values.view(from, self.rows)?))
    }

    /// From here on rows are kept so that [`Sliding::rewind`] can come back.
    pub fn checkpoint(&mut self) {
        self.mark = Some(self.len);
    }

    /// Forgets rows since the checkpoint, down to `len` positions, and ends the checkpoint.
    pub fn rewind(&mut self, len: i32) {
        debug_assert!(self.mark.is_some_and(|mark| mark <= len));
        let forget = (self.len - len).max(0);
        (self.len, self.rows) = (self.len - forget, self.rows - forget);
        self.mark = None;
    }

    /// What the next position sees of the past.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects the slice.
    pub fn state(&self) -> Result<Vec<Array>> {
        if self.is_empty() {
            return Ok(Vec::new());
        }
        let (keys, values) = self.last(self.window - 1)?;
        Ok(vec![keys, values])
    }

    /// Takes over what [`Sliding::state`] gave at position `len`.
    ///
    /// # Errors
    /// [`crate::Error::SavedState`] when a shape is not this layer's.
    pub fn restore(&mut self, keys: &Array, values: &Array, len: i32) -> Result<()> {
        let rows = len.min(self.window - 1);
        for array in [keys, values] {
            expect_shape(array, &[1, self.heads, rows, self.head_dim])?;
        }
        *self = Self::new(self.heads, self.head_dim, self.window);
        self.append(keys, values)?;
        self.len = len;
        Ok(())
    }
}
