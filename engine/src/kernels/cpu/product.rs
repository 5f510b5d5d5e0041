//! Products with packed and dense matrices. A row's result does not depend on the other rows of a pass.

use std::borrow::Cow;

use half::{bf16, f16};
use mlx_rs::{Array, Dtype};
use mlx_sys::{View, mlx_dtype};
use steersman_cpu_kernels::{self as kernels, Activations, Floats, FloatsMut};

use super::{elements, run, shape, slice_mut};
use crate::error::Result;
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

fn has_type(array: &Array) -> bool {
    matches!(array.dtype(), Dtype::Float32 | Dtype::Bfloat16 | Dtype::Float16)
}

/// `x` [.., in] times the transposed `matrix` [out, in], [.., out] in `x`'s dtype. `None` if [`supports`] is false, or
/// `x` does not fit.
pub fn product(activations: Activations, x: &Array, matrix: &Packed) -> Option<Result<Array>> {
    let quantization = matrix.quantization;
    let columns = matrix.scales.dim(-1) * quantization.group_size;
    let biases = matrix.biases.as_ref()?;
    if !supports(matrix) || !has_type(x) || x.shape().last() != Some(&columns) {
        return None;
    }
    let mut shape = x.shape().to_vec();
    *shape.last_mut()? = matrix.weight.dim(0);
    let inputs = [x, &matrix.weight, &matrix.scales, biases];
    let parameters =
        [quantization.bits, quantization.group_size, i32::from(activations == Activations::Int8)];
    // SAFETY: `multiply` computes one output from four such inputs.
    Some(unsafe { run(&inputs, [&shape], x.dtype(), multiply, &parameters) }.map(|[y]| y))
}

/// Whether [`dense_product`] can multiply with a matrix.
pub fn supports_dense(matrix: &Array) -> bool {
    matrix.ndim() == 2
        && has_type(matrix)
        && usize::try_from(matrix.dim(1)).is_ok_and(kernels::Dense::supports)
}

/// `x` [.., in] times the transposed `matrix` [out, in] of floats, [.., out] in `x`'s dtype. `None` if
/// [`supports_dense`] is false, or `x` does not fit.
pub fn dense_product(x: &Array, matrix: &Array) -> Option<Result<Array>> {
    let mut shape = x.shape().to_vec();
    if !supports_dense(matrix) || !has_type(x) || shape.last() != Some(&matrix.dim(1)) {
        return None;
    }
    *shape.last_mut()? = matrix.dim(0);
    // SAFETY: `multiply_dense` computes one output from two such inputs.
    let product = unsafe { run(&[x, matrix], [&shape], x.dtype(), multiply_dense, &[]) };
    Some(product.map(|[y]| y))
}

/// Runs on the thread of MLX's stream.
///
/// # Safety
/// As [`mlx_sys::CpuFunction`]; the inputs are x and the matrix as [`dense_product`] passes them, and there is one output.
unsafe extern "C" fn multiply_dense(views: *const View, count: usize, _parameters: *const i32) {
    // SAFETY: as `multiply`.
    unsafe {
        let [x, elements, output] = std::slice::from_raw_parts(views, count) else {
            unreachable!("made with two inputs and one output");
        };
        let elements = OwnedFloats::read(elements);
        let matrix = kernels::Dense {
            elements: elements.floats(),
            rows: shape(output).last().copied().unwrap_or(1),
            columns: shape(x).last().copied().unwrap_or(1),
        };
        write_product(Activations::Exact, x, matrix.into(), output);
    }
}

/// Multiplies the floats of `x` with `matrix`.
///
/// # Safety
/// The views are valid, have the shapes of the product, and nothing else refers to the output.
unsafe fn write_product(
    activations: Activations,
    x: &View,
    matrix: kernels::Matrix<'_>,
    output: &View,
) {
    // SAFETY: promised by the caller.
    unsafe {
        let x = OwnedFloats::read(x);
        let length = shape(output).iter().product();
        let y = match output.dtype {
            BF16 => FloatsMut::Bf16(slice_mut(output, length)),
            F16 => FloatsMut::F16(slice_mut(output, length)),
            _ => FloatsMut::F32(slice_mut(output, length)),
        };
        kernels::product(activations, x.floats(), matrix, y)
            .expect("shapes were checked when the operation was made");
    }
}

/// Runs on the thread of MLX's stream.
///
/// # Safety
/// As [`mlx_sys::CpuFunction`]; the inputs are x, words, scales and biases as [`product`] passes them, and there is one
/// output.
unsafe extern "C" fn multiply(views: *const View, count: usize, parameters: *const i32) {
    // SAFETY: MLX passes as many views as there are inputs and outputs, which are valid during this call. `product` has
    // checked types and shapes. The output is a new array that nothing else refers to.
    unsafe {
        let [x, words, scales, biases, output] = std::slice::from_raw_parts(views, count) else {
            unreachable!("made with four inputs and one output");
        };
        let number = |i: usize| usize::try_from(*parameters.add(i)).unwrap_or(0);
        let words = elements::<u32>(words);
        let (scales, biases) = (OwnedFloats::read(scales), OwnedFloats::read(biases));
        let matrix = kernels::Packed {
            words: &words,
            scales: scales.floats(),
            biases: biases.floats(),
            rows: shape(output).last().copied().unwrap_or(1),
            columns: shape(x).last().copied().unwrap_or(1),
            group_size: number(1),
            bits: number(0),
        };
        let activations =
            if *parameters.add(2) == 0 { Activations::Exact } else { Activations::Int8 };
        write_product(activations, x, matrix.into(), output);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::Quantization;
    use mlx_rs::transforms::eval;
    use mlx_rs::{Device, DeviceType, random};

    fn exact(x: &Array, matrix: &Packed) -> Option<Result<Array>> {
        product(Activations::Exact, x, matrix)
    }

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
                let y = exact(&x, &matrix).unwrap().unwrap();
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
            let difference = exact(&x, &matrix).unwrap().unwrap();
            let difference = difference.subtract(exact(&x, &wide).unwrap().unwrap()).unwrap();
            assert!(largest(&difference) == 0.0);
        }
    }

    /// Rounding to 8 bits moves a number by up to 1/254 of its group's largest, evenly spread.
    #[test]
    fn products_in_8_bits_are_near_exact_ones() {
        if on_gpu() {
            return;
        }
        for (bits, group_size) in [(4, 32), (4, 64), (8, 128)] {
            let matrix = packed(70, 1152, bits, group_size);
            let x = normal(2, &[2, 3, 1152]);
            let y = product(Activations::Int8, &x, &matrix).unwrap().unwrap();
            let expected = exact(&x, &matrix).unwrap().unwrap();
            let error = largest(&y.subtract(&expected).unwrap()) / largest(&expected);
            assert!((1e-5..1e-2).contains(&error), "{bits} bits, groups of {group_size}: {error}");
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
            let [view, copy] = [view, copy].map(|x| exact(&x, &matrix).unwrap().unwrap());
            assert!(largest(&view.subtract(copy).unwrap()) == 0.0);
        }
    }

    #[test]
    fn dense_products_equal_those_of_mlx() {
        if on_gpu() {
            return;
        }
        for stored in [Dtype::Float32, Dtype::Bfloat16, Dtype::Float16] {
            let matrix = normal(1, &[70, 1152]).as_dtype(stored).unwrap();
            let wide = matrix.as_dtype(Dtype::Float32).unwrap();
            for (dtype, tolerance) in
                [(Dtype::Float32, 1e-5), (Dtype::Bfloat16, 1e-2), (Dtype::Float16, 2e-3)]
            {
                let x = normal(2, &[2, 3, 1152]).as_dtype(dtype).unwrap();
                let expected = x.as_dtype(Dtype::Float32).unwrap().matmul(wide.t()).unwrap();
                let y = dense_product(&x, &matrix).unwrap().unwrap();
                assert_eq!((y.shape(), y.dtype()), (expected.shape(), dtype));
                let error = largest(&y.subtract(&expected).unwrap()) / largest(&expected);
                assert!(error < tolerance, "{stored:?}, {dtype:?}: {error}");
            }
        }
        let x = normal(3, &[1, 1152]);
        assert!(dense_product(&x, &normal(4, &[8, 1150])).is_none());
        assert!(dense_product(&x, &normal(4, &[8, 1120])).is_none());
        assert!(!supports_dense(&normal(4, &[2, 8, 1152])));
    }

    #[test]
    fn other_formats_have_no_kernel() {
        assert!(supports(&packed(32, 128, 4, 64)));
        assert!(!supports(&packed(32, 128, 6, 64)));
        let mxfp4 = Quantization { group_size: 32, bits: 4, mode: Mode::Mxfp4 };
        assert!(!supports(&Packed::quantize(&normal(6, &[32, 128]), mxfp4)));
        let wrong = exact(&normal(7, &[1, 64]), &packed(32, 128, 4, 64));
        assert!(wrong.is_none());
    }
}
