//! Arithmetic that families share: layers hold weights and are pure functions of their inputs.
//!
//! Nothing here knows a family or a request. Only [`attention`] and the recurrent layers
//! ([`by_run`]) touch caches, and only append to them.

mod attention;
mod compiled;
mod gated_delta;
mod heads;
mod joined;
mod kimi_delta;
mod linear;
mod mamba2;
mod mlp;
mod moe;
mod norm;
mod packed;
mod rope;
mod rows;
mod runs;

pub use attention::{Scores, append_and_attend, attend_appended, attention};
pub use compiled::{compile_steps, fused};
pub use gated_delta::{
    CHUNK, GatedDelta, Projected, convolve, delta_rule_chunked, delta_rule_recurrent,
    delta_rule_short,
};
pub use heads::Heads;
pub use joined::Joined;
pub use kimi_delta::KimiDelta;
pub use linear::{Dense, Embedding, Join, Linear, Part};
pub use mamba2::{GatedNorm, GroupPart, Mamba2};
pub use mlp::{Activation, Block, Gate, GatedMlp, PlainMlp};
pub use moe::{Experts, Groups, Mlp, Moe, Shared};
pub use norm::{LayerNorm, RmsNorm, mean_square};
pub use packed::{OwnKernel, Packed, from_fp8};
pub use rope::{Rope, RopeConfig, RopeParameters, Scaling};
pub use rows::{beside, joined_rows, pick_rows, rows_of, token_ids};
pub use runs::by_run;

pub use crate::kernels::{DENSE_ROWS, Input, Mode, Outputs, Quantization};

use mlx_rs::Array;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::{concatenate, maximum, minimum, sigmoid, tanh};

use crate::cache::Span;
use crate::error::Result;
use crate::kernels::cpu;

/// `x * sigmoid(x)` in `x`'s dtype.
pub fn silu(x: &Array) -> Result<Array> {
    Ok(x.multiply(sigmoid(x)?)?)
}

/// GELU by its tanh approximation (arXiv:1606.08415), in `x`'s dtype.
pub fn gelu(x: &Array) -> Result<Array> {
    let cubic = scaled(&x.square()?.multiply(x)?, 0.044_715)?;
    let t = tanh(scaled(&x.add(cubic)?, (2.0 / std::f32::consts::PI).sqrt())?)?;
    Ok(scaled(x, 0.5)?.multiply(t.add(Array::from_f32(1.0).as_dtype(x.dtype())?)?)?)
}

/// `silu(gate) * up`, element by element.
pub fn swiglu(gate: Array, up: Array) -> Result<Array> {
    if let Some(y) = cpu::swiglu(&gate, &up) {
        return y;
    }
    let [y] = fused(&[gate, up], |x| Ok([silu(&x[0])?.multiply(&x[1])?]))?;
    Ok(y)
}

/// Bound of the clamped SwiGLU.
pub const SWIGLU_LIMIT: f32 = 7.0;

/// `gate * sigmoid(1.702 gate) * (up + 1)`, element by element, with the gate at most [`SWIGLU_LIMIT`] and
/// `up` clamped to it on both sides (gpt-oss).
pub fn clamped_swiglu(gate: Array, up: Array) -> Result<Array> {
    let [y] = fused(&[gate, up], |x| {
        let number = |number: f32| Array::from_f32(number).as_dtype(x[0].dtype());
        let gate = minimum(&x[0], number(SWIGLU_LIMIT)?)?;
        let up = maximum(minimum(&x[1], number(SWIGLU_LIMIT)?)?, number(-SWIGLU_LIMIT)?)?;
        let gated = gate.multiply(sigmoid(scaled(&gate, 1.702)?)?)?;
        Ok([gated.multiply(up.add(number(1.0)?)?)?])
    })?;
    Ok(y)
}

/// `gelu(gate) * up`, element by element.
pub fn geglu(gate: Array, up: Array) -> Result<Array> {
    let [y] = fused(&[gate, up], |x| Ok([gelu(&x[0])?.multiply(&x[1])?]))?;
    Ok(y)
}

/// `sigmoid(gate) * x`, element by element.
pub fn sigmoid_gated(gate: Array, x: Array) -> Result<Array> {
    let [y] = fused(&[gate, x], |x| Ok([sigmoid(&x[0])?.multiply(&x[1])?]))?;
    Ok(y)
}

/// `factor * x` in `x`'s dtype, to which the factor is rounded first.
pub fn scaled(x: &Array, factor: f32) -> Result<Array> {
    // An f32 constant would promote everything after it to f32.
    Ok(x.multiply(Array::from_f32(factor).as_dtype(x.dtype())?)?)
}

/// `cap * tanh(x / cap)` in `x`'s dtype, which bounds scores to (-cap, cap).
pub fn softcap(x: &Array, cap: f32) -> Result<Array> {
    let cap = Array::from_f32(cap).as_dtype(x.dtype())?;
    Ok(tanh(x.divide(&cap)?)?.multiply(&cap)?)
}

/// Runs `mix` on each span's rows of the arrays `x` [1, R, ..] and joins the results.
///
/// Linear layers process all rows of a pass at once; attention and recurrence go span by span.
pub fn by_span<const N: usize>(
    x: [Array; N],
    spans: &mut [Span<'_>],
    mut mix: impl FnMut([Array; N], &mut Span<'_>) -> Result<Array>,
) -> Result<Array> {
    if let [span] = spans {
        return mix(x, span);
    }
    let mut start = 0;
    let mut parts = Vec::with_capacity(spans.len());
    for span in spans {
        let end = start + span.rows;
        let mut rows = x.clone();
        for array in &mut rows {
            *array = array.try_index((.., start..end))?;
        }
        parts.push(mix(rows, span)?);
        start = end;
    }
    Ok(concatenate(&parts, 1)?)
}
