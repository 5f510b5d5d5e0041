//! Normalisation: by the root mean square (arXiv:1910.07467), and layer normalisation
//! (arXiv:1607.06450).

use mlx_rs::{Array, fast};

use crate::error::Result;
use crate::kernels::NormView;

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
        self.view().forward(x)
    }

    /// The norm as kernels read it.
    pub fn view(&self) -> NormView<'_> {
        NormView { weight: &self.weight, eps: self.eps }
    }
}

/// `(x - mean(x)) / sqrt(var(x) + eps) * weight` over the last axis, statistics in f32.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    /// [D]
    pub weight: Array,
    /// Added to the variance.
    pub eps: f32,
}

impl LayerNorm {
    /// `x` [.., D], same shape and dtype back.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        Ok(fast::layer_norm(x, Some(&self.weight), None, self.eps)?)
    }
}
