//! Keys and values of one sliding-window attention layer.
//!
//! Rows lie in order in two buffers. When they are full, the rows that the window still needs move
//! to the front of new buffers, at most once in [`STEP`] rows. A ring would overwrite its oldest
//! row with the first drafted one and could not rewind.
//! The cache applies neither masks nor rotary embeddings: `nn::attention` does both.
//!
//! Source: Mistral 7B (arXiv:2310.06825, section 2); for the content of a window, mlx-lm
//! `models/cache.py`, `RotatingKVCache`.

use mlx_rs::Array;

use super::expect_shape;
use super::kv_buffer::{KvBuffer, STEP};
use crate::error::Result;

/// Keys and values, each [1, H_kv, rows, D].
#[derive(Debug, Clone)]
pub struct Sliding {
    heads: i32,
    head_dim: i32,
    window: i32,
    /// Positions appended so far.
    len: i32,
    /// Number of the newest positions that the buffers hold.
    rows: i32,
    /// `len` at the draft mark. Rows in the window of that position are kept, too.
    draft_mark: Option<i32>,
    keys: KvBuffer,
    values: KvBuffer,
}

impl Sliding {
    /// An empty cache for `heads` key-value heads of `head_dim`. A position attends to itself and
    /// to the `window - 1` positions before it.
    pub fn new(heads: i32, head_dim: i32, window: i32) -> Self {
        let (keys, values) = (KvBuffer::default(), KvBuffer::default());
        Self { heads, head_dim, window, len: 0, rows: 0, draft_mark: None, keys, values }
    }

    /// Number of positions appended so far.
    pub fn len(&self) -> i32 {
        self.len
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of key-value heads and their dimension.
    pub fn shape(&self) -> [i32; 2] {
        [self.heads, self.head_dim]
    }

    /// Positions that a position attends to, itself included.
    pub fn window(&self) -> i32 {
        self.window
    }

    /// Appends `k`, `v` [1, H_kv, T, D].
    pub fn append(&mut self, k: &Array, v: &Array) -> Result<()> {
        let new = k.dim(2);
        if self.rows + new > self.keys.capacity() {
            let drafted = self.draft_mark.map_or(0, |mark| self.len - mark);
            let keep = self.rows.min(self.window - 1 + drafted);
            let more = (new + STEP).max(self.window);
            self.keys.grow(k, self.rows - keep, self.rows, more)?;
            self.values.grow(v, self.rows - keep, self.rows, more)?;
            self.rows = keep;
        }
        self.keys.append(k, self.rows, STEP)?;
        self.values.append(v, self.rows, STEP)?;
        (self.rows, self.len) = (self.rows + new, self.len + new);
        Ok(())
    }

    /// Keys and values in the windows of the last `queries` positions.
    pub fn view(&self, queries: i32) -> Result<(Array, Array)> {
        self.last(self.window - 1 + queries)
    }

    fn last(&self, count: i32) -> Result<(Array, Array)> {
        let from = (self.rows - count).max(0);
        Ok((self.keys.view(from, self.rows)?, self.values.view(from, self.rows)?))
    }

    /// Sets the draft mark to the present length.
    pub fn mark_draft(&mut self) {
        self.draft_mark = Some(self.len);
    }

    /// Drops positions `len..`, which lie after the draft mark, and clears the mark.
    pub fn rewind_draft(&mut self, len: i32) {
        debug_assert!(self.draft_mark.is_some_and(|mark| mark <= len));
        let dropped = (self.len - len).max(0);
        (self.len, self.rows) = (self.len - dropped, self.rows - dropped);
        self.draft_mark = None;
    }

    /// Keys and values in the window of the next position, which is not appended yet.
    pub fn arrays(&self) -> Result<Vec<Array>> {
        if self.is_empty() {
            return Ok(Vec::new());
        }
        let (keys, values) = self.last(self.window - 1)?;
        Ok(vec![keys, values])
    }

    /// Replaces the content with what [`Sliding::arrays`] returned at length `len`.
    ///
    /// # Errors
    /// [`crate::Error::SavedState`] if a shape does not fit this layer.
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
