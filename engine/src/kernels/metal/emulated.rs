//! Kernels on a CPU, as operations of MLX, for tests: an emulation compiles the text that a Mac would compile.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use mlx_rs::{Array, Dtype, Stream};
use mlx_sys::{CpuOperation, View, mlx_array, mlx_dtype};

use super::failed;
use crate::error::{Error, Result};

/// Runs a kernel: reads the inputs, writes to the buffers that it writes in place, fills the outputs, with a grid of threads along x, y and z, and threadgroups of some of
/// them. Fails with a sentence that names the fault.
pub type EmulatedLaunch = Box<
    dyn Fn(&[&[u8]], &mut [&mut [u8]], [u32; 3], [u32; 3]) -> std::result::Result<(), String>
        + Send
        + Sync,
>;

/// Compiles the body of a kernel, with a header before it, for inputs and outputs of these types and names.
pub type Compile =
    fn(&str, &str, &[[&str; 2]], &[[&str; 2]]) -> std::result::Result<EmulatedLaunch, String>;

thread_local! {
    static COMPILE: Cell<Option<Compile>> = const { Cell::new(None) };
    /// How often this thread has launched each kernel.
    static LAUNCHES: RefCell<HashMap<&'static str, usize>> = RefCell::default();
}

/// A kernel under the emulation.
struct EmulatedKernel {
    name: &'static str,
    launch: EmulatedLaunch,
    inputs: usize,
}

/// All kernels of the process. Operations run on threads of MLX, which find them by number.
static KERNELS: RwLock<Vec<Arc<EmulatedKernel>>> = RwLock::new(Vec::new());

/// Faults of launches, with the kernel's name.
static FAULTS: Mutex<Vec<(&str, String)>> = Mutex::new(Vec::new());

/// Makes kernels of this thread run on the CPU, compiled by `compile`. For tests: the emulation is slow.
#[cfg(test)]
pub fn emulate(compile: Compile) {
    COMPILE.set(Some(compile));
}

/// Whether kernels of this thread run on the CPU.
pub fn is_emulated() -> bool {
    COMPILE.get().is_some()
}

/// The first fault of the kernel `name` that was not taken yet. The outputs of such a launch are not numbers.
#[cfg(test)]
pub fn take_fault(name: &str) -> Option<String> {
    let mut faults = FAULTS.lock().unwrap_or_else(PoisonError::into_inner);
    let first = faults.iter().position(|(kernel, _)| *kernel == name)?;
    Some(faults.remove(first).1)
}

/// How often this thread has launched the kernel `name`.
#[cfg(test)]
pub fn launches(name: &str) -> usize {
    LAUNCHES.with_borrow(|launches| launches.get(name).copied().unwrap_or_default())
}

/// The number of a new kernel. An input's type has `constant` before it if it is in that address space. Inputs that are written
/// in place are before the outputs, with `in_place` before the type.
pub fn compile(
    name: &'static str,
    header: &str,
    body: &str,
    inputs: &[[&str; 2]],
    outputs: &[[&str; 2]],
) -> Result<i32> {
    let compile = COMPILE.get().ok_or_else(|| failed(name, "there is no emulation"))?;
    let launch =
        compile(header, body, inputs, outputs).map_err(|problem| failed(name, &problem))?;
    let mut kernels = KERNELS.write().unwrap_or_else(PoisonError::into_inner);
    kernels.push(Arc::new(EmulatedKernel { name, launch, inputs: inputs.len() }));
    Ok(i32::try_from(kernels.len() - 1).expect("a test has fewer kernels than 2^31"))
}

/// Arrays of these shapes and types that the kernel of this number computes from `inputs`, of which those that it writes in
/// place are the last.
pub fn run(
    number: i32,
    inputs: &[&Array],
    outputs: &[(&[i32], Dtype)],
    groups: [i32; 3],
    threads: i32,
) -> Result<Vec<Array>> {
    let name = {
        let kernels = KERNELS.read().unwrap_or_else(PoisonError::into_inner);
        kernels[usize::try_from(number).unwrap_or_default()].name
    };
    LAUNCHES.with_borrow_mut(|launches| *launches.entry(name).or_default() += 1);
    let handles: Vec<mlx_array> = inputs.iter().map(|input| input.as_ptr()).collect();
    // An operation on the CPU has results of one type. Those with wider elements have more of them, and are viewed.
    let narrow = outputs.iter().map(|&(_, dtype)| dtype).min_by_key(|dtype| width(*dtype));
    let narrow = narrow.expect("a kernel has outputs");
    let shapes: Vec<Vec<i32>> = outputs
        .iter()
        .map(|&(shape, dtype)| {
            let mut shape = shape.to_vec();
            let factor = (width(dtype) / width(narrow)) as i32;
            *shape.last_mut().expect("an output has dimensions") *= factor;
            shape
        })
        .collect();
    let shapes: Vec<&[i32]> = shapes.iter().map(|shape| &**shape).collect();
    let operation = CpuOperation {
        shapes: &shapes,
        dtype: narrow as mlx_dtype,
        function: run_kernel,
        parameters: &[number, groups[0], groups[1], groups[2], threads],
        at_once: false,
    };
    let stream = Stream::thread_local_or_default();
    let mut res = vec![mlx_array::default(); outputs.len()];
    // SAFETY: the handles are those of living arrays, and `run_kernel` computes such outputs from them.
    let status = unsafe { mlx_sys::cpu_operation(&mut res, &handles, &operation, stream.as_ptr()) };
    if status != 0 {
        return Err(Error::Array(format!("MLX made no operation with results of {shapes:?}")));
    }
    // SAFETY: just filled, and nothing else owns them.
    let arrays = res.into_iter().map(|array| unsafe { Array::from_ptr(array) });
    let viewed = arrays.zip(outputs).map(|(array, &(_, dtype))| {
        if dtype == narrow { Ok(array) } else { Ok(array.view_dtype(dtype)?) }
    });
    viewed.collect()
}

/// Bytes of an element.
fn width(dtype: Dtype) -> usize {
    match dtype {
        Dtype::Uint8 | Dtype::Int8 | Dtype::Bool => 1,
        Dtype::Float16 | Dtype::Bfloat16 | Dtype::Int16 | Dtype::Uint16 => 2,
        Dtype::Float32 | Dtype::Int32 | Dtype::Uint32 => 4,
        _ => 8,
    }
}

/// # Safety
/// As [`mlx_sys::CpuFunction`], with the arrays and parameters of [`run`].
unsafe extern "C" fn run_kernel(views: *const View, count: usize, parameters: *const i32) {
    // SAFETY: promised by the caller. The outputs are new arrays that nothing else refers to, and nothing else reads or writes
    // the inputs that are written in place: the stream runs one operation after the other.
    unsafe {
        let parameters = std::slice::from_raw_parts(parameters, 5);
        let [number, x, y, z, threads] =
            [0, 1, 2, 3, 4].map(|i| u32::try_from(parameters[i]).unwrap_or(0));
        let kernel = {
            let kernels = KERNELS.read().unwrap_or_else(PoisonError::into_inner);
            kernels[number as usize].clone()
        };
        let (inputs, outputs) = std::slice::from_raw_parts(views, count).split_at(kernel.inputs);
        let inputs: Vec<Vec<u8>> = inputs.iter().map(|view| bytes_of(view)).collect();
        let inputs: Vec<&[u8]> = inputs.iter().map(|bytes| &**bytes).collect();
        let mut outputs: Vec<&mut [u8]> = outputs
            .iter()
            .map(|view| {
                debug_assert!(is_contiguous(view), "an output, or written in place");
                let length = sizes(view).iter().product::<usize>() * view_width(view);
                std::slice::from_raw_parts_mut(view.data.cast(), length)
            })
            .collect();
        let grid = [x * threads, y, z];
        if let Err(problem) = (kernel.launch)(&inputs, &mut outputs, grid, [threads, 1, 1]) {
            eprintln!("Metal kernel {} under the emulation: {problem}", kernel.name);
            outputs.iter_mut().for_each(|output| output.fill(0xff));
            let mut faults = FAULTS.lock().unwrap_or_else(PoisonError::into_inner);
            faults.push((kernel.name, problem));
        }
    }
}

/// # Safety
/// The view is valid.
unsafe fn sizes(view: &View) -> Vec<usize> {
    if view.dimensions == 0 {
        return Vec::new();
    }
    // SAFETY: a valid view has that many sizes.
    let sizes = unsafe { std::slice::from_raw_parts(view.shape, view.dimensions) };
    sizes.iter().map(|size| usize::try_from(*size).unwrap_or(0)).collect()
}

/// Bytes of an element of a view.
fn view_width(view: &View) -> usize {
    const TYPES: [Dtype; 6] = [
        Dtype::Float32,
        Dtype::Bfloat16,
        Dtype::Float16,
        Dtype::Int32,
        Dtype::Uint32,
        Dtype::Uint8,
    ];
    let dtype = TYPES.into_iter().find(|dtype| *dtype as mlx_dtype == view.dtype);
    width(dtype.expect("kernels have parameters of these types"))
}

/// Whether the elements lie in row-major order.
///
/// # Safety
/// The view is valid.
unsafe fn is_contiguous(view: &View) -> bool {
    let mut stride = 1;
    // SAFETY: a valid view has a stride for each of its sizes.
    unsafe { sizes(view) }.iter().enumerate().rev().all(|(i, size)| {
        let fits = *size == 1 || unsafe { *view.strides.add(i) } == stride;
        stride *= *size as i64;
        fits
    })
}

/// The elements in row-major order, as MLX copies them before a kernel of a Mac.
///
/// # Safety
/// The view is valid, and nothing writes its elements.
unsafe fn bytes_of(view: &View) -> Vec<u8> {
    let width = view_width(view);
    // SAFETY: a valid view has that many sizes and strides, and elements at all their sums.
    unsafe {
        let sizes = sizes(view);
        let data = view.data.cast::<u8>().cast_const();
        let length = sizes.iter().product::<usize>() * width;
        if is_contiguous(view) && length > 0 {
            return std::slice::from_raw_parts(data, length).to_vec();
        }
        let mut offsets = vec![0i64];
        for (i, size) in sizes.iter().enumerate() {
            let stride = *view.strides.add(i);
            let own = |offset: i64| (0..*size as i64).map(move |i| offset + i * stride);
            offsets = offsets.into_iter().flat_map(own).collect();
        }
        let element = |offset: i64| {
            std::slice::from_raw_parts(data.offset(offset as isize * width as isize), width)
        };
        offsets.into_iter().flat_map(element).copied().collect()
    }
}
