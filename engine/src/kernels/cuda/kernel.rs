//! Kernels and their variants: a kernel's text is compiled for each set of types and constants.
//!
//! A variant is compiled and loaded at its first use. [`prepare`] does so beforehand for all variants that graphs use:
//! the graphs are made, which names the variants, and are not evaluated before these are compiled, all at the same time.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString};
use std::fmt::Write;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype, Stream};
use mlx_sys::{CudaLaunch, mlx_array, mlx_dtype};
use sha2::{Digest, Sha256};

use super::Capability;
use super::compiler::Compiler;
use crate::cache::Buffers;
use crate::error::{Error, Result};
use crate::kernels::LaunchSpan;

/// The code of each variant's name. MLX refers to it until the process ends.
static CODE: Mutex<BTreeMap<CString, &'static [u8]>> = Mutex::new(BTreeMap::new());

thread_local! {
    static VARIANTS: RefCell<Variants> = RefCell::default();
}

/// A kernel's text, and the names of its parameters.
pub struct Kernel {
    pub name: &'static str,
    pub inputs: &'static [&'static str],
    pub outputs: &'static [&'static str],
    /// Integers after the pointers to inputs and outputs.
    pub numbers: &'static [&'static str],
    /// Text before the kernel.
    pub header: &'static str,
    /// The body. The signature is generated from the names. It calls `wait_for_inputs` (common.cuh) once, before it reads
    /// what other kernels write.
    pub source: &'static str,
}

/// One use of a kernel.
pub struct Launch<'a> {
    /// One for each name. Those that are not contiguous in row-major order are copied.
    pub inputs: &'a [&'a Array],
    /// Shape and type of each output.
    pub outputs: &'a [(&'a [i32], Dtype)],
    /// One for each name.
    pub numbers: &'a [i32],
    /// Spans of the pass, at most [`SPANS`], if the kernel reads or writes their caches. With a span's index, these are the
    /// names that a kernel's text has for it: `kv0`, the buffer of own rows, and `shared0`, then `first0`, the first of its
    /// rows in the launch, `rows0`, `position0`, `place0`, the place of the first in the buffer, `capacity0`,
    /// `shared_rows0` and `shared_capacity0`. `EACH_SPAN(X)` is `X(0) X(1) ..`. They are parameters, because a GPU waits
    /// long for an array that the host has just written.
    pub spans: &'a [LaunchSpan<'a>],
    /// Integers known when the kernel is compiled. Each set of them is another variant.
    pub constants: &'a [(&'a str, i32)],
    /// The type `T` of the body.
    pub dtype: Dtype,
    /// Blocks along x, y and z.
    pub blocks: [i32; 3],
    /// Blocks along x that share a cluster, `CLUSTER` in the body. More than 1 if the device has clusters.
    pub cluster: i32,
    /// Threads of a block, along x.
    pub threads: i32,
    /// Bytes of dynamic shared memory.
    pub shared: i32,
}

/// Most spans of a launch.
pub const SPANS: usize = 32;

/// Names of a span's buffers.
const SPAN_BUFFERS: [&str; 2] = ["kv", "shared"];

/// Names of a span's numbers.
const SPAN_NUMBERS: [&str; 7] =
    ["first", "rows", "position", "place", "capacity", "shared_rows", "shared_capacity"];

impl<'a> Launch<'a> {
    /// The number of spans in the text: there are variants for 1, 8 and [`SPANS`].
    fn variant_spans(&self) -> usize {
        match self.spans.len() {
            0 => 0,
            spans => [1, 8].into_iter().find(|&count| count >= spans).unwrap_or(SPANS),
        }
    }

    /// Inputs and numbers, those of the spans included. Missing spans have no rows.
    fn arguments(&self) -> (Vec<&'a Array>, Vec<i32>) {
        let (mut inputs, mut numbers) = (self.inputs.to_vec(), self.numbers.to_vec());
        let mut first = 0;
        for i in 0..self.variant_spans() {
            let &LaunchSpan { mut rows, position, buffers: Buffers { shared, own, len, .. } } =
                self.spans.get(i).unwrap_or(&self.spans[0]);
            if i >= self.spans.len() {
                rows = 0;
            }
            // Without shared rows it is not read.
            let (before, shared_rows) = shared.map_or((own, 0), |kv| (&*kv.buffer, kv.rows));
            inputs.extend([own, before]);
            let numbers_of = [first, rows, position, len, own.dim(2), shared_rows, before.dim(2)];
            numbers.extend(numbers_of);
            first += rows;
        }
        (inputs, numbers)
    }
}

/// What distinguishes a variant.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Key {
    kernel: &'static str,
    numbers: Vec<i32>,
}

/// A variant of a kernel.
#[derive(Clone)]
struct Variant {
    name: Rc<CStr>,
    /// Empty while it is compiled.
    code: &'static [u8],
}

/// A variant that is compiled on a thread of its own. Graphs that have it must not be evaluated.
struct Compiling {
    key: Rc<Key>,
    name: Rc<CStr>,
    form: Form,
    thread: JoinHandle<std::result::Result<Vec<u8>, String>>,
}

/// What all launches of a variant have in common.
#[derive(Debug, Clone, Copy)]
struct Form {
    inputs: usize,
    outputs: usize,
    numbers: usize,
    cluster: i32,
    threads: i32,
    shared: i32,
}

#[derive(Default)]
struct Variants {
    compiler: Option<Arc<Compiler>>,
    /// Where compiled kernels are kept, if anywhere.
    folder: Option<PathBuf>,
    /// All but those of `compiling` are loaded.
    all: HashMap<Rc<Key>, Variant>,
    compiling: Vec<Compiling>,
    /// Whether graphs are made that are not evaluated.
    preparing: bool,
}

/// Keeps kernels that this thread compiles in `folder`.
pub fn keep_in(folder: PathBuf) {
    VARIANTS.with_borrow_mut(|variants| variants.folder = Some(folder));
}

/// Makes a compiler for devices of `capability`.
///
/// # Errors
/// Why there is none.
pub fn open_compiler(capability: Capability) -> std::result::Result<(), String> {
    if !mlx_sys::launches_cuda_kernels() {
        return Err(
            "the program was linked without exporting the functions of shim/cuda_driver.h".into()
        );
    }
    VARIANTS.with_borrow_mut(|variants| {
        if variants.compiler.is_none() {
            let compiler = Compiler::open(capability, variants.folder.clone())?;
            variants.compiler = Some(Arc::new(compiler));
        }
        Ok(())
    })
}

/// Compiles and loads the kernels of the graphs that `make` makes. `make` must not evaluate any. Calls `progress` with
/// the number of kernels that are loaded, and of all.
///
/// # Errors
/// The error of `make`, or that of a kernel that does not compile.
pub fn prepare(
    make: impl FnOnce() -> Result<()>,
    mut progress: impl FnMut(usize, usize),
) -> Result<()> {
    VARIANTS.with_borrow_mut(|variants| variants.preparing = true);
    let made = make();
    let compiling = VARIANTS.with_borrow_mut(|variants| {
        variants.preparing = false;
        std::mem::take(&mut variants.compiling)
    });
    let count = compiling.len();
    progress(0, count);
    for (i, Compiling { key, name, form, thread }) in compiling.into_iter().enumerate() {
        // Without code it would be compiled again at its first use, which can wait.
        VARIANTS.with_borrow_mut(|variants| variants.all.remove(&key));
        let code = thread.join().map_err(|_| failed(&name, "the compiler panicked"))?;
        let code = code.map_err(|problem| failed(&name, &problem))?;
        let variant = Variant { code: keep(&name, code), name };
        load(&variant, form)?;
        VARIANTS.with_borrow_mut(|variants| variants.all.insert(key, variant));
        progress(i + 1, count);
    }
    made
}

/// The code of the kernel `name`, for the life of the process. Another thread may have compiled it before.
fn keep(name: &CStr, code: Vec<u8>) -> &'static [u8] {
    let mut kept = CODE.lock().unwrap_or_else(PoisonError::into_inner);
    kept.entry(name.into()).or_insert_with(|| code.leak())
}

fn failed(name: &CStr, problem: &str) -> Error {
    Error::Array(format!("CUDA kernel {}: {problem}", name.to_string_lossy()))
}

impl Kernel {
    /// The outputs of a launch.
    pub fn run(&self, launch: &Launch<'_>) -> Result<Vec<Array>> {
        let variant = self.variant(launch)?;
        launch_kernel(&variant, false, launch)
    }

    /// The variant for a launch, which is compiled if it is new.
    fn variant(&self, launch: &Launch<'_>) -> Result<Variant> {
        let key = self.key(launch);
        let known = VARIANTS.with_borrow(|variants| variants.all.get(&key).cloned());
        if let Some(variant) = known {
            return Ok(variant);
        }
        let key = Rc::new(key);
        let text = self.text(launch);
        let hash = hex::encode(&Sha256::digest(&text)[..8]);
        let name = CString::new(format!("steersman_{}_{hash}", self.name));
        let name: Rc<CStr> = name.expect("names have no zero bytes").into();
        let text = text.replace(NAME, &name.to_string_lossy());
        let (compiler, preparing) =
            VARIANTS.with_borrow(|variants| (variants.compiler.clone(), variants.preparing));
        let compiler = compiler.ok_or_else(|| failed(&name, "there is no compiler"))?;
        let spans = launch.variant_spans();
        let form = Form {
            inputs: self.inputs.len() + spans * SPAN_BUFFERS.len(),
            outputs: self.outputs.len(),
            numbers: self.numbers.len() + spans * SPAN_NUMBERS.len(),
            cluster: launch.cluster,
            threads: launch.threads,
            shared: launch.shared,
        };
        let mut variant = Variant { name: name.clone(), code: &[] };
        if preparing {
            let own = CString::from(&*name);
            let thread = std::thread::spawn(move || compiler.compile(&own, &text));
            let compiling = Compiling { key: key.clone(), name, form, thread };
            VARIANTS.with_borrow_mut(|variants| variants.compiling.push(compiling));
        } else {
            let code = compiler.compile(&name, &text).map_err(|problem| failed(&name, &problem))?;
            variant.code = keep(&variant.name, code);
            load(&variant, form)?;
        }
        VARIANTS.with_borrow_mut(|variants| variants.all.insert(key, variant.clone()));
        Ok(variant)
    }

    fn key(&self, launch: &Launch<'_>) -> Key {
        let mut numbers = vec![launch.cluster, launch.threads, launch.shared, launch.dtype as i32];
        numbers.push(i32::try_from(launch.variant_spans()).expect("at most 32"));
        numbers.extend(launch.constants.iter().map(|&(_, value)| value));
        numbers.extend(launch.inputs.iter().map(|input| input.dtype() as i32));
        numbers.extend(launch.outputs.iter().map(|&(_, dtype)| dtype as i32));
        Key { kernel: self.name, numbers }
    }

    /// The whole text of a variant, with [`NAME`] for its name.
    fn text(&self, launch: &Launch<'_>) -> String {
        debug_assert!(
            self.source.contains("wait_for_inputs();"),
            "it starts before its inputs are written"
        );
        let mut parameters: Vec<String> = Vec::new();
        for (name, input) in self.inputs.iter().zip(launch.inputs) {
            parameters.push(format!("const {}* {name}", c_type(input.dtype())));
        }
        let spans = launch.variant_spans();
        for i in 0..spans {
            let buffer = |name| format!("const {}* {name}{i}", c_type(launch.dtype));
            parameters.extend(SPAN_BUFFERS.map(buffer));
        }
        for (name, (_, dtype)) in self.outputs.iter().zip(launch.outputs) {
            parameters.push(format!("{}* {name}", c_type(*dtype)));
        }
        parameters.extend(self.numbers.iter().map(|name| format!("int {name}")));
        for i in 0..spans {
            parameters.extend(SPAN_NUMBERS.iter().map(|name| format!("int {name}{i}")));
        }
        parameters.push("int is_idle".into());
        let each_span: String = (0..spans).map(|i| format!(" X({i})")).collect();
        let constants = launch.constants.iter().fold(String::new(), |mut text, (name, value)| {
            let _ = writeln!(text, "constexpr int {name} = {value};");
            text
        });
        let clusters = match launch.cluster {
            1 => String::new(),
            blocks => format!("__cluster_dims__({blocks}, 1, 1) "),
        };
        format!(
            "// {} bytes of shared memory\n#define EACH_SPAN(X){each_span}\n{}\n{}\nextern \"C\" __global__ void {clusters}__launch_bounds__({}) \
             {NAME}({}) {{\nif (is_idle) return wait_for_inputs();\nusing T = {};\nconstexpr int CLUSTER = {};\n{constants}\n{}\n}}\n",
            launch.shared,
            include_str!("common.cuh"),
            self.header,
            launch.threads,
            parameters.join(", "),
            c_type(launch.dtype),
            launch.cluster,
            self.source,
        )
    }
}

/// Stands for the kernel's name in its text.
const NAME: &str = "STEERSMAN_KERNEL";

/// The type of an element in a kernel's text.
fn c_type(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Float32 => "float",
        Dtype::Bfloat16 => "bf16",
        Dtype::Float16 => "f16",
        Dtype::Int32 => "int",
        Dtype::Uint32 => "unsigned",
        Dtype::Uint8 => "unsigned char",
        other => unreachable!("no kernel has parameters of {other:?}"),
    }
}

/// Loads code into MLX: one launch that does nothing. MLX sets the shared memory of a kernel at its first launch.
fn load(variant: &Variant, form: Form) -> Result<()> {
    let input = Array::from_int(0);
    let outputs = launch_kernel(
        variant,
        true,
        &Launch {
            inputs: &vec![&input; form.inputs],
            outputs: &vec![(&[1][..], Dtype::Int32); form.outputs],
            numbers: &vec![0; form.numbers],
            spans: &[],
            constants: &[],
            dtype: Dtype::Int32,
            blocks: [form.cluster, 1, 1],
            cluster: form.cluster,
            threads: form.threads,
            shared: form.shared,
        },
    )?;
    Ok(eval(&outputs)?)
}

fn launch_kernel(variant: &Variant, is_idle: bool, launch: &Launch<'_>) -> Result<Vec<Array>> {
    let &Variant { ref name, code } = variant;
    let (inputs, mut numbers) = launch.arguments();
    let inputs: Vec<mlx_array> = inputs.into_iter().map(Array::as_ptr).collect();
    let results: Vec<(&[i32], mlx_dtype)> =
        launch.outputs.iter().map(|&(shape, dtype)| (shape, dtype as mlx_dtype)).collect();
    numbers.push(i32::from(is_idle));
    let mut res = vec![mlx_array::default(); results.len()];
    let stream = Stream::thread_local_or_default();
    let own = CudaLaunch {
        name,
        code,
        starts_early: super::enabled().is_some_and(Capability::starts_early),
        results: &results,
        numbers: &numbers,
        blocks: launch.blocks,
        threads: launch.threads,
        shared_bytes: launch.shared,
    };
    // SAFETY: the handles are those of living arrays. The kernel was compiled for these types and this device, and
    // loaded before; its callers choose shapes and constants that its text expects.
    let status = unsafe { mlx_sys::cuda_kernel(&mut res, &inputs, &own, stream.as_ptr()) };
    if status != 0 {
        // mlx-rs does not expose MLX's error text.
        return Err(failed(name, "MLX rejects the launch"));
    }
    // SAFETY: just filled, and nothing else owns them.
    Ok(res.into_iter().map(|array| unsafe { Array::from_ptr(array) }).collect())
}
