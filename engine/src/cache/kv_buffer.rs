//! A tensor of keys, values or both that grows at its end, in a buffer with spare capacity.
//!
//! MLX writes new rows in place as long as nothing else holds the buffer.

use std::cell::Cell;
use std::rc::Rc;

use mlx_rs::Array;
use mlx_rs::ops::indexing::{TryIndexMutOp, TryIndexOp};
use mlx_rs::ops::{concatenate, zeros_dtype};

use crate::error::Result;

/// Rows by which a buffer grows. Growing copies the buffer, so it must not happen at every step.
pub const STEP: i32 = 256;

/// The capacity of a buffer of `rows` rows that grows by `step`.
pub(super) fn capacity_for(rows: i32, step: i32) -> i32 {
    (rows + step - 1) / step * step
}

/// Rows `from..to` of a buffer [1, H, capacity, D].
pub(super) fn rows(buffer: &Array, from: i32, to: i32) -> Result<Array> {
    Ok(buffer.try_index((.., .., from..to, ..))?)
}

/// A buffer [1, H, capacity, D]. Its owner knows how many rows are filled.
#[derive(Debug, Clone, Default)]
pub(super) struct KvBuffer {
    buffer: Option<Array>,
    /// Shared by the clones of a buffer, which then no kernel writes in place.
    owner: Rc<()>,
    /// Rows before this one have been shown to operations of MLX, which may not have read them yet.
    shown: Cell<i32>,
}

impl From<Array> for KvBuffer {
    fn from(buffer: Array) -> Self {
        Self { buffer: Some(buffer), ..Self::default() }
    }
}

impl KvBuffer {
    /// Writes `new` [1, H, T, D] after the first `len` rows. The buffer grows by `step`.
    pub fn append(&mut self, new: &Array, len: i32, step: i32) -> Result<()> {
        let end = len + new.dim(2);
        let capacity = self.capacity();
        if end > capacity {
            self.grow(new, 0, capacity, capacity_for(end, step) - capacity)?;
        }
        let buffer = self.buffer.as_mut().expect("just grown");
        buffer.try_index_mut((.., .., len..end, ..), new)?;
        // A new array to MLX, whether it has reused the memory or not.
        self.owner = Rc::default();
        Ok(())
    }

    /// Whether a kernel may write `more` rows in place after the first `len`: there is room, and neither a clone nor an
    /// operation that has not run sees them.
    pub fn has_own_room(&self, len: i32, more: i32) -> bool {
        len + more <= self.capacity()
            && Rc::strong_count(&self.owner) == 1
            && self.shown.get() <= len
    }

    /// Copies the first `len` rows to a buffer with room for `more` rows of `like`'s shape and dtype after them.
    pub fn reserve(&mut self, like: &Array, len: i32, more: i32, step: i32) -> Result<()> {
        let capacity = self.capacity().max(capacity_for(len + more, step));
        self.grow(like, 0, len, capacity - len)
    }

    /// Keeps rows `from..to` and adds zeroed capacity for `more` rows of `like`'s shape and dtype.
    pub fn grow(&mut self, like: &Array, from: i32, to: i32, more: i32) -> Result<()> {
        let room = zeros_dtype(&[1, like.dim(1), more, like.dim(3)], like.dtype())?;
        self.buffer = Some(match self.buffer.take() {
            None => room,
            Some(buffer) => concatenate(&[&buffer.try_index((.., .., from..to, ..))?, &room], 2)?,
        });
        self.owner = Rc::default();
        self.shown.set(0);
        Ok(())
    }

    /// Joins `parts`, with the capacity that appending them one after another would have reached. Without rows there is no
    /// buffer.
    pub fn fill(parts: &[&Array], step: i32) -> Result<Self> {
        let len: i32 = parts.iter().map(|part| part.dim(2)).sum();
        let Some(like) = parts.first().filter(|_| len > 0) else { return Ok(Self::default()) };
        let room = capacity_for(len, step) - len;
        let room = zeros_dtype(&[1, like.dim(1), room, like.dim(3)], like.dtype())?;
        let all: Vec<&Array> = parts.iter().copied().chain([&room]).collect();
        Ok(Self::from(concatenate(&all, 2)?))
    }

    pub fn capacity(&self) -> i32 {
        self.buffer.as_ref().map_or(0, |buffer| buffer.dim(2))
    }

    /// The whole buffer.
    ///
    /// # Panics
    /// If nothing was written yet.
    pub fn buffer(&self) -> &Array {
        self.buffer.as_ref().expect("only filled rows are read")
    }

    /// Rows `from..to`.
    pub fn view(&self, from: i32, to: i32) -> Result<Array> {
        rows(self.shown(to), from, to)
    }

    /// The whole buffer, of which operations will read rows before `to`.
    pub fn shown(&self, to: i32) -> &Array {
        self.shown.set(self.shown.get().max(to));
        self.buffer()
    }
}
