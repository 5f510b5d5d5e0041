//! Products of a few rows with a matrix of 4 bits in the order in which a warp of tensor cores takes it ([`Tiled`]).
//!
//! Each load of a warp is 512 contiguous bytes. In MLX's order the same load touches 8 lines of the cache, and their
//! number, not the memory, bounds the product. MLX's own kernel for fewer than 8 rows reads the matrix once a row. Clusters
//! of blocks divide the inputs, so that 32 rows fit in shared memory.

use std::ops::Range;

use half::bf16;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::{concatenate, matmul, pad};
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::{Capability, Kernel, Launch, MULTIPROCESSORS, enabled};
use crate::error::Result;
use crate::kernels::{DENSE_ROWS, Input, Mode, PackedView, Quantization};

const KERNEL: Kernel = Kernel {
    name: "tiled",
    inputs: &["x", "w", "norm", "residual"],
    outputs: &["out"],
    numbers: &["outputs", "all_rows"],
    header: "",
    source: include_str!("tiled.cu"),
};

const ROWS_OF: Kernel = Kernel {
    name: "rows",
    inputs: &["w", "ids"],
    outputs: &["out"],
    numbers: &[],
    header: "",
    source: include_str!("rows.cu"),
};

pub const QUANTIZATION: Quantization = Quantization { group_size: 64, bits: 4, mode: Mode::Affine };

/// Most rows: more are multiplied densely.
const ROWS: i32 = DENSE_ROWS - 1;

/// Inputs of a tile.
const SLAB: i32 = 256;

/// Outputs of a tile.
const TILE: i32 = 16;

/// Words of a tile before its scales.
const TILE_WORDS: i32 = SLAB * TILE / 8;

/// Rows that a warp multiplies at a time, the columns of an mma.
const SET: i32 = 8;

/// Most sets of rows in a block: more take too many registers.
const SETS: i32 = 4;

/// Warps that a block may have.
const WARPS: [i32; 3] = [16, 12, 8];

/// What a block does between two turns, in the time that a warp takes for a tile: chosen by trying all blocks for the
/// matrices of Qwen3.5-9B on an H200.
const TURN: i32 = 4;

/// Clusters of 4 blocks that run at the same time on an H200, which has multiprocessors in groups of 16 and 18.
const CLUSTERS_OF_4: i32 = 30;

/// Tiles from which clusters of 2 are faster than those of 4 for more than 16 rows.
const MANY_TILES: i32 = 1024;

/// A matrix of 4 bits in groups of 64, [out, in], in tiles of 16 outputs and 256 inputs. The last tiles of a row or a
/// column are filled up with zeros.
///
/// A tile is [4 groups of 64 inputs][8 outputs g][4 t][outputs g and g + 8][2] words of 8 inputs, where the words of a
/// group are divided among t; then the scales as [8 g][g and g + 8][4 groups], and the biases likewise.
#[derive(Debug, Clone)]
pub struct Tiled {
    /// u32 [ceil(out / 16), ceil(in / 256), 576]
    words: Array,
    outputs: i32,
    inputs: i32,
}

impl Tiled {
    /// The format of the matrices.
    pub const QUANTIZATION: Quantization = QUANTIZATION;

    /// The type of the dequantized matrices.
    pub const DTYPE: Dtype = Dtype::Bfloat16;

    /// `matrix` in tiles. `None` if there is no kernel for its format or its number of inputs, or none is used.
    pub fn new(matrix: PackedView<'_>) -> Result<Option<Self>> {
        let (Some(biases), 2) = (matrix.biases, matrix.words.ndim()) else { return Ok(None) };
        let [outputs, inputs] = [matrix.words.dim(0), matrix.words.dim(1) * 8];
        let types = [matrix.scales.dtype(), biases.dtype(), matrix.dtype];
        let set = Product { rows: SET, outputs, inputs, normed: true, gated: false };
        let fits = matrix.quantization == QUANTIZATION
            && types == [Dtype::Bfloat16; 3]
            && outputs >= TILE
            && crate::kernels::KernelKind::Products.is_on()
            && enabled().is_some_and(|device| set.block(device).is_some());
        if !fits {
            return Ok(None);
        }
        let (tiles, slabs) = (up(outputs, TILE), up(inputs, SLAB));
        let filled = |array: &Array| -> Result<Array> {
            let widths =
                [tiles * TILE - outputs, slabs * array.dim(1) * SLAB / inputs - array.dim(1)];
            Ok(pad(array, &widths.map(|width| (0, width))[..], None, None)?)
        };
        let words = filled(matrix.words)?
            .reshape(&[tiles, 2, 8, slabs, 4, 4, 2])?
            .transpose_axes(&[0, 3, 4, 2, 5, 1, 6])?
            .reshape(&[tiles, slabs, -1])?;
        let by_group = |array: &Array| -> Result<Array> {
            let ordered = filled(array)?
                .reshape(&[tiles, 2, 8, slabs, 4])?
                .transpose_axes(&[0, 3, 2, 1, 4])?
                .reshape(&[tiles, slabs, -1])?;
            Ok(ordered.contiguous()?.view::<u32>()?)
        };
        let words = concatenate(&[words, by_group(matrix.scales)?, by_group(biases)?], 2)?;
        // The matrix in the other order is freed at once.
        eval([&words])?;
        Ok(Some(Self { words, outputs, inputs }))
    }

    /// Words, scales and biases in MLX's order, as [`Tiled::new`] got them.
    pub fn packed(&self) -> Result<[Array; 3]> {
        let (tiles, slabs) = (self.words.dim(0), self.words.dim(1));
        let part = |range: Range<i32>| self.words.try_index((.., .., range));
        let whole = |array: Array, inputs: i32| -> Result<Array> {
            let array =
                array.reshape(&[tiles * TILE, -1])?.try_index((..self.outputs, ..inputs))?;
            Ok(array.contiguous()?)
        };
        let words = part(0..TILE_WORDS)?
            .reshape(&[tiles, slabs, 4, 8, 4, 2, 2])?
            .transpose_axes(&[0, 5, 3, 1, 2, 4, 6])?;
        let by_group = |range: Range<i32>| -> Result<Array> {
            let array = part(range)?.contiguous()?.view::<bf16>()?;
            let array =
                array.reshape(&[tiles, slabs, 8, 2, 4])?.transpose_axes(&[0, 3, 2, 1, 4])?;
            whole(array, self.inputs / QUANTIZATION.group_size)
        };
        Ok([
            whole(words, self.inputs / 8)?,
            by_group(TILE_WORDS..TILE_WORDS + 32)?,
            by_group(TILE_WORDS + 32..TILE_WORDS + 64)?,
        ])
    }

    /// One matrix with the outputs of all `parts`, which have the same inputs. `None` if a part but the last does not fill
    /// its tiles.
    pub fn joined(parts: &[&Self]) -> Result<Option<Self>> {
        let Some(first) = parts.first() else { return Ok(None) };
        if parts.iter().rev().skip(1).any(|part| part.outputs % TILE != 0) {
            return Ok(None);
        }
        let outputs = parts.iter().map(|part| part.outputs).sum();
        let words: Vec<&Array> = parts.iter().map(|part| &part.words).collect();
        let words = concatenate(&words, 0)?;
        // The parts are freed at once, layer by layer.
        eval([&words])?;
        Ok(Some(Self { words, outputs, inputs: first.inputs }))
    }

    /// Outputs and inputs.
    pub fn shape(&self) -> [i32; 2] {
        [self.outputs, self.inputs]
    }

    /// `x` [.., in] times the transposed matrix, [.., out] in `x`'s dtype.
    pub fn matmul(&self, x: &Array) -> Result<Array> {
        match self.product(Input::Rows(x), None)? {
            Some(y) => Ok(y),
            None => Ok(matmul(x, self.dequantize()?.as_dtype(x.dtype())?.swap_axes(-1, -2)?)?),
        }
    }

    /// `x` [.., R, in] times the transposed matrix, and `residual` [.., R, out] added: [.., R, out]. `None` if there is
    /// no kernel for so many rows or their type.
    pub fn product(&self, x: Input<'_>, residual: Option<&Array>) -> Result<Option<Array>> {
        self.run(x, residual, false)
    }

    /// SwiGLU of the product: of the matrix's outputs, the first half are gates and the second
    /// half ups. [.., R, out / 2]; `None` as for [`Tiled::product`].
    pub fn swiglu(&self, x: Input<'_>) -> Result<Option<Array>> {
        self.run(x, None, true)
    }

    /// The rows `ids` [R] (u32) of the matrix, [R, in].
    pub fn rows(&self, ids: &Array) -> Result<Array> {
        self.dense(ids, ids.dim(0), true)
    }

    /// The dequantized matrix, [out, in].
    pub fn dequantize(&self) -> Result<Array> {
        self.dense(&Array::from_slice(&[0u32], &[1]), self.shape()[0], false)
    }

    fn dense(&self, ids: &Array, count: i32, gather: bool) -> Result<Array> {
        const THREADS: i32 = 128;
        let inputs = self.shape()[1];
        let rows = ROWS_OF.run(&Launch {
            inputs: &[&self.words, &ids.as_dtype(Dtype::Uint32)?],
            outputs: &[(&[count, inputs], Dtype::Bfloat16)],
            numbers: &[],
            spans: &[],
            constants: &[("K", inputs), ("GATHER", i32::from(gather)), ("THREADS", THREADS)],
            dtype: Dtype::Bfloat16,
            blocks: [count, 1, 1],
            cluster: 1,
            threads: THREADS,
            shared: 0,
        })?;
        Ok(rows.into_iter().next().expect("one output"))
    }

    fn run(&self, x: Input<'_>, residual: Option<&Array>, gated: bool) -> Result<Option<Array>> {
        let Some(device) = enabled() else { return Ok(None) };
        // Inputs that are not used are not read.
        let (x, norm, eps) = match x {
            Input::Rows(x) => (x, None, 0.0),
            Input::Normed(x, norm) => (x, Some(norm.weight), norm.eps),
        };
        let [outputs, inputs] = self.shape();
        let rows = i32::try_from(x.size()).unwrap_or(i32::MAX) / inputs;
        let read = [x, norm.unwrap_or(x), residual.unwrap_or(x)];
        if rows > ROWS || read.iter().any(|array| array.dtype() != Dtype::Bfloat16) {
            return Ok(None);
        }
        let product = Product { rows, outputs, inputs, normed: norm.is_some(), gated };
        let Some(block) = product.block(device) else { return Ok(None) };
        let mut shape = x.shape().to_vec();
        shape.pop();
        shape.push(if gated { outputs / 2 } else { outputs });
        let y = KERNEL.run(&Launch {
            inputs: &[x, &self.words, norm.unwrap_or(x), residual.unwrap_or(x)],
            outputs: &[(&shape, Dtype::Bfloat16)],
            numbers: &[outputs, rows],
            spans: &[],
            constants: &[
                ("FORM", i32::from(norm.is_some())),
                ("EPS", eps.to_bits().cast_signed()),
                ("ADD", i32::from(residual.is_some())),
                ("GATED", i32::from(gated)),
                ("K", inputs),
                ("WARPS", block.warps),
                ("SETS", block.sets),
                ("ALONE", i32::from(rows == 1)),
            ],
            dtype: Dtype::Bfloat16,
            blocks: block.blocks,
            cluster: block.cluster,
            threads: 32 * block.warps,
            shared: block.shared,
        })?;
        Ok(y.into_iter().next())
    }
}

/// What decides how a product is divided.
#[derive(Debug, Clone, Copy)]
struct Product {
    rows: i32,
    outputs: i32,
    inputs: i32,
    /// Whether the rows are normed while they are read.
    normed: bool,
    /// Whether the outputs are gates and ups.
    gated: bool,
}

/// How a product is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Block {
    /// Sets of [`SET`] rows.
    sets: i32,
    warps: i32,
    /// Blocks of a cluster.
    cluster: i32,
    /// Blocks along x, y and z.
    blocks: [i32; 3],
    /// Bytes of shared memory.
    shared: i32,
}

impl Product {
    /// The fastest division; `None` if no block fits in the device's shared memory.
    fn block(&self, device: Capability) -> Option<Block> {
        let most = SETS.min(up(self.rows, SET));
        (1..=most).rev().find_map(|sets| {
            let clusters: &[i32] = match sets {
                _ if !device.clusters => &[1],
                1 | 2 => &[1, 2, 4],
                _ if self.outputs / TILE >= MANY_TILES => &[2, 4],
                _ => &[4, 2],
            };
            clusters.iter().find_map(|&cluster| {
                let blocks = WARPS.into_iter().filter_map(|warps| {
                    self.block_with(sets, warps, cluster)
                        .filter(|(_, block)| block.shared <= device.shared_memory())
                });
                Some(blocks.min_by_key(|&(time, _)| time)?.1)
            })
        })
    }

    /// The division into blocks of `sets` and `warps` in clusters, and an estimate of its time. `None` if a gate would
    /// be without its up.
    fn block_with(&self, sets: i32, warps: i32, cluster: i32) -> Option<(i32, Block)> {
        let (slabs, quarters) = (up(self.inputs, SLAB), 4 / cluster);
        let is_alone = self.rows == 1;
        let own_rows = if is_alone { 1 } else { SET * sets };
        let tiles = warps / quarters;
        if self.gated && (tiles % 2 != 0 || self.outputs % (2 * TILE) != 0) {
            return None;
        }
        let y = up(self.rows, own_rows);
        let at_once = if cluster == 4 { CLUSTERS_OF_4 } else { MULTIPROCESSORS / cluster };
        let groups = up(up(self.outputs, TILE), tiles);
        let turns = up(groups, (at_once / y).max(1));
        let own_slabs = up(slabs * quarters, 4);
        let floats = own_slabs * 4 * own_rows
            + if self.normed { 4 * up(own_rows * slabs, 4) } else { 0 }
            + if self.normed && is_alone { own_slabs * SLAB / 2 } else { 0 }
            + turns.min(2) * quarters * own_rows * (tiles * TILE + 4);
        // Beside it are the norms of the rows.
        let shared = own_rows * own_slabs * SLAB * 2 + (floats + own_rows) * 4;
        let blocks = [up(groups, turns) * cluster, y, 1];
        Some((turns * (warps + TURN), Block { sets, warps, cluster, blocks, shared }))
    }
}

/// `a / b`, rounded up.
fn up(a: i32, b: i32) -> i32 {
    (a + b - 1) / b
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOPPER: Capability = Capability { major: 9, minor: 0, clusters: true };
    const ADA: Capability = Capability { major: 8, minor: 9, clusters: false };

    fn block(
        rows: i32,
        [outputs, inputs]: [i32; 2],
        gated: bool,
        device: Capability,
    ) -> Option<[i32; 5]> {
        let product = Product { rows, outputs, inputs, normed: false, gated };
        let Block { sets, warps, cluster, blocks, shared } = product.block(device)?;
        assert!(shared <= device.shared_memory());
        assert_eq!(blocks[0] % cluster, 0);
        assert!(blocks[1] * sets * SET >= rows);
        Some([sets, warps, cluster, blocks[0], blocks[1]])
    }

    #[test]
    fn blocks_divide_the_matrices_of_common_models() {
        let cases = [
            (1, [4096, 4096], Some([1, 8, 1, 128, 1])),
            (1, [12352, 4096], Some([1, 12, 1, 129, 1])),
            (1, [248_320, 4096], Some([1, 16, 1, 130, 1])),
            (8, [4096, 12288], Some([1, 8, 1, 128, 1])),
            (16, [4096, 4096], Some([2, 8, 1, 128, 1])),
            (16, [4096, 12288], Some([2, 8, 2, 128, 1])),
            (32, [4096, 4096], Some([4, 12, 4, 88, 1])),
            (32, [4096, 12288], Some([4, 12, 4, 88, 1])),
            (32, [248_320, 4096], Some([4, 16, 2, 130, 1])),
            (127, [4096, 4096], Some([4, 16, 4, 24, 4])),
        ];
        for (rows, shape, expected) in cases {
            assert_eq!(block(rows, shape, false, HOPPER), expected, "{rows} {shape:?}");
        }
        // Gates are beside ups.
        assert_eq!(block(1, [24576, 4096], true, HOPPER), Some([1, 16, 1, 128, 1]));
        assert_eq!(block(32, [24576, 4096], true, HOPPER), Some([4, 16, 2, 128, 1]));
    }

    #[test]
    fn without_clusters_rows_are_divided_until_they_fit() {
        assert_eq!(block(32, [4096, 4096], false, ADA), Some([1, 16, 1, 32, 4]));
        assert_eq!(block(32, [1024, 1024], false, ADA).map(|block| block[0]), Some(4));
        assert_eq!(block(1, [4096, 12288], false, ADA), Some([1, 8, 1, 128, 1]));
        assert_eq!(block(2, [4096, 12288], false, ADA), None);
        // As on Hopper with MLX's graphs.
        let alone = Capability { clusters: false, ..HOPPER };
        assert_eq!(block(16, [4096, 12288], false, alone), Some([1, 16, 1, 64, 2]));
    }
}
