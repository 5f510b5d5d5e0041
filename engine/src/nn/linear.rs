//! Linear layers and embeddings. Other layers do not know whether they are dense or quantized.

use mlx_rs::ops::{gather_mm, matmul};
use mlx_rs::{Array, Dtype};

use super::{OwnKernel, Packed};
use crate::error::Result;
use crate::kernels::Input;
use crate::kernels::cpu;
use crate::kernels::cuda::Tiled;
use crate::ranks::Ranks;

/// A matrix of floats [out, in], or a stack of them [E, out, in].
#[derive(Debug, Clone)]
pub struct Dense {
    /// The elements, as they are stored.
    pub weight: Array,
    /// Type of [`Dense::array`] and of rows.
    pub dtype: Dtype,
    /// Whether products are [`cpu::products`], which [`cpu::supports_dense`] allows, or MLX's.
    pub own_kernel: bool,
}

impl From<Array> for Dense {
    /// A matrix that MLX multiplies with.
    fn from(weight: Array) -> Self {
        let dtype = weight.dtype();
        Self { weight, dtype, own_kernel: false }
    }
}

impl Dense {
    /// The matrix, or the stack of them.
    pub fn array(&self) -> Result<Array> {
        Ok(self.weight.as_dtype(self.dtype)?)
    }

    /// `x` [.., in] times the transposed matrix by MLX, [.., out] in `x`'s dtype.
    pub fn matmul(&self, x: &Array) -> Result<Array> {
        Ok(matmul(x, self.array()?.t())?)
    }

    /// The rows `ids` of the matrix.
    pub fn rows(&self, ids: &Array) -> Result<Array> {
        Ok(self.weight.take_axis(ids, 0)?.as_dtype(self.dtype)?)
    }
}

/// Weights of a linear layer, [out, in], or of a stack of them, [E, out, in].
#[derive(Debug, Clone)]
pub enum Linear {
    /// Floating-point weights.
    Dense {
        /// [out, in]
        weight: Dense,
        /// [out], added to the product.
        bias: Option<Array>,
    },
    /// Packed weights.
    Quantized {
        /// [out, in]
        weight: Packed,
        /// [out], added to the product.
        bias: Option<Array>,
    },
    /// Packed weights in the order of our own kernel for CUDA; never a stack.
    Tiled {
        /// [out, in]
        weight: Tiled,
        /// [out], added to the product.
        bias: Option<Array>,
    },
    /// What this rank has of a layer that is cut; never a stack.
    Part(Part),
}

/// A part of a layer whose other parts other ranks have.
#[derive(Debug, Clone)]
pub struct Part {
    /// The layer, as one of its own.
    pub layer: Box<Linear>,
    /// How the outputs of all parts become those of the whole layer.
    pub join: Join,
    /// Those who have the parts.
    pub ranks: Ranks,
}

/// How outputs of parts become those of the whole layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Join {
    /// Each part has some of the inputs: the outputs are summed.
    Sum,
    /// Each part has some of the outputs: they stand side by side.
    Gather,
}

impl Part {
    /// As [`Linear::apply`].
    fn apply(&self, x: Input<'_>, residual: Option<&Array>) -> Result<Array> {
        match (self.join, residual) {
            (Join::Sum, residual) => {
                let once = residual.filter(|_| self.ranks.is_first());
                self.ranks.sum(self.layer.apply(x, once)?)
            }
            (Join::Gather, None) => self.ranks.gather(self.layer.apply(x, None)?),
            (Join::Gather, Some(residual)) => Ok(residual.add(self.apply(x, None)?)?),
        }
    }
}

impl Linear {
    /// Outputs and inputs, [out, in].
    pub fn shape(&self) -> [i32; 2] {
        match self {
            Self::Part(part) => part.layer.shape(),
            Self::Dense { weight, .. } => [weight.weight.dim(-2), weight.weight.dim(-1)],
            Self::Quantized { weight, .. } => {
                let inputs = weight.scales.dim(-1) * weight.quantization.group_size;
                [weight.weight.dim(-2), inputs]
            }
            Self::Tiled { weight, .. } => weight.shape(),
        }
    }

    /// [out, in], or [E, out, in] of a stack.
    pub fn dims(&self) -> Vec<i32> {
        let leading = match self {
            Self::Dense { weight, .. } => &weight.weight,
            Self::Quantized { weight, .. } => &weight.weight,
            Self::Tiled { .. } | Self::Part(_) => return self.shape().into(),
        };
        let leading = &leading.shape()[..leading.ndim() - 2];
        [leading, &self.shape()].concat()
    }

    /// The matrix for kernels on CPUs, if they multiply with it.
    pub fn matrix(&self) -> Option<cpu::Matrix<'_>> {
        match self {
            Self::Dense { weight: Dense { weight, dtype, own_kernel: true }, bias } => {
                cpu::Matrix::dense(weight, bias.as_ref(), *dtype)
            }
            Self::Quantized { weight, bias } => {
                let OwnKernel { activations, is_symmetric } = weight.own_kernel?;
                cpu::Matrix::packed(weight.view(), bias.as_ref(), activations, is_symmetric)
            }
            _ => None,
        }
    }

    /// The matrix, or the stack of them, dequantized.
    pub fn dense(&self) -> Result<Array> {
        match self {
            Self::Dense { weight, .. } => weight.array(),
            Self::Quantized { weight, .. } => weight.dequantize(),
            Self::Tiled { weight, .. } => weight.dequantize(),
            Self::Part(part) => part.layer.dense(),
        }
    }

    /// The layer that only adds up to the whole one: the outputs of all ranks are summed by the caller.
    pub fn unsummed(self) -> Self {
        match self {
            Self::Part(Part { layer, join: Join::Sum, .. }) => *layer,
            layer => layer,
        }
    }

    /// `x` [.., in] to [.., out], in `x`'s dtype.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        self.apply(Input::Rows(x), None)
    }

    /// [`Linear::forward`] of `x`, added to `residual` [.., out] if there is one.
    pub fn apply(&self, x: Input<'_>, residual: Option<&Array>) -> Result<Array> {
        let product = match self {
            Self::Part(part) => return part.apply(x, residual),
            Self::Tiled { weight, bias: None } => weight.product(x, residual)?,
            _ => cpu::products([self.matrix()], x, residual)?.map(|[y]| y),
        };
        if let Some(y) = product {
            return Ok(y);
        }
        let x = &x.rows()?;
        let (mut y, bias) = match self {
            Self::Dense { weight, bias } => (weight.matmul(x)?, bias),
            Self::Quantized { weight, bias } => (weight.matmul(x)?, bias),
            Self::Tiled { weight, bias } => (weight.matmul(x)?, bias),
            Self::Part(_) => unreachable!("applied above"),
        };
        if let Some(bias) = bias {
            y = y.add(bias)?;
        }
        match residual {
            Some(residual) => Ok(residual.add(y)?),
            None => Ok(y),
        }
    }

    /// Each row of `x` with its own matrix of a stack: `x` [.., 1, in] and `which` [..] (u32), whose
    /// shapes broadcast, to [.., 1, out]. `sorted` states that `which` is sorted; each matrix is then
    /// read once.
    pub fn gather(&self, x: &Array, which: &Array, sorted: bool) -> Result<Array> {
        let (y, bias) = match self {
            Self::Dense { weight, bias } => {
                (gather_mm(x, weight.array()?.swap_axes(-1, -2)?, None, which, sorted)?, bias)
            }
            Self::Quantized { weight, bias } => (weight.gather(x, which, sorted)?, bias),
            Self::Tiled { .. } | Self::Part(_) => unreachable!("a stack has its own format"),
        };
        match bias {
            Some(bias) => Ok(y.add(bias.take_axis(which, 0)?.expand_dims(-2)?)?),
            None => Ok(y),
        }
    }
}

/// Token embeddings [V, D].
#[derive(Debug, Clone)]
pub struct Embedding(pub Linear);

impl Embedding {
    /// Embeddings of the tokens `ids` [R] (u32), [1, R, D].
    pub fn forward(&self, ids: &Array) -> Result<Array> {
        if let Some(matrix) = self.0.matrix()
            && let Some(rows) = cpu::embed(&matrix, ids)?
        {
            return Ok(rows);
        }
        let rows = match &self.0 {
            Linear::Dense { weight, .. } => weight.rows(ids)?,
            Linear::Quantized { weight, .. } => weight.rows(ids)?.dequantize()?,
            Linear::Tiled { weight, .. } => weight.rows(ids)?,
            Linear::Part(_) => unreachable!("every rank has all embeddings"),
        };
        Ok(rows.expand_dims(0)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cpu::Activations;
    use crate::nn::{Mode, Quantization};
    use mlx_rs::{Device, DeviceType, random};

    fn normal(seed: u64, shape: &[i32]) -> Array {
        random::normal::<f32>(shape, None, None, &random::key(seed).unwrap()).unwrap()
    }

    /// Multiplying packed weights equals multiplying the dequantized ones: as a layer, as an
    /// embedding and as a stack. `loss` bounds the root mean square error of packed normal numbers,
    /// so that a mode cannot be confused with another one.
    fn check(group_size: i32, bits: i32, mode: Mode, loss: f32) {
        let quantization = Quantization { group_size, bits, mode };
        let number = |a: Array| a.item_exact::<f32>();
        let close = |a: Array, b: Array| {
            let difference = number(a.subtract(b).unwrap().abs().unwrap().max(None).unwrap());
            assert!(difference < 1e-4, "{quantization:?}: {difference}");
        };
        let forms = |matrix: &Array| {
            let packed = Packed::quantize(matrix, quantization);
            let dense = packed.dequantize().unwrap();
            let error = dense.subtract(matrix).unwrap().square().unwrap().mean(None).unwrap();
            let error = number(error).sqrt();
            assert!((loss / 3.0..loss).contains(&error), "{quantization:?} loses {error}");
            (
                Linear::Quantized { weight: packed, bias: None },
                Linear::Dense { weight: dense.into(), bias: None },
            )
        };
        let x = normal(1, &[1, 3, 256]);
        let (packed, dense) = forms(&normal(2, &[32, 256]));
        close(packed.forward(&x).unwrap(), dense.forward(&x).unwrap());
        let ids = Array::from_slice(&[5u32, 0, 31], &[3]);
        let rows = |linear| Embedding(linear).forward(&ids).unwrap();
        close(rows(packed), rows(dense));
        let (packed, dense) = forms(&normal(3, &[4, 32, 256]));
        let (x, which) = (x.reshape(&[3, 1, 256]).unwrap(), Array::from_slice(&[0u32, 2, 3], &[3]));
        for sorted in [false, true] {
            let gathered = |linear: &Linear| linear.gather(&x, &which, sorted).unwrap();
            close(gathered(&packed), gathered(&dense));
        }
    }

    /// Products and embeddings of packed weights whose scales are stored in 16 bits, as checkpoints have them.
    #[test]
    fn layers_with_own_kernels_equal_dense_ones() {
        if matches!(Device::try_default().unwrap().get_type().unwrap(), DeviceType::Gpu) {
            return;
        }
        for (group_size, bits) in [(32, 4), (64, 4), (128, 4), (64, 8)] {
            let quantization = Quantization { group_size, bits, mode: Mode::Affine };
            let short = normal(4, &[96, 256]).as_dtype(Dtype::Bfloat16).unwrap();
            let packed = Packed::quantize(&short, quantization);
            let own_kernel =
                Some(OwnKernel { activations: Activations::Exact, is_symmetric: false });
            let weight = Packed { own_kernel, dtype: Dtype::Float32, ..packed };
            let dense = Linear::Dense { weight: weight.dequantize().unwrap().into(), bias: None };
            let own = Linear::Quantized { weight, bias: None };
            let largest = |a: Array| a.abs().unwrap().max(None).unwrap().item_exact::<f32>();
            let x = normal(5, &[1, 3, 256]);
            let [y, expected] = [&own, &dense].map(|layer| layer.forward(&x).unwrap());
            assert!(largest(y.subtract(expected).unwrap()) < 1e-4, "{quantization:?}");
            let ids = Array::from_slice(&[5u32, 0, 95], &[3]);
            let [rows, expected] =
                [own, dense].map(|layer| Embedding(layer).forward(&ids).unwrap());
            assert_eq!(rows.dtype(), Dtype::Float32);
            assert!(largest(rows.subtract(expected).unwrap()) == 0.0, "{quantization:?}");
        }
    }

    /// Weights of 16 bits that kernels widen equal those that were widened before.
    #[test]
    fn dense_layers_with_own_kernels_equal_those_of_mlx() {
        if matches!(Device::try_default().unwrap().get_type().unwrap(), DeviceType::Gpu) {
            return;
        }
        for stored in [Dtype::Float32, Dtype::Bfloat16, Dtype::Float16] {
            let weight = normal(4, &[96, 256]).as_dtype(stored).unwrap();
            let wide = Dense::from(weight.as_dtype(Dtype::Float32).unwrap());
            let own = Dense { weight, dtype: Dtype::Float32, own_kernel: true };
            let largest = |a: Array| a.abs().unwrap().max(None).unwrap().item_exact::<f32>();
            let x = normal(5, &[1, 3, 256]);
            let [own, mlx] = [own, wide].map(|weight| Linear::Dense { weight, bias: None });
            let [y, expected] = [&own, &mlx].map(|layer| layer.forward(&x).unwrap());
            assert!(largest(y.subtract(expected).unwrap()) < 1e-4, "{stored:?}");
            let ids = Array::from_slice(&[5u32, 0, 95], &[3]);
            let [rows, expected] = [own, mlx].map(|layer| Embedding(layer).forward(&ids).unwrap());
            assert_eq!(rows.dtype(), Dtype::Float32);
            assert!(largest(rows.subtract(expected).unwrap()) == 0.0, "{stored:?}");
        }
    }

    /// Every group size, width and mode that MLX has.
    #[test]
    fn quantized_layers_equal_their_dequantized_form() {
        for group_size in [32, 64, 128] {
            for (bits, loss) in [(2, 0.6), (3, 0.3), (4, 0.13), (5, 0.06), (6, 0.03), (8, 0.008)] {
                check(group_size, bits, Mode::Affine, loss);
            }
        }
        check(32, 4, Mode::Mxfp4, 0.2);
        check(16, 4, Mode::Nvfp4, 0.15);
        check(32, 8, Mode::Mxfp8, 0.05);
    }
}
