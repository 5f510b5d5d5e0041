//! Kernels of our own, for formulas that MLX computes in many operations or with slow ones.
//!
//! A layer asks for a kernel and computes the formula in MLX's operations if there is none for its device,
//! shape or type. Those operations are the reference of the kernel's test. `model.kernels = "mlx"` turns all
//! kernels off.

pub mod cpu;
pub mod cuda;

use mlx_rs::Array;

use crate::cache::Writes;
use crate::error::Result;
use crate::nn::{GatedDelta, Outputs};

/// Rows of a GatedDeltaNet layer, by a kernel or by operations.
pub struct GatedDeltaRows {
    /// [B, T, H_v D_v], after the gated norm.
    pub y: Array,
    /// f32 [B, H_v, D_v, D_k], the state after the last row.
    pub state: Array,
    /// [B, K - 1, C], the last inputs of the convolution.
    pub tail: Array,
    /// What the rows wrote to the state, if asked for.
    pub writes: Option<Writes>,
}

/// Runs the rows `x` of a batch after `state` f32 [B, H_v, D_v, D_k] and `tail` [B, K - 1, C]. `record` asks for what they
/// write. `None` if there is no kernel for the layer and the device.
pub fn gated_delta(
    layer: &GatedDelta,
    x: &Outputs<4>,
    before: [&Array; 2],
    record: bool,
) -> Result<Option<GatedDeltaRows>> {
    match cpu::gated_delta(layer, x, before, record) {
        Some(rows) => rows.map(Some),
        None => cuda::gated_delta(layer, x, before, record),
    }
}
