//! The tensors of a GGUF file as MLX arrays, under the names of a checkpoint of MLX's converter.
//!
//! `steersman_gguf` reads and converts them; its documentation states what is exact. Where matrices are dequantized in
//! any case, they are from the file's own blocks, so that every type is exact in f32.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use mlx_rs::Array;
use mlx_rs::ops::concatenate;
use steersman_gguf::quants::GROUP;
use steersman_gguf::{Data, Floats, Form, Model, Tensor};

use super::storage::Storage;
use crate::error::{ConfigError, Error, Result};
use crate::loading;
use crate::nn::{Mode, Quantization};

/// Arrays by name, and the quantization of layers by name without `.weight`.
pub(super) type Arrays = (HashMap<String, Array>, HashMap<String, Quantization>);

/// Reads all tensors of the file at `path`, and of the parts beside it.
///
/// # Errors
/// [`Error::Config`] names the file, and what it has that is not supported.
pub(super) fn arrays(path: &Path, storage: Storage) -> Result<Arrays> {
    let problem = |error: steersman_gguf::Error| problem(path, &error);
    let model = Model::open(path).map_err(problem)?;
    let (mut arrays, mut quantizations) = (HashMap::new(), HashMap::new());
    for (i, tensor) in model.tensors().iter().enumerate() {
        loading::advance(i, model.tensors().len());
        let data = model.read(tensor, form(tensor, storage)).map_err(problem)?;
        let layer = tensor.layer();
        match data {
            Data::Floats(numbers) => {
                arrays.insert(tensor.name.clone(), floats(numbers, &tensor.shape)?);
            }
            Data::Packed { bits, codes, scales, biases } => {
                arrays.insert(
                    tensor.name.clone(),
                    array(&codes, &tensor.packed_shape(bits), Array::from_slice)?,
                );
                for (part, numbers) in [("scales", scales), ("biases", biases)] {
                    let numbers = floats(numbers, &tensor.group_shape())?;
                    arrays.insert(format!("{layer}.{part}"), numbers);
                }
                let quantization = Quantization {
                    group_size: GROUP as i32,
                    bits: bits as i32,
                    mode: Mode::Affine,
                };
                quantizations.insert(layer.to_string(), quantization);
            }
        }
    }
    Ok((arrays, quantizations))
}

/// The file at `path`, or all parts of the model of which it is the first.
///
/// # Errors
/// As [`arrays`].
pub(super) fn files(path: &Path) -> Result<Vec<PathBuf>> {
    let model = Model::open(path).map_err(|error| problem(path, &error))?;
    Ok(model.files().to_vec())
}

fn problem(path: &Path, error: &steersman_gguf::Error) -> Error {
    Error::Config(ConfigError::Model { path: path.into(), problem: error.to_string() })
}

/// The form that [`Storage`] asks for.
fn form(tensor: &Tensor, storage: Storage) -> Form {
    match storage {
        Storage::Packed => Form::Packed,
        // The kernels take no stacks, and 4 or 8 bits.
        Storage::OwnKernels(_) if tensor.is_stack() => Form::Floats,
        Storage::OwnKernels(_) => Form::PackedEvenly,
        Storage::Dequantized => Form::Floats,
    }
}

fn floats(numbers: Floats, shape: &[usize]) -> Result<Array> {
    match numbers {
        Floats::F32(numbers) => array(&numbers, shape, Array::from_slice),
        Floats::F16(numbers) => array(&numbers, shape, Array::from_slice),
        Floats::Bf16(numbers) => array(&numbers, shape, Array::from_slice),
    }
}

/// An array of any size: MLX's constructor `new` takes up to `i32::MAX` elements.
fn array<T>(numbers: &[T], shape: &[usize], new: fn(&[T], &[i32]) -> Array) -> Result<Array> {
    let size =
        |n: usize| i32::try_from(n).map_err(|_| Error::Array(format!("{shape:?} is too large")));
    let mut dimensions = shape.iter().map(|n| size(*n)).collect::<Result<Vec<i32>>>()?;
    if size(numbers.len()).is_ok() || shape.len() < 2 {
        return Ok(new(numbers, &dimensions));
    }
    let row = shape[1..].iter().product::<usize>().max(1);
    let rows = (i32::MAX as usize / row).max(1);
    let mut parts = Vec::new();
    for part in numbers.chunks(rows * row) {
        dimensions[0] = size(part.len() / row)?;
        parts.push(new(part, &dimensions));
    }
    Ok(concatenate(&parts, 0)?)
}
