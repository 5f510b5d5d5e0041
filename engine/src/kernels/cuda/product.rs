//! Products of a few rows with a matrix of 4 bits. MLX's own kernel for fewer than 8 rows reads the matrix once
//! a row, and at a fifth of the memory's bandwidth.

use mlx_rs::{Array, Dtype};

use super::{Kernel, Launch, enabled};
use crate::error::Result;
use crate::nn::{Mode, Packed, Quantization};

const KERNEL: Kernel = Kernel {
    name: "product",
    inputs: &["x", "w", "scales", "biases"],
    outputs: &["out"],
    header: "",
    source: include_str!("product.cu"),
    contiguous: true,
};

const QUANTIZATION: Quantization = Quantization { group_size: 64, bits: 4, mode: Mode::Affine };

/// Inputs that a warp multiplies at a time.
const SLAB: i32 = 256;

/// Outputs that a block computes at a time.
const TILE: i32 = 16;

/// Rows that a block computes. Further rows read the matrix again.
const BLOCK_ROWS: i32 = 8;

/// Most rows; for more, MLX's product is faster.
const ROWS: i32 = 16;

/// Most warps of a block.
const WARPS: i32 = 16;

/// Streaming multiprocessors of an H100 and H200. A block stays on one and computes many tiles.
const MULTIPROCESSORS: i32 = 132;

/// `x` [.., R, in] times the transposed `matrix` [out, in]: [.., R, out]. `None` if there is no kernel for its
/// format or for so many rows.
pub fn product(x: &Array, matrix: &Packed) -> Result<Option<Array>> {
    let Some(device) = enabled() else { return Ok(None) };
    let (Some(biases), 2) = (&matrix.biases, matrix.weight.ndim()) else { return Ok(None) };
    let (inputs, outputs) = (x.dim(-1), matrix.weight.dim(0));
    let rows = i32::try_from(x.size()).unwrap_or(i32::MAX) / inputs;
    let slabs = inputs / SLAB;
    let fits = matrix.quantization == QUANTIZATION
        && [x, &matrix.scales, biases].iter().all(|a| a.dtype() == Dtype::Bfloat16)
        && (inputs % SLAB, outputs % TILE) == (0, 0)
        && rows <= ROWS;
    if !fits {
        return Ok(None);
    }
    let warps = warps(slabs);
    // Fragments and sums of x; sums of the warps, twice.
    let shared = inputs * 16 + inputs / 64 * 32 + warps * 1024;
    if shared > device.shared_memory() {
        return Ok(None);
    }
    let mut shape = x.shape().to_vec();
    shape.pop();
    shape.push(outputs);
    let y = KERNEL.run(&Launch {
        inputs: &[&x.reshape(&[rows, inputs])?, &matrix.weight, &matrix.scales, biases],
        outputs: &[(&[rows, outputs], Dtype::Bfloat16)],
        constants: &[("K", inputs), ("WARPS", warps)],
        dtype: Dtype::Bfloat16,
        blocks: [(outputs / TILE).min(MULTIPROCESSORS), (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, 1],
        threads: 32 * warps,
        shared,
    })?;
    Ok(Some(y[0].reshape(&shape)?))
}

/// The number of warps that leaves the fewest without a slab in the last round.
fn warps(slabs: i32) -> i32 {
    let idle = |warps: &i32| (slabs + warps - 1) / warps * warps - slabs;
    (WARPS / 2..=WARPS).rev().min_by_key(idle).expect("the range is not empty").min(slabs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warps_divide_the_slabs_of_common_widths() {
        let expected = [(16, 16), (48, 16), (10, 10), (38, 13), (8, 8), (1, 1), (20, 10)];
        for (slabs, expected) in expected {
            assert_eq!(warps(slabs), expected, "{slabs}");
        }
    }
}
