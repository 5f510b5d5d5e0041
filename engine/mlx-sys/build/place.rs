//! Puts the shared libraries beside the binaries, in `<target>/<profile>/lib`, so that the two can
//! be moved together.
//!
//! A wheel keeps its layout there: `lib/mlx/lib/libmlx.so` looks for `lib/mlx_cpu.libs`,
//! libmlx.dylib for the Metal kernels in its own folder, and the CUDA build for headers in
//! `lib/mlx/include` and for NVIDIA's libraries in `lib/nvidia`. The user's own MLX (MLX_ROOT)
//! stays where it is, and a symbolic link leads to it.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::SystemTime;

use crate::{Result, Target};

/// Places the wheel's `mlx` folder, and OpenBLAS.
pub fn beside_binaries(target: &Target, mlx: &Path, openblas: Option<&Path>) -> Result<()> {
    let root = target.beside_binaries();
    let place = || -> io::Result<()> {
        remove(&root)?;
        link_files(&mlx.join("lib"), &target.lib())?;
        let wheel = mlx.parent().unwrap_or(mlx);
        for folder in folders(wheel)?.iter().filter(|folder| folder.ends_with(".libs")) {
            link_files(&wheel.join(folder), &root.join(folder))?;
        }
        // MLX's own headers are for C++ programs; others are there to compile kernels at run time.
        let include = mlx.join("include");
        for folder in folders(&include)?.iter().filter(|folder| *folder != "mlx") {
            link_tree(&include.join(folder), &root.join("mlx/include").join(folder))?;
        }
        if let Some(folder) = openblas {
            link_files(folder, &target.lib())?;
        }
        // Named for the wheel, and cargo runs us again when it is gone: another backend's build has
        // replaced what lies here, or a CI cache has kept our output and dropped this.
        let stamp = root.join(wheel.file_name().unwrap_or_default());
        println!("cargo::rerun-if-changed={}", stamp.display());
        // A file newer than the start of this run would count as changed.
        File::create(stamp)?.set_modified(SystemTime::UNIX_EPOCH)
    };
    place().map_err(|error| format!("cannot place libraries in {}: {error}", root.display()))
}

/// Leads to the user's own MLX.
pub fn in_place(target: &Target, mlx: &Path) -> Result<()> {
    let root = target.beside_binaries();
    let place = || -> io::Result<()> {
        remove(&root)?;
        fs::create_dir_all(root.join("mlx"))?;
        symlink(&mlx.join("lib"), &target.lib())
    };
    place().map_err(|error| format!("cannot write {}: {error}", root.display()))
}

/// Names of the folders in `parent`.
fn folders(parent: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(parent)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    Ok(names)
}

/// Removes what an earlier build placed, of another backend perhaps.
fn remove(root: &Path) -> io::Result<()> {
    match fs::remove_dir_all(root) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The files in `from`, not its folders (CMake's). Hard links, or copies where the file system has
/// none: MLX for CUDA is 140 MB.
fn link_files(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_file() && fs::hard_link(entry.path(), &to).is_err() {
            fs::copy(entry.path(), &to)?;
        }
    }
    Ok(())
}

fn link_tree(from: &Path, to: &Path) -> io::Result<()> {
    link_files(from, to)?;
    folders(from)?.iter().try_for_each(|folder| link_tree(&from.join(folder), &to.join(folder)))
}

#[cfg(unix)]
fn symlink(from: &Path, to: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(from, to)
}

#[cfg(not(unix))]
fn symlink(_from: &Path, _to: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
