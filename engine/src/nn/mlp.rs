//! Feed-forward blocks: gated, SwiGLU and GEGLU (arXiv:2002.05202), and with one matrix before the
//! activation, squared ReLU (arXiv:2109.08668) and xIELU (arXiv:2411.13010).

use mlx_rs::ops::{expm1, logaddexp, maximum, minimum, select};
use mlx_rs::{Array, Dtype};

use super::{Input, Joined, Linear, RmsNorm, clamped_swiglu, geglu, swiglu};
use crate::error::Result;

/// A feed-forward block, or a stack of them.
#[derive(Debug, Clone)]
pub enum Block {
    /// With a gate.
    Gated(GatedMlp),
    /// Without one.
    Plain(PlainMlp),
}

impl Block {
    /// `x` [1, R, D], same shape back.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        self.forward_of(Input::Rows(x))
    }

    /// [`Block::forward`] of `x`.
    pub fn forward_of(&self, x: Input<'_>) -> Result<Array> {
        match self {
            Self::Gated(mlp) => mlp.apply(x, None),
            Self::Plain(mlp) => mlp.forward(&x.rows()?),
        }
    }

    /// `x + block(norm x)`; `x` [1, R, D], same shape back.
    pub fn residual(&self, x: &Array, norm: &RmsNorm) -> Result<Array> {
        match self {
            Self::Gated(mlp) => mlp.residual(x, norm),
            Self::Plain(mlp) => Ok(x.add(mlp.forward(&norm.forward(x)?)?)?),
        }
    }

    /// Each row of `x` through its own block of a stack; arguments as in [`Linear::gather`].
    pub fn gather(&self, x: &Array, which: &Array, sorted: bool) -> Result<Array> {
        match self {
            Self::Gated(mlp) => mlp.gather(x, which, sorted),
            Self::Plain(mlp) => mlp.gather(x, which, sorted),
        }
    }
}

impl From<GatedMlp> for Block {
    fn from(mlp: GatedMlp) -> Self {
        Self::Gated(mlp)
    }
}

impl From<PlainMlp> for Block {
    fn from(mlp: PlainMlp) -> Self {
        Self::Plain(mlp)
    }
}

/// How a gate and an up become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// [`swiglu`]
    Silu,
    /// [`geglu`]
    Gelu,
    /// [`clamped_swiglu`]
    ClampedSilu,
}

impl Gate {
    fn apply(self, gate: Array, up: Array) -> Result<Array> {
        match self {
            Self::Silu => swiglu(gate, up),
            Self::Gelu => geglu(gate, up),
            Self::ClampedSilu => clamped_swiglu(gate, up),
        }
    }
}

/// `down(gate(gate x, up x))`. A stack of them has a leading dimension E.
#[derive(Debug, Clone)]
pub struct GatedMlp {
    /// How the outputs of `gate_up` become one.
    pub gate: Gate,
    /// `gate_proj` and `up_proj`, [F, D] each.
    pub gate_up: Joined<2>,
    /// [D, F]
    pub down_proj: Linear,
}

impl GatedMlp {
    /// `x` [1, R, D], same shape back.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        self.apply(Input::Rows(x), None)
    }

    /// `x + block(norm x)`; `x` [1, R, D], same shape back.
    fn residual(&self, x: &Array, norm: &RmsNorm) -> Result<Array> {
        self.apply(Input::Normed(x, norm.view()), Some(x))
    }

    /// The block of which each rank computes a part: the caller sums the outputs of all.
    pub fn unsummed(self) -> Self {
        Self { down_proj: self.down_proj.unsummed(), ..self }
    }

    fn apply(&self, x: Input<'_>, residual: Option<&Array>) -> Result<Array> {
        let fused = if self.gate == Gate::Silu { self.gate_up.swiglu(x)? } else { None };
        let both = match fused {
            Some(both) => both,
            None => {
                let [gate, up] = self.gate_up.views(self.gate_up.outputs(x)?)?;
                self.gate.apply(gate, up)?
            }
        };
        self.down_proj.apply(Input::Rows(&both), residual)
    }

    /// Each row of `x` through its own block of a stack; arguments as in [`Linear::gather`].
    pub fn gather(&self, x: &Array, which: &Array, sorted: bool) -> Result<Array> {
        let [gate, up] = self.gate_up.gather(x, which, sorted)?;
        self.down_proj.gather(&self.gate.apply(gate, up)?, which, sorted)
    }
}

/// `down(activation(up x))`. A stack of them has a leading dimension E.
#[derive(Debug, Clone)]
pub struct PlainMlp {
    /// Activation of the outputs of `up_proj`.
    pub activation: Activation,
    /// [F, D]
    pub up_proj: Linear,
    /// [D, F]
    pub down_proj: Linear,
}

/// An activation that is not gated.
#[derive(Debug, Clone)]
pub enum Activation {
    /// `max(x, 0)^2`
    Relu2,
    /// `a x^2 + b x` for positive x, `(e^min(x, eps) - 1 - x) c + b x` for others.
    Xielu {
        /// f32 [1], `a` before the softplus.
        alpha_p: Array,
        /// f32 [1], `c - b` before the softplus.
        alpha_n: Array,
        /// f32 [1], `b`
        beta: Array,
        /// f32 [1]
        eps: Array,
    },
}

impl PlainMlp {
    /// `x` [1, R, D], same shape back.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        self.down_proj.forward(&self.activation.forward(&self.up_proj.forward(x)?)?)
    }

    /// Each row of `x` through its own block of a stack; arguments as in [`Linear::gather`].
    pub fn gather(&self, x: &Array, which: &Array, sorted: bool) -> Result<Array> {
        let activated = self.activation.forward(&self.up_proj.gather(x, which, sorted)?)?;
        self.down_proj.gather(&activated, which, sorted)
    }
}

impl Activation {
    /// `x` [..], same shape and dtype back.
    fn forward(&self, x: &Array) -> Result<Array> {
        let zero = Array::from_f32(0.0);
        match self {
            Self::Relu2 => Ok(maximum(x, zero.as_dtype(x.dtype())?)?.square()?),
            Self::Xielu { alpha_p, alpha_n, beta, eps } => {
                let dtype = x.dtype();
                // The difference of e^x - 1 and x has few digits left in 16 bits.
                let x = &x.as_dtype(Dtype::Float32)?;
                let softplus = |alpha: &Array| logaddexp(alpha, &zero);
                let line = x.multiply(beta)?;
                let curve = expm1(minimum(x, eps)?)?.subtract(x)?;
                let negative = curve.multiply(softplus(alpha_n)?.add(beta)?)?;
                let positive = x.square()?.multiply(softplus(alpha_p)?)?;
                let y = select(x.gt(&zero)?, positive, negative)?.add(line)?;
                Ok(y.as_dtype(dtype)?)
            }
        }
    }
}
