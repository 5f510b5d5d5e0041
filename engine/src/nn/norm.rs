//! Root mean square normalisation (arXiv:1910.07467).

use mlx_rs::{Array, fast};

use crate::error::Result;
use crate::kernels::cpu;

/// `x / sqrt(mean(x^2) + eps) * weight` over the last axis, statistics in f32.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    /// [D], the plain factor. The loader converts (1 + w) norms.
    pub weight: Array,
    /// Added to the mean of squares.
    pub eps: f32,
}

impl RmsNorm {
    /// `x` [.., D], same shape and dtype back.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match cpu::rms_norm(x, self) {
            Some(y) => y,
            None => Ok(fast::rms_norm(x, Some(&self.weight), self.eps)?),
        }
    }
}
