//! Builds `mlx-sys`: finds or fetches MLX, compiles mlx-c against it, writes the Rust bindings, places the libraries.
//!
//! Needs cargo, `python3 -m pip` and a C++20 compiler, and nothing else: MLX itself, OpenBLAS and libclang come as PyPI
//! wheels (`wheel`), mlx-c's source lies in the published `mlx-sys` crate (`source`). What was fetched is kept in
//! `<target>/mlx` and shared by all profiles.
//!
//! # Why
//! The published crate builds on macOS alone and compiles MLX with CMake from a git clone: 20 minutes on two cores and no
//! Linux. A wheel holds the same library, made by MLX's authors, for every platform we serve; mlx-c takes a minute.

mod bindings;
mod compile;
mod place;
mod source;
mod target;
mod wheel;

use std::process::{Command, ExitCode};

use compile::Compiler;
use target::{Backend, Target};

/// What is missing and how to get it, in words for the person who runs cargo.
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
            println!(
                "cargo::warning=MLX is taken from {} (MLX_ROOT), with the BLAS that it has",
                root.display()
            );
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

/// Runs `command` and returns what it printed; `purpose` ("fetching MLX") opens the message when it fails.
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
