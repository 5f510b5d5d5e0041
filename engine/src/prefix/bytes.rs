//! Conversion between arrays and the tensors of the prefix store.

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

/// Elements that share a scale and a bias in [`KvFormat::Bits8`].
pub const GROUP: i32 = 32;

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvFormat {
    /// Unchanged.
    Exact,
    /// Rounded to 8 bits, in groups of [`GROUP`] elements with a scale and a bias each.
    Bits8,
}

impl KvFormat {
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

    /// Inverts [`KvFormat::to_tensors`], up to rounding.
    ///
    /// # Errors
    /// [`Error::SavedState`] if the tensors are invalid or have another format.
    pub fn to_arrays(self, tensors: &[Tensor]) -> Result<Vec<Array>> {
        let arrays = to_arrays(tensors)?;
        if self == Self::Exact {
            return Ok(arrays);
        }
        let whole = |triple: &[Array]| match triple {
            [elements, scales, biases] => Ok(dequantize(elements, scales, biases, GROUP, 8)?),
            _ => Err(Error::SavedState("KV in 8 bits needs three tensors an array".into())),
        };
        arrays.chunks(3).map(whole).collect()
    }
}

/// Copies arrays to tensors without a change of precision.
pub fn to_tensors(arrays: &[Array]) -> Result<Vec<Tensor>> {
    let bytes = |array: &Array| -> Result<Array> { Ok(array.contiguous()?.view::<u8>()?) };
    let bytes = arrays.iter().map(bytes).collect::<Result<Vec<_>>>()?;
    eval(&bytes)?;
    arrays.iter().zip(&bytes).map(|(array, bytes)| to_tensor(array, bytes)).collect()
}

fn to_tensor(array: &Array, bytes: &Array) -> Result<Tensor> {
    let Some((name, ..)) = DTYPES.iter().find(|(_, dtype, _)| *dtype == array.dtype()) else {
        return Err(Error::Array(format!("state of type {:?} cannot be saved", array.dtype())));
    };
    let bytes = bytes.try_as_slice::<u8>().map_err(Error::from)?.to_vec();
    Ok(Tensor { dtype: (*name).into(), shape: array.shape().to_vec(), bytes })
}

/// Inverts [`to_tensors`].
///
/// # Errors
/// [`Error::SavedState`] if a tensor is invalid.
pub fn to_arrays(tensors: &[Tensor]) -> Result<Vec<Array>> {
    tensors.iter().map(to_array).collect()
}

fn to_array(tensor: &Tensor) -> Result<Array> {
    let invalid = || {
        let Tensor { dtype, shape, bytes } = tensor;
        Error::SavedState(format!("invalid tensor: {dtype} {shape:?} in {} bytes", bytes.len()))
    };
    let (_, dtype, size) =
        DTYPES.iter().find(|(name, ..)| *name == tensor.dtype).ok_or_else(invalid)?;
    let elements: usize = tensor.shape.iter().map(|&n| usize::try_from(n).unwrap_or(0)).product();
    if elements == 0 || elements * size != tensor.bytes.len() {
        return Err(invalid());
    }
    let length = i32::try_from(tensor.bytes.len()).map_err(|_| invalid())?;
    let bytes = Array::from_slice(&tensor.bytes, &[length]);
    Ok(bytes.view_dtype(*dtype)?.reshape(&tensor.shape)?)
}
