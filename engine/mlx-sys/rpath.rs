//! Tells a program where MLX's libraries lie, relative to itself: in `lib`, or in `../lib` for
//! tests, examples and `bin/`.
//!
//! It is the build script of each of our packages that links programs: `build =
//! "../engine/mlx-sys/rpath.rs"` in the Cargo.toml. Cargo passes a link argument only to the
//! package whose build script asks for it, so `mlx-sys` cannot ask for its users; and what stands
//! in `.cargo/config.toml` is lost when a user sets RUSTFLAGS.
//!
//! The tag is DT_RUNPATH, which comes after LD_LIBRARY_PATH: the same program runs with another
//! build of the same MLX.

fn main() {
    println!("cargo::rerun-if-changed=Cargo.toml");
    let (origin, tag) = match std::env::var("CARGO_CFG_TARGET_OS").as_deref() {
        Ok("macos") => ("@executable_path", ""),
        _ => ("$ORIGIN", "--enable-new-dtags,"),
    };
    for folder in ["lib/mlx/lib", "../lib/mlx/lib"] {
        println!("cargo::rustc-link-arg=-Wl,{tag}-rpath,{origin}/{folder}");
    }
}
