//! mlx-c's source: it lies in the published `mlx-sys` crate, which cargo fetches without building.
//!
//! `cargo metadata` runs in an empty package that depends on that crate. Cargo downloads, checks
//! and unpacks it, through whatever mirror or proxy the user has configured, and says where it is.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Result, Target, run};

const VERSION: &str = "0.7.0";
/// sha256 of the published crate, as a Cargo.lock has it.
const CHECKSUM: &str = "da965f83ce211b80f9b681d9bbd6fa625fe6bb2e659ba7bc55dd95eea8d3b028";
/// What cargo tells build scripts, and a nested cargo would take for the user's wish.
const SET_BY_CARGO: [&str; 8] = [
    "CARGO_CFG_",
    "CARGO_ENCODED_RUSTFLAGS",
    "CARGO_FEATURE_",
    "CARGO_MAKEFLAGS",
    "CARGO_MANIFEST_",
    "CARGO_PKG_",
    "RUSTC_WORKSPACE_WRAPPER",
    "TARGET",
];

/// The folder that holds `mlx/c/*.h` and `mlx/c/*.cpp`.
pub fn mlx_c(target: &Target) -> Result<PathBuf> {
    target.cached(&format!("mlx-c-{VERSION}"), |folder| {
        let package = folder.join("fetch");
        write_package(&package)
            .map_err(|error| format!("cannot write {}: {error}", package.display()))?;
        let published = fetch(&package)?;
        copy_tree(&published.join("src/mlx-c/mlx"), &folder.join("mlx"))
            .and_then(|()| fs::remove_dir_all(&package))
            .map_err(|error| format!("cannot copy mlx-c's source: {error}"))
    })
}

/// An empty [workspace] keeps cargo from our own workspace above, whose [patch] would lead it back
/// to this crate.
fn write_package(folder: &Path) -> io::Result<()> {
    let manifest = format!(
        "[package]\nname = \"fetch\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n\
         [dependencies]\nmlx-sys = {{ version = \"={VERSION}\", default-features = false }}\n\n\
         [workspace]\n"
    );
    fs::create_dir_all(folder.join("src"))?;
    fs::write(folder.join("src/lib.rs"), "")?;
    fs::write(folder.join("Cargo.toml"), manifest)
}

/// The folder of the published crate, wherever cargo keeps it.
fn fetch(package: &Path) -> Result<PathBuf> {
    // A registry that cargo has on disk already may be all there is: no network is asked for first.
    let metadata =
        cargo_metadata(package, &["--offline"]).or_else(|_| cargo_metadata(package, &[]))?;

    let lock = fs::read_to_string(package.join("Cargo.lock")).unwrap_or_default();
    if !lock.contains(&format!("checksum = \"{CHECKSUM}\"")) {
        return Err(format!(
            "the crate mlx-sys {VERSION} that cargo fetched is another than the published one \
             (sha256 {CHECKSUM})"
        ));
    }
    // One long line of JSON. Of all the packages that it names, one has mlx-c in it.
    metadata
        .split("\"manifest_path\":\"")
        .skip(1)
        .filter_map(|rest| Path::new(rest.split('"').next()?).parent())
        .find(|folder| folder.join("src/mlx-c/mlx/c/mlx.h").is_file())
        .map(Path::to_path_buf)
        .ok_or_else(|| "the crate mlx-sys that cargo fetched has no mlx-c in it".to_owned())
}

fn cargo_metadata(package: &Path, arguments: &[&str]) -> Result<String> {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if SET_BY_CARGO.iter().any(|prefix| text.starts_with(prefix)) {
            cargo.env_remove(&name);
        }
    }
    cargo
        .current_dir(package)
        .args(["metadata", "--quiet", "--format-version=1"])
        .args(arguments)
        .arg("--filter-platform")
        .arg(env::var_os("HOST").unwrap_or_default());
    run(&mut cargo, "fetching mlx-c, in the published crate mlx-sys")
}

fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
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
