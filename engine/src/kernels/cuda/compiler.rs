//! Compiles kernels with NVRTC, and keeps the code on disk.
//!
//! NVRTC is a part of the CUDA libraries that MLX needs, and is looked for when the first kernel is compiled, so that
//! the program starts without it.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr;
use std::time::SystemTime;

use libloading::{Library, Symbol};
use sha2::{Digest, Sha256};

use super::Capability;

/// Names of the library: those of CUDA 13 and 12, and the one in a development installation.
const LIBRARIES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Most files in the folder; the oldest are deleted first.
const FILES: usize = 256;

/// Bytes of the SHA-256 before the code in a file.
const DIGEST: usize = 32;

/// `nvrtcProgram`.
type Program = *mut c_void;

/// A compiler for one device.
pub struct Compiler {
    nvrtc: Library,
    /// NVRTC's version, which is a part of the names of files.
    version: [c_int; 2],
    capability: Capability,
    /// Where code is kept, if anywhere.
    folder: Option<PathBuf>,
}

impl Compiler {
    /// A compiler for devices of `capability` that keeps code in `folder`.
    ///
    /// # Errors
    /// Why NVRTC cannot be used.
    pub fn open(capability: Capability, folder: Option<PathBuf>) -> Result<Self, String> {
        // SAFETY: NVRTC's initializers do nothing but prepare its own state.
        let mut opened = LIBRARIES.iter().map(|name| unsafe { Library::new(name) });
        let nvrtc = opened.find_map(Result::ok);
        let Some(nvrtc) = nvrtc else {
            return Err(format!("none of {} can be loaded", LIBRARIES.join(", ")));
        };
        let mut compiler = Self { nvrtc, version: [0; 2], capability, folder };
        let [mut major, mut minor] = [0; 2];
        // SAFETY: nvrtcVersion fills two integers.
        compiler.check("nvrtcVersion", unsafe {
            let version: Symbol<'_, unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int> =
                compiler.function(c"nvrtcVersion")?;
            version(&raw mut major, &raw mut minor)
        })?;
        compiler.version = [major, minor];
        Ok(compiler)
    }

    /// The code of `text`, whose kernel is called `name`; from disk, if it is there.
    ///
    /// # Errors
    /// NVRTC's messages if it does not compile.
    pub fn compile(&self, name: &CStr, text: &str) -> Result<Vec<u8>, String> {
        let Capability { major, minor, .. } = self.capability;
        let options = [format!("--gpu-architecture=sm_{major}{minor}"), "--std=c++17".into()];
        let Some(folder) = &self.folder else { return self.run(name, text, &options) };
        let mut sha = Sha256::new();
        sha.update(format!("{:?} {options:?} {name:?}\n{text}", self.version));
        let path = folder.join(format!("{}.cubin", hex::encode(&sha.finalize()[..16])));
        if let Some(code) = read(&path) {
            return Ok(code);
        }
        let code = self.run(name, text, &options)?;
        if let Err(error) = write(&path, &code) {
            tracing::warn!(path = %path.display(), %error, "compiled kernel not saved");
        }
        Ok(code)
    }

    fn run(&self, name: &CStr, text: &str, options: &[String]) -> Result<Vec<u8>, String> {
        let text = CString::new(text).map_err(|error| error.to_string())?;
        let options: Vec<CString> = options
            .iter()
            .map(|option| CString::new(option.as_str()).map_err(|error| error.to_string()))
            .collect::<Result<_, _>>()?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = Program::default();
        // SAFETY: the signatures are those of nvrtc.h. NVRTC copies the text; strings end with a zero byte; buffers
        // have the sizes that NVRTC asks for; the program is destroyed once, after its last use.
        unsafe {
            type Create = unsafe extern "C" fn(
                *mut Program,
                *const c_char,
                *const c_char,
                c_int,
                *const *const c_char,
                *const *const c_char,
            ) -> c_int;
            type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
            let create: Symbol<'_, Create> = self.function(c"nvrtcCreateProgram")?;
            let compile: Symbol<'_, Compile> = self.function(c"nvrtcCompileProgram")?;
            let destroy: Symbol<'_, unsafe extern "C" fn(*mut Program) -> c_int> =
                self.function(c"nvrtcDestroyProgram")?;
            let created =
                create(&raw mut program, text.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null());
            self.check("nvrtcCreateProgram", created)?;
            let count = c_int::try_from(options.len()).expect("a few options");
            let code = match compile(program, count, options.as_ptr()) {
                0 => self.fetch(program, c"nvrtcGetCUBINSize", c"nvrtcGetCUBIN"),
                _ => {
                    let log = self.fetch(program, c"nvrtcGetProgramLogSize", c"nvrtcGetProgramLog");
                    Err(log.map_or_else(|e| e, |log| String::from_utf8_lossy(&log).into_owned()))
                }
            };
            destroy(&raw mut program);
            code
        }
    }

    /// The bytes of a program that one function counts and another one copies.
    ///
    /// # Safety
    /// `size` and `get` have the signatures of `nvrtcGetCUBINSize` and `nvrtcGetCUBIN`; `program` has been compiled.
    unsafe fn fetch(&self, program: Program, size: &CStr, get: &CStr) -> Result<Vec<u8>, String> {
        // SAFETY: promised by the caller; the buffer has the size that NVRTC asks for.
        unsafe {
            let size: Symbol<'_, unsafe extern "C" fn(Program, *mut usize) -> c_int> =
                self.function(size)?;
            let get: Symbol<'_, unsafe extern "C" fn(Program, *mut c_char) -> c_int> =
                self.function(get)?;
            let mut bytes = 0;
            self.check("its size", size(program, &raw mut bytes))?;
            let mut buffer = vec![0u8; bytes];
            self.check("its bytes", get(program, buffer.as_mut_ptr().cast()))?;
            Ok(buffer)
        }
    }

    /// # Safety
    /// `T` is the signature of the function.
    unsafe fn function<T>(&self, name: &CStr) -> Result<Symbol<'_, T>, String> {
        // SAFETY: promised by the caller.
        unsafe { self.nvrtc.get(name.to_bytes_with_nul()) }.map_err(|error| error.to_string())
    }

    fn check(&self, what: &str, status: c_int) -> Result<(), String> {
        if status == 0 { Ok(()) } else { Err(format!("NVRTC: {what}: error {status}")) }
    }
}

/// The code in a file; `None` if there is none, or it is damaged.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut code = steersman_gguf::files::read_at(path).ok()?;
    if code.len() <= DIGEST || Sha256::digest(&code[DIGEST..]).as_slice() != &code[..DIGEST] {
        return None;
    }
    code.drain(..DIGEST);
    Some(code)
}

/// Writes a file at once, so that no other process reads a part of it.
fn write(path: &Path, code: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().expect("it is in a folder");
    steersman_files::create_private_folder(folder)?;
    delete_oldest(folder, FILES - 1)?;
    steersman_files::replace_private(path, &[&Sha256::digest(code)[..], code].concat())
}

/// Deletes the files of `folder` written first, so that `left` remain.
fn delete_oldest(folder: &Path, left: usize) -> std::io::Result<()> {
    let mut files = Vec::new();
    for file in fs::read_dir(folder)? {
        let file = file?;
        let written = file.metadata().and_then(|m| m.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
        files.push((written, file.path()));
    }
    files.sort();
    let surplus = files.len().saturating_sub(left);
    for (_, path) in &files[..surplus] {
        // Another process may have deleted it.
        let _ = fs::remove_file(path);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_kept_and_damaged_files_are_compiled_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernels/a.cubin");
        assert_eq!(read(&path), None);
        write(&path, b"code").unwrap();
        assert_eq!(read(&path).as_deref(), Some(&b"code"[..]));
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert_eq!(read(&path), None);
        fs::write(&path, b"").unwrap();
        assert_eq!(read(&path), None);
    }

    #[test]
    fn the_folder_of_compiled_kernels_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        for i in 0..FILES + 5 {
            write(&folder.path().join(format!("{i}.cubin")), b"code").unwrap();
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), FILES);
        assert!(read(&folder.path().join(format!("{}.cubin", FILES + 4))).is_some());
    }
}
