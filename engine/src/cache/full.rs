//! Keys and values of every position of one attention layer.
//!
//! Two buffers [1, H_kv, capacity, D] that grow by [`STEP`] positions, of which `len` are filled;
//! MLX writes new rows in place as long as nothing else holds the buffer.
//!
//! Source: mlx-lm `models/cache.py`, `KVCache`.

use mlx_rs::Array;
use mlx_rs::ops::indexing::{TryIndexMutOp, TryIndexOp};
use mlx_rs::ops::{concatenate, zeros_dtype};

use super::expect_shape;
use crate::error::Result;

/// Positions by which the buffers grow: growing copies, so not each step.
const STEP: i32 = 256;

/// Keys and values, each [1, H_kv, len, D].
#[derive(Debug, Clone)]
pub struct Full {
    heads: i32,
    head_dim: i32,
    len: i32,
    buffers: Option<(Array, Array)>,
}

impl Full {
    /// An empty cache for `heads` key-value heads of `head_dim`.
    pub fn new(heads: i32, head_dim: i32) -> Self {
        Self { heads, head_dim, len: 0, buffers: None }
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
        let end = self.len + k.dim(2);
        let capacity = self.buffers.as_ref().map_or(0, |(keys, _)| keys.dim(2));
        if end > capacity {
            let more = (end - capacity + STEP - 1) / STEP * STEP;
            let room = [1, self.heads, more, self.head_dim];
            let room = zeros_dtype(&room, k.dtype())?;
            self.buffers = Some(match self.buffers.take() {
                None => (room.clone(), room),
                Some((keys, values)) => {
                    (concatenate(&[&keys, &room], 2)?, concatenate(&[&values, &room], 2)?)
                }
            });
        }
        let (keys, values) = self.buffers.as_mut().expect("just grown");
        keys.try_index_mut((.., .., self.len..end, ..), k)?;
        values.try_index_mut((.., .., self.len..end, ..), v)?;
        self.len = end;
        Ok(())
    }

    /// Keys and values of all positions, [1, H_kv, len, D] each.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects the slice.
    pub fn view(&self) -> Result<(Array, Array)> {
        let (keys, values) = self.buffers.as_ref().expect("nothing looks at an empty cache");
        let filled = |a: &Array| a.try_index((.., .., ..self.len, ..));
        Ok((filled(keys)?, filled(values)?))
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

    /// Takes over keys and values of `len` positions.
    ///
    /// The buffers get the capacity they would have had, so that what follows runs the same
    /// kernels on the same layout as it would have without the interruption.
    ///
    /// # Errors
    /// [`crate::Error::Store`] when a shape is not this layer's.
    pub fn restore(&mut self, keys: &Array, values: &Array, len: usize) -> Result<()> {
        let len = i32::try_from(len).unwrap_or(i32::MAX);
        for array in [keys, values] {
            expect_shape(array, &[1, self.heads, len, self.head_dim])?;
        }
        *self = Self::new(self.heads, self.head_dim);
        self.append(keys, values)
    }
}
