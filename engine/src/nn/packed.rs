//! Quantized matrices: packed numbers, their scales, and MLX's operations on them.
//!
//! mlx-rs 0.33 has these operations for affine quantization only, so this file calls mlx-c for every
//! mode.
//!
//! Source: `mlx.core.quantize` for affine (w = q * scale + bias, one scale and bias for a group of
//! inputs); the OCP Microscaling specification 1.0 for `mxfp4` and `mxfp8`; NVIDIA's NVFP4 without
//! the scale of the tensor, which mlx-c does not support.

#![allow(unsafe_code, reason = "calls mlx-c for quantization modes that mlx-rs lacks")]

use mlx_rs::ops::matmul;
use mlx_rs::{Array, Dtype, Stream};
use mlx_sys::{mlx_array, mlx_optional_dtype, mlx_optional_int, mlx_stream};

use crate::error::{Error, Result};
use crate::kernels::cpu::Activations;
use crate::kernels::cuda::{self, Tiled};
use crate::kernels::metal;
use crate::kernels::{DENSE_ROWS, Mode, PackedView, Quantization};

/// A quantized matrix [out, in], or a stack of them [E, out, in].
#[derive(Debug, Clone)]
pub struct Packed {
    /// u32 [.., out, in * bits / 32]
    pub weight: Array,
    /// [.., out, in / group_size]: floats for affine, bytes that encode floats otherwise.
    pub scales: Array,
    /// [.., out, in / group_size], for affine only.
    pub biases: Option<Array>,
    /// Group size, bits and mode.
    pub quantization: Quantization,
    /// Type of the dequantized matrix.
    pub dtype: Dtype,
    /// For [`cpu::products`](crate::kernels::cpu::products), which [`cpu::supports`](crate::kernels::cpu::supports) allows;
    /// `None` uses MLX's products.
    pub own_kernel: Option<OwnKernel>,
}

/// How products of our own read a packed matrix and their input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnKernel {
    /// How they read rows of the input.
    pub activations: Activations,
    /// Whether they compute biases from scales, see [`Packed::is_symmetric`].
    pub is_symmetric: bool,
}

impl Packed {
    /// A matrix in MLX's order from one in that of our own kernel for CUDA.
    pub fn from_tiled(tiled: &Tiled) -> Result<Self> {
        let [weight, scales, biases] = tiled.packed()?;
        Ok(Self {
            weight,
            scales,
            biases: Some(biases),
            quantization: Tiled::QUANTIZATION,
            dtype: Tiled::DTYPE,
            own_kernel: None,
        })
    }

    /// The matrix as kernels read it.
    pub fn view(&self) -> PackedView<'_> {
        PackedView {
            words: &self.weight,
            scales: &self.scales,
            biases: self.biases.as_ref(),
            quantization: self.quantization,
            dtype: self.dtype,
        }
    }

    /// `x` [.., in] times the transposed matrix, [.., out] in `x`'s dtype: by MLX, or by a kernel for Metal.
    pub fn matmul(&self, x: &Array) -> Result<Array> {
        if let Some(y) = metal::packed_rows(&self.view(), x)? {
            return Ok(y);
        }
        // Dense products of f32 are rounded to TF32.
        let dense = cuda::is_enabled() && x.dtype() != Dtype::Float32 && x.ndim() > 1;
        if dense && x.dim(-2) >= DENSE_ROWS {
            return Ok(matmul(x, self.dequantize()?.as_dtype(x.dtype())?.swap_axes(-1, -2)?)?);
        }
        self.call("quantized_matmul", |res, group_size, bits, mode, stream| {
            // SAFETY: see `call`; `x` lives as long as this function.
            unsafe {
                let [weight, scales, biases] = self.pointers();
                mlx_sys::mlx_quantized_matmul(
                    res,
                    x.as_ptr(),
                    weight,
                    scales,
                    biases,
                    true,
                    group_size,
                    bits,
                    mode,
                    stream,
                )
            }
        })
    }

    /// Whether each bias is `-2^(bits - 1)` times its scale, as in files of GGUF's Q4_0 and Q8_0.
    pub fn is_symmetric(&self) -> Result<bool> {
        let (Some(biases), bits) = (&self.biases, self.quantization.bits) else { return Ok(false) };
        let factor = Array::from_f32(-f32::exp2(bits as f32 - 1.0));
        let symmetric = self.scales.multiply(factor.as_dtype(self.scales.dtype())?)?;
        Ok(biases.eq_values(symmetric)?)
    }

    /// Each row of `x` [.., 1, in] times the transposed matrix at its index in `which` [..] (u32),
    /// [.., 1, out]. `sorted` states that `which` is sorted.
    pub fn gather(&self, x: &Array, which: &Array, sorted: bool) -> Result<Array> {
        self.call("gather_qmm", |res, group_size, bits, mode, stream| {
            // SAFETY: see `call`; `x` and `which` live as long as this function. An empty handle
            // means no left indices: rows are used in order.
            unsafe {
                let [weight, scales, biases] = self.pointers();
                mlx_sys::mlx_gather_qmm(
                    res,
                    x.as_ptr(),
                    weight,
                    scales,
                    biases,
                    mlx_array::default(),
                    which.as_ptr(),
                    true,
                    group_size,
                    bits,
                    mode,
                    sorted,
                    stream,
                )
            }
        })
    }

    /// The dequantized matrix, [.., out, in].
    pub fn dequantize(&self) -> Result<Array> {
        if self.quantization.mode == Mode::Affine && self.scales.dtype() != self.dtype {
            // As stored in the checkpoint, for a kernel of our own. MLX would round the matrix to their type.
            let cast = |array: &Array| array.as_dtype(self.dtype);
            let (scales, biases) =
                (cast(&self.scales)?, self.biases.as_ref().map(cast).transpose()?);
            let weight = self.weight.clone();
            return Self { weight, scales, biases, own_kernel: None, ..*self }.dequantize();
        }
        let dtype = mlx_optional_dtype { value: 0, has_value: false };
        let array = self.call("dequantize", |res, group_size, bits, mode, stream| {
            // SAFETY: see `call`. An empty handle means no scale of the tensor.
            unsafe {
                let [weight, scales, biases] = self.pointers();
                mlx_sys::mlx_dequantize(
                    res,
                    weight,
                    scales,
                    biases,
                    group_size,
                    bits,
                    mode,
                    mlx_array::default(),
                    dtype,
                    stream,
                )
            }
        })?;
        // Exact even if MLX dequantizes to bfloat16: the product of two such short floats has 6 bits.
        Ok(array.as_dtype(self.dtype)?)
    }

    /// The rows `ids` [R] (u32).
    pub fn rows(&self, ids: &Array) -> Result<Self> {
        Ok(Self {
            weight: self.weight.take_axis(ids, 0)?,
            scales: self.scales.take_axis(ids, 0)?,
            biases: self.biases.as_ref().map(|biases| biases.take_axis(ids, 0)).transpose()?,
            ..*self
        })
    }

    /// Weight, scales and biases, valid as long as `self`; an empty handle if there are no biases.
    fn pointers(&self) -> [mlx_array; 3] {
        let biases = self.biases.as_ref().map_or_else(mlx_array::default, Array::as_ptr);
        [self.weight.as_ptr(), self.scales.as_ptr(), biases]
    }

    /// Runs one of mlx-c's operations. Each fills `res` with a new array and returns 0, or returns
    /// another status and leaves `res` empty. They use their arguments during the call only: MLX
    /// counts references to what it keeps.
    fn call(
        &self,
        operation: &str,
        run: impl FnOnce(
            *mut mlx_array,
            mlx_optional_int,
            mlx_optional_int,
            *const std::ffi::c_char,
            mlx_stream,
        ) -> i32,
    ) -> Result<Array> {
        let stream = Stream::thread_local_or_default();
        let Quantization { group_size, bits, mode } = self.quantization;
        let some = |value| mlx_optional_int { value, has_value: true };
        let mut res = mlx_array::default();
        let status =
            run(&mut res, some(group_size), some(bits), mode.name().as_ptr(), stream.as_ptr());
        if status == 0 {
            // SAFETY: just filled, and nothing else owns it.
            return Ok(unsafe { Array::from_ptr(res) });
        }
        // mlx-rs does not expose MLX's error text.
        Err(Error::Array(format!(
            "{operation} rejects {bits}-bit {mode:?} weights {:?} with scales {:?}",
            self.weight.shape(),
            self.scales.shape()
        )))
    }
}

/// 8-bit floats (E4M3), stored in bytes, as `dtype`.
///
/// # Errors
/// [`Error::Array`] if `bytes` is not u8 or `dtype` is not a float.
pub fn from_fp8(bytes: &Array, dtype: Dtype) -> Result<Array> {
    let stream = Stream::thread_local_or_default();
    let mut res = mlx_array::default();
    // SAFETY: reads `bytes`, which lives as long as this function, and fills `res` with a new array
    // or leaves it empty.
    let status = unsafe {
        mlx_sys::mlx_from_fp8(
            &mut res,
            bytes.as_ptr(),
            dtype as mlx_sys::mlx_dtype,
            stream.as_ptr(),
        )
    };
    if status != 0 {
        return Err(Error::Array(format!("{:?} does not hold 8-bit floats", bytes.dtype())));
    }
    // SAFETY: just filled, and owned by nobody else.
    Ok(unsafe { Array::from_ptr(res) })
}

#[cfg(test)]
impl Packed {
    /// Packs a matrix.
    pub fn quantize(matrix: &Array, quantization: Quantization) -> Self {
        let Quantization { group_size, bits, mode } = quantization;
        let some = |value| mlx_optional_int { value, has_value: true };
        let stream = Stream::thread_local_or_default();
        // SAFETY: mlx_quantize fills the vector, which is read and then freed; each array taken from
        // it is a separate reference.
        let mut parts = unsafe {
            let mut vector = mlx_sys::mlx_vector_array_new();
            let status = mlx_sys::mlx_quantize(
                &mut vector,
                matrix.as_ptr(),
                some(group_size),
                some(bits),
                mode.name().as_ptr(),
                mlx_array::default(),
                stream.as_ptr(),
            );
            assert_eq!(status, 0);
            let parts: Vec<Array> = (0..mlx_sys::mlx_vector_array_size(vector))
                .map(|i| {
                    let mut part = mlx_array::default();
                    assert_eq!(mlx_sys::mlx_vector_array_get(&mut part, vector, i), 0);
                    Array::from_ptr(part)
                })
                .collect();
            mlx_sys::mlx_vector_array_free(vector);
            parts.into_iter()
        };
        Self {
            weight: parts.next().unwrap(),
            scales: parts.next().unwrap(),
            biases: parts.next(),
            quantization,
            dtype: matrix.dtype(),
            own_kernel: None,
        }
    }
}
