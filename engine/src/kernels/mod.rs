//! Kernels of our own, for formulas that MLX computes in many operations or with slow ones.
//!
//! A layer asks for a kernel and computes the formula in MLX's operations if there is none for its device,
//! shape or type. Those operations are the reference of the kernel's test. `model.kernels = "mlx"` turns all
//! kernels off.

pub mod cpu;
pub mod cuda;
pub mod metal;
mod switch;
#[cfg(test)]
mod tests;
mod views;

pub use self::switch::{KernelKind, turn_off};
pub use self::views::{
    DENSE_ROWS, DeltaView, ExpertsView, HeadsView, Input, Mode, NormView, Outputs, PackedView,
    Quantization, RotationView, SharedGate,
};

use std::rc::Rc;

use mlx_rs::ops::sigmoid;
use mlx_rs::{Array, fast};

use crate::cache::{Buffers, Element, RewindKernels, Span, Writer, Writes, WritesOf};
use crate::error::Result;

impl NormView<'_> {
    /// `x / sqrt(mean(x^2) + eps) * weight` over the last axis, statistics in f32; `x` [.., D], same shape and dtype back.
    pub fn forward(self, x: &Array) -> Result<Array> {
        match cpu::rms_norm(x, self) {
            Some(y) => y,
            None => Ok(fast::rms_norm(x, Some(self.weight), self.eps)?),
        }
    }
}

impl Input<'_> {
    /// The rows, [.., in].
    pub fn rows(self) -> Result<Array> {
        match self {
            Self::Rows(x) => Ok(x.clone()),
            Self::Normed(x, norm) => norm.forward(x),
        }
    }
}

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

/// Runs the rows `x` of a batch after the state f32 [H_v, D_v, D_k] and the tail [K - 1, C] of each sequence. `record` asks
/// for what they write. `None` if there is no kernel for the layer and the device.
pub fn gated_delta(
    layer: &DeltaView<'_>,
    x: &Outputs<4>,
    before: [&[&Element]; 2],
    record: bool,
) -> Result<Option<GatedDeltaRows>> {
    if !KernelKind::GatedDelta.is_on() {
        return Ok(None);
    }
    match cpu::gated_delta(layer, x, before, record) {
        Some(rows) => rows.map(Some),
        None => match metal::gated_delta(layer, x, before, record)? {
            Some(rows) => Ok(Some(rows)),
            None => cuda::gated_delta(layer, x, before, record),
        },
    }
}

/// Kernels that rewind recurrent layers, for [`Recurrent::with_kernels`](crate::cache::Recurrent::with_kernels).
pub const REWIND: RewindKernels = RewindKernels { rewind, replay, rows_of: cpu::rows_of };

/// [`RewindKernels::rewind`] on a GPU.
fn rewind(
    before: [&Element; 2],
    writes: &WritesOf,
    x: &Element,
    keep: i32,
) -> Result<Option<[Array; 2]>> {
    if !KernelKind::Rewind.is_on() {
        return Ok(None);
    }
    match metal::rewind(before, writes, x, keep)? {
        Some(kept) => Ok(Some(kept)),
        None => cuda::rewind(before, writes, x, keep),
    }
}

/// [`RewindKernels::replay`] on a CPU.
fn replay(state: &Element, writes: &WritesOf, rows: i32) -> Option<Result<Array>> {
    if KernelKind::Rewind.is_on() { cpu::replay(state, writes, rows) } else { None }
}

/// A product of rows: the scores of a router, or the outputs of a shared expert.
pub type Rows<'a> = &'a dyn Fn(Input<'_>) -> Result<Array>;

/// Returns `x + moe(norm x)` for `x` [1, R, D], without `x` if the view says so, or `None` if no kernel supports these experts or this number of rows.
/// `router` computes the scores of all experts [1, R, E], `shared` the shared expert without its gate, if there is one.
pub fn experts(
    moe: &ExpertsView<'_>,
    x: &Array,
    norm: NormView<'_>,
    router: Rows<'_>,
    shared: Option<Rows<'_>>,
) -> Result<Option<Array>> {
    if !KernelKind::Experts.is_on() {
        return Ok(None);
    }
    match metal::experts(moe, x, norm, router, shared)? {
        Some(y) => Ok(Some(y)),
        None => cuda::experts(moe, x, norm, router, shared),
    }
}

/// A span's rows in a launch, and the keys and values of its sequence.
#[derive(Debug, Clone, Copy)]
pub struct LaunchSpan<'a> {
    /// Number of rows.
    pub rows: i32,
    /// Position of the first.
    pub position: i32,
    /// Buffers before the rows are appended. Where a kernel appends them, nothing else may hold the buffer of own rows.
    pub buffers: Buffers<'a>,
}

impl<'a> LaunchSpan<'a> {
    /// The newest `rows` rows in `buffers`, which hold all positions.
    pub fn appended(rows: i32, buffers: Buffers<'a>) -> Self {
        let position = buffers.positions() - rows;
        Self { rows, position, buffers: Buffers { len: buffers.len - rows, ..buffers } }
    }

    /// Keys that the last row sees.
    pub fn keys(&self) -> i32 {
        self.buffers.positions() + self.rows
    }
}

/// Returns true if a kernel computes attention of few rows of `q` [1, R, H_q, D] over keys and values like `kv`
/// [1, 2 H_kv, R, D], where they lie.
pub fn has_attention(q: &Array, kv: &Array) -> bool {
    let kv_heads = kv.dim(1) / 2;
    KernelKind::Attention.is_on()
        && q.dtype() == kv.dtype()
        && (metal::has_attention(q, kv_heads) || cuda::has_attention(q, kv_heads))
}

/// The first of `spans` that one launch of [`attention`] takes: none if MLX's operation does as well.
pub fn first_spans<'a>(spans: impl Iterator<Item = LaunchSpan<'a>>) -> Vec<LaunchSpan<'a>> {
    let takes = |spans: &[LaunchSpan<'_>]| match metal::is_enabled() {
        true => metal::takes(spans),
        false => cuda::takes(spans.iter().map(|span| (span.rows, span.keys()))),
    };
    let mut taken = Vec::new();
    for span in spans {
        taken.push(span);
        if !takes(&taken) {
            taken.pop();
            break;
        }
    }
    if metal::is_enabled() && !metal::is_worth(&taken) {
        taken.clear();
    }
    taken
}

/// Whether a kernel appends the keys and values of `rows` rows, for a later [`attention`] over them.
pub fn can_append(rows: i32) -> bool {
    metal::is_enabled() && KernelKind::Attention.is_on() && rows <= metal::MOST_ROWS
}

/// Returns true if one launch of [`append`] takes these spans.
pub fn appends(spans: &[(i32, LaunchSpan<'_>)]) -> bool {
    metal::appends(spans)
}

/// Appends rows of `kv` [1, 2 H_kv, R, D] to the buffers of `spans`, each with the first of its rows in `kv`. [`can_append`]
/// and [`appends`] must be true.
pub fn append(kv: &Array, spans: &[(i32, LaunchSpan<'_>)]) -> Result<Writer> {
    metal::append(kv, spans)
}

/// Causal attention of `q` [1, R, H_q, D], the queries of the last rows of each span, times the sigmoid of `gates`
/// [1, R, H_q D]: [1, R, H_q D]. [`has_attention`] must be true, and the spans those that [`first_spans`] returned.
pub fn attention(
    q: &Array,
    gates: Option<&Array>,
    scale: f32,
    spans: &[LaunchSpan<'_>],
) -> Result<Array> {
    if metal::is_enabled() {
        return metal::attention(q, gates, scale, spans);
    }
    let mixed = cuda::attention(q, scale, spans, None)?;
    match gates {
        Some(gates) => Ok(sigmoid(gates)?.multiply(mixed)?),
        None => Ok(mixed),
    }
}

/// Attention of the rows of spans.
pub struct HeadsRows {
    /// [1, R, H_q D]
    pub mixed: Array,
    /// The kernel that writes keys and values.
    pub writer: Writer,
}

/// Returns true if there is a kernel for these heads and the rows of `spans`.
pub fn has_heads(heads: &HeadsView<'_>, projected: &Outputs<3>, spans: &[Span<'_>]) -> bool {
    KernelKind::Heads.is_on()
        && (cpu::has_heads(heads, projected)
            || (KernelKind::Attention.is_on() && cuda::has_heads(heads, spans)))
}

/// Appends keys and values of all rows to the buffers of `spans`, and returns the attention of their queries, times the sigmoid of
/// their gates. [`has_heads`] must be true.
pub fn heads(
    heads: &HeadsView<'_>,
    projected: &Outputs<3>,
    scale: f32,
    spans: &[LaunchSpan<'_>],
) -> Result<HeadsRows> {
    let (mixed, output) = match projected {
        Outputs::Apart(parts) if !cuda::is_enabled() => {
            let mixed = cpu::heads(heads, parts, scale, spans)?;
            (mixed.clone(), mixed)
        }
        _ => cuda::attend_heads(heads, projected, scale, spans)?,
    };
    Ok(HeadsRows { mixed, writer: Writer { output: Rc::new(output), is_ordered: true } })
}
