//! Kernels and their variants: a kernel's text is compiled for each set of types and constants.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fmt::Write;
use std::rc::Rc;

use mlx_rs::{Array, Dtype, Stream};
use mlx_sys::{mlx_array, mlx_dtype};
use sha2::{Digest, Sha256};

use super::{affine, emulated, failed};
use crate::error::Result;

/// Text before each kernel on a Mac. An array in threadgroup memory is a class under the emulation.
const HEADER: &str = "#define SHARED(T, name, n) threadgroup T name[n]\n";

thread_local! {
    static VARIANTS: RefCell<HashMap<Key, Rc<Variant>>> = RefCell::default();
}

/// A kernel's text: the body of a function. MLX and the emulation make its signature from the names of inputs and outputs,
/// and from the attributes of threads that the text names.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    pub name: &'static str,
    /// Casts floats explicitly, declares threadgroup memory with `SHARED`, and names no address space of an input that may
    /// have fewer than 8 elements: MLX passes those as constants.
    pub source: &'static str,
}

/// One use of a kernel.
pub struct Launch<'a> {
    /// Definitions before the kernel. One of [`affine::HEADER`] stands for its text: a header is hashed in each launch.
    pub header: String,
    /// Names and arrays. Those that are not contiguous in row-major order are copied. With the outputs, at most
    /// [`BUFFERS`].
    pub inputs: &'a [(&'a str, &'a Array)],
    /// Inputs before the others, which the kernel writes: contiguous buffers. The text casts them, as MLX declares them as
    /// constants. MLX does not know of the writes: a later kernel that reads or writes the buffers must have one of the
    /// outputs among its inputs.
    pub in_place: &'a [(&'a str, &'a Array)],
    /// Name, shape and type of each output.
    pub outputs: &'a [(&'a str, &'a [i32], Dtype)],
    /// Integers known when the kernel is compiled. Each set of them is another variant.
    pub constants: &'a [(&'a str, i32)],
    /// The type `T` of the body.
    pub dtype: Dtype,
    /// Threadgroups along x, y and z.
    pub groups: [i32; 3],
    /// Threads of a threadgroup, along x: a multiple of 32.
    pub threads: i32,
}

/// Most inputs and outputs of a kernel (Metal's feature set tables, "Maximum number of entries in the buffer argument
/// table").
pub const BUFFERS: usize = 31;

/// Names of buffers in kernels that have any number of them.
pub const NAMES: [&str; 28] = [
    "kv0", "kv1", "kv2", "kv3", "kv4", "kv5", "kv6", "kv7", "kv8", "kv9", "kv10", "kv11", "kv12",
    "kv13", "kv14", "kv15", "kv16", "kv17", "kv18", "kv19", "kv20", "kv21", "kv22", "kv23", "kv24",
    "kv25", "kv26", "kv27",
];

/// What distinguishes a variant.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Key {
    kernel: &'static str,
    header: String,
    numbers: Vec<i32>,
}

/// A variant of a kernel.
enum Variant {
    /// MLX's kernel.
    Device(Handle),
    /// The number of a kernel under the emulation.
    Emulated(i32),
}

/// Whether MLX has a Metal device.
pub fn has_metal() -> bool {
    let mut available = false;
    // SAFETY: fills one bool.
    let status = unsafe { mlx_sys::mlx_metal_is_available(&raw mut available) };
    status == 0 && available
}

/// The generation of the GPU, which MLX names `applegpu_g13g` on an M1.
pub fn generation() -> Option<u32> {
    // SAFETY: the device and its info are freed once, after the name was read; the key ends with a zero byte.
    unsafe {
        let device = mlx_sys::mlx_device_new_type(mlx_sys::mlx_device_type__MLX_GPU, 0);
        let mut info = mlx_sys::mlx_device_info_new();
        let mut name = std::ptr::null();
        let mut generation = None;
        if mlx_sys::mlx_device_info_get(&raw mut info, device) == 0
            && mlx_sys::mlx_device_info_get_string(&raw mut name, info, c"architecture".as_ptr())
                == 0
            && !name.is_null()
        {
            generation = generation_of(&CStr::from_ptr(name).to_string_lossy());
        }
        mlx_sys::mlx_device_info_free(info);
        mlx_sys::mlx_device_free(device);
        generation
    }
}

/// The number in the name of an architecture.
fn generation_of(architecture: &str) -> Option<u32> {
    let number = architecture.split_once("_g")?.1;
    number.trim_end_matches(|c: char| !c.is_ascii_digit()).parse().ok()
}

impl<'a> Launch<'a> {
    /// The inputs in the order of the kernel's parameters.
    fn all_inputs(&self) -> impl Iterator<Item = (&'a str, &'a Array)> {
        self.in_place.iter().chain(self.inputs).copied()
    }
}

impl Kernel {
    /// The outputs of a launch.
    pub fn run(&self, launch: &Launch<'_>) -> Result<Vec<Array>> {
        debug_assert!(
            launch.all_inputs().count() + launch.outputs.len() <= BUFFERS,
            "{}",
            self.name
        );
        let variant = self.variant(launch)?;
        match &*variant {
            Variant::Device(handle) => handle.apply(launch),
            Variant::Emulated(number) => {
                let inputs = launch.inputs.iter().chain(launch.in_place);
                let inputs: Vec<&Array> = inputs.map(|(_, array)| *array).collect();
                let outputs: Vec<(&[i32], Dtype)> =
                    launch.outputs.iter().map(|&(_, shape, dtype)| (shape, dtype)).collect();
                emulated::run(*number, &inputs, &outputs, launch.groups, launch.threads)
            }
        }
    }

    /// The variant for a launch, which is made if it is new.
    fn variant(&self, launch: &Launch<'_>) -> Result<Rc<Variant>> {
        let key = self.key(launch);
        let known = VARIANTS.with_borrow(|variants| variants.get(&key).cloned());
        if let Some(variant) = known {
            return Ok(variant);
        }
        let variant = Rc::new(if emulated::is_emulated() {
            Variant::Emulated(self.emulated(launch)?)
        } else {
            Variant::Device(self.on_device(launch, &key)?)
        });
        VARIANTS.with_borrow_mut(|variants| variants.insert(key, variant.clone()));
        Ok(variant)
    }

    fn key(&self, launch: &Launch<'_>) -> Key {
        // The emulation declares buffers that are written as such.
        let emulated = emulated::is_emulated().then_some(launch.in_place.len() as i32);
        let mut numbers = vec![launch.dtype as i32, emulated.unwrap_or(-1)];
        numbers.extend(launch.constants.iter().map(|&(_, value)| value));
        let input =
            |(_, array): (&str, &Array)| [array.dtype() as i32, i32::from(is_constant(array))];
        numbers.extend(launch.all_inputs().flat_map(input));
        numbers.extend(launch.outputs.iter().map(|&(_, _, dtype)| dtype as i32));
        Key { kernel: self.name, header: launch.header.clone(), numbers }
    }

    /// The body with the constants before it, and names of types by `name_of`.
    fn body(&self, launch: &Launch<'_>, name_of: fn(Dtype) -> &'static str) -> String {
        let mut text = format!("typedef {} T;\n", name_of(launch.dtype));
        for (name, value) in launch.constants {
            let _ = writeln!(text, "constexpr int {name} = {value};");
        }
        text + self.source
    }

    fn on_device(&self, launch: &Launch<'_>, key: &Key) -> Result<Handle> {
        let body = self.body(launch, metal_type);
        let header = format!("{HEADER}{}", full(&launch.header));
        // MLX compiles a kernel again whenever another text has its name.
        let hash = Sha256::digest(format!("{header}{body}{:?}", key.numbers));
        let name = format!("steersman_{}_{}", self.name, hex::encode(&hash[..8]));
        let inputs: Vec<&str> = launch.all_inputs().map(|(name, _)| name).collect();
        let outputs: Vec<&str> = launch.outputs.iter().map(|(name, ..)| *name).collect();
        Handle::new(&name, [&inputs, &outputs], &body, &header)
    }

    fn emulated(&self, launch: &Launch<'_>) -> Result<i32> {
        let body = self.body(launch, emulated_type);
        let kinds = launch.inputs.iter().map(|(name, array)| {
            // MLX passes it as a reference.
            debug_assert!(array.ndim() > 0, "{}: {name} has no dimensions", self.name);
            let space = if is_constant(array) { "constant " } else { "" };
            format!("{space}{}", emulated_type(array.dtype()))
        });
        let kinds: Vec<String> = kinds.collect();
        let inputs: Vec<[&str; 2]> =
            kinds.iter().zip(launch.inputs).map(|(kind, &(name, _))| [&**kind, name]).collect();
        let written = |array: &Array| format!("in_place {}", emulated_type(array.dtype()));
        let kinds: Vec<String> = launch.in_place.iter().map(|(_, array)| written(array)).collect();
        let in_place = kinds.iter().zip(launch.in_place).map(|(kind, &(name, _))| [&**kind, name]);
        let outputs = launch.outputs.iter().map(|&(name, _, dtype)| [emulated_type(dtype), name]);
        let outputs: Vec<[&str; 2]> = in_place.chain(outputs).collect();
        emulated::compile(self.name, &full(&launch.header), &body, &inputs, &outputs)
    }
}

/// Whether MLX passes an input in the address space `constant` instead of `device`.
fn is_constant(input: &Array) -> bool {
    input.size() < 8
}

/// The header with the text that it includes.
fn full(header: &str) -> String {
    header.replace(affine::HEADER, affine::TEXT)
}

/// The type of an element in a kernel's text, as MLX names it.
fn metal_type(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Bfloat16 => "bfloat16_t",
        other => emulated_type(other),
    }
}

/// The type of an element in a kernel's text under the emulation.
fn emulated_type(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Float32 => "float",
        Dtype::Bfloat16 => "bfloat",
        Dtype::Float16 => "half",
        Dtype::Int32 => "int",
        Dtype::Uint32 => "uint",
        Dtype::Uint8 => "uchar",
        other => unreachable!("no kernel has parameters of {other:?}"),
    }
}

/// A kernel of MLX.
struct Handle {
    name: String,
    raw: mlx_sys::mlx_fast_metal_kernel,
}

impl Handle {
    fn new(name: &str, names: [&[&str]; 2], body: &str, header: &str) -> Result<Self> {
        let text =
            |text: &str| CString::new(text).map_err(|_| failed(name, "its text has a zero byte"));
        let (own_name, body, header) = (text(name)?, text(body)?, text(header)?);
        let texts =
            |names: &[&str]| names.iter().map(|name| text(name)).collect::<Result<Vec<_>>>();
        let (inputs, outputs) = (texts(names[0])?, texts(names[1])?);
        // SAFETY: MLX copies the strings, which live as long as this function; the lists are freed once.
        let raw = unsafe {
            let [inputs, outputs] = [list_of(&inputs), list_of(&outputs)];
            let raw = mlx_sys::mlx_fast_metal_kernel_new(
                own_name.as_ptr(),
                inputs,
                outputs,
                body.as_ptr(),
                header.as_ptr(),
                true,
                false,
            );
            mlx_sys::mlx_vector_string_free(inputs);
            mlx_sys::mlx_vector_string_free(outputs);
            raw
        };
        if raw.ctx.is_null() {
            return Err(failed(name, "MLX rejects it"));
        }
        Ok(Self { name: name.into(), raw })
    }

    fn apply(&self, launch: &Launch<'_>) -> Result<Vec<Array>> {
        let stream = Stream::thread_local_or_default();
        let inputs: Vec<mlx_array> = launch.all_inputs().map(|(_, array)| array.as_ptr()).collect();
        let [x, y, z] = launch.groups;
        // SAFETY: the handles are those of living arrays, and MLX copies what it keeps. What is made here is freed once. The
        // text stays within the arrays of such shapes, and writes every element of the outputs.
        unsafe {
            let config = mlx_sys::mlx_fast_metal_kernel_config_new();
            let mut status = 0;
            for &(_, shape, dtype) in launch.outputs {
                status |= mlx_sys::mlx_fast_metal_kernel_config_add_output_arg(
                    config,
                    shape.as_ptr(),
                    shape.len(),
                    dtype as mlx_dtype,
                );
            }
            let threads = launch.threads;
            status |= mlx_sys::mlx_fast_metal_kernel_config_set_grid(config, x * threads, y, z);
            status |= mlx_sys::mlx_fast_metal_kernel_config_set_thread_group(config, threads, 1, 1);
            let list = mlx_sys::mlx_vector_array_new_data(inputs.as_ptr(), inputs.len());
            let mut results = mlx_sys::mlx_vector_array_new();
            if status == 0 {
                status = mlx_sys::mlx_fast_metal_kernel_apply(
                    &raw mut results,
                    self.raw,
                    list,
                    config,
                    stream.as_ptr(),
                );
            }
            let mut arrays = Vec::with_capacity(launch.outputs.len());
            for i in 0..launch.outputs.len() {
                let mut array = mlx_array::default();
                if status == 0 {
                    status = mlx_sys::mlx_vector_array_get(&raw mut array, results, i);
                    arrays.push(Array::from_ptr(array));
                }
            }
            mlx_sys::mlx_vector_array_free(results);
            mlx_sys::mlx_vector_array_free(list);
            mlx_sys::mlx_fast_metal_kernel_config_free(config);
            // mlx-rs does not expose MLX's error text.
            if status == 0 { Ok(arrays) } else { Err(failed(&self.name, "MLX rejects the launch")) }
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and freed once. Graphs that have it keep their own reference.
        unsafe { mlx_sys::mlx_fast_metal_kernel_free(self.raw) };
    }
}

/// The i-th of the pointers `names`, as an expression.
pub fn choice(names: &[&str]) -> String {
    let (last, others) = names.split_last().expect("there is a pointer");
    let mut text = String::from("(");
    for (i, name) in others.iter().enumerate() {
        let _ = write!(text, "(i) == {i} ? {name} : ");
    }
    text + last + ")"
}

/// A list of strings, which the caller frees.
///
/// # Safety
/// The list is freed once.
unsafe fn list_of(strings: &[CString]) -> mlx_sys::mlx_vector_string {
    // SAFETY: MLX copies each string.
    unsafe {
        let list = mlx_sys::mlx_vector_string_new();
        for string in strings {
            let string: &CStr = string;
            mlx_sys::mlx_vector_string_append_value(list, string.as_ptr());
        }
        list
    }
}

#[cfg(test)]
mod tests {
    use super::generation_of;

    #[test]
    fn generations_are_read_from_the_names_of_architectures() {
        let names = [
            "applegpu_g13g",
            "applegpu_g14s",
            "applegpu_g15d",
            "applegpu_g17p",
            "applegpu",
            "sm_90",
        ];
        let expected = [Some(13), Some(14), Some(15), Some(17), None, None];
        assert_eq!(names.map(generation_of), expected);
    }
}
