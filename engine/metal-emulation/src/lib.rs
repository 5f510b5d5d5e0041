//! Runs Metal kernels on a CPU, for tests.
//!
//! A kernel's text is compiled as C++ when it is first used, with `emulation.h` before it, and loaded. The header has the
//! threads, barriers and collectives of Metal, and finds races and indices of threadgroup memory that are out of bounds.
//! This file checks the buffers: nothing is written beside an output, every element of an output is written unless it is an
//! input that is written in place, and what is read beside an input is not a number. It shows that a text computes what it should, under several orders of threads.
//! [`types`] checks address spaces and constness. Neither shows that Apple's compiler accepts the text, nor how fast it is.
//!
//! Needs a C++ compiler (`CXX`, or `c++`), and libclang for the types. Compiled texts stay beside the running program, in
//! `metal-emulation/`.

#![allow(unsafe_code, reason = "loads and calls compiled C++")]

use std::collections::BTreeMap;
use std::ffi::{CStr, OsString, c_char, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{env, fs, process};

use libloading::Library;

mod types;

const HEADER: &str = include_str!("emulation.h");

/// Bytes before and after each buffer that nothing may write, and that are not a number if they are read.
const MARGIN: usize = 4096;

/// Each byte of a margin.
const MARGIN_BYTE: u8 = 0xff;

/// The first bytes of an element that was not written: not a number in every type of float.
const UNWRITTEN: [u8; 4] = [0xa5, 0xff, 0xa5, 0xff];

/// The order of threads in further launches.
static ORDER: AtomicU32 = AtomicU32::new(0);

/// The loaded libraries by [`name`], and those that are being built, which other threads wait for.
static LIBRARIES: Mutex<BTreeMap<u64, Place>> = Mutex::new(BTreeMap::new());

/// Where a library is loaded once, by the first thread that needs it.
type Place = Arc<Mutex<Option<Arc<Loaded>>>>;

/// The library of a text.
struct Loaded {
    entry: Entry,
    /// Held in a launch: the fibers of a library are global.
    launch: Mutex<()>,
    /// Stays loaded.
    _library: Library,
}

/// Before the type of an output that the kernel does not fill: an input, which MLX passes as a constant.
const IN_PLACE: &str = "in_place ";

/// Runs a kernel: reads the inputs, fills the outputs, with a grid of threads along x, y and z, and threadgroups of some of
/// them. Fails with a sentence that names the fault.
pub type Launch =
    Box<dyn Fn(&[&[u8]], &mut [&mut [u8]], [u32; 3], [u32; 3]) -> Result<(), String> + Send + Sync>;

type Entry = unsafe extern "C" fn(*const *mut c_void, *const u32, *const u32, u32) -> *const c_char;

/// The order in which the threads of a threadgroup run between barriers and collectives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// The first thread first.
    Ascending,
    /// The last thread first.
    Descending,
    /// Another order each time, and simdgroups that drift apart.
    Random(u16),
}

/// Sets the order of threads in further launches of the process. The default is ascending.
pub fn set_order(order: Order) {
    let number = match order {
        Order::Ascending => 0,
        Order::Descending => 1,
        Order::Random(seed) => u32::from(seed) + 2,
    };
    ORDER.store(number, Ordering::Relaxed);
}

/// Compiles the body of a kernel, with `header` before it, and checks its types. Inputs and outputs are given by the type of
/// an element and the name. The type of an input has `constant` before it if MLX passes it in that address space: if it has
/// fewer than 8 elements. An input that the kernel writes is an output with [`IN_PLACE`] before its type.
///
/// # Errors
/// What the compiler or the check of types finds, or why there is none.
pub fn compile(
    header: &str,
    body: &str,
    inputs: &[[&str; 2]],
    outputs: &[[&str; 2]],
) -> Result<Launch, String> {
    let text = text(header, body, inputs, outputs);
    let library = load(&text, || types::check(header, body, inputs, outputs))?;
    let kinds: Vec<(bool, usize)> = outputs
        .iter()
        .map(|[kind, _]| (kind.starts_with(IN_PLACE), element_size(plain(kind))))
        .collect();
    let counts = [inputs.len(), outputs.len()];
    Ok(Box::new(move |inputs: &[&[u8]], outputs: &mut [&mut [u8]], grid, group| {
        assert_eq!([inputs.len(), outputs.len()], counts, "a buffer for each name");
        run(&library, &kinds, inputs, outputs, [grid, group])
    }))
}

/// The whole text: names of the buffers as variables, the body, and the function that is called.
fn text(header: &str, body: &str, inputs: &[[&str; 2]], outputs: &[[&str; 2]]) -> String {
    let mut declared = String::new();
    let mut set = String::new();
    let inputs = inputs.iter().map(|name| (true, name));
    let outputs = outputs.iter().map(|name| (name[0].starts_with(IN_PLACE), name));
    for (i, (is_const, [kind, name])) in inputs.chain(outputs).enumerate() {
        let (kind, is_const) = (plain(kind), if is_const { "const " } else { "" });
        declared += &format!("static {is_const}{kind}* {name};\n");
        set += &format!("  {name} = static_cast<{kind}*>(buffers[{i}]);\n");
    }
    format!(
        "{HEADER}\n{declared}\n{header}\nstatic void emulation::body() {{\n#line 1 \"body\"\n{body}\n}}\n\
         extern \"C\" const char* emulation_launch(void* const* buffers, const uint* grid, const uint* size, uint32_t \
         order) {{\n{set}  return emulation::run(grid, size, order);\n}}\n"
    )
}

/// The type of an element.
fn plain(kind: &str) -> &str {
    kind.strip_prefix(IN_PLACE).unwrap_or(kind)
}

fn element_size(kind: &str) -> usize {
    match kind {
        "uchar" => 1,
        "bfloat" | "half" | "ushort" => 2,
        _ => 4,
    }
}

/// The library of a text. It is checked and built unless it was built before, and loaded once.
fn load(text: &str, check: impl FnOnce() -> Result<(), String>) -> Result<Arc<Loaded>, String> {
    let name = name(text)?;
    let place = lock(&LIBRARIES).entry(name).or_default().clone();
    let mut place = lock(&place);
    if let Some(library) = &*place {
        return Ok(library.clone());
    }
    let path = build(name, text, check)?;
    // SAFETY: the library has no initializers.
    let library = unsafe { Library::new(&path) }.map_err(|error| error.to_string())?;
    // SAFETY: the text defines a function of this name and type, which lives as long as the library.
    let entry =
        unsafe { *library.get::<Entry>(b"emulation_launch\0").map_err(|error| error.to_string())? };
    let loaded = Arc::new(Loaded { entry, launch: Mutex::default(), _library: library });
    Ok(place.insert(loaded).clone())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What distinguishes the library of a text from others.
fn name(text: &str) -> Result<u64, String> {
    let mut hasher = DefaultHasher::new();
    (text, OPTIONS, LIBRARIES_OF_C, types::version()?).hash(&mut hasher);
    Ok(hasher.finish())
}

/// The file of the library of a text, checked and built unless it was built before.
fn build(
    name: u64,
    text: &str,
    check: impl FnOnce() -> Result<(), String>,
) -> Result<PathBuf, String> {
    let failed = |what: &str, error: std::io::Error| format!("cannot {what}: {error}");
    let program = env::current_exe().map_err(|error| failed("find the program", error))?;
    let folder = program.parent().unwrap_or(Path::new(".")).join("metal-emulation");
    fs::create_dir_all(&folder).map_err(|error| failed("create a folder for kernels", error))?;
    let library = folder.join(format!("{name:016x}.so"));
    if !library.exists() {
        check()?;
        // Tests of several processes may build the same text.
        let own = library.with_extension(format!("{}.tmp", process::id()));
        call_compiler(text, &own)?;
        fs::rename(&own, &library).map_err(|error| failed("name a library", error))?;
    }
    Ok(library)
}

/// Options of the compiler.
const OPTIONS: [&str; 7] = [
    // Metal's language before version 4 is C++14, which also compiles in two thirds of the time.
    "-std=c++14",
    "-O1",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-x",
    "c++",
];

/// What a text is linked with. A text uses nothing of the library of C++, which takes longer to link than a text to compile.
/// On macOS, there is one library for all.
const LIBRARIES_OF_C: &[&str] =
    if cfg!(target_os = "macos") { &[] } else { &["-nodefaultlibs", "-lm", "-lc", "-lgcc"] };

fn call_compiler(text: &str, library: &PathBuf) -> Result<(), String> {
    let compiler = env::var_os("CXX").unwrap_or_else(|| OsString::from("c++"));
    let mut child = Command::new(&compiler)
        .args(OPTIONS)
        .args(["-", "-o"])
        .arg(library)
        .args(LIBRARIES_OF_C)
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("cannot start {}: {error}", compiler.display()))?;
    if let Some(mut input) = child.stdin.take() {
        // A compiler that ends early explains why on stderr.
        let _ = input.write_all(text.as_bytes());
    }
    let output = child.wait_with_output().map_err(|error| format!("the compiler: {error}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok(())
}

/// A copy of a buffer with margins.
struct Guarded {
    /// Words, for alignment.
    words: Vec<u64>,
    length: usize,
}

impl Guarded {
    fn new(length: usize) -> Self {
        let words = (2 * MARGIN + length).div_ceil(8);
        Self { words: vec![u64::from_ne_bytes([MARGIN_BYTE; 8]); words], length }
    }

    fn bytes(&mut self) -> &mut [u8] {
        let count = self.words.len() * 8;
        // SAFETY: the words have as many bytes, and bytes have no alignment.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), count) }
    }

    fn content(&mut self) -> &mut [u8] {
        let end = MARGIN + self.length;
        &mut self.bytes()[MARGIN..end]
    }

    fn has_clean_margins(&mut self) -> bool {
        let end = MARGIN + self.length;
        let bytes = self.bytes();
        bytes[..MARGIN].iter().chain(&bytes[end..]).all(|byte| *byte == MARGIN_BYTE)
    }
}

fn run(
    library: &Loaded,
    kinds: &[(bool, usize)],
    inputs: &[&[u8]],
    outputs: &mut [&mut [u8]],
    [grid, group]: [[u32; 3]; 2],
) -> Result<(), String> {
    let _one = lock(&library.launch);
    let mut guarded: Vec<Guarded> = Vec::with_capacity(inputs.len() + outputs.len());
    for input in inputs {
        let mut copy = Guarded::new(input.len());
        copy.content().copy_from_slice(input);
        guarded.push(copy);
    }
    for (output, &(in_place, size)) in outputs.iter().zip(kinds) {
        let mut copy = Guarded::new(output.len());
        if in_place {
            copy.content().copy_from_slice(output);
            guarded.push(copy);
            continue;
        }
        for element in copy.content().chunks_mut(size) {
            let length = element.len();
            element.copy_from_slice(&UNWRITTEN[..length]);
        }
        guarded.push(copy);
    }
    let pointers: Vec<*mut c_void> =
        guarded.iter_mut().map(|copy| copy.content().as_mut_ptr().cast()).collect();
    // SAFETY: as many pointers as the text has buffers. A kernel that leaves its buffers by more than the margins ends the
    // process, or worse: it is a test.
    let problem = unsafe {
        (library.entry)(
            pointers.as_ptr(),
            grid.as_ptr(),
            group.as_ptr(),
            ORDER.load(Ordering::Relaxed),
        )
    };
    if !problem.is_null() {
        // SAFETY: not null, and a sentence that ends with a zero byte.
        return Err(unsafe { CStr::from_ptr(problem) }.to_string_lossy().into_owned());
    }
    for (i, copy) in guarded.iter_mut().enumerate() {
        if !copy.has_clean_margins() {
            return Err(format!("buffer {i} was written beside its elements"));
        }
        let Some(o) = i.checked_sub(inputs.len()) else {
            if copy.content() != inputs[i] {
                return Err(format!("input {i} was written"));
            }
            continue;
        };
        let (in_place, size) = kinds[o];
        let is_unwritten =
            |element: &[u8]| !in_place && size > 1 && *element == UNWRITTEN[..element.len()];
        if let Some(element) = copy.content().chunks(size).position(is_unwritten) {
            return Err(format!("element {element} of output {o} was not written"));
        }
        outputs[o].copy_from_slice(copy.content());
    }
    Ok(())
}

#[cfg(test)]
mod tests;
