//! Gated feed-forward blocks, SwiGLU and GEGLU (arXiv:2002.05202).

use mlx_rs::Array;

use super::{Linear, geglu, swiglu};
use crate::error::Result;

/// `down(silu(gate x) * up x)`.
#[derive(Debug, Clone)]
pub struct SwiGlu {
    /// [F, D]
    pub gate_proj: Linear,
    /// [F, D]
    pub up_proj: Linear,
    /// [D, F]
    pub down_proj: Linear,
}

impl SwiGlu {
    /// `x` [1, R, D], same shape back.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when the shapes do not fit.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        self.down_proj.forward(&swiglu(self.gate_proj.forward(x)?, self.up_proj.forward(x)?)?)
    }
}

/// `down(gelu(gate x) * up x)`, GELU by its tanh approximation.
#[derive(Debug, Clone)]
pub struct GeGlu {
    /// [F, D]
    pub gate_proj: Linear,
    /// [F, D]
    pub up_proj: Linear,
    /// [D, F]
    pub down_proj: Linear,
}

impl GeGlu {
    /// `x` [1, R, D], same shape back.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when the shapes do not fit.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        self.down_proj.forward(&geglu(self.gate_proj.forward(x)?, self.up_proj.forward(x)?)?)
    }
}
