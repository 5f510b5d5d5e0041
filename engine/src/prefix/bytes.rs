//! Arrays to bytes and back, as the store on disk keeps them.

use mlx_rs::ops::{dequantize, quantize};
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use crate::error::{Error, Result};
use crate::store::Tensor;

/// Element types that are stored, by safetensors' names, with their size in bytes.
const DTYPES: &[(&str, Dtype, usize)] = &[
    ("F32", Dtype::Float32, 4),
    ("F16", Dtype::Float16, 2),
    ("BF16", Dtype::Bfloat16, 2),
    ("U32", Dtype::Uint32, 4),
];

/// Elements that share a scale, where rows are stored in fewer bits.
pub const GROUP: i32 = 32;

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// As they are.
    Exact,
    /// Rounded to 8 bits, in groups of 32 elements with a scale and a bias each.
    Bits8,
}

impl Rows {
    /// Tensors of `arrays`.
    ///
    /// # Errors
    /// [`Error::Array`] when MLX cannot compute or copy them.
    pub fn to_tensors<'a>(self, arrays: impl Iterator<Item = &'a Array>) -> Result<Vec<Tensor>> {
        let mut stored = Vec::new();
        for array in arrays {
            match self {
                Self::Exact => stored.push(array.clone()),
                Self::Bits8 => {
                    let (elements, scales, biases) = quantize(array, GROUP, 8)?;
                    stored.extend([elements, scales, biases]);
                }
            }
        }
        to_tensors(&stored)
    }

    /// What [`Rows::to_tensors`] was given, up to rounding.
    ///
    /// # Errors
    /// [`Error::Store`] when the tensors are damaged or not stored so.
    pub fn to_arrays(self, tensors: &[Tensor]) -> Result<Vec<Array>> {
        let arrays = to_arrays(tensors)?;
        if self == Self::Exact {
            return Ok(arrays);
        }
        let whole = |triple: &[Array]| match triple {
            [elements, scales, biases] => Ok(dequantize(elements, scales, biases, GROUP, 8)?),
            _ => Err(Error::Store("rows in 8 bits have three tensors each".into())),
        };
        arrays.chunks(3).map(whole).collect()
    }
}

/// Tensors of `arrays`, as they are.
///
/// # Errors
/// [`Error::Array`] when MLX cannot compute or copy them.
pub fn to_tensors(arrays: &[Array]) -> Result<Vec<Tensor>> {
    let bytes = |array: &Array| -> Result<Array> { Ok(array.contiguous()?.view::<u8>()?) };
    let bytes = arrays.iter().map(bytes).collect::<Result<Vec<_>>>()?;
    eval(&bytes)?;
    arrays.iter().zip(&bytes).map(|(array, bytes)| to_tensor(array, bytes)).collect()
}

fn to_tensor(array: &Array, bytes: &Array) -> Result<Tensor> {
    let Some((name, ..)) = DTYPES.iter().find(|(_, dtype, _)| *dtype == array.dtype()) else {
        return Err(Error::Array(format!("a cache holds {:?}", array.dtype())));
    };
    let bytes = bytes.try_as_slice::<u8>().map_err(|e| Error::Array(e.to_string()))?.to_vec();
    Ok(Tensor { dtype: (*name).into(), shape: array.shape().to_vec(), bytes })
}

/// Arrays of `tensors`.
///
/// # Errors
/// [`Error::Store`] when one is damaged.
pub fn to_arrays(tensors: &[Tensor]) -> Result<Vec<Array>> {
    tensors.iter().map(to_array).collect()
}

fn to_array(tensor: &Tensor) -> Result<Array> {
    let damaged = || Error::Store(format!("a tensor of {} {:?}", tensor.dtype, tensor.shape));
    let (_, dtype, size) =
        DTYPES.iter().find(|(name, ..)| *name == tensor.dtype).ok_or_else(damaged)?;
    let elements: usize = tensor.shape.iter().map(|&n| usize::try_from(n).unwrap_or(0)).product();
    if elements == 0 || elements * size != tensor.bytes.len() {
        return Err(damaged());
    }
    let length = i32::try_from(tensor.bytes.len()).map_err(|_| damaged())?;
    let bytes = Array::from_slice(&tensor.bytes, &[length]);
    Ok(bytes.view_dtype(*dtype)?.reshape(&tensor.shape)?)
}
