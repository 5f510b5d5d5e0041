//! Packed matrices as Metal kernels read them: affine quantization in every width that MLX has.
//!
//! Source: MLX 0.32.2 `mlx/backend/metal/kernels/quantized.h` for the packing: 8 weights of 3 and
//! of 5 bits, and 4 of 6 bits, are whole bytes. All widths are one stream of bits, so 8 weights
//! have as many bytes as one has bits.

use mlx_rs::Array;

use crate::kernels::{Mode, PackedView, Quantization};

/// The header of a launch that reads packed matrices, which stands for [`TEXT`].
pub const HEADER: &str = "#include \"affine.metal\"\n";

/// The functions that read packed matrices.
pub const TEXT: &str = include_str!("affine.metal");

/// Widths of a weight.
const BITS: [i32; 6] = [2, 3, 4, 5, 6, 8];

/// Weights that a lane reads at once.
const PACK: i32 = 8;

/// A packed matrix [out, in], or a stack of them [E, out, in].
#[derive(Debug, Clone, Copy)]
pub struct Affine<'a> {
    /// u32 [.., out, in * bits / 32]
    pub words: &'a Array,
    /// [.., out, in / group_size]
    pub scales: &'a Array,
    /// [.., out, in / group_size]
    pub biases: &'a Array,
    /// Bits of a weight.
    pub bits: i32,
    /// Inputs that share a scale.
    pub group_size: i32,
}

impl<'a> Affine<'a> {
    /// The matrix; `None` if it has another format, or fewer words than the header's functions may
    /// read: MLX passes fewer than 8 as constants.
    pub fn of(matrix: &PackedView<'a>) -> Option<Self> {
        let &PackedView { words, scales, biases, quantization, .. } = matrix;
        let Quantization { group_size, bits, mode } = quantization;
        let fits = mode == Mode::Affine
            && BITS.contains(&bits)
            && group_size % PACK == 0
            && words.size() >= 8;
        let biases = biases?;
        fits.then_some(Self { words, scales, biases, bits, group_size })
    }

    /// Inputs of each matrix.
    pub fn inputs(&self) -> i32 {
        self.scales.dim(-1) * self.group_size
    }

    /// The words, scales and biases, by the names of a launch's inputs.
    pub fn named(
        &self,
        [words, scales, biases]: [&'static str; 3],
    ) -> [(&'static str, &'a Array); 3] {
        [(words, self.words), (scales, self.scales), (biases, self.biases)]
    }

    /// Outputs of each matrix.
    pub fn outputs(&self) -> i32 {
        self.words.dim(-2)
    }
}
