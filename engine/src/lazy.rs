//! Laziness of MLX: when an array is computed.
//!
//! MLX computes an array when it is evaluated. [`submit`] starts this while the thread does other work. An operation that MLX
//! queues costs some 10 us on two threads, as long as a small product takes. In a section of [`run_at_once`], an operation of
//! our own whose inputs are available runs during the call that makes it instead, and costs 2. After one of MLX's own, the
//! rest of a pass is queued as ever.
//!
//! Never decides what is computed: the results are the same bits either way.

#![allow(unsafe_code, reason = "asks MLX about arrays through mlx-sys")]

use std::cell::Cell;

use mlx_rs::transforms::{async_eval, eval};
use mlx_rs::{Array, Stream};
use mlx_sys::mlx_array;

use crate::error::{Error, Result};

thread_local! {
    /// Whether operations of our own run during the call that makes them.
    static AT_ONCE: Cell<bool> = const { Cell::new(false) };
    /// Whether arrays have been submitted that nothing has waited for.
    static SUBMITTED: Cell<bool> = const { Cell::new(false) };
}

/// Computes `arrays` while this thread does other work. All of the engine that calls [`async_eval`] does so here.
#[expect(clippy::disallowed_methods, reason = "this is the function to call instead")]
pub fn submit<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
    SUBMITTED.set(true);
    Ok(async_eval(arrays)?)
}

/// Returns true if `array` has been evaluated.
pub fn is_available(array: &Array) -> bool {
    // SAFETY: the handle is that of a living array.
    unsafe { mlx_sys::is_available(array.as_ptr()) }
}

/// Operations that MLX runs to evaluate an array.
pub fn pending_operations(array: &Array) -> usize {
    // SAFETY: the handle is that of a living array.
    unsafe { mlx_sys::operations(array.as_ptr()) }
}

/// `x` with another shape of as many elements. If `x` is available, this makes no operation of MLX, which would end a section
/// of [`run_at_once`].
pub fn reshape(x: &Array, shape: &[i32]) -> Result<Array> {
    let stream = Stream::thread_local_or_default();
    let mut res = mlx_array::default();
    // SAFETY: the handles are those of a living array and stream.
    let status = unsafe { mlx_sys::reshape(&mut res, x.as_ptr(), shape, stream.as_ptr()) };
    if status != 0 {
        return Err(Error::Array(format!("an array of {:?} has no shape {shape:?}", x.shape())));
    }
    // SAFETY: just filled, and nothing else owns it.
    Ok(unsafe { Array::from_ptr(res) })
}

/// A section in which operations of our own on this thread run at once. It ends when this is dropped.
#[derive(Debug)]
pub struct AtOnce(());

impl Drop for AtOnce {
    fn drop(&mut self) {
        AT_ONCE.set(false);
    }
}

/// Begins a section in which operations of our own run at once. Waits for `first`, which the section reads, and for everything
/// that was [submitted](submit) before: an operation writes to the buffers of caches, which submitted work may read.
pub fn run_at_once(first: &Array) -> Result<AtOnce> {
    if !is_available(first) {
        // The stream runs one operation after the other.
        eval([first])?;
    } else if SUBMITTED.get() {
        let stream = Stream::thread_local_or_default();
        // SAFETY: the handle is that of a living stream.
        if unsafe { mlx_sys::mlx_synchronize(stream.as_ptr()) } != 0 {
            return Err(Error::Array("MLX did not finish what was submitted".into()));
        }
    }
    SUBMITTED.set(false);
    AT_ONCE.set(true);
    Ok(AtOnce(()))
}

/// Returns true in a section of [`run_at_once`] on this thread.
pub fn runs_at_once() -> bool {
    AT_ONCE.get()
}
