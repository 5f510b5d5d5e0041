//! Tells a program where MLX's libraries lie, relative to itself: `lib/mlx/lib` or, for tests and examples, `../lib/mlx/lib`.
//!
//! The build script of every package of ours that links a program (`build = "../engine/mlx-sys/rpath.rs"` in its
//! Cargo.toml), because cargo passes a link argument from a build script to its own package alone. In `.cargo/config.toml`
//! it would be lost as soon as a user sets RUSTFLAGS.
//!
//! DT_RUNPATH, not DT_RPATH: LD_LIBRARY_PATH comes first, so the same program runs with another build of the same MLX.

fn main() {
    println!("cargo::rerun-if-changed=Cargo.toml");
    let (origin, tags) = match std::env::var("CARGO_CFG_TARGET_OS").as_deref() {
        Ok("macos") => ("@executable_path", ""),
        _ => ("$ORIGIN", "-Wl,--enable-new-dtags,"),
    };
    let tags = if tags.is_empty() { "-Wl," } else { tags };
    for folder in ["lib/mlx/lib", "../lib/mlx/lib"] {
        println!("cargo::rustc-link-arg={tags}-rpath,{origin}/{folder}");
    }
}
