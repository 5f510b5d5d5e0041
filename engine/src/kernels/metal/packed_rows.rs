//! Products of a few rows with packed weights, on Macs where MLX reads all weights once for each row.
//!
//! Source: MLX 0.32.2 `mlx/backend/metal/quantized.cpp`: from generation 15 of the GPU on, its own product of affine weights
//! reads them once for up to 5 rows.

use mlx_rs::Array;

use super::affine::{self, Affine};
use super::{Kernel, LANES, Launch, generation, is_enabled, is_float};
use crate::error::Result;
use crate::kernels::{KernelKind, PackedView};

pub const KERNEL: Kernel =
    Kernel { name: "packed_rows", source: include_str!("packed_rows.metal") };

/// The first generation of GPUs whose products MLX computes well: M3.
const GENERATION: u32 = 15;

/// Most rows of a product: the sums of 4 outputs stay in registers.
const MOST_ROWS: i32 = 8;

/// Simdgroups of a threadgroup, and outputs of each.
const SIMDGROUPS: i32 = 2;
const OUTPUTS: i32 = 4;

/// `x` [.., in] times the transposed matrix, [.., out] in `x`'s dtype. `None` if there is no kernel for the rows, the format
/// or the device.
pub fn packed_rows(weight: &PackedView<'_>, x: &Array) -> Result<Option<Array>> {
    let is_used = is_enabled() && KernelKind::Products.is_on();
    if !is_used || generation().is_some_and(|generation| generation >= GENERATION) {
        return Ok(None);
    }
    let Some(weight) = Affine::of(weight) else { return Ok(None) };
    let rows = rows_of(x);
    let fits = weight.words.ndim() == 2
        && x.dim(-1) == weight.inputs()
        && (2..=MOST_ROWS).contains(&rows)
        && is_float(x.dtype());
    if fits { product(&KERNEL, &weight, x).map(Some) } else { Ok(None) }
}

/// The rows of `x` [.., in].
fn rows_of(x: &Array) -> i32 {
    x.shape()[..x.ndim() - 1].iter().product()
}

/// The product by `kernel`, for as many rows as there is a kernel for.
pub fn product(kernel: &Kernel, weight: &Affine<'_>, x: &Array) -> Result<Array> {
    let (outputs, dtype) = (weight.outputs(), x.dtype());
    let mut shape = x.shape().to_vec();
    *shape.last_mut().expect("rows have a dimension") = outputs;
    let each = SIMDGROUPS * OUTPUTS;
    let mut arrays = vec![("x", x)];
    arrays.extend(weight.named(["words", "scales", "biases"]));
    let y = kernel.run(&Launch {
        header: affine::HEADER.into(),
        inputs: &arrays,
        in_place: &[],
        outputs: &[("y", &shape, dtype)],
        constants: &[
            ("N", outputs),
            ("K", weight.inputs()),
            ("ROWS", rows_of(x)),
            ("BITS", weight.bits),
            ("GROUP", weight.group_size),
        ],
        dtype,
        groups: [1, (outputs + each - 1) / each, 1],
        threads: LANES * SIMDGROUPS,
    })?;
    Ok(y.into_iter().next().expect("one output"))
}
