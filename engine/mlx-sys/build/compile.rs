//! Compiles mlx-c and our shims, as one file, into a static library.
//!
//! # Why one file
//! Each of mlx-c's 28 files spends most of its compile time on the same MLX headers: one core takes
//! 55 s for separate files, 10 s for one (gcc 12, -O2). And a linker includes a whole object or
//! nothing, so it cannot drop the shims.

use std::env;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use crate::{Backend, Result, Target, run};

/// A compiler must accept this: C++20, as MLX's headers use it.
const CPP20: &str = "
#include <concepts>
#include <span>
#include <version>
template <typename T> requires std::integral<T> auto size(std::span<T> s) { return s.size(); }
";
/// In gcc since version 13, in clang's own library since 17.
const FORMAT: &str = "
#include <format>
#include <string>
std::string text(int n) { return std::format(\"{}\", n); }
";
/// The wheels are made for manylinux_2_35.
const GLIBC: &str = "
#include <features.h>
#if !__GLIBC_PREREQ(2, 35)
#error older than glibc 2.35
#endif
";

pub struct Compiler {
    build: cc::Build,
    has_format: bool,
}

impl Compiler {
    /// Fails without a C++20 compiler, and with `wheel` if MLX's wheel needs a newer C library.
    pub fn probe(target: &Target, wheel: bool) -> Result<Self> {
        let no_compiler = |error| {
            format!(
                "a C++20 compiler is needed (gcc 12, clang 15 or newer). Debian and Ubuntu: `apt \
                 install g++`; Fedora: `dnf install gcc-c++`; macOS: `xcode-select --install`. Or \
                 set the environment variable CXX.\n{error}"
            )
        };
        let old_glibc = |error| {
            format!(
                "MLX's wheels need glibc 2.35 (Debian 12, Ubuntu 22.04, Fedora 36 or newer). On an \
                 older system, build MLX from source and set MLX_ROOT to its folder.\n{error}"
            )
        };
        if target.backend == Backend::Metal && env::var_os("MACOSX_DEPLOYMENT_TARGET").is_none() {
            #[allow(unsafe_code, reason = "cc reads the deployment target from the environment")]
            // SAFETY: this script has not started a thread yet, so nothing reads the environment.
            unsafe {
                // Rust's default is macOS 11, whose C++ library has no std::format. MLX needs 14.
                env::set_var("MACOSX_DEPLOYMENT_TARGET", "14.0");
            }
        }
        let mut build = cc::Build::new();
        build.cpp(true).std("c++20").warnings(false).debug(false).opt_level(2);
        let compiler = build.try_get_compiler().map_err(|error| no_compiler(error.to_string()))?;
        let accepts = |name: &str, text: &str| {
            let file = target.write(name, text)?;
            let mut check = compiler.to_command();
            run(check.arg("-fsyntax-only").arg(&file), "trying the C++ compiler")
        };
        accepts("cpp20.cpp", CPP20).map_err(no_compiler)?;
        if wheel && target.backend != Backend::Metal {
            accepts("glibc.cpp", GLIBC).map_err(old_glibc)?;
        }
        let has_format = accepts("format.cpp", FORMAT).is_ok();
        Ok(Self { build, has_format })
    }

    /// Compiles mlx-c, at `mlx_c`, against the MLX headers in `include`.
    pub fn compile(
        mut self,
        target: &Target,
        mlx_c: &Path,
        include: &Path,
        openblas: bool,
    ) -> Result<()> {
        let mut unit = String::new();
        for file in cpp_files(&mlx_c.join("mlx/c"))? {
            let _ = writeln!(unit, "#include \"{}\"", file.display());
        }
        unit.push_str("#include \"shim/runtime.h\"\n");
        if openblas {
            self.build.define("STEERSMAN_OPENBLAS", None);
        }
        // mlx-c uses std::format without including its header.
        for header in ["shim/half.h", if self.has_format { "format" } else { "shim/format.h" }] {
            self.build.flag("-include").flag(header);
        }
        self.build
            .file(target.write("mlxc.cpp", &unit)?)
            .includes([Path::new("."), mlx_c, include])
            // MLX's errors contain `at mlx/c/ops.cpp:2291`, without this build's folder.
            .flag_if_supported(format!("-ffile-prefix-map={}/=", mlx_c.display()))
            .try_compile("mlxc")
            .map_err(|error| format!("compiling mlx-c failed: {error}"))
    }
}

fn cpp_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder)
        .map_err(|error| format!("cannot read {}: {error}", folder.display()))?;
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "cpp"));
    files.sort();
    Ok(files)
}
