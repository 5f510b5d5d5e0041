//! State of one GatedDeltaNet layer: the delta rule's matrix and the convolution's tail.
//!
//! Fixed in size however long the prompt is, and changed by every row: it cannot be cut back to an
//! earlier position, only restored from a copy.

use mlx_rs::{Array, Dtype};

use super::expect_shape;
use crate::error::Result;

/// `state` f32 [1, H_v, D_v, D_k] and `tail` [1, K - 1, C], zeros at the start.
#[derive(Debug, Clone)]
pub struct Recurrent {
    /// The delta rule's matrix, always f32: errors add up over the whole context.
    pub state: Array,
    /// The convolution's last inputs, before the convolution and its activation.
    pub tail: Array,
}

impl Recurrent {
    /// State before the first row: `state` and `tail` of these shapes, the tail in `dtype`.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX cannot make them.
    pub fn new(state: &[i32], tail: &[i32], dtype: Dtype) -> Result<Self> {
        Ok(Self {
            state: mlx_rs::ops::zeros_dtype(state, Dtype::Float32)?,
            tail: mlx_rs::ops::zeros_dtype(tail, dtype)?,
        })
    }

    /// State and tail.
    pub fn state(&self) -> Vec<Array> {
        vec![self.state.clone(), self.tail.clone()]
    }

    /// Takes over state and tail.
    ///
    /// # Errors
    /// [`crate::Error::Store`] when a shape is not this layer's.
    pub fn restore(&mut self, state: Array, tail: Array) -> Result<()> {
        expect_shape(&state, self.state.shape())?;
        expect_shape(&tail, self.tail.shape())?;
        (self.state, self.tail) = (state, tail);
        Ok(())
    }
}
