//! Normalisation: by the root mean square (arXiv:1910.07467), and layer normalisation
//! (arXiv:1607.06450).

use mlx_rs::{Array, Dtype, fast};

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

    /// [`RmsNorm::forward`] of a part `x` [.., D] of longer rows, whose mean square is `mean_square` [.., 1] (f32).
    pub fn forward_by(&self, x: &Array, mean_square: &Array) -> Result<Array> {
        let factor = mean_square.add(Array::from_f32(self.eps))?.rsqrt()?;
        let y = x.as_dtype(Dtype::Float32)?.multiply(factor)?.as_dtype(x.dtype())?;
        Ok(y.multiply(&self.weight)?)
    }

    /// The norm as kernels read it.
    pub fn view(&self) -> NormView<'_> {
        NormView { weight: &self.weight, eps: self.eps }
    }
}

/// The mean square of `x` [.., D] over the last axis, [.., 1] (f32).
pub fn mean_square(x: &Array) -> Result<Array> {
    Ok(x.as_dtype(Dtype::Float32)?.square()?.mean_axis(-1, true)?)
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
