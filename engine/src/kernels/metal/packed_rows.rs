//! Products of a few rows with packed weights, on Macs where MLX reads all weights once for each row.
//!
//! Source: MLX 0.32.2 `mlx/backend/metal/quantized.cpp`: from generation 15 of the GPU on, its own product of affine weights
//! reads them once for up to 5 rows.

use mlx_rs::{Array, Dtype};

use super::{Kernel, LANES, Launch, generation, is_enabled};
use crate::error::Result;
use crate::kernels::{KernelKind, Mode, PackedView, Quantization};

const KERNEL: Kernel = Kernel { name: "packed_rows", source: include_str!("packed_rows.metal") };

/// The first generation of GPUs whose products MLX computes well: M3.
const GENERATION: u32 = 15;

/// Most rows of a product: the sums of 4 outputs stay in registers.
const MOST_ROWS: usize = 8;

/// Simdgroups of a threadgroup, and outputs of each.
const SIMDGROUPS: i32 = 2;
const OUTPUTS: i32 = 4;

/// `x` [.., in] times the transposed matrix, [.., out] in `x`'s dtype. `None` if there is no kernel for the rows, the format
/// or the device.
pub fn packed_rows(weight: &PackedView<'_>, x: &Array) -> Result<Option<Array>> {
    let &PackedView { words, scales, biases: Some(biases), quantization, .. } = weight else {
        return Ok(None);
    };
    let is_used = is_enabled() && KernelKind::Products.is_on();
    if !is_used || generation().is_some_and(|generation| generation >= GENERATION) {
        return Ok(None);
    }
    let Quantization { group_size, bits, mode } = quantization;
    let inputs = x.dim(-1);
    let rows = x.size() / usize::try_from(inputs.max(1)).unwrap_or(1);
    let dtype = x.dtype();
    let fits = (mode, bits, words.ndim()) == (Mode::Affine, 4, 2)
        && inputs % group_size == 0
        && group_size % 8 == 0
        && (2..=MOST_ROWS).contains(&rows)
        && matches!(dtype, Dtype::Float32 | Dtype::Bfloat16 | Dtype::Float16);
    if !fits {
        return Ok(None);
    }
    let outputs = words.dim(0);
    let mut shape = x.shape().to_vec();
    *shape.last_mut().expect("rows have a dimension") = outputs;
    let each = SIMDGROUPS * OUTPUTS;
    let y = KERNEL.run(&Launch {
        header: String::new(),
        inputs: &[("x", x), ("words", words), ("scales", scales), ("biases", biases)],
        outputs: &[("y", &shape, dtype)],
        constants: &[
            ("N", outputs),
            ("K", inputs),
            ("ROWS", i32::try_from(rows).expect("at most 8")),
            ("GROUP", group_size),
        ],
        dtype,
        groups: [1, (outputs + each - 1) / each, 1],
        threads: LANES * SIMDGROUPS,
    })?;
    Ok(y.into_iter().next())
}
