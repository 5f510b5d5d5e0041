//! Rust bindings of mlx-c's headers.

use std::path::Path;

use crate::{Result, Target, run};

/// Writes `$OUT_DIR/bindings.rs`, which `src/lib.rs` includes.
pub fn write(target: &Target, mlx_c: &Path) -> Result<()> {
    let mut builder = bindgen::builder()
        .header(mlx_c.join("mlx/c/mlx.h").to_string_lossy())
        .clang_args(["-include", "shim/half.h", "-I"])
        .clang_arg(mlx_c.to_string_lossy())
        .allowlist_item("_?mlx_.*|MLX_.*|b?float16_t")
        .new_type_alias("float16_t")
        .derive_default(true)
        .default_enum_style(bindgen::EnumVariation::Consts)
        .layout_tests(false)
        .formatter(bindgen::Formatter::None);
    // libclang from a wheel comes without the compiler's own headers (stddef.h, stdbool.h): the C compiler lends its own.
    for folder in compiler_headers() {
        builder = builder.clang_arg("-idirafter").clang_arg(folder);
    }
    let bindings = builder
        .generate()
        .map_err(|error| format!("bindgen cannot read mlx-c's headers: {error}"))?;
    target.write("bindings.rs", &bindings.to_string()).map(drop)
}

fn compiler_headers() -> Vec<String> {
    let mut compiler = cc::Build::new().get_compiler().to_command();
    let folder =
        run(compiler.arg("-print-file-name=include"), "asking the C compiler for its headers");
    folder
        .into_iter()
        .map(|folder| folder.trim().to_owned())
        .filter(|folder| Path::new(folder).is_absolute())
        .collect()
}
