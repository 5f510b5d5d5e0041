//! Exports the functions that libmlx calls in the program instead of CUDA's driver (shim/cuda_driver.h), and sets the
//! run path of MLX's libraries, relative to the program: `lib`, or `../lib` for tests, examples and `bin/`. The server also
//! looks where pip puts MLX's and OpenBLAS's wheels: its own wheel has it in `site-packages/steersman/bin/`
//! (server/package/build.py).
//!
//! This is the build script of each of our packages that links programs: `build =
//! "../engine/mlx-sys/rpath.rs"` in its Cargo.toml. Cargo applies link arguments only to the package
//! of the build script, so `mlx-sys` cannot set them for its users; and `.cargo/config.toml` is
//! ignored if a user sets RUSTFLAGS.
//!
//! The tag is DT_RUNPATH. LD_LIBRARY_PATH takes precedence over it, so a program can run with
//! another build of the same MLX.

fn main() {
    println!("cargo::rerun-if-changed=Cargo.toml");
    let is_macos = std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "macos");
    let (origin, tag) =
        if is_macos { ("@executable_path", "") } else { ("$ORIGIN", "--enable-new-dtags,") };
    if !is_macos {
        for function in ["cuModuleLoadDataEx", "cuModuleGetFunction", "cuLaunchKernelEx"] {
            println!("cargo::rustc-link-arg=-Wl,--export-dynamic-symbol={function}");
        }
    }
    for folder in ["lib/mlx/lib", "../lib/mlx/lib"] {
        println!("cargo::rustc-link-arg=-Wl,{tag}-rpath,{origin}/{folder}");
    }
    if std::env::var("CARGO_PKG_NAME").as_deref() == Ok("steersman") {
        for folder in ["../../mlx/lib", "../../scipy_openblas32/lib"] {
            println!("cargo::rustc-link-arg-bins=-Wl,{tag}-rpath,{origin}/{folder}");
        }
    }
}
