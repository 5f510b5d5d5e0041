//! Builds `mlx-sys`: finds or fetches MLX, writes the Rust bindings of mlx-c, compiles mlx-c, and
//! places the libraries beside the binaries.
//!
//! Needs only cargo, `python3 -m pip` and a C++20 compiler: MLX, OpenBLAS and libclang come as PyPI
//! wheels (`wheel`), mlx-c's source is in the published `mlx-sys` crate (`source`). Fetched files
//! stay in `<target>/mlx`, for all profiles.
//!
//! # Why
//! The published crate builds on macOS only: it compiles MLX with CMake from a git clone. The wheels
//! contain the same library, built by MLX's authors, for every platform that Steersman supports;
//! the rest compiles in ten seconds.

mod bindings;
mod compile;
mod place;
mod source;
mod target;
mod wheel;

use std::process::{Command, ExitCode};

use compile::Compiler;
use target::{Backend, Target};

/// An error tells the person who runs cargo what is missing and how to get it.
type Result<T> = std::result::Result<T, String>;

fn main() -> ExitCode {
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            for line in message.lines() {
                println!("cargo::error={line}");
            }
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<()> {
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rerun-if-changed=shim");
    let target = Target::from_env()?;
    let own = wheel::own_mlx(&target)?;
    let compiler = Compiler::probe(&target, own.is_none())?;
    let mlx_c = source::mlx_c(&target)?;
    wheel::libclang(&target)?;
    bindings::write(&target, &mlx_c)?;

    let (mlx, openblas) = match own {
        Some(root) => {
            let root_name = root.display();
            println!("cargo::warning=MLX_ROOT: using MLX in {root_name} with its own BLAS");
            place::in_place(&target, &root)?;
            (root, false)
        }
        None => {
            let mlx = wheel::mlx(&target)?;
            let openblas = wheel::openblas(&target)?;
            place::beside_binaries(&target, &mlx, openblas.as_deref())?;
            (mlx, openblas.is_some())
        }
    };
    let include = mlx.join("include");
    compiler.compile(&target, &mlx_c, &include, openblas)?;

    println!("cargo::rustc-link-search=native={}", target.lib().display());
    if openblas {
        println!("cargo::rustc-link-lib=dylib=scipy_openblas");
    }
    println!("cargo::rustc-link-lib=dylib=mlx");
    println!("cargo::rustc-env=MLX_VERSION={}", wheel::MLX_VERSION);
    println!("cargo::metadata=version={}", wheel::MLX_VERSION);
    println!("cargo::metadata=include={}", include.display());
    println!("cargo::metadata=lib={}", target.lib().display());
    Ok(())
}

/// Runs `command` and returns its output. An error begins with `purpose` ("fetching MLX") and ends
/// with the last lines of stderr.
fn run(command: &mut Command, purpose: &str) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .map_err(|error| format!("{purpose}: cannot start `{program}`: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = stderr.lines().filter(|line| !line.trim().is_empty()).collect();
    let tail = &lines[lines.len().saturating_sub(12)..];
    Err(format!("{purpose}: `{program}` failed ({})\n{}", output.status, tail.join("\n")))
}
