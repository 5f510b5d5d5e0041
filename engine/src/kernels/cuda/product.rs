//! Products of a few rows with a matrix of 4 bits. MLX's own kernel for fewer than 8 rows reads the matrix once
//! a row, and at a fifth of the memory's bandwidth.
//!
//! For matrices in MLX's order. Those with a multiple of 1024 inputs are put in another one ([`Tiled`](super::Tiled)).

use mlx_rs::{Array, Dtype};

use super::{Kernel, Launch, enabled};
use crate::error::Result;
use crate::nn::{DENSE_ROWS, Input, Mode, Packed, Quantization};

const KERNEL: Kernel = Kernel {
    name: "product",
    inputs: &["x", "w", "scales", "biases", "norm", "residual"],
    outputs: &["out"],
    numbers: &["outputs", "all_rows"],
    header: "",
    source: include_str!("product.cu"),
};

pub const QUANTIZATION: Quantization = Quantization { group_size: 64, bits: 4, mode: Mode::Affine };

/// Inputs that a warp multiplies at a time.
const SLAB: i32 = 256;

/// Outputs that a block computes at a time.
const TILE: i32 = 16;

/// Rows that a warp multiplies at a time, the columns of an mma.
const SET: i32 = 8;

/// Most sets of rows in a block: more take too many registers.
const SETS: i32 = 2;

/// Most rows: more are multiplied densely.
pub const ROWS: i32 = DENSE_ROWS - 1;

/// Most warps of a block.
const WARPS: i32 = 16;

/// Streaming multiprocessors of an H100 and H200. A block stays on one and computes many tiles.
pub const MULTIPROCESSORS: i32 = 132;

/// `x` [.., R, in] times the transposed `matrix` [out, in], and `residual` [.., R, out] added: [.., R, out]. `None` if
/// there is no kernel for its format or for so many rows.
pub fn product(x: Input<'_>, matrix: &Packed, residual: Option<&Array>) -> Result<Option<Array>> {
    let Some(device) = enabled() else { return Ok(None) };
    let (Some(biases), 2) = (&matrix.biases, matrix.weight.ndim()) else { return Ok(None) };
    // Inputs that are not used are not read.
    let (x, form, norm, eps) = match x {
        Input::Rows(x) => (x, 0, x, 0.0),
        Input::Normed(x, norm) => (x, 1, &norm.weight, norm.eps),
    };
    let (inputs, outputs) = (x.dim(-1), matrix.weight.dim(0));
    let rows = i32::try_from(x.size()).unwrap_or(i32::MAX) / inputs;
    let read = [x, &matrix.scales, biases, norm, residual.unwrap_or(x)];
    let fits = matrix.quantization == QUANTIZATION
        && read.iter().all(|a| a.dtype() == Dtype::Bfloat16)
        && (inputs % SLAB, outputs % TILE) == (0, 0)
        && rows <= ROWS;
    if !fits {
        return Ok(None);
    }
    let Some(Block { sets, warps, parts: sums, shared }) =
        Block::of(rows, inputs, device.shared_memory())
    else {
        return Ok(None);
    };
    let blocks = (rows + SET * sets - 1) / (SET * sets);
    let mut shape = x.shape().to_vec();
    shape.pop();
    shape.push(outputs);
    let y = KERNEL.run(&Launch {
        inputs: &[x, &matrix.weight, &matrix.scales, biases, norm, residual.unwrap_or(x)],
        outputs: &[(&shape, Dtype::Bfloat16)],
        numbers: &[outputs, rows],
        constants: &[
            ("FORM", form),
            ("EPS", eps.to_bits().cast_signed()),
            ("ADD", i32::from(residual.is_some())),
            ("K", inputs),
            ("WARPS", warps),
            ("PARTS", sums),
            ("SETS", sets),
        ],
        dtype: Dtype::Bfloat16,
        // All at the same time, so that further rows find the matrix in the cache.
        blocks: [(outputs / TILE).min(MULTIPROCESSORS / blocks), blocks, 1],
        cluster: 1,
        threads: 32 * warps,
        shared,
    })?;
    Ok(y.into_iter().next())
}

/// What a block computes, and with what.
#[derive(Debug, PartialEq, Eq)]
struct Block {
    /// Sets of [`SET`] rows.
    sets: i32,
    warps: i32,
    /// Partial sums of an output.
    parts: i32,
    /// Bytes of shared memory.
    shared: i32,
}

impl Block {
    /// The block for `rows` rows of `inputs` inputs; `None` if it does not fit in `memory` bytes.
    fn of(rows: i32, inputs: i32, memory: i32) -> Option<Self> {
        let parts = warps(inputs / SLAB);
        // Fragments and sums of x; partial sums, twice; sums of squares.
        let shared = |sets| sets * (inputs * 16 + inputs / 64 * 32 + parts * 1024);
        let memory = memory - SETS * SET * 9 * 4;
        // A warp with two sets needs twice the registers, so there are half as many warps. Each then has two
        // slabs, whose sums stay apart.
        let in_pairs = ((rows + SET - 1) / SET) % SETS == 0
            && parts == inputs / SLAB
            && shared(SETS) <= memory;
        let (sets, warps) = if in_pairs { (SETS, (parts + 1) / 2) } else { (1, parts) };
        (shared(sets) <= memory).then(|| Self { sets, warps, parts, shared: shared(sets) })
    }
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

    #[test]
    fn blocks_fit_in_shared_memory() {
        const MEMORY: i32 = 227 << 10;
        let block = |rows, inputs| {
            let block = Block::of(rows, inputs, MEMORY)?;
            assert!(block.shared <= MEMORY);
            Some([block.sets, block.warps, block.parts])
        };
        assert_eq!(block(1, 4096), Some([1, 16, 16]));
        assert_eq!(block(16, 4096), Some([2, 8, 16]));
        assert_eq!(block(24, 4096), Some([1, 16, 16]));
        assert_eq!(block(32, 2560), Some([2, 5, 10]));
        assert_eq!(block(32, 5120), Some([1, 10, 10]));
        assert_eq!(block(32, 12288), Some([1, 16, 16]));
        assert_eq!(block(8, 16384), None);
    }
}
