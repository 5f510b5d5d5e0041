//! Conversion between arrays and the tensors of the prefix store.

use mlx_rs::ops::{concatenate, dequantize, quantize, zeros};
use mlx_rs::{Array, Dtype};

use crate::error::{Error, Result, catch_panic};
use crate::lazy::submit;
use crate::store::{Key, Layout, PartKind, QueuedPart, Tensor};

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
    /// [`to_part`] of the arrays as they are stored.
    pub fn to_part<'a>(
        self,
        place: (Key, PartKind, usize),
        arrays: impl Iterator<Item = &'a Array>,
    ) -> Result<QueuedPart> {
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
        to_part(place, &stored)
    }

    /// Inverts [`KvFormat::to_part`], up to rounding.
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

/// A part of these arrays without a change of precision. They are copied on the device when they have
/// been computed; the store's writer, which reads the copy, waits for it.
///
/// # Why
/// The engine's thread waits for neither the device nor the copy to the host. On CUDA, MLX moves a buffer
/// that the host reads to memory that both share, so it must not be that of a running cache. One copy of
/// all arrays is read at once.
pub fn to_part(place: (Key, PartKind, usize), arrays: &[Array]) -> Result<QueuedPart> {
    let layouts = arrays.iter().map(layout).collect::<Result<Vec<_>>>()?;
    let size = layouts.iter().map(|layout| layout.bytes).sum::<usize>();
    if i32::try_from(size).is_err() {
        return Err(Error::Array(format!("state of {size} bytes is too large to be saved")));
    }
    if size == 0 {
        // KV of a model whose layers are all windows.
        return Ok(QueuedPart::later(place, layouts, || Ok(Vec::new())));
    }
    let bytes = joined_bytes(arrays, layouts.iter().all(|layout| layout.bytes % 8 == 0))?;
    submit([&bytes])?;
    // Only one thread reads an array at a time.
    Ok(QueuedPart::later(place, layouts, move || {
        let read = || Ok(bytes.try_as_slice::<u8>().map_err(Error::from)?.to_vec());
        catch_panic("being saved", read).map_err(|error| error.to_string())
    }))
}

fn layout(array: &Array) -> Result<Layout> {
    let Some((name, ..)) = DTYPES.iter().find(|(_, dtype, _)| *dtype == array.dtype()) else {
        return Err(Error::Array(format!("state of type {:?} cannot be saved", array.dtype())));
    };
    Ok(Layout { dtype: (*name).into(), shape: array.shape().to_vec(), bytes: array.nbytes() })
}

/// The elements of all arrays, one after the other, in a buffer of their own: u8 [bytes].
fn joined_bytes(arrays: &[Array], in_words: bool) -> Result<Array> {
    let flat = |array: &Array| -> Result<Array> {
        let flat = array.flatten(None, None)?;
        // MLX copies element by element.
        Ok(if in_words { flat.view::<u64>()? } else { flat.view::<u8>()? })
    };
    let flat = arrays.iter().map(flat).collect::<Result<Vec<_>>>()?;
    // The concatenation of one array is that array.
    let nothing = if in_words { zeros::<u64>(&[0])? } else { zeros::<u8>(&[0])? };
    let parts: Vec<&Array> = flat.iter().chain([&nothing]).collect();
    Ok(concatenate(&parts, 0)?.view::<u8>()?)
}

/// The arrays of a part that [`to_part`] made.
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

#[cfg(test)]
mod tests {
    use super::*;
    use mlx_rs::random;

    /// A model whose layers are all windows has KV parts without tensors: they were dropped as damaged, and
    /// its saved state was never found again.
    #[test]
    fn arrays_are_restored_as_they_were_saved() {
        let normal = |shape: &[i32], dtype: Dtype| {
            let array = random::normal::<f32>(shape, None, None, None).unwrap();
            array.as_dtype(dtype).unwrap()
        };
        let whole = normal(&[3, 2, 40, 8], Dtype::Float32);
        let cases = [
            vec![],
            vec![normal(&[1, 1, 1, 1], Dtype::Bfloat16)],
            vec![normal(&[1, 3, 5], Dtype::Float32), normal(&[1, 7], Dtype::Float16)],
            // Views that are not contiguous.
            whole.split_at_indices(&[7, 20], 2).unwrap(),
        ];
        for arrays in cases {
            let part = to_part(([7; 32], PartKind::Kv, 1), &arrays).unwrap();
            let restored = to_arrays(part.tensors().unwrap()).unwrap();
            assert_eq!(restored.len(), arrays.len());
            for (restored, array) in restored.iter().zip(&arrays) {
                assert_eq!(restored.shape(), array.shape());
                assert_eq!(restored.dtype(), array.dtype());
                assert!(restored.eq_values(array).unwrap());
            }
        }
    }
}
