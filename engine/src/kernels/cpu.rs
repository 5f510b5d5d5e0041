//! Kernels on the CPU, as operations of MLX.
//!
//! The arithmetic is in the crate `steersman-cpu-kernels`; this module makes slices of MLX's arrays.

#![allow(unsafe_code, reason = "defines operations of MLX through mlx-sys")]

mod heads;
mod layers;
mod product;

pub use heads::{has_heads, heads};
pub use layers::{gated_delta, rms_norm, swiglu};
pub use product::{products, supports, supports_dense, swiglu_product};
pub use steersman_cpu_kernels::Activations;
/// Sets the number of threads of each further kernel.
pub use steersman_cpu_kernels::set_threads;
/// Backs memory of weights with huge pages.
pub use steersman_cpu_kernels::use_huge_pages;

use std::borrow::Cow;
use std::cell::Cell;
use std::ops::Range;

use mlx_rs::{Array, Dtype, Stream};
use mlx_sys::{CpuFunction, View, mlx_array, mlx_dtype};

use crate::error::{Error, Result};

thread_local! {
    static ENABLED: Cell<bool> = const { Cell::new(false) };
}

/// Makes layers on this thread use these kernels, or none of them. The default is none. Products do not depend on it:
/// [`Packed::own_kernel`](crate::nn::Packed::own_kernel) and [`Dense::own_kernel`](crate::nn::Dense::own_kernel) turn them
/// on for each matrix.
pub fn enable(on: bool) {
    ENABLED.set(on);
}

/// Where the elements of an array are in memory. The array is evaluated, and not a view.
pub fn addresses(array: &Array) -> Range<usize> {
    // SAFETY: the handle is that of a living array. The function does not look at its dtype.
    let start = unsafe { mlx_sys::mlx_array_data_uint8(array.as_ptr()) }.addr();
    start..start + array.nbytes()
}

/// Arrays of `shapes` and `dtype` that `function` computes from `inputs`.
///
/// # Safety
/// `function` computes as many outputs from such inputs.
unsafe fn run<const N: usize>(
    inputs: &[&Array],
    shapes: [&[i32]; N],
    dtype: Dtype,
    function: CpuFunction,
    parameters: &[i32],
) -> Result<[Array; N]> {
    let inputs: Vec<mlx_array> = inputs.iter().map(|input| input.as_ptr()).collect();
    let stream = Stream::thread_local_or_default();
    let mut res = [mlx_array::default(); N];
    // SAFETY: the handles are those of living arrays; the rest is promised by the caller.
    let status = unsafe {
        mlx_sys::cpu_operation(
            &mut res,
            &inputs,
            &shapes,
            dtype as mlx_dtype,
            function,
            parameters,
            stream.as_ptr(),
        )
    };
    if status != 0 {
        return Err(Error::Array(format!("MLX made no operation with results of {shapes:?}")));
    }
    // SAFETY: just filled, and nothing else owns them.
    Ok(res.map(|array| unsafe { Array::from_ptr(array) }))
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
