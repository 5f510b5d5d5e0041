//! Products with packed matrices on the CPU, as an operation of MLX.
//!
//! The arithmetic is in the crate `steersman-cpu-kernels`; this file makes slices of MLX's arrays. A row's result does
//! not depend on the other rows of a pass.

#![allow(unsafe_code, reason = "defines an operation of MLX through mlx-sys")]

use std::borrow::Cow;

use half::{bf16, f16};
use mlx_rs::{Array, Dtype, Stream};
use mlx_sys::{View, mlx_array, mlx_dtype};
use steersman_cpu_kernels::{self as kernels, Floats, FloatsMut};

use crate::error::{Error, Result};
use crate::nn::{Mode, Packed};

/// Whether [`product`] can multiply with a matrix.
pub fn supports(matrix: &Packed) -> bool {
    let quantization = matrix.quantization;
    let number = |number: i32| usize::try_from(number).unwrap_or(0);
    quantization.mode == Mode::Affine
        && kernels::Packed::supports(number(quantization.bits), number(quantization.group_size))
        && matrix.weight.ndim() == 2
        && matrix.weight.dtype() == Dtype::Uint32
        && has_type(&matrix.scales)
        && matrix
            .biases
            .as_ref()
            .is_some_and(|biases| has_type(biases) && biases.shape() == matrix.scales.shape())
}

/// Sets the number of threads of each further product.
pub use kernels::set_threads;

fn has_type(array: &Array) -> bool {
    matches!(array.dtype(), Dtype::Float32 | Dtype::Bfloat16 | Dtype::Float16)
}

/// `x` [.., in] times the transposed `matrix` [out, in], [.., out] in `x`'s dtype. `None` if [`supports`] is false, or
/// `x` does not fit.
pub fn product(x: &Array, matrix: &Packed) -> Option<Result<Array>> {
    let quantization = matrix.quantization;
    let columns = matrix.scales.dim(-1) * quantization.group_size;
    let biases = matrix.biases.as_ref()?;
    if !supports(matrix) || !has_type(x) || x.shape().last() != Some(&columns) {
        return None;
    }
    let mut shape = x.shape().to_vec();
    *shape.last_mut()? = matrix.weight.dim(0);
    let inputs = [x.as_ptr(), matrix.weight.as_ptr(), matrix.scales.as_ptr(), biases.as_ptr()];
    let parameters = [quantization.bits, quantization.group_size, 0, 0];
    let stream = Stream::thread_local_or_default();
    let mut res = mlx_array::default();
    // SAFETY: the handles are those of living arrays; `multiply` computes a product from four such inputs.
    let status = unsafe {
        mlx_sys::cpu_operation(
            &mut res,
            &inputs,
            &shape,
            x.dtype() as mlx_dtype,
            multiply,
            parameters,
            stream.as_ptr(),
        )
    };
    if status != 0 {
        return Some(Err(Error::Array(format!("no product of {:?} and {shape:?}", x.shape()))));
    }
    // SAFETY: just filled, and nothing else owns it.
    Some(Ok(unsafe { Array::from_ptr(res) }))
}

/// Runs on the thread of MLX's stream.
///
/// # Safety
/// As [`mlx_sys::CpuFunction`]; the inputs are x, words, scales and biases as [`product`] passes them.
unsafe extern "C" fn multiply(
    inputs: *const View,
    count: usize,
    output: *const View,
    parameters: *const i32,
) {
    // SAFETY: MLX passes as many views as there are inputs, which are valid during this call. `product` has checked
    // types and shapes. The output is a new array that nothing else refers to.
    unsafe {
        let [x, words, scales, biases] = std::slice::from_raw_parts(inputs, count) else {
            unreachable!("made with four inputs");
        };
        let output = &*output;
        let length = |view: &View| shape(view).iter().product::<usize>();
        let number = |i: usize| usize::try_from(*parameters.add(i)).unwrap_or(0);
        let words = elements::<u32>(words);
        let (scales, biases) = (OwnedFloats::read(scales), OwnedFloats::read(biases));
        let x_floats = OwnedFloats::read(x);
        let matrix = kernels::Packed {
            words: &words,
            scales: scales.floats(),
            biases: biases.floats(),
            rows: shape(output).last().copied().unwrap_or(1),
            columns: shape(x).last().copied().unwrap_or(1),
            group_size: number(1),
            bits: number(0),
        };
        let length = length(output);
        let y = match output.dtype {
            BF16 => FloatsMut::Bf16(slice_mut(output, length)),
            F16 => FloatsMut::F16(slice_mut(output, length)),
            _ => FloatsMut::F32(slice_mut(output, length)),
        };
        kernels::product(x_floats.floats(), &matrix, y).expect("shapes were checked by `product`");
    }
}

const BF16: mlx_dtype = Dtype::Bfloat16 as mlx_dtype;
const F16: mlx_dtype = Dtype::Float16 as mlx_dtype;

/// The floats of an input, copied if they are not contiguous.
enum OwnedFloats<'a> {
    F32(Cow<'a, [f32]>),
    Bf16(Cow<'a, [bf16]>),
    F16(Cow<'a, [f16]>),
}

impl<'a> OwnedFloats<'a> {
    /// # Safety
    /// As [`elements`], with the type that `view.dtype` names.
    unsafe fn read(view: &'a View) -> Self {
        // SAFETY: promised by the caller.
        unsafe {
            match view.dtype {
                BF16 => Self::Bf16(elements(view)),
                F16 => Self::F16(elements(view)),
                _ => Self::F32(elements(view)),
            }
        }
    }

    fn floats(&self) -> Floats<'_> {
        match self {
            Self::F32(floats) => Floats::F32(floats),
            Self::Bf16(floats) => Floats::Bf16(floats),
            Self::F16(floats) => Floats::F16(floats),
        }
    }
}

/// Sizes of the dimensions.
///
/// # Safety
/// The view is valid.
unsafe fn shape(view: &View) -> Vec<usize> {
    // SAFETY: a valid view has that many sizes.
    let sizes = unsafe { list(view.shape, view.dimensions) };
    sizes.iter().map(|size| usize::try_from(*size).unwrap_or(0)).collect()
}

/// A slice that may be empty, for which C++ may pass a null pointer.
///
/// # Safety
/// `data` is valid for `length` elements that nothing writes.
unsafe fn list<'a, T>(data: *const T, length: usize) -> &'a [T] {
    if length == 0 {
        return &[];
    }
    // SAFETY: promised by the caller.
    unsafe { std::slice::from_raw_parts(data, length) }
}

/// The output's elements.
///
/// # Safety
/// The view is valid and has `length` contiguous elements of type `T` that nothing else refers to.
unsafe fn slice_mut<'a, T>(view: *const View, length: usize) -> &'a mut [T] {
    if length == 0 {
        return &mut [];
    }
    // SAFETY: promised by the caller.
    unsafe { std::slice::from_raw_parts_mut((*view).data.cast(), length) }
}

/// The elements in row-major order: MLX's own if they are contiguous, otherwise a copy.
///
/// # Safety
/// The view is valid, its elements have type `T`, and nothing writes them.
unsafe fn elements<T: Copy>(view: &View) -> Cow<'_, [T]> {
    let data = view.data.cast::<T>().cast_const();
    // SAFETY: a valid view has that many sizes and strides, and elements at all their sums.
    unsafe {
        let sizes = shape(view);
        let strides = list(view.strides, view.dimensions);
        let length = sizes.iter().product();
        let mut contiguous = 1;
        let is_contiguous = sizes.iter().zip(strides).rev().all(|(size, stride)| {
            let fits = *size == 1 || usize::try_from(*stride) == Ok(contiguous);
            contiguous *= size;
            fits
        });
        if is_contiguous || length == 0 {
            return Cow::Borrowed(list(data, length));
        }
        let mut offsets = vec![0i64];
        for (size, stride) in sizes.iter().zip(strides) {
            offsets = offsets
                .iter()
                .flat_map(|offset| (0..*size as i64).map(move |i| offset + i * stride))
                .collect();
        }
        Cow::Owned(offsets.iter().map(|offset| data.offset(*offset as isize).read()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::Quantization;
    use mlx_rs::transforms::eval;
    use mlx_rs::{Device, DeviceType, random};

    fn normal(seed: u64, shape: &[i32]) -> Array {
        random::normal::<f32>(shape, None, None, &random::key(seed).unwrap()).unwrap()
    }

    fn packed(rows: i32, columns: i32, bits: i32, group_size: i32) -> Packed {
        let quantization = Quantization { group_size, bits, mode: Mode::Affine };
        Packed::quantize(&normal(1, &[rows, columns]), quantization)
    }

    /// The kernels run on the CPU only.
    fn on_gpu() -> bool {
        matches!(Device::try_default().unwrap().get_type().unwrap(), DeviceType::Gpu)
    }

    fn largest(array: &Array) -> f32 {
        array.abs().unwrap().max(None).unwrap().as_dtype(Dtype::Float32).unwrap().item_exact()
    }

    #[test]
    fn products_equal_those_of_mlx() {
        if on_gpu() {
            return;
        }
        for (bits, group_size) in [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)] {
            let mut matrix = packed(70, 1152, bits, group_size);
            for (dtype, tolerance) in
                [(Dtype::Float32, 1e-5), (Dtype::Bfloat16, 1e-2), (Dtype::Float16, 2e-3)]
            {
                let x = normal(2, &[2, 3, 1152]).as_dtype(dtype).unwrap();
                let expected = matrix.matmul(&x.as_dtype(Dtype::Float32).unwrap()).unwrap();
                let y = product(&x, &matrix).unwrap().unwrap();
                assert_eq!((y.shape(), y.dtype()), (expected.shape(), dtype));
                let error = largest(&y.subtract(&expected).unwrap()) / largest(&expected);
                assert!(
                    error < tolerance,
                    "{bits} bits, groups of {group_size}, {dtype:?}: {error}"
                );
            }
            // Scales of 16 bits are widened without a loss.
            let short = |array: &Array| array.as_dtype(Dtype::Bfloat16).unwrap();
            matrix.biases = matrix.biases.as_ref().map(short);
            matrix.scales = short(&matrix.scales);
            let mut wide = matrix.clone();
            wide.scales = wide.scales.as_dtype(Dtype::Float32).unwrap();
            wide.biases = wide.biases.map(|biases| biases.as_dtype(Dtype::Float32).unwrap());
            let x = normal(3, &[1, 1152]);
            let difference = product(&x, &matrix).unwrap().unwrap();
            let difference = difference.subtract(product(&x, &wide).unwrap().unwrap()).unwrap();
            assert!(largest(&difference) == 0.0);
        }
    }

    /// Rows of a view that is transposed or broadcast are copied first.
    #[test]
    fn inputs_may_have_any_strides() {
        if on_gpu() {
            return;
        }
        let matrix = packed(40, 128, 4, 64);
        let x = normal(4, &[128, 3, 2]);
        let strided = x.transpose_axes(&[2, 1, 0]).unwrap();
        let straight = strided.add(Array::from_f32(0.0)).unwrap();
        eval([&straight]).unwrap();
        let row = mlx_rs::ops::broadcast_to(normal(5, &[128]), &[5, 128]).unwrap();
        let repeated = row.add(Array::from_f32(0.0)).unwrap();
        for (view, copy) in [(strided, straight), (row, repeated)] {
            let [view, copy] = [view, copy].map(|x| product(&x, &matrix).unwrap().unwrap());
            assert!(largest(&view.subtract(copy).unwrap()) == 0.0);
        }
    }

    #[test]
    fn other_formats_have_no_kernel() {
        assert!(supports(&packed(32, 128, 4, 64)));
        assert!(!supports(&packed(32, 128, 6, 64)));
        let mxfp4 = Quantization { group_size: 32, bits: 4, mode: Mode::Mxfp4 };
        assert!(!supports(&Packed::quantize(&normal(6, &[32, 128]), mxfp4)));
        let wrong = product(&normal(7, &[1, 64]), &packed(32, 128, 4, 64));
        assert!(wrong.is_none());
    }
}
