//! Rotary position embedding (arXiv:2104.09864), halves paired, on the first `dims` of a head.

use mlx_rs::{Array, fast};

use crate::error::Result;

/// Rotates queries and keys by their position.
#[derive(Debug, Clone, Copy)]
pub struct Rope {
    /// How many of a head's dimensions are rotated; the others pass through.
    pub dims: i32,
    /// Base of the frequencies, `rope_theta`.
    pub theta: f32,
}

impl Rope {
    /// `x` [1, H, T, D], whose first row stands at position `offset`.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when the shapes do not fit.
    pub fn forward(&self, x: &Array, offset: i32) -> Result<Array> {
        Ok(fast::rope(x, self.dims, false, self.theta, 1.0, offset, None)?)
    }
}
