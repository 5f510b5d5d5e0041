//! Compiles mlx-c and our shims, as one file, into a static library.
//!
//! # Why one file
//! Each of mlx-c's 28 files spends most of its time on the same MLX headers: 55 s of one core apart, 10 s together
//! (gcc 12, -O2). And the linker takes one object whole, so the shims are never left out.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use crate::{Backend, Result, Target, run};

/// What a compiler must accept: C++20, as MLX's headers use it.
const CPP20: &str = "
#include <concepts>
#include <span>
#include <version>
template <typename T> requires std::integral<T> int bytes(std::span<T> s) { return int(s.size_bytes()); }
";
/// gcc has `<format>` from version 13 on, clang's own library from 17 on.
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
    /// When there is no C++20 compiler, or the system's C library is too old for MLX's wheels and they are asked for.
    pub fn probe(target: &Target, with_wheel: bool) -> Result<Self> {
        let needed = "a C++20 compiler is needed (gcc 12, clang 15 or newer)";
        let how = "Debian and Ubuntu: `apt install g++`; Fedora: `dnf install gcc-c++`; macOS: `xcode-select --install`. \
                   Or name one in the environment variable CXX.";
        let mut build = cc::Build::new();
        build.cpp(true).std("c++20").warnings(false).debug(false).opt_level(2);
        let compiler =
            build.try_get_compiler().map_err(|error| format!("{needed}. {how}\n{error}"))?;
        let accepts = |name: &str, text: &str| {
            let file = target.write(name, text)?;
            run(compiler.to_command().arg("-fsyntax-only").arg(&file), "trying the C++ compiler")
        };
        accepts("cpp20.cpp", CPP20).map_err(|error| format!("{needed}. {how}\n{error}"))?;
        if with_wheel && target.backend != Backend::Metal {
            accepts("glibc.cpp", GLIBC).map_err(|error| {
                format!(
                    "MLX's wheels need glibc 2.35 (Debian 12, Ubuntu 22.04, Fedora 36 or newer). On an older system, build MLX \
                     yourself and point MLX_ROOT to it.\n{error}"
                )
            })?;
        }
        let has_format = accepts("format.cpp", FORMAT).is_ok();
        Ok(Self { build, has_format })
    }

    /// Compiles mlx-c, at `mlx_c`, against the MLX headers in `include`, and links the result to this crate.
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
            // MLX's errors name the file they come from; the folder of this build means nothing to who reads them.
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
