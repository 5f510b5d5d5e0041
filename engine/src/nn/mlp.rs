//! Gated feed-forward blocks, SwiGLU and GEGLU (arXiv:2002.05202).

use mlx_rs::Array;

use super::Linear;
use crate::error::Result;

/// `down(gated(gate x, up x))`. A stack of them has a leading dimension E.
#[derive(Debug, Clone)]
pub struct GatedMlp {
    /// [`super::swiglu`], [`super::geglu`] or [`super::clamped_swiglu`].
    pub gated: fn(Array, Array) -> Result<Array>,
    /// [F, D]
    pub gate_proj: Linear,
    /// [F, D]
    pub up_proj: Linear,
    /// [D, F]
    pub down_proj: Linear,
}

impl GatedMlp {
    /// `x` [1, R, D], same shape back.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        let gated = (self.gated)(self.gate_proj.forward(x)?, self.up_proj.forward(x)?)?;
        self.down_proj.forward(&gated)
    }

    /// Each row of `x` through its own block of a stack; arguments as in [`Linear::gather`].
    pub fn gather(&self, x: &Array, which: &Array, sorted: bool) -> Result<Array> {
        let gate = self.gate_proj.gather(x, which, sorted)?;
        let up = self.up_proj.gather(x, which, sorted)?;
        self.down_proj.gather(&(self.gated)(gate, up)?, which, sorted)
    }
}
