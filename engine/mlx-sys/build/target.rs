//! The target platform, and the folders that the build writes to.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Result;

/// The build of MLX. The table in `wheel` has a row for each backend and platform.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    Cpu,
    Cuda,
    Metal,
}

pub struct Target {
    pub backend: Backend,
    /// Cargo's name: `x86_64` or `aarch64`.
    pub arch: String,
    /// Lowest macOS that the program must run on, as (major, minor); `None` for Linux.
    pub macos: Option<(u32, u32)>,
    /// `<target>/<profile>`, cargo's folder of binaries.
    profile: PathBuf,
    /// `<target>/mlx`, fetched files for all profiles.
    cache: PathBuf,
    out: PathBuf,
}

impl Target {
    /// Fails if there is no MLX for the platform.
    pub fn from_env() -> Result<Self> {
        println!("cargo::rerun-if-env-changed=MACOSX_DEPLOYMENT_TARGET");
        let (os, arch, triple) =
            (var("CARGO_CFG_TARGET_OS"), var("CARGO_CFG_TARGET_ARCH"), var("TARGET"));
        let backend = match (os.as_str(), arch.as_str(), var("CARGO_CFG_TARGET_ENV").as_str()) {
            ("macos", "aarch64", _) => Backend::Metal,
            ("linux", "x86_64" | "aarch64", "gnu") => match env::var_os("CARGO_FEATURE_CUDA") {
                Some(_) => Backend::Cuda,
                None => Backend::Cpu,
            },
            _ => {
                return Err(format!(
                    "there is no prebuilt MLX for {triple}: Steersman builds for Linux with \
                     glibc (x86-64 and aarch64) and for macOS on Apple Silicon"
                ));
            }
        };
        let macos = (backend == Backend::Metal).then(macos_version);

        // OUT_DIR is <target>[/<triple>]/<profile>/build/mlx-sys-<hash>/out. Cargo has no variable
        // for the folders above.
        let out = PathBuf::from(var("OUT_DIR"));
        let profile = out
            .ancestors()
            .find(|folder| folder.ends_with("build"))
            .and_then(Path::parent)
            .ok_or_else(|| {
                format!("OUT_DIR is {}, which has no parent folder `build`", out.display())
            })?
            .to_path_buf();
        let above = profile.parent().unwrap_or(&profile);
        let cache = above.ancestors().find(|folder| !folder.ends_with(&triple)).unwrap_or(above);
        let cache = cache.join("mlx");
        fs::create_dir_all(&cache)
            .map_err(|error| format!("cannot create the folder {}: {error}", cache.display()))?;
        Ok(Self { backend, arch, macos, profile, cache, out })
    }

    /// File name of MLX's shared library.
    pub fn libmlx(&self) -> &'static str {
        if self.backend == Backend::Metal { "libmlx.dylib" } else { "libmlx.so" }
    }

    /// The folder of all libraries beside the binaries.
    pub fn beside_binaries(&self) -> PathBuf {
        self.profile.join("lib")
    }

    /// The folder of MLX's shared libraries. The wheel's layout (`mlx/lib`, `mlx_cpu.libs`) is kept,
    /// because libmlx loads other libraries by relative paths. `rpath.rs` names the same folder.
    pub fn lib(&self) -> PathBuf {
        self.beside_binaries().join("mlx/lib")
    }

    /// Writes `text` to the file `name` in OUT_DIR.
    pub fn write(&self, name: &str, text: &str) -> Result<PathBuf> {
        let file = self.out.join(name);
        fs::write(&file, text)
            .map_err(|error| format!("cannot write {}: {error}", file.display()))?;
        Ok(file)
    }

    /// The folder `name` of the cache, filled by `fill` if it does not exist.
    ///
    /// `fill` writes to a temporary folder, which is renamed when it is complete, so an interrupted
    /// download is never used. The lock serializes concurrent builds of two profiles.
    pub fn cached(&self, name: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let folder = self.cache.join(name);
        let part = self.cache.join(format!("{name}.part"));
        let fail = |error| format!("cannot write {}: {error}", folder.display());
        let lock = File::create(self.cache.join("lock")).map_err(fail)?;
        lock.lock().map_err(fail)?;
        if folder.is_dir() {
            return Ok(folder);
        }
        if part.exists() {
            fs::remove_dir_all(&part).map_err(fail)?;
        }
        fs::create_dir_all(&part).map_err(fail)?;
        fill(&part)?;
        fs::rename(&part, &folder).map_err(fail)?;
        Ok(folder)
    }
}

/// A variable that cargo sets for every build script.
fn var(name: &str) -> String {
    env::var(name).unwrap_or_default()
}

/// MACOSX_DEPLOYMENT_TARGET, else the version of this Mac, else the lowest that MLX supports.
fn macos_version() -> (u32, u32) {
    let host_version = || {
        let output = Command::new("sw_vers").arg("-productVersion").output().ok()?;
        String::from_utf8(output.stdout).ok()
    };
    let version = env::var("MACOSX_DEPLOYMENT_TARGET").ok().or_else(host_version);
    let version = version.unwrap_or_else(|| "14.0".to_owned());
    let mut parts = version.trim().split('.').map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}
