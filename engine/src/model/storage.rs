//! How the matrices of a checkpoint are held.

use crate::kernels::cpu::Activations;

/// How matrices of a checkpoint are held in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// They stay packed, and MLX multiplies with them.
    Packed,
    /// They are dequantized.
    Dequantized,
    /// Matrices that [`crate::kernels::cpu`] can multiply with stay packed, and the others are
    /// dequantized. Matrices of floats that it can multiply with stay in 16 bits.
    OwnKernels(Activations),
}
