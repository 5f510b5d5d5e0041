//! Compiles mlx-c and our shims, as one file, into a static library.
//!
//! # Why one file
//! Each of mlx-c's 28 files spends most of its time on the same MLX headers: one core takes 55 s
//! for them apart, 10 s together (gcc 12, -O2). And a linker takes an object whole or not at all,
//! so the shims are never left out.

use std::env;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use crate::{Backend, Result, Target, run};

/// What a compiler must accept: C++20, as MLX's headers use it.
const CPP20: &str = "
#include <concepts>
#include <span>
#include <version>
template <typename T> requires std::integral<T> auto size(std::span<T> s) { return s.size(); }
";
/// gcc has it from version 13 on, clang's own library from 17 on.
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
    /// # Errors
    /// When there is no C++20 compiler; with `wheel`, when MLX's wheel needs a newer C library.
    pub fn probe(target: &Target, wheel: bool) -> Result<Self> {
        let no_compiler = |error| {
            format!(
                "a C++20 compiler is needed (gcc 12, clang 15 or newer). Debian and Ubuntu: `apt \
                 install g++`; Fedora: `dnf install gcc-c++`; macOS: `xcode-select --install`. Or \
                 name one in the environment variable CXX.\n{error}"
            )
        };
        let old_glibc = |error| {
            format!(
                "MLX's wheels need glibc 2.35 (Debian 12, Ubuntu 22.04, Fedora 36 or newer). On an \
                 older system, build MLX from source and point MLX_ROOT to it.\n{error}"
            )
        };
        if target.backend == Backend::Metal && env::var_os("MACOSX_DEPLOYMENT_TARGET").is_none() {
            #[allow(unsafe_code, reason = "cc takes the deployment target from the environment")]
            // SAFETY: this script has started no thread yet, so none reads the environment now.
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

    /// Compiles mlx-c, at `mlx_c`, against the MLX headers in `include`; this crate links it.
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
        // mlx-c says std::format and includes nothing for it.
        for header in ["shim/half.h", if self.has_format { "format" } else { "shim/format.h" }] {
            self.build.flag("-include").flag(header);
        }
        self.build
            .file(target.write("mlxc.cpp", &unit)?)
            .includes([Path::new("."), mlx_c, include])
            // MLX's errors say `at mlx/c/ops.cpp:2291`, without the folder of this build before it.
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
