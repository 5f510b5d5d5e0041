//! Metal kernels. MLX compiles the text of each when it is first used on a Mac, for the types and constants of that use.
//!
//! On other platforms tests run the same texts on a CPU ([`emulate`]), through the same callers, as operations of MLX.
//! None of it was run on a Mac.

#![allow(
    unsafe_code,
    reason = "calls mlx-c for custom kernels, and defines operations of MLX through mlx-sys"
)]

mod affine;
mod append;
mod attention;
mod emulated;
mod experts;
mod gated_delta;
mod heads;
mod kernel;
mod packed_rows;
mod rewind;

pub use append::{append, appends};
pub use attention::{MOST_ROWS, attention, has_attention, is_worth, takes};
pub use emulated::is_emulated;
#[cfg(test)]
pub use emulated::{emulate, launches, take_fault};
pub use experts::experts;
pub use gated_delta::gated_delta;
pub use heads::{RotatedHeads, rotated_heads};
pub use packed_rows::packed_rows;
pub use rewind::rewind;

use std::cell::Cell;

use mlx_rs::Dtype;

use self::kernel::{Kernel, Launch};
use crate::error::Error;

/// Threads of a simdgroup.
const LANES: i32 = 32;

thread_local! {
    static ENABLED: Cell<bool> = const { Cell::new(false) };
    static GENERATION: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Makes layers on this thread use these kernels, or none of them. The default is none, and without Metal or an emulation it
/// is none. Returns whether they are used.
pub fn enable(on: bool) -> bool {
    ENABLED.set(on && (kernel::has_metal() || is_emulated()));
    GENERATION.set(if on && kernel::has_metal() { kernel::generation() } else { None });
    ENABLED.get()
}

/// The generation of the GPU: 13 is M1, 17 is M5. `None` under an emulation, and where MLX does not know it.
fn generation() -> Option<u32> {
    GENERATION.get()
}

/// Whether layers on this thread use these kernels.
pub fn is_enabled() -> bool {
    ENABLED.get()
}

/// Whether `dtype` is one of the types of activations that kernels have.
fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::Float32 | Dtype::Bfloat16 | Dtype::Float16)
}

/// An error of the kernel `name`.
fn failed(name: &str, problem: &str) -> Error {
    Error::Array(format!("Metal kernel {name}: {problem}"))
}

#[cfg(test)]
mod tests;
