//! MLX's C interface in Rust, for mlx-rs, on every platform that Steersman supports.
//!
//! Replaces the published `mlx-sys` through `[patch.crates-io]`. The build script takes MLX 0.32.2
//! from its PyPI wheel, compiles mlx-c 0.7.0 against it, and places the shared libraries in
//! `<target>/<profile>/lib`, beside the binaries. It needs cargo, `python3 -m pip` and a C++20
//! compiler. Fetched files stay in `<target>/mlx`, so later builds need no network.
//!
//! A package that links a program sets `build = "../engine/mlx-sys/rpath.rs"` in its Cargo.toml. The
//! program then finds its libraries wherever both are moved: `cp -r target/debug/steersman
//! target/debug/lib /elsewhere/`, or `bin/steersman` beside `lib/`.
//!
//! Environment variables:
//!
//! | Variable | Effect |
//! |---|---|
//! | `MLX_ROOT` | use this MLX 0.32.2 (a folder with `include/` and `lib/`) instead of a wheel |
//! | `LIBCLANG_PATH` | folder of libclang, which reads headers; default: the system's or a wheel's |
//! | `CXX`, `CXXFLAGS` | the C++ compiler and its flags, as for every user of the `cc` crate |
//! | `MACOSX_DEPLOYMENT_TARGET` | lowest macOS to run on; default: that of the building Mac |
//!
//! Feature `cuda` uses MLX's CUDA 13 build for Linux. NVIDIA's libraries (cuDNN 9, cuBLAS, cuFFT,
//! NVRTC, NCCL) are not part of it. They are found in the system's folders, on `LD_LIBRARY_PATH`, or
//! in `lib/nvidia` after `python3 -m pip install --target lib` of the dependencies of `mlx-cuda-13`.
//! A program linked with the CPU build also runs with the CUDA build, if `LD_LIBRARY_PATH` contains
//! the folder of that libmlx.so.

#![allow(unsafe_code, reason = "this crate is the interface to C")]

use std::ffi::{CStr, c_char, c_int, c_void};

#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    clippy::all,
    clippy::pedantic,
    rustdoc::all,
    reason = "generated from mlx-c's headers, which document it"
)]
mod bindings {
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}

pub use bindings::*;

/// Version of MLX.
pub const VERSION: &str = env!("MLX_VERSION");

unsafe extern "C" {
    fn steersman_blas() -> *const c_char;
    fn steersman_blas_threads() -> c_int;
    fn steersman_set_blas_threads(threads: c_int);
    fn steersman_cpu_operation(
        res: *mut mlx_array,
        results: usize,
        inputs: *const mlx_array,
        count: usize,
        shapes: *const i32,
        dimensions: *const usize,
        dtype: mlx_dtype,
        function: CpuFunction,
        parameters: *const i32,
        parameter_count: usize,
        at_once: bool,
        stream: mlx_stream,
    ) -> c_int;
    fn steersman_is_available(array: mlx_array) -> bool;
    fn steersman_operations(array: mlx_array) -> usize;
    fn steersman_reshape(
        res: *mut mlx_array,
        input: mlx_array,
        shape: *const i32,
        dimensions: usize,
        stream: mlx_stream,
    ) -> c_int;
    fn steersman_cuda_launches() -> bool;
    fn steersman_cuda_kernel(
        res: *mut mlx_array,
        results: usize,
        inputs: *const mlx_array,
        count: usize,
        launch: *const RawLaunch,
        stream: mlx_stream,
    ) -> c_int;
}

/// An array while an operation of ours runs (shim/cpu_operation.h).
#[repr(C)]
#[derive(Debug)]
pub struct View {
    /// The first element.
    pub data: *mut c_void,
    /// [`Self::dimensions`] sizes.
    pub shape: *const i32,
    /// As many strides, in elements.
    pub strides: *const i64,
    /// Number of dimensions.
    pub dimensions: usize,
    /// Type of the elements.
    pub dtype: mlx_dtype,
}

/// Computes an operation of ours. The `count` views are the inputs, to read, and after them the outputs, to fill, which
/// are contiguous in row-major order. Gets the parameters that the operation was made with. Runs on a thread of MLX or
/// on that of the caller, while the views are valid.
pub type CpuFunction =
    unsafe extern "C" fn(views: *const View, count: usize, parameters: *const i32);

/// What [`cpu_operation`] computes.
#[derive(Debug)]
pub struct CpuOperation<'a> {
    /// Sizes of each output.
    pub shapes: &'a [&'a [i32]],
    /// Type of the outputs.
    pub dtype: mlx_dtype,
    /// Fills the outputs.
    pub function: CpuFunction,
    /// Passed to the function.
    pub parameters: &'a [i32],
    /// Whether the function runs during the call that makes the operation if the inputs are available, and not when the
    /// outputs are evaluated.
    pub at_once: bool,
}

/// Sets `res` to the outputs of an operation on the CPU. Returns 0, or another number on an error, as mlx-c's operations do.
///
/// # Safety
/// The inputs and `res`, as many as there are shapes, are valid handles. The function computes what it promises from such
/// inputs.
pub unsafe fn cpu_operation(
    res: &mut [mlx_array],
    inputs: &[mlx_array],
    operation: &CpuOperation<'_>,
    stream: mlx_stream,
) -> c_int {
    let &CpuOperation { shapes, dtype, function, parameters, at_once } = operation;
    let dimensions: Vec<usize> = shapes.iter().map(|shape| shape.len()).collect();
    let sizes = shapes.concat();
    // SAFETY: the slices are valid during the call, which copies what it keeps; the rest is promised by the caller.
    unsafe {
        steersman_cpu_operation(
            res.as_mut_ptr(),
            res.len(),
            inputs.as_ptr(),
            inputs.len(),
            sizes.as_ptr(),
            dimensions.as_ptr(),
            dtype,
            function,
            parameters.as_ptr(),
            parameters.len(),
            at_once,
            stream,
        )
    }
}

/// Whether the data of an array are there: computing it is over.
///
/// # Safety
/// The handle is valid.
pub unsafe fn is_available(array: mlx_array) -> bool {
    // SAFETY: promised by the caller.
    unsafe { steersman_is_available(array) }
}

/// Number of operations that MLX runs to evaluate an array.
///
/// # Safety
/// The handle is valid.
pub unsafe fn operations(array: mlx_array) -> usize {
    // SAFETY: promised by the caller.
    unsafe { steersman_operations(array) }
}

/// Sets `res` to `input` with another shape of as many elements: without an operation if its data are available and
/// contiguous. Returns a status as [`cpu_operation`].
///
/// # Safety
/// The handles are valid.
pub unsafe fn reshape(
    res: &mut mlx_array,
    input: mlx_array,
    shape: &[i32],
    stream: mlx_stream,
) -> c_int {
    // SAFETY: promised by the caller; the slice is valid during the call.
    unsafe { steersman_reshape(res, input, shape.as_ptr(), shape.len(), stream) }
}

/// One launch of a compiled CUDA kernel. Its parameters are a pointer for each input, one for each result, and the
/// numbers. MLX copies inputs that are not contiguous in row-major order.
#[derive(Debug, Clone, Copy)]
pub struct CudaLaunch<'a> {
    /// Name of the kernel in the code. The process has one kernel of this name.
    pub name: &'a CStr,
    /// The code (cubin). Empty if the results are not evaluated.
    pub code: &'static [u8],
    /// Whether it waits for the kernel before it, and may start before that has ended.
    pub starts_early: bool,
    /// Shape and type of each result.
    pub results: &'a [(&'a [i32], mlx_dtype)],
    /// Integers after the pointers.
    pub numbers: &'a [i32],
    /// Blocks along x, y and z.
    pub blocks: [i32; 3],
    /// Threads of a block, along x.
    pub threads: i32,
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: i32,
}

/// `steersman_cuda_launch` (shim/cuda_kernel.h).
#[repr(C)]
struct RawLaunch {
    name: *const c_char,
    code: *const c_char,
    starts_early: bool,
    shapes: *const i32,
    dimensions: *const usize,
    types: *const mlx_dtype,
    numbers: *const i32,
    number_count: usize,
    blocks: [i32; 3],
    threads: i32,
    shared_bytes: i32,
}

/// Whether MLX launches kernels through this program (shim/cuda_driver.h), which [`cuda_kernel`] needs. The program
/// has to export the driver's functions (rpath.rs).
pub fn launches_cuda_kernels() -> bool {
    // SAFETY: has no arguments, and compares two addresses.
    unsafe { steersman_cuda_launches() }
}

/// Makes arrays that a compiled CUDA kernel computes when they are evaluated. Returns 0 and sets `res`, or returns
/// another number, as mlx-c's operations do.
///
/// # Safety
/// The inputs and `res`, as many as there are results, are valid handles. The code is for the device of the stream, has
/// a kernel of that name with these parameters, and the kernel stays within the arrays.
pub unsafe fn cuda_kernel(
    res: &mut [mlx_array],
    inputs: &[mlx_array],
    launch: &CudaLaunch<'_>,
    stream: mlx_stream,
) -> c_int {
    debug_assert_eq!(res.len(), launch.results.len());
    let dimensions: Vec<usize> = launch.results.iter().map(|(shape, _)| shape.len()).collect();
    let shapes: Vec<i32> =
        launch.results.iter().flat_map(|(shape, _)| shape.iter().copied()).collect();
    let types: Vec<mlx_dtype> = launch.results.iter().map(|&(_, dtype)| dtype).collect();
    let raw = RawLaunch {
        name: launch.name.as_ptr(),
        code: launch.code.as_ptr().cast(),
        starts_early: launch.starts_early,
        shapes: shapes.as_ptr(),
        dimensions: dimensions.as_ptr(),
        types: types.as_ptr(),
        numbers: launch.numbers.as_ptr(),
        number_count: launch.numbers.len(),
        blocks: launch.blocks,
        threads: launch.threads,
        shared_bytes: launch.shared_bytes,
    };
    // SAFETY: the slices are valid during the call, which copies what it keeps; the rest is promised by the caller.
    unsafe {
        steersman_cuda_kernel(
            res.as_mut_ptr(),
            res.len(),
            inputs.as_ptr(),
            inputs.len(),
            &raw const raw,
            stream,
        )
    }
}

/// Build configuration of the OpenBLAS that MLX's CPU operations use ("OpenBLAS 0.3.34 ... Haswell
/// MAX_THREADS=64"). `None` if MLX uses its own BLAS: Accelerate on macOS, or that of `MLX_ROOT`.
pub fn blas() -> Option<String> {
    // SAFETY: has no arguments, and returns null or a string that lives as long as the program
    // (shim/runtime.h, shim/blas.h).
    let config = unsafe { steersman_blas() };
    if config.is_null() {
        return None;
    }
    // SAFETY: not null, ends with a zero byte, never changed or freed.
    let config = unsafe { CStr::from_ptr(config) };
    Some(config.to_string_lossy().into_owned())
}

/// The version of MLX's library that the process has loaded.
pub fn version() -> String {
    // SAFETY: mlx_version fills the string, which is copied and then freed.
    unsafe {
        let mut version = mlx_string_new();
        let status = mlx_version(&raw mut version);
        let text = match status {
            0 => CStr::from_ptr(mlx_string_data(version)).to_string_lossy().into_owned(),
            _ => String::new(),
        };
        mlx_string_free(version);
        text
    }
}

/// The name of the first GPU, if MLX knows it.
pub fn gpu_name() -> Option<String> {
    gpu_text(c"device_name")
}

/// A text that MLX reports of the first GPU. `None` without a GPU, and if its system does not report `key`.
pub fn gpu_text(key: &CStr) -> Option<String> {
    with_gpu_info(|info| {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the info is alive, and the key ends with a zero byte.
        let status = unsafe { mlx_device_info_get_string(&raw mut text, info, key.as_ptr()) };
        if status != 0 || text.is_null() {
            return None;
        }
        // SAFETY: not null, ends with a zero byte, and belongs to the info.
        Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    })
}

/// A number that MLX reports of the first GPU. `None` without a GPU, and if its system does not report `key`.
pub fn gpu_number(key: &CStr) -> Option<u64> {
    with_gpu_info(|info| {
        let mut number = 0;
        // SAFETY: the info is alive, and the key ends with a zero byte.
        let status = unsafe { mlx_device_info_get_size(&raw mut number, info, key.as_ptr()) };
        (status == 0).then_some(number as u64)
    })
}

/// Calls `read` with what MLX reports of the first GPU.
fn with_gpu_info<T>(read: impl FnOnce(mlx_device_info) -> Option<T>) -> Option<T> {
    // SAFETY: the device and its info are freed once, after they were read; `read` cannot keep the handle's data.
    unsafe {
        let device = mlx_device_new_type(mlx_device_type__MLX_GPU, 0);
        let mut info = mlx_device_info_new();
        let status = mlx_device_info_get(&raw mut info, device);
        let value = if status == 0 { read(info) } else { None };
        mlx_device_info_free(info);
        mlx_device_free(device);
        value
    }
}

/// The number of threads that OpenBLAS uses for a matrix product; 0 without [`blas`].
pub fn blas_threads() -> usize {
    // SAFETY: has no arguments, and reads one number.
    usize::try_from(unsafe { steersman_blas_threads() }).unwrap_or(0)
}

/// Sets the number of threads of each further matrix product of OpenBLAS. Without [`blas`] nothing
/// changes.
pub fn set_blas_threads(threads: usize) {
    let threads = c_int::try_from(threads.max(1)).unwrap_or(c_int::MAX);
    // SAFETY: OpenBLAS limits the number to its own maximum; a product that is running keeps its
    // threads.
    unsafe { steersman_set_blas_threads(threads) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// mlx-c has no 16-bit floats on x86-64; ours must have the same bits on every platform.
    #[test]
    fn sixteen_bit_floats_read_back_as_their_bits() {
        // 1.5 in each format.
        check(mlx_dtype__MLX_FLOAT16, 0x3e00, |array| unsafe {
            let mut item = float16_t(0);
            assert_eq!(mlx_array_item_float16(&mut item, array), 0);
            [item.0, (*mlx_array_data_float16(array)).0]
        });
        check(mlx_dtype__MLX_BFLOAT16, 0x3fc0, |array| unsafe {
            let mut item: bfloat16_t = 0;
            assert_eq!(mlx_array_item_bfloat16(&mut item, array), 0);
            [item, *mlx_array_data_bfloat16(array)]
        });

        fn check(dtype: mlx_dtype, bits: u16, read: impl Fn(mlx_array) -> [u16; 2]) {
            let shape = [1];
            // SAFETY: MLX copies one element of two bytes from `bits`; `read` gets a live array of
            // `dtype`, and nothing refers to it after it is freed.
            unsafe {
                let data = (&raw const bits).cast::<c_void>();
                let array = mlx_array_new_data(data, shape.as_ptr(), 1, dtype);
                assert_eq!(mlx_array_eval(array), 0);
                assert_eq!(read(array), [bits, bits]);
                mlx_array_free(array);
            }
        }
    }

    #[test]
    fn library_version_matches_mlx_c() {
        assert_eq!(version(), VERSION);
    }

    #[test]
    fn matrix_products_on_linux_use_openblas() {
        let expected = cfg!(target_os = "linux") && option_env!("MLX_ROOT").is_none();
        assert_eq!(blas().is_some_and(|config| config.starts_with("OpenBLAS")), expected);
    }
}
