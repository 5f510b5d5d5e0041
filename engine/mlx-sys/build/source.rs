//! mlx-c's source: it lies in the published `mlx-sys` crate, which cargo fetches for us without building it.
//!
//! A package of no content that depends on the published crate is written to the cache, and `cargo metadata` is run in it:
//! cargo downloads, checks and unpacks, with the user's own mirrors and proxies, and tells where.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Result, Target, run};

const VERSION: &str = "0.7.0";
/// sha256 of the published crate, as its line in a Cargo.lock has it.
const CHECKSUM: &str = "da965f83ce211b80f9b681d9bbd6fa625fe6bb2e659ba7bc55dd95eea8d3b028";

/// The folder that holds `mlx/c/*.{h,cpp}`.
pub fn mlx_c(target: &Target) -> Result<PathBuf> {
    target.cached(&format!("mlx-c-{VERSION}"), |folder| {
        let package = folder.join("fetch");
        let published = published(&package)?;
        let copy = |from: &Path, to: &Path| {
            copy_tree(from, to).map_err(|error| format!("cannot copy mlx-c's source: {error}"))
        };
        copy(&published.join("src/mlx-c/mlx"), &folder.join("mlx"))?;
        fs::remove_dir_all(&package)
            .map_err(|error| format!("cannot remove {}: {error}", package.display()))
    })
}

/// The folder of the published crate, wherever cargo keeps it.
fn published(package: &Path) -> Result<PathBuf> {
    let write = |error| format!("cannot write {}: {error}", package.display());
    fs::create_dir_all(package.join("src")).map_err(write)?;
    fs::write(package.join("src/lib.rs"), "").map_err(write)?;
    // An empty [workspace] keeps cargo from looking for ours above this folder, and with it from our own [patch].
    let manifest = format!(
        "[package]\nname = \"fetch\"\nversion = \"0.0.0\"\nedition = \"2021\"\n\n\
         [dependencies]\nmlx-sys = {{ version = \"={VERSION}\", default-features = false }}\n\n[workspace]\n"
    );
    fs::write(package.join("Cargo.toml"), manifest).map_err(write)?;

    let metadata = run(
        cargo()
            .args(["metadata", "--quiet", "--format-version=1", "--manifest-path"])
            .arg(package.join("Cargo.toml")),
        "fetching mlx-c (in the published crate mlx-sys)",
    )?;
    let lock = fs::read_to_string(package.join("Cargo.lock"))
        .map_err(|error| format!("cargo left no Cargo.lock: {error}"))?;
    if !lock.contains(&format!("checksum = \"{CHECKSUM}\"")) {
        return Err(format!(
            "the crate mlx-sys {VERSION} that cargo fetched is not the published one (sha256 {CHECKSUM})"
        ));
    }
    // One long line of JSON; of all packages that it names, one has mlx-c in it.
    metadata
        .split("\"manifest_path\":\"")
        .skip(1)
        .filter_map(|rest| Path::new(rest.split('"').next()?).parent())
        .find(|folder| folder.join("src/mlx-c/mlx/c/mlx.h").is_file())
        .map(Path::to_path_buf)
        .ok_or_else(|| "cargo fetched the crate mlx-sys, but src/mlx-c is not in it".to_owned())
}

/// The cargo that runs us, without what it tells build scripts alone: a nested cargo would take it for the user's wish.
fn cargo() -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os() {
        let known = name.to_string_lossy();
        let set_by_cargo = [
            "CARGO_CFG_",
            "CARGO_FEATURE_",
            "CARGO_MANIFEST_",
            "CARGO_PKG_",
            "CARGO_MAKEFLAGS",
            "CARGO_ENCODED_RUSTFLAGS",
            "DEP_",
        ];
        if set_by_cargo.iter().any(|prefix| known.starts_with(prefix)) {
            cargo.env_remove(&name);
        }
    }
    cargo.env_remove("TARGET").env_remove("HOST").env_remove("RUSTC_WORKSPACE_WRAPPER");
    cargo
}

fn copy_tree(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}
