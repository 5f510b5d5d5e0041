//! CUDA kernels. MLX compiles their text with NVRTC at the first use, for each set of constants and types, and
//! launches them as operations of its graph.

#![allow(unsafe_code, reason = "calls mlx-c for custom kernels, which mlx-rs lacks")]

mod attention;
mod gated_delta;
mod product;

pub use attention::{AttentionSpan, ROWS, SPANS, attention};
pub use gated_delta::gated_delta;
pub use product::product;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char};
use std::fmt;

use mlx_rs::{Array, Dtype, Stream};
use mlx_sys::{mlx_array, mlx_fast_cuda_kernel};

use crate::error::{Error, Result};

thread_local! {
    static ENABLED: Cell<Option<Capability>> = const { Cell::new(None) };
    /// MLX's kernels by name. They live as long as the thread that runs the model.
    static KERNELS: RefCell<HashMap<String, mlx_fast_cuda_kernel>> = RefCell::default();
}

/// What a device can do, as CUDA numbers it: 9.0 is Hopper (H100, H200).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Capability {
    major: usize,
    minor: usize,
}

impl Capability {
    /// The first with products of bfloat16 on tensor cores (Ampere).
    const LOWEST: Self = Self { major: 8, minor: 0 };

    /// That of MLX's GPU, if it is a CUDA device that can run these kernels.
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
        let capability = Self {
            major: number(c"compute_capability_major")?,
            minor: number(c"compute_capability_minor")?,
        };
        (capability >= Self::LOWEST).then_some(capability)
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

/// Makes layers on this thread use these kernels on a device of `capability`, or none of them. The default is none.
pub fn enable(capability: Option<Capability>) {
    ENABLED.set(capability);
}

/// The device, if layers on this thread use these kernels.
fn enabled() -> Option<Capability> {
    ENABLED.get()
}

/// Whether layers on this thread use these kernels.
pub fn is_enabled() -> bool {
    enabled().is_some()
}

/// A kernel's text, and the names of its parameters.
struct Kernel {
    name: &'static str,
    inputs: &'static [&'static str],
    outputs: &'static [&'static str],
    /// Text before the kernel.
    header: &'static str,
    /// The body. MLX generates the signature: a pointer for each input and output, and `NAME_shape` and
    /// `NAME_strides` after an input if the body has these names.
    source: &'static str,
    /// Whether MLX copies inputs that are not contiguous in row-major order.
    contiguous: bool,
}

/// One use of a kernel.
struct Launch<'a> {
    /// One for each name.
    inputs: &'a [&'a Array],
    /// Shape and type of each output.
    outputs: &'a [(&'a [i32], Dtype)],
    /// Integers known when the kernel is compiled. Each set of them compiles it again.
    constants: &'a [(&'a str, i32)],
    /// The type `T` of the body.
    dtype: Dtype,
    /// Blocks along x, y and z.
    blocks: [i32; 3],
    /// Threads of a block, along x.
    threads: i32,
    /// Bytes of dynamic shared memory.
    shared: i32,
}

impl Kernel {
    fn run(&self, launch: &Launch<'_>) -> Result<Vec<Array>> {
        // MLX finds compiled kernels by name, constants and template types alone.
        let name = format!("steersman_{}_{}", self.name, launch.shared);
        let name = launch.inputs.iter().fold(name, |name, input| {
            let dtype = input.dtype() as u32;
            format!("{name}_{dtype}")
        });
        let kernel = KERNELS.with_borrow_mut(|kernels| {
            let entry = kernels.entry(name);
            *entry.or_insert_with_key(|name| self.register(name, launch.shared))
        });
        let pointers: Vec<mlx_array> = launch.inputs.iter().map(|input| input.as_ptr()).collect();
        let text = |text: &str| CString::new(text).expect("names have no zero bytes");
        let stream = Stream::thread_local_or_default();
        // SAFETY: mlx-c copies what it gets: handles of live arrays, shapes with their lengths, and strings
        // that end with a zero byte. Config and vectors are freed once, below; each array taken from the
        // outputs is a separate reference.
        unsafe {
            let config = mlx_sys::mlx_fast_cuda_kernel_config_new();
            for (shape, dtype) in launch.outputs {
                mlx_sys::mlx_fast_cuda_kernel_config_add_output_arg(
                    config,
                    shape.as_ptr(),
                    shape.len(),
                    *dtype as mlx_sys::mlx_dtype,
                );
            }
            for (name, value) in launch.constants {
                let name = text(name);
                mlx_sys::mlx_fast_cuda_kernel_config_add_template_arg_int(
                    config,
                    name.as_ptr(),
                    *value,
                );
            }
            mlx_sys::mlx_fast_cuda_kernel_config_add_template_arg_dtype(
                config,
                c"T".as_ptr(),
                launch.dtype as mlx_sys::mlx_dtype,
            );
            let [x, y, z] = launch.blocks;
            // MLX counts threads, not blocks.
            mlx_sys::mlx_fast_cuda_kernel_config_set_grid(config, x * launch.threads, y, z);
            mlx_sys::mlx_fast_cuda_kernel_config_set_thread_group(config, launch.threads, 1, 1);
            let inputs = mlx_sys::mlx_vector_array_new_data(pointers.as_ptr(), pointers.len());
            let mut outputs = mlx_sys::mlx_vector_array_new();
            let status = mlx_sys::mlx_fast_cuda_kernel_apply(
                &raw mut outputs,
                kernel,
                inputs,
                config,
                stream.as_ptr(),
            );
            let arrays = (0..mlx_sys::mlx_vector_array_size(outputs)).map(|i| {
                let mut array = mlx_array::default();
                mlx_sys::mlx_vector_array_get(&raw mut array, outputs, i);
                Array::from_ptr(array)
            });
            let arrays: Vec<Array> = arrays.collect();
            mlx_sys::mlx_vector_array_free(outputs);
            mlx_sys::mlx_vector_array_free(inputs);
            mlx_sys::mlx_fast_cuda_kernel_config_free(config);
            if status == 0 && arrays.len() == launch.outputs.len() {
                return Ok(arrays);
            }
        }
        // mlx-rs does not expose MLX's error text.
        Err(Error::Array(format!("MLX rejects the kernel {}", self.name)))
    }

    /// MLX's kernel for this one.
    fn register(&self, name: &str, shared: i32) -> mlx_fast_cuda_kernel {
        let text = |text: &str| CString::new(text).expect("kernels have no zero bytes");
        let [name, header, source] = [name, self.header, self.source].map(text);
        // SAFETY: mlx-c copies all strings, which end with a zero byte; the vectors are freed once.
        unsafe {
            let strings = |names: &[&str]| {
                let names: Vec<CString> = names.iter().map(|name| text(name)).collect();
                let mut pointers: Vec<*const c_char> =
                    names.iter().map(|name| name.as_ptr()).collect();
                mlx_sys::mlx_vector_string_new_data(pointers.as_mut_ptr(), pointers.len())
            };
            let (inputs, outputs) = (strings(self.inputs), strings(self.outputs));
            let kernel = mlx_sys::mlx_fast_cuda_kernel_new(
                name.as_ptr(),
                inputs,
                outputs,
                source.as_ptr(),
                header.as_ptr(),
                self.contiguous,
                shared,
            );
            mlx_sys::mlx_vector_string_free(inputs);
            mlx_sys::mlx_vector_string_free(outputs);
            kernel
        }
    }
}

#[cfg(test)]
mod tests;
