//! Checks the types of a kernel's text with clang: address spaces, constness, conversions.
//!
//! Metal is C++ with address spaces, and clang knows such a language: C++ for OpenCL. `types.h`
//! maps the words of one to the other. The text becomes the function that MLX makes of it on a Mac
//! (`custom_kernel.cpp` of MLX 0.32.2): a `const device` pointer for an input, a `const constant`
//! pointer for one of fewer than 8 elements, a `device` pointer for an output, and a parameter for
//! each attribute of threads that the body names.
//!
//! Finds what Apple's compiler refuses in such texts most often: a pointer without an address
//! space, or with another one, a write to an input, a float in the place of a bfloat, a number of
//! 64 bits, threadgroup memory within a block. It does not show that Apple's compiler accepts the
//! text.
//!
//! Needs libclang 14 or later, which the build of `mlx-sys` fetches where the system has none.
//! Without it texts are not checked, and `CI` makes that a failure.

use std::ffi::{CStr, CString, c_char, c_int, c_uint};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{env, fs, ptr};

use clang_sys::{
    CXDiagnostic, CXErrorCode, CXFile, CXIndex, CXSourceLocation, CXString, CXTranslationUnit,
    CXTranslationUnit_Flags, CXUnsavedFile,
};
use libloading::Library;

use super::IN_PLACE;

const HEADER: &str = include_str!("types.h");

const ARGUMENTS: [&CStr; 6] = [
    c"-cl-std=clc++2021",
    c"-target",
    c"spir64",
    c"-cl-no-stdinc",
    c"-Xclang",
    // No generic address space, to which all pointers would convert, and no double.
    c"-cl-ext=-all,+cl_khr_fp16",
];

/// Name of the text for clang, which finds the language by its end.
const FILE: &CStr = c"text.clcpp";

/// The attributes of threads that a text may name, and their types.
const ATTRIBUTES: [[&str; 2]; 12] = [
    ["simdgroup_index_in_threadgroup", "uint"],
    ["simdgroups_per_threadgroup", "uint"],
    ["thread_execution_width", "uint"],
    ["thread_index_in_simdgroup", "uint"],
    ["thread_index_in_threadgroup", "uint"],
    ["thread_position_in_grid", "uint3"],
    ["thread_position_in_threadgroup", "uint3"],
    ["threadgroup_position_in_grid", "uint3"],
    ["threadgroups_per_grid", "uint3"],
    ["threads_per_grid", "uint3"],
    ["threads_per_simdgroup", "uint"],
    ["threads_per_threadgroup", "uint3"],
];

/// libclang, with the functions that check a text.
struct Clang {
    create_index: unsafe extern "C" fn(c_int, c_int) -> CXIndex,
    parse: Parse,
    count: unsafe extern "C" fn(CXTranslationUnit) -> c_uint,
    diagnostic: unsafe extern "C" fn(CXTranslationUnit, c_uint) -> CXDiagnostic,
    severity: unsafe extern "C" fn(CXDiagnostic) -> c_int,
    message: unsafe extern "C" fn(CXDiagnostic) -> CXString,
    location: unsafe extern "C" fn(CXDiagnostic) -> CXSourceLocation,
    place: Place,
    characters: unsafe extern "C" fn(CXString) -> *const c_char,
    dispose_string: unsafe extern "C" fn(CXString),
    dispose_diagnostic: unsafe extern "C" fn(CXDiagnostic),
    dispose_unit: unsafe extern "C" fn(CXTranslationUnit),
    dispose_index: unsafe extern "C" fn(CXIndex),
    path: PathBuf,
    /// Stays loaded.
    _library: Library,
}

type Parse = unsafe extern "C" fn(
    CXIndex,
    *const c_char,
    *const *const c_char,
    c_int,
    *mut CXUnsavedFile,
    c_uint,
    CXTranslationUnit_Flags,
    *mut CXTranslationUnit,
) -> CXErrorCode;

type Place =
    unsafe extern "C" fn(CXSourceLocation, *mut CXFile, *mut c_uint, *mut c_uint, *mut c_uint);

/// The least severity of a diagnostic that is an error.
const ERROR: c_int = 3;

/// What else the result of a check depends on, apart from the text. `None` if texts are not
/// checked.
pub fn version() -> Result<Option<String>, String> {
    Ok(clang()?.map(|clang| format!("{HEADER}{}", clang.path.display())))
}

/// Checks the types of a text. An input is given by its type, after `constant` if it has fewer than
/// 8 elements, and its name.
///
/// # Errors
/// What is wrong, with lines of the body.
pub fn check(
    header: &str,
    body: &str,
    inputs: &[[&str; 2]],
    outputs: &[[&str; 2]],
) -> Result<(), String> {
    let Some(clang) = clang()? else { return Ok(()) };
    let mut problems: Vec<String> = [("header", header), ("text", body)]
        .into_iter()
        .flat_map(|(name, text)| {
            let plain = pointers_without_address_space(text);
            plain.into_iter().map(move |(line, declared)| {
                format!("line {line} of the {name}: `{declared}` has no address space")
            })
        })
        .collect();
    problems.extend(clang.errors(&text(header, body, inputs, outputs))?);
    if problems.is_empty() { Ok(()) } else { Err(problems.join("\n")) }
}

/// The text as a kernel of C++ for OpenCL.
fn text(header: &str, body: &str, inputs: &[[&str; 2]], outputs: &[[&str; 2]]) -> String {
    let mut parameters: Vec<String> = Vec::new();
    for [kind, name] in inputs {
        let space = if kind.starts_with("constant ") { "" } else { "device " };
        parameters.push(format!("const {space}{kind}* {name}"));
    }
    parameters.extend(outputs.iter().map(|[kind, name]| match kind.strip_prefix(IN_PLACE) {
        Some(kind) => format!("const device {kind}* {name}"),
        None => format!("device {kind}* {name}"),
    }));
    let named = ATTRIBUTES.iter().filter(|[name, _]| body.contains(name));
    parameters.extend(named.map(|[name, kind]| format!("{kind} {name}")));
    let parameters = parameters.join(", ");
    format!("{HEADER}{header}\nkernel void body({parameters}) {{\n{START}\n{body}\n}}\n")
}

/// The line before a body.
const START: &str = "// body";

/// Lines and declarations of pointers and references without an address space. Metal refuses them,
/// while OpenCL takes them as pointers to the thread's own memory.
fn pointers_without_address_space(text: &str) -> Vec<(usize, String)> {
    const SPACES: [&str; 4] = ["device", "constant", "threadgroup", "thread"];
    const TYPES: [&str; 12] = [
        "T", "float", "half", "bfloat", "int", "uint", "short", "ushort", "char", "uchar", "bool",
        "float4",
    ];
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        for (at, _) in code.match_indices(['*', '&']) {
            let before = code[..at].trim_end();
            let word = before.rsplit(|c| !is_word(c)).next().unwrap_or_default();
            let declared = before.rsplit([';', '{', '}', '(', ',', '<']).next().unwrap_or_default();
            let has_space = declared.split(|c| !is_word(c)).any(|word| SPACES.contains(&word));
            if TYPES.contains(&word) && !has_space {
                found.push((i + 1, format!("{}{}", declared.trim(), &code[at..=at])));
            }
        }
    }
    found
}

/// libclang, or `None` where there is none.
fn clang() -> Result<Option<&'static Clang>, String> {
    static CLANG: OnceLock<Result<Clang, String>> = OnceLock::new();
    let clang = CLANG.get_or_init(|| {
        let clang = find().and_then(|path| Clang::load(&path));
        if let Err(problem) = &clang {
            eprintln!("the types of Metal kernels are not checked: {problem}");
        }
        clang
    });
    match clang {
        Ok(clang) => Ok(Some(clang)),
        Err(problem) if env::var_os("CI").is_some() => {
            Err(format!("cannot check the types of a Metal kernel: {problem}"))
        }
        Err(_) => Ok(None),
    }
}

/// The file of libclang: in `LIBCLANG_PATH`, or the one that `mlx-sys` fetched for this build, or the
/// system's.
fn find() -> Result<PathBuf, String> {
    let program =
        env::current_exe().map_err(|error| format!("cannot find the program: {error}"))?;
    let name = format!("platlib/clang/native/libclang{}", env::consts::DLL_SUFFIX);
    let entries = |folder: PathBuf| fs::read_dir(folder).into_iter().flatten().flatten();
    let mut fetched = program
        .ancestors()
        .flat_map(|folder| entries(folder.join("mlx")))
        .filter(|wheel| wheel.file_name().to_string_lossy().starts_with("libclang-"))
        .flat_map(|wheel| entries(wheel.path()))
        .map(|data| data.path().join(&name))
        .filter(|file| file.is_file() && env::var_os("LIBCLANG_PATH").is_none());
    let other = || clang_sys::load_manually().map(|library| library.path().to_owned());
    fetched.next().map_or_else(other, Ok)
}

impl Clang {
    fn load(path: &Path) -> Result<Self, String> {
        // SAFETY: libclang's initializers have no preconditions, and its functions have these
        // types.
        unsafe {
            let library = Library::new(path).map_err(|error| error.to_string())?;
            macro_rules! function {
                ($name:literal) => {
                    *library.get($name).map_err(|error| format!("{}: {error}", path.display()))?
                };
            }
            Ok(Self {
                create_index: function!(b"clang_createIndex\0"),
                parse: function!(b"clang_parseTranslationUnit2\0"),
                count: function!(b"clang_getNumDiagnostics\0"),
                diagnostic: function!(b"clang_getDiagnostic\0"),
                severity: function!(b"clang_getDiagnosticSeverity\0"),
                message: function!(b"clang_getDiagnosticSpelling\0"),
                location: function!(b"clang_getDiagnosticLocation\0"),
                place: function!(b"clang_getExpansionLocation\0"),
                characters: function!(b"clang_getCString\0"),
                dispose_string: function!(b"clang_disposeString\0"),
                dispose_diagnostic: function!(b"clang_disposeDiagnostic\0"),
                dispose_unit: function!(b"clang_disposeTranslationUnit\0"),
                dispose_index: function!(b"clang_disposeIndex\0"),
                path: path.to_owned(),
                _library: library,
            })
        }
    }

    /// The errors of a text.
    fn errors(&self, text: &str) -> Result<Vec<String>, String> {
        let start = text.lines().position(|line| line == START).unwrap_or_default() + 1;
        let contents = CString::new(text).map_err(|_| "a text has a zero byte".to_owned())?;
        let arguments = ARGUMENTS.map(CStr::as_ptr);
        let mut file = CXUnsavedFile {
            Filename: FILE.as_ptr(),
            Contents: contents.as_ptr(),
            Length: text.len().try_into().expect("a text has fewer bytes than 2^32"),
        };
        // SAFETY: the strings live as long as this function, and what is made here is disposed of
        // once.
        unsafe {
            let index = (self.create_index)(0, 0);
            let mut unit = ptr::null_mut();
            let status = (self.parse)(
                index,
                FILE.as_ptr(),
                arguments.as_ptr(),
                arguments.len().try_into().expect("a few arguments"),
                &raw mut file,
                1,
                0,
                &raw mut unit,
            );
            if status != 0 {
                (self.dispose_index)(index);
                return Err(format!(
                    "{} does not parse C++ for OpenCL (libclang 14 or later does): error {status}",
                    self.path.display()
                ));
            }
            let mut errors = Vec::new();
            for i in 0..(self.count)(unit) {
                let diagnostic = (self.diagnostic)(unit, i);
                if (self.severity)(diagnostic) >= ERROR {
                    errors.push(self.describe(diagnostic, start));
                }
                (self.dispose_diagnostic)(diagnostic);
            }
            (self.dispose_unit)(unit);
            (self.dispose_index)(index);
            Ok(errors)
        }
    }

    /// The line and the message of a diagnostic. The body begins after line `start`.
    ///
    /// # Safety
    /// The diagnostic is one of this library.
    unsafe fn describe(&self, diagnostic: CXDiagnostic, start: usize) -> String {
        // SAFETY: promised by the caller; the message is disposed of once, after it was copied.
        unsafe {
            let mut line = 0;
            let none = ptr::null_mut;
            (self.place)(
                (self.location)(diagnostic),
                ptr::null_mut(),
                &raw mut line,
                none(),
                none(),
            );
            let message = (self.message)(diagnostic);
            let words = CStr::from_ptr((self.characters)(message)).to_string_lossy().into_owned();
            (self.dispose_string)(message);
            match (line as usize).checked_sub(start) {
                Some(line) => format!("line {line} of the text: {words}"),
                None => format!("before the text: {words}"),
            }
        }
    }
}
