//! The platform that is built for, and the folders that the build writes to.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Result;

/// Which MLX: the table in `wheel` has one row for each backend and platform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    Cpu,
    Cuda,
    Metal,
}

pub struct Target {
    pub backend: Backend,
    /// As cargo names it: `x86_64` or `aarch64`.
    pub arch: String,
    /// Lowest macOS that the build must run on, as (major, minor); (0, 0) on Linux.
    pub macos: (u32, u32),
    /// `<target>/mlx`: what was fetched, for all profiles.
    pub cache: PathBuf,
    /// `<target>/<profile>`: where cargo puts binaries.
    pub profile: PathBuf,
    pub out: PathBuf,
}

impl Target {
    /// # Errors
    /// When MLX has no library for the platform.
    pub fn from_env() -> Result<Self> {
        println!("cargo::rerun-if-env-changed=MACOSX_DEPLOYMENT_TARGET");
        let (os, arch) = (var("CARGO_CFG_TARGET_OS"), var("CARGO_CFG_TARGET_ARCH"));
        let backend = match (os.as_str(), arch.as_str()) {
            ("macos", "aarch64") => Backend::Metal,
            ("linux", "x86_64" | "aarch64") if var("CARGO_CFG_TARGET_ENV") == "gnu" => {
                if env::var_os("CARGO_FEATURE_CUDA").is_some() {
                    Backend::Cuda
                } else {
                    Backend::Cpu
                }
            }
            _ => {
                return Err(format!(
                    "MLX is not published for {}: Steersman builds for Linux with glibc (x86-64, aarch64) and for macOS on Apple Silicon.",
                    var("TARGET")
                ));
            }
        };
        let out = PathBuf::from(var("OUT_DIR"));
        // OUT_DIR is <target>[/<triple>]/<profile>/build/mlx-sys-<hash>/out; cargo has no variable for the folders above.
        let profile = out
            .ancestors()
            .find(|path| path.ends_with("build"))
            .and_then(Path::parent)
            .ok_or_else(|| format!("no `build` folder above OUT_DIR ({})", out.display()))?
            .to_path_buf();
        let mut root = profile.parent().unwrap_or(&profile);
        if root.ends_with(var("TARGET")) {
            root = root.parent().unwrap_or(root);
        }
        let cache = root.join("mlx");
        fs::create_dir_all(&cache)
            .map_err(|error| format!("cannot make the folder {}: {error}", cache.display()))?;
        let macos = if backend == Backend::Metal { macos_version() } else { (0, 0) };
        Ok(Self { backend, arch, macos, cache, profile, out })
    }

    /// Where the shared libraries lie beside the binaries. The wheel's own layout (`mlx/lib`, `mlx_cpu.libs`) is kept
    /// below `lib`, because libmlx finds its companions by paths relative to itself.
    pub fn lib(&self) -> PathBuf {
        self.profile.join("lib/mlx/lib")
    }

    /// File name of MLX's shared library.
    pub fn libmlx(&self) -> &'static str {
        if self.backend == Backend::Metal { "libmlx.dylib" } else { "libmlx.so" }
    }

    /// Writes `text` to the file `name` in OUT_DIR.
    pub fn write(&self, name: &str, text: &str) -> Result<PathBuf> {
        let file = self.out.join(name);
        fs::write(&file, text)
            .map_err(|error| format!("cannot write {}: {error}", file.display()))?;
        Ok(file)
    }

    /// The folder `name` of the cache, filled by `fill` if it is not there yet.
    ///
    /// `fill` writes to another folder that gets the name when it is complete, so an interrupted download is never
    /// taken for a whole one. One build at a time: cargo runs this script once a profile, at the same time if asked to.
    pub fn cached(&self, name: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let folder = self.cache.join(name);
        let part = self.cache.join(format!("{name}.part"));
        let say = |error: std::io::Error| format!("cannot write {}: {error}", folder.display());
        let lock = File::create(self.cache.join("lock")).map_err(say)?;
        lock.lock().map_err(say)?;
        if folder.is_dir() {
            return Ok(folder);
        }
        if part.exists() {
            fs::remove_dir_all(&part).map_err(say)?;
        }
        fs::create_dir_all(&part).map_err(say)?;
        fill(&part)?;
        fs::rename(&part, &folder).map_err(say)?;
        Ok(folder)
    }
}

/// A variable that cargo sets for every build script.
fn var(name: &str) -> String {
    env::var(name).unwrap_or_default()
}

/// MACOSX_DEPLOYMENT_TARGET, else the version of this Mac, else the lowest that MLX has a library for.
fn macos_version() -> (u32, u32) {
    let host = || {
        let output = Command::new("sw_vers").arg("-productVersion").output().ok()?;
        Some(OsString::from(String::from_utf8_lossy(&output.stdout).trim()))
    };
    let version = env::var_os("MACOSX_DEPLOYMENT_TARGET").or_else(host).unwrap_or_default();
    let version = version.to_string_lossy();
    let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}
