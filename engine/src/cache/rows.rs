//! Rows of one tensor, appended at the end of a buffer that grows by steps.
//!
//! MLX writes new rows in place as long as nothing else holds the buffer.

use mlx_rs::Array;
use mlx_rs::ops::indexing::{TryIndexMutOp, TryIndexOp};
use mlx_rs::ops::{concatenate, zeros_dtype};

use crate::error::Result;

/// Rows by which a buffer grows: growing copies, so not each step.
pub(super) const STEP: i32 = 256;

/// A buffer [1, H, capacity, D], filled as far as its owner says.
#[derive(Debug, Clone, Default)]
pub(super) struct Rows {
    buffer: Option<Array>,
}

impl Rows {
    /// Writes `new` [1, H, T, D] behind the first `len` rows.
    pub fn append(&mut self, new: &Array, len: i32) -> Result<()> {
        let end = len + new.dim(2);
        let capacity = self.buffer.as_ref().map_or(0, |buffer| buffer.dim(2));
        if end > capacity {
            let more = (end - capacity + STEP - 1) / STEP * STEP;
            self.grow(new, 0, capacity, more)?;
        }
        let buffer = self.buffer.as_mut().expect("just grown");
        buffer.try_index_mut((.., .., len..end, ..), new)?;
        Ok(())
    }

    /// Keeps the rows from `from` to `to`, and puts room for `more` of `like`'s kind behind them.
    pub fn grow(&mut self, like: &Array, from: i32, to: i32, more: i32) -> Result<()> {
        let room = zeros_dtype(&[1, like.dim(1), more, like.dim(3)], like.dtype())?;
        self.buffer = Some(match self.buffer.take() {
            None => room,
            Some(buffer) => concatenate(&[&buffer.try_index((.., .., from..to, ..))?, &room], 2)?,
        });
        Ok(())
    }

    /// Takes over rows in several parts, with the capacity that appending them would have led to.
    pub fn fill(parts: &[&Array]) -> Result<Self> {
        let len: i32 = parts.iter().map(|part| part.dim(2)).sum();
        let mut rows = Self::default();
        let Some(like) = parts.first() else { return Ok(rows) };
        let room = (len + STEP - 1) / STEP * STEP - len;
        let room = zeros_dtype(&[1, like.dim(1), room, like.dim(3)], like.dtype())?;
        let all: Vec<&Array> = parts.iter().copied().chain([&room]).collect();
        rows.buffer = Some(concatenate(&all, 2)?);
        Ok(rows)
    }

    /// Rows that fit.
    pub fn capacity(&self) -> i32 {
        self.buffer.as_ref().map_or(0, |buffer| buffer.dim(2))
    }

    /// The rows from `from` to `to`.
    pub fn view(&self, from: i32, to: i32) -> Result<Array> {
        let buffer = self.buffer.as_ref().expect("nothing looks at rows that are not there");
        Ok(buffer.try_index((.., .., from..to, ..))?)
    }
}
