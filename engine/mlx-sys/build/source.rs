//! mlx-c's source, from the published `mlx-sys` crate, which cargo fetches without building.
//!
//! `cargo metadata` runs in an empty package that depends on that crate. Cargo downloads, checks and
//! unpacks it, through the user's mirror or proxy, and reports its folder.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Result, Target, run};

const VERSION: &str = "0.7.0";
/// sha256 of the published crate, as in a Cargo.lock.
const CHECKSUM: &str = "da965f83ce211b80f9b681d9bbd6fa625fe6bb2e659ba7bc55dd95eea8d3b028";
/// Variables that cargo sets for build scripts. A nested cargo would read them as user settings.
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

/// Writes a package with an empty [workspace], so that cargo ignores our own workspace above: its
/// [patch] would replace the published crate with this one.
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

/// The folder of the published crate in cargo's registry.
fn fetch(package: &Path) -> Result<PathBuf> {
    // Offline first: the crate may be on disk already, and there may be no network.
    let metadata =
        cargo_metadata(package, &["--offline"]).or_else(|_| cargo_metadata(package, &[]))?;

    let lock = fs::read_to_string(package.join("Cargo.lock")).unwrap_or_default();
    if !lock.contains(&format!("checksum = \"{CHECKSUM}\"")) {
        return Err(format!(
            "the crate mlx-sys {VERSION} that cargo fetched differs from the published one \
             (sha256 {CHECKSUM})"
        ));
    }
    // One long line of JSON. One of its packages contains mlx-c.
    metadata
        .split("\"manifest_path\":\"")
        .skip(1)
        .filter_map(|rest| Path::new(rest.split('"').next()?).parent())
        .find(|folder| folder.join("src/mlx-c/mlx/c/mlx.h").is_file())
        .map(Path::to_path_buf)
        .ok_or_else(|| "the crate mlx-sys that cargo fetched does not contain mlx-c".to_owned())
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
    run(&mut cargo, "fetching mlx-c from the published crate mlx-sys")
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
