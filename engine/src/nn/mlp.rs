//! Gated feed-forward blocks, SwiGLU and GEGLU (arXiv:2002.05202).

use mlx_rs::Array;

use super::{Joined, Linear};
use crate::error::Result;

/// `down(gated(gate x, up x))`. A stack of them has a leading dimension E.
#[derive(Debug, Clone)]
pub struct GatedMlp {
    /// [`super::swiglu`], [`super::geglu`] or [`super::clamped_swiglu`].
    pub gated: fn(Array, Array) -> Result<Array>,
    /// `gate_proj` and `up_proj`, [F, D] each.
    pub gate_up: Joined<2>,
    /// [D, F]
    pub down_proj: Linear,
}

impl GatedMlp {
    /// `x` [1, R, D], same shape back.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        let [gate, up] = self.gate_up.forward(x)?;
        self.down_proj.forward(&(self.gated)(gate, up)?)
    }

    /// Each row of `x` through its own block of a stack; arguments as in [`Linear::gather`].
    pub fn gather(&self, x: &Array, which: &Array, sorted: bool) -> Result<Array> {
        let [gate, up] = self.gate_up.gather(x, which, sorted)?;
        self.down_proj.gather(&(self.gated)(gate, up)?, which, sorted)
    }
}
