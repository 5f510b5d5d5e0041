//! Rust bindings of mlx-c's headers.

use std::path::Path;

use crate::{Result, Target, run};

/// mlx-rs 0.33 passes `mode` as `*const i8`, and a `char` of C has no sign on Linux for aarch64.
const MLX_PAD: &str = r#"unsafe extern "C" {
    pub fn mlx_pad(
        res: *mut mlx_array,
        a: mlx_array,
        axes: *const ::std::os::raw::c_int,
        axes_num: usize,
        low_pad_size: *const ::std::os::raw::c_int,
        low_pad_size_num: usize,
        high_pad_size: *const ::std::os::raw::c_int,
        high_pad_size_num: usize,
        pad_value: mlx_array,
        mode: *const i8,
        s: mlx_stream,
    ) -> ::std::os::raw::c_int;
}"#;

/// Writes `$OUT_DIR/bindings.rs`, which `src/lib.rs` includes.
pub fn write(target: &Target, mlx_c: &Path) -> Result<()> {
    let mut builder = bindgen::builder()
        .header(mlx_c.join("mlx/c/mlx.h").to_string_lossy())
        .clang_args(["-include", "shim/half.h", "-I"])
        .clang_arg(mlx_c.to_string_lossy())
        .allowlist_item("_?mlx_.*|MLX_.*|b?float16_t")
        .blocklist_function("mlx_pad")
        .raw_line(MLX_PAD)
        // mlx-rs expects `float16_t` as a tuple struct, `bfloat16_t` as a number, and defaults.
        .new_type_alias("float16_t")
        .derive_default(true)
        .layout_tests(false)
        .formatter(bindgen::Formatter::None);
    // The wheel's libclang lacks headers (stddef.h, stdbool.h): use the compiler's.
    if let Some(folder) = compiler_headers() {
        builder = builder.clang_args(["-idirafter", &folder]);
    }
    let bindings = builder
        .generate()
        .map_err(|error| format!("bindgen cannot read mlx-c's headers: {error}"))?;
    target.write("bindings.rs", &bindings.to_string()).map(drop)
}

fn compiler_headers() -> Option<String> {
    let mut compiler = cc::Build::new().try_get_compiler().ok()?.to_command();
    let folder =
        run(compiler.arg("-print-file-name=include"), "finding the compiler's headers").ok()?;
    // A compiler without such a folder prints the bare name.
    Path::new(folder.trim()).is_absolute().then(|| folder.trim().to_owned())
}
