//! Kernels on the CPU, as operations of MLX.
//!
//! The arithmetic is in the crate `steersman-cpu-kernels`; this module makes slices of MLX's arrays. In a section of
//! [`run_at_once`], an operation whose inputs are available runs during the call that makes it.

#![allow(unsafe_code, reason = "defines operations of MLX through mlx-sys")]

mod heads;
mod layers;
mod product;

pub use heads::{has_heads, heads};
pub use layers::{beside, gated_delta, pick_rows, replay, rms_norm, rows_of, swiglu};
pub use product::{Matrix, embed, products, supports, supports_dense, swiglu_product};
pub use steersman_cpu_kernels::Activations;
/// Sets the number of threads of each further kernel.
pub use steersman_cpu_kernels::set_threads;
/// Backs memory of weights with huge pages.
pub use steersman_cpu_kernels::use_huge_pages;

use std::borrow::Cow;
use std::cell::Cell;
use std::ops::Range;

use mlx_rs::{Array, Dtype, Stream};
use mlx_sys::{CpuFunction, CpuOperation, View, mlx_array, mlx_dtype};

use crate::error::{Error, Result};
use crate::lazy::{self, AtOnce, is_available};

thread_local! {
    /// Whether layers on this thread use these kernels.
    static ENABLED: Cell<bool> = const { Cell::new(false) };
}

/// Makes layers on this thread use these kernels, or none of them. The default is none. Products do not depend on it:
/// the layer of each matrix chooses between [`products`] and MLX's.
pub fn enable(on: bool) {
    ENABLED.set(on);
}

/// Returns true if layers on this thread use these kernels.
pub fn is_enabled() -> bool {
    ENABLED.get()
}

/// Begins a section in which operations run at once ([`lazy::run_at_once`]), if the kernels are enabled.
pub fn run_at_once(first: &Array) -> Result<Option<AtOnce>> {
    if ENABLED.get() { lazy::run_at_once(first).map(Some) } else { Ok(None) }
}

/// [`run_at_once`] if `first` is available.
pub fn run_at_once_after(first: &Array) -> Result<Option<AtOnce>> {
    if is_available(first) { run_at_once(first) } else { Ok(None) }
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
    let (dtype, at_once) = (dtype as mlx_dtype, lazy::runs_at_once());
    let operation = CpuOperation { shapes: &shapes, dtype, function, parameters, at_once };
    let stream = Stream::thread_local_or_default();
    let mut res = [mlx_array::default(); N];
    // SAFETY: the handles are those of living arrays; the rest is promised by the caller.
    let status = unsafe { mlx_sys::cpu_operation(&mut res, &inputs, &operation, stream.as_ptr()) };
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

#[cfg(test)]
mod tests {
    use mlx_rs::transforms::eval;
    use mlx_rs::{Device, random};

    use super::*;

    fn normal(seed: u64, shape: &[i32]) -> Array {
        random::normal::<f32>(shape, None, None, &random::key(seed).unwrap()).unwrap()
    }

    fn gated(x: &Array) -> Array {
        swiglu(x, x).expect("the kernels are enabled").unwrap()
    }

    #[test]
    fn operations_on_available_arrays_run_at_once() {
        Device::set_default(&Device::cpu());
        assert!(run_at_once(&normal(1, &[2, 64])).unwrap().is_none());
        enable(true);
        let x = normal(1, &[2, 64]);
        let queued = gated(&x);
        assert!(!is_available(&queued));
        let section = run_at_once(&x).unwrap().expect("the kernels are enabled");
        let at_once = gated(&x);
        assert!(is_available(&at_once));
        // Rows that are picked are there as well, and have the same numbers.
        let picked = pick_rows(&[&x, &at_once], &[[1, 1], [0, 0]]).unwrap().unwrap();
        assert!(is_available(&picked));
        let numbers = |array: &Array| array.as_slice::<f32>().to_vec();
        assert_eq!(numbers(&picked), [&numbers(&at_once)[64..], &numbers(&x)[..64]].concat());
        assert!(pick_rows(&[&x], &[[0, 2]]).is_none() && pick_rows(&[&x], &[[1, 0]]).is_none());
        // What follows an operation of MLX waits for it.
        assert!(!is_available(&gated(&x.abs().unwrap())));
        drop(section);
        assert!(!is_available(&gated(&x)));
        assert!(at_once.eq_values(&queued).unwrap());
        // As further operands, and as elements of another shape.
        let doubled = at_once.add(&queued).unwrap();
        assert!(doubled.eq_values(queued.multiply(Array::from_f32(2.0)).unwrap()).unwrap());
        for (x, is_there) in [(&at_once, true), (&normal(2, &[2, 64]), false)] {
            let view = lazy::reshape(x, &[8, 16]).unwrap();
            assert_eq!((view.shape(), is_available(&view)), (&[8, 16][..], is_there));
            assert!(view.eq_values(x.reshape(&[8, 16]).unwrap()).unwrap());
        }
        assert!(lazy::reshape(&at_once, &[8, 15]).is_err());
        enable(false);
    }

    #[test]
    fn a_section_waits_for_submitted_work() {
        Device::set_default(&Device::cpu());
        enable(true);
        let (x, large) = (normal(1, &[2, 64]), normal(2, &[512, 512]));
        eval([&x, &large]).unwrap();
        let product = (0..8).fold(large.clone(), |x, _| x.matmul(&large).unwrap());
        lazy::submit([&product]).unwrap();
        let _section = run_at_once(&x).unwrap();
        assert!(is_available(&product));
        enable(false);
    }
}
