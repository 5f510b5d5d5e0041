//! Places the shared libraries beside the binaries, in `<target>/<profile>/lib`, so that both can be
//! moved together.
//!
//! The wheel's layout is kept: `lib/mlx/lib/libmlx.so` loads `lib/mlx_cpu.libs`, libmlx.dylib the
//! Metal kernels in its own folder, and the CUDA build headers in `lib/mlx/include` and NVIDIA's
//! libraries in `lib/nvidia`. The user's own MLX (MLX_ROOT) is linked by a symbolic link.

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
        // MLX's own headers are for C++ programs; the others are for compiling kernels at run time.
        let include = mlx.join("include");
        for folder in folders(&include)?.iter().filter(|folder| *folder != "mlx") {
            link_tree(&include.join(folder), &root.join("mlx/include").join(folder))?;
        }
        if let Some(folder) = openblas {
            link_files(folder, &target.lib())?;
        }
        // Named after the wheel. Cargo reruns this script if it is missing: another backend's build
        // has replaced the libraries, or a CI cache has kept the output but not this folder.
        let stamp = root.join(wheel.file_name().unwrap_or_default());
        println!("cargo::rerun-if-changed={}", stamp.display());
        // Cargo considers a file newer than the start of this run as changed.
        File::create(stamp)?.set_modified(SystemTime::UNIX_EPOCH)
    };
    place().map_err(|error| format!("cannot place libraries in {}: {error}", root.display()))
}

/// Links to the user's own MLX.
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

/// Removes the libraries of an earlier build, perhaps of another backend.
fn remove(root: &Path) -> io::Result<()> {
    match fs::remove_dir_all(root) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Hard-links the files in `from`, not its folders (CMake's). Copies them if the file system has no
/// hard links: MLX for CUDA is 140 MB.
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
