//! Linear layers and embeddings, dense or affine-quantized: the one place that knows the difference.
//!
//! Source: affine quantization as `mlx.core.quantize` defines it (w = q * scale + bias, one scale
//! and bias a group of inputs).

use mlx_rs::Array;
use mlx_rs::ops::{dequantize, gather_mm, gather_qmm, matmul, quantized_matmul};

use crate::error::Result;

/// Weights of a linear layer, [out, in]; or of a stack of them, [E, out, in].
#[derive(Debug, Clone)]
pub enum Linear {
    /// `weight` [out, in].
    Dense {
        /// The matrix.
        weight: Array,
        /// [out], added to the product.
        bias: Option<Array>,
    },
    /// Packed integers with a scale and a bias a group.
    Quantized {
        /// u32 [out, in * bits / 32].
        weight: Array,
        /// [out, in / group_size].
        scales: Array,
        /// [out, in / group_size].
        biases: Array,
        /// Inputs that share a scale.
        group_size: i32,
        /// Bits of an element.
        bits: i32,
        /// [out], added to the product.
        bias: Option<Array>,
    },
}

impl Linear {
    /// `x` [.., in] to [.., out], in `x`'s dtype.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when the shapes do not fit.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        let (y, bias) = match self {
            Self::Dense { weight, bias } => (matmul(x, weight.t())?, bias),
            Self::Quantized { weight, scales, biases, group_size, bits, bias } => {
                (quantized_matmul(x, weight, scales, biases, true, *group_size, *bits)?, bias)
            }
        };
        match bias {
            Some(bias) => Ok(y.add(bias)?),
            None => Ok(y),
        }
    }

    /// Each row of `x` with its own matrix of a stack: `x` [.., 1, in] and `which` [..] (u32), two
    /// shapes that broadcast, to [.., 1, out]. `sorted` where `which` is, which reads each matrix
    /// once.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when the shapes do not fit.
    pub fn gather(&self, x: &Array, which: &Array, sorted: bool) -> Result<Array> {
        let (y, bias) = match self {
            Self::Dense { weight, bias } => {
                let matrices = weight.swap_axes(-1, -2)?;
                (gather_mm(x, matrices, None, which, sorted)?, bias)
            }
            Self::Quantized { weight, scales, biases, group_size, bits, bias } => {
                let (group_size, bits) = (*group_size, *bits);
                let y = gather_qmm(
                    x, weight, scales, biases, None, which, true, group_size, bits, sorted,
                )?;
                (y, bias)
            }
        };
        match bias {
            Some(bias) => Ok(y.add(bias.take_axis(which, 0)?.expand_dims(-2)?)?),
            None => Ok(y),
        }
    }
}

/// Token embeddings [V, D], which can also serve as the output head.
#[derive(Debug, Clone)]
pub struct Embedding(pub Linear);

impl Embedding {
    /// Rows of the tokens: `ids` [R] of u32 to [1, R, D].
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects the shapes.
    pub fn forward(&self, ids: &Array) -> Result<Array> {
        let rows = match &self.0 {
            Linear::Dense { weight, .. } => weight.take_axis(ids, 0)?,
            Linear::Quantized { weight, scales, biases, group_size, bits, .. } => dequantize(
                weight.take_axis(ids, 0)?,
                scales.take_axis(ids, 0)?,
                &biases.take_axis(ids, 0)?,
                *group_size,
                *bits,
            )?,
        };
        Ok(rows.expand_dims(0)?)
    }

    /// Logits with the embedding as the head: `h` [1, R, D] to [1, R, V].
    ///
    /// # Errors
    /// [`crate::Error::Array`] when the shapes do not fit.
    pub fn as_linear(&self, h: &Array) -> Result<Array> {
        self.0.forward(h)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlx_rs::ops::quantize;
    use mlx_rs::random;

    /// Every group size and width that MLX has: multiplying packed weights equals multiplying
    /// what they unpack to, as a layer and as an embedding.
    #[test]
    fn quantized_layers_equal_their_dequantized_form() {
        let normal = |seed, shape: &[i32]| {
            random::normal::<f32>(shape, None, None, &random::key(seed).unwrap()).unwrap()
        };
        let x = normal(1, &[1, 3, 256]);
        let ids = Array::from_slice(&[5u32, 0, 31], &[3]);
        for group_size in [32, 64, 128] {
            for bits in [2, 3, 4, 5, 6, 8] {
                let (weight, scales, biases) =
                    quantize(normal(2, &[32, 256]), group_size, bits).unwrap();
                let dense = dequantize(&weight, &scales, &biases, group_size, bits).unwrap();
                let dense = Linear::Dense { weight: dense, bias: None };
                let packed =
                    Linear::Quantized { weight, scales, biases, group_size, bits, bias: None };
                let close = |a: Array, b: Array| {
                    let difference = a.subtract(b).unwrap().abs().unwrap().max(None).unwrap();
                    let difference = difference.item_exact::<f32>();
                    assert!(difference < 1e-4, "{bits} bits, group {group_size}: {difference}");
                };
                close(packed.forward(&x).unwrap(), dense.forward(&x).unwrap());
                let rows = |linear| Embedding(linear).forward(&ids).unwrap();
                close(rows(packed), rows(dense));
            }
        }
    }
}
