//! CUDA kernels. Their text is compiled with NVRTC for each set of constants and types, kept on disk, and launched as
//! operations of MLX's graph. MLX compiles custom kernels itself, too: with headers that take 3 s each, one after another,
//! again in each process, and it makes the text anew for each launch.

#![allow(
    unsafe_code,
    reason = "calls mlx-c, mlx-sys and NVRTC for custom kernels, which mlx-rs lacks"
)]

mod attention;
mod compiler;
mod experts;
mod gated_delta;
mod heads;
mod kernel;
mod rewind;
mod tiled;

pub use attention::{attention, has_attention, takes};
pub use experts::experts;
pub use gated_delta::gated_delta;
pub use heads::{attend_heads, has_heads};
pub use kernel::{keep_in, prepare};
pub use rewind::rewind;
pub use tiled::Tiled;

use std::cell::Cell;
use std::ffi::CStr;
use std::fmt;

use self::kernel::{Kernel, Launch};

/// The environment variable that makes MLX launch kernels one by one (0, set at the start of the program) or as graphs
/// (1).
const GRAPHS: &str = "MLX_USE_CUDA_GRAPHS";

/// Streaming multiprocessors of an H100 and H200. A block stays on one.
const MULTIPROCESSORS: i32 = 132;

thread_local! {
    static ENABLED: Cell<Option<Capability>> = const { Cell::new(None) };
}

/// What a device can do, as CUDA numbers it: 9.0 is Hopper (H100, H200).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Capability {
    major: usize,
    minor: usize,
    /// Whether kernels may form clusters of blocks, which read each other's shared memory.
    clusters: bool,
}

impl Capability {
    /// The first with products of bfloat16 on tensor cores (Ampere).
    const LOWEST: Self = Self { major: 8, minor: 0, clusters: false };

    /// The capability of MLX's GPU, if it is a CUDA device that can run these kernels.
    pub fn of_device() -> Option<Self> {
        let mut available = false;
        // SAFETY: fills one bool.
        let status = unsafe { mlx_sys::mlx_cuda_is_available(&raw mut available) };
        if status != 0 || !available {
            return None;
        }
        let number = |key: &CStr| {
            let mut number = 0;
            // SAFETY: the device and its info are freed once, after they were read; the key ends with a zero byte.
            let status = unsafe {
                let device = mlx_sys::mlx_device_new_type(mlx_sys::mlx_device_type__MLX_GPU, 0);
                let mut info = mlx_sys::mlx_device_info_new();
                mlx_sys::mlx_device_info_get(&raw mut info, device);
                let status = mlx_sys::mlx_device_info_get_size(&raw mut number, info, key.as_ptr());
                mlx_sys::mlx_device_info_free(info);
                mlx_sys::mlx_device_free(device);
                status
            };
            (status == 0).then_some(number)
        };
        let [major, minor] =
            [number(c"compute_capability_major")?, number(c"compute_capability_minor")?];
        // MLX reuses a CUDA graph for another one of the same form, and the update leaves the size of clusters as it was:
        // kernels of another size then fail without an error (seen on an H200 with MLX 0.32.2).
        let has_graphs = std::env::var(GRAPHS).map_or(true, |value| value != "0");
        let capability = Self { major, minor, clusters: major >= 9 && !has_graphs };
        (capability >= Self::LOWEST).then_some(capability)
    }

    /// Whether a kernel may start before the one before it has ended.
    fn starts_early(self) -> bool {
        self.major >= 9
    }

    /// Most bytes of shared memory of a block ("Technical Specifications per Compute Capability" of the CUDA
    /// programming guide).
    fn shared_memory(self) -> i32 {
        match (self.major, self.minor) {
            (8, 0 | 7) => 163 << 10,
            (9..=11, _) => 227 << 10,
            _ => 99 << 10,
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Makes layers on this thread use these kernels on a device of `capability`, or none of them. The default is none, and
/// without a compiler it is none. Returns the device if they are used.
pub fn enable(capability: Option<Capability>) -> Option<Capability> {
    let opened =
        capability.map(|capability| kernel::open_compiler(capability).map(|()| capability));
    let enabled = opened.transpose().unwrap_or_else(|problem| {
        tracing::warn!(problem, "CUDA kernels are off: they cannot be compiled");
        None
    });
    ENABLED.set(enabled);
    enabled
}

/// The device, if layers on this thread use these kernels.
fn enabled() -> Option<Capability> {
    ENABLED.get()
}

/// Whether layers on this thread use these kernels.
pub fn is_enabled() -> bool {
    enabled().is_some()
}

#[cfg(test)]
mod tests;
