//! Views of layers: what kernels read of their weights, the rows that go in, and those that come out.
//!
//! Layers (`nn`) own the weights and call kernels with views of them. Kernels never know layers.

use std::cell::OnceCell;
use std::ffi::CStr;

use mlx_rs::ops::{arange, exp, zeros_dtype};
use mlx_rs::{Array, Dtype};
use serde::Deserialize;

use crate::error::Result;

/// Rows from which it is faster on CUDA to dequantize a matrix and to multiply with the dense one: 4,096 x 12,288
/// with 128 rows takes 210 us either way, with 512 rows 287 instead of 584, with 2,048 rows 481 instead of 1,997
/// (H200).
pub const DENSE_ROWS: i32 = 128;

/// Weight of a norm by the root mean square.
#[derive(Debug, Clone, Copy)]
pub struct NormView<'a> {
    /// [D], the plain factor.
    pub weight: &'a Array,
    /// Added to the mean of squares.
    pub eps: f32,
}

/// Rows that a layer reads. A kernel computes the last step to them while it reads, which saves an operation.
#[derive(Debug, Clone, Copy)]
pub enum Input<'a> {
    /// The rows [.., in] as they are.
    Rows(&'a Array),
    /// The norm of the rows [.., in].
    Normed(&'a Array, NormView<'a>),
}

/// The outputs of N layers.
#[derive(Debug, Clone)]
pub enum Outputs<const N: usize> {
    /// Side by side in one array.
    Joined(Array),
    /// One array for each.
    Apart([Array; N]),
}

/// Encoding of the packed numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Integers of 2 to 8 bits with a scale and a bias for each group.
    #[default]
    Affine,
    /// 4-bit floats (E2M1) with a power of two for each 32.
    Mxfp4,
    /// 4-bit floats (E2M1) with an 8-bit float (E4M3) for each 16.
    Nvfp4,
    /// 8-bit floats (E4M3) with a power of two for each 32.
    Mxfp8,
}

impl Mode {
    /// MLX's name of the encoding.
    pub fn name(self) -> &'static CStr {
        match self {
            Self::Affine => c"affine",
            Self::Mxfp4 => c"mxfp4",
            Self::Nvfp4 => c"nvfp4",
            Self::Mxfp8 => c"mxfp8",
        }
    }

    /// Group size and bits if a checkpoint does not state them: MLX's defaults for affine, the only
    /// valid values for the others.
    pub fn defaults(self) -> (i32, i32) {
        match self {
            Self::Affine => (64, 4),
            Self::Mxfp4 => (32, 4),
            Self::Nvfp4 => (16, 4),
            Self::Mxfp8 => (32, 8),
        }
    }
}

/// How a matrix is quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quantization {
    /// Inputs that share a scale.
    pub group_size: i32,
    /// Bits of an element.
    pub bits: i32,
    /// Encoding of an element.
    pub mode: Mode,
}

/// A quantized matrix [out, in], or a stack of them [E, out, in].
#[derive(Debug, Clone, Copy)]
pub struct PackedView<'a> {
    /// u32 [.., out, in * bits / 32]
    pub words: &'a Array,
    /// [.., out, in / group_size]: floats for affine, bytes that encode floats otherwise.
    pub scales: &'a Array,
    /// [.., out, in / group_size], for affine only.
    pub biases: Option<&'a Array>,
    /// Group size, bits and mode.
    pub quantization: Quantization,
    /// Type of the dequantized matrix.
    pub dtype: Dtype,
}

/// The rotation of queries and keys by their position.
#[derive(Debug, Clone, Copy)]
pub struct RotationView<'a> {
    /// Rotated dimensions of a head.
    pub dims: i32,
    /// Base of the frequencies.
    pub theta: f32,
    /// Factor of positions.
    pub scale: f32,
    /// f32 [dims / 2]: positions per radian, if they are not the powers of the base.
    pub wavelengths: Option<&'a Array>,
    /// Whether dimension `i` is paired with `i + dims / 2`, and nothing else changes.
    pub has_plain_halves: bool,
    /// The value of [`RotationView::frequencies`], which the layer holds from its first use on.
    pub frequencies: &'a OnceCell<Array>,
}

impl<'a> RotationView<'a> {
    /// f32 [dims / 2]: radians a position, rounded as MLX does in its rotation.
    pub fn frequencies(self) -> Result<&'a Array> {
        if self.frequencies.get().is_none() {
            let frequencies = match self.wavelengths {
                Some(wavelengths) => wavelengths.reciprocal()?,
                None => {
                    let half = self.dims / 2;
                    let step = Array::from_f32(self.theta.ln() / half as f32);
                    exp(arange::<_, f32>(0, -half, -1)?.multiply(step)?)?
                }
            };
            // Set by this thread only.
            let _ = self.frequencies.set(frequencies);
        }
        Ok(self.frequencies.get().expect("just set"))
    }
}

/// Heads of an attention layer, and what happens to them between projection and attention.
#[derive(Debug, Clone, Copy)]
pub struct HeadsView<'a> {
    /// H_q
    pub heads: i32,
    /// H_kv
    pub kv_heads: i32,
    /// D
    pub head_dim: i32,
    /// Whether each query is followed by the gate of its result.
    pub gated: bool,
    /// Norm of each query, [D].
    pub q_norm: Option<NormView<'a>>,
    /// Norm of each key, [D].
    pub k_norm: Option<NormView<'a>>,
    /// `None` if the layer does not know positions.
    pub rotation: Option<RotationView<'a>>,
}

/// Weights and shape of the recurrent part of a GatedDeltaNet layer.
#[derive(Debug, Clone, Copy)]
pub struct DeltaView<'a> {
    /// Depthwise causal convolution over q, k and v: one [C] for each tap, oldest first.
    pub conv1d: &'a [Array],
    /// f32 [H_v], log of the decay rate.
    pub a_log: &'a Array,
    /// [H_v], added to the decay's input.
    pub dt_bias: &'a Array,
    /// [D_v], norm of the output before the gate.
    pub norm: NormView<'a>,
    /// H_k, heads of q and k. Each serves H_v / H_k value heads.
    pub key_heads: i32,
    /// H_v
    pub value_heads: i32,
    /// D_k
    pub key_dim: i32,
    /// D_v
    pub value_dim: i32,
}

impl DeltaView<'_> {
    /// C, the inputs of the convolution: 2 H_k D_k + H_v D_v.
    pub fn channels(&self) -> i32 {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// The projections one by one: q, k and v before the convolution [B, T, C], the output gate [B, T, H_v D_v], the strength
    /// before the sigmoid [B, T, H_v], and the input of the decay [B, T, H_v].
    pub fn parts(&self, x: &Outputs<4>) -> Result<[Array; 4]> {
        match x {
            Outputs::Apart(parts) => Ok(parts.clone()),
            Outputs::Joined(all) => {
                let values = self.value_heads * self.value_dim;
                let z = self.channels();
                let b = z + values;
                let parts = all.split_at_indices(&[z, b, b + self.value_heads], 2)?;
                Ok(parts.try_into().expect("three places make four parts"))
            }
        }
    }
}

/// Experts with gates (SiLU) whose matrices are packed, and the choice among them by a softmax.
#[derive(Debug, Clone, Copy)]
pub struct ExpertsView<'a> {
    /// The stacks of `gate_proj`, `up_proj` and `down_proj`.
    pub stacks: [PackedView<'a>; 3],
    /// The gate of the shared expert, [1, D].
    pub shared_gate: Option<SharedGate<'a>>,
    /// Experts a row.
    pub top_k: i32,
    /// Whether the chosen probabilities are scaled to a sum of 1.
    pub norm_topk_prob: bool,
    /// Factor of the chosen probabilities.
    pub scale: f32,
    /// Whether the rows that go in are added to those that come out. Where ranks have parts of the experts, one rank does.
    pub adds_rows: bool,
}

impl ExpertsView<'_> {
    /// What is added to the outputs for the rows `x`.
    pub fn residual(&self, x: &Array) -> Result<Array> {
        if self.adds_rows { Ok(x.clone()) } else { Ok(zeros_dtype(x.shape(), x.dtype())?) }
    }
}

/// The matrix [1, D] of the gate of a shared expert.
#[derive(Debug, Clone, Copy)]
pub enum SharedGate<'a> {
    /// Floats as they are stored.
    Dense(&'a Array),
    /// Packed numbers.
    Packed(PackedView<'a>),
}
