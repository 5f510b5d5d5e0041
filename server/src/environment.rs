//! Environment variables that libraries read. Set before the program starts a thread.

#![allow(unsafe_code, reason = "std::env::set_var")]

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// Where MLX keeps the CUDA kernels that it compiles.
const KERNELS: &str = "MLX_PTX_CACHE_DIR";

/// Sets what MLX reads on a machine with NVIDIA GPUs. A value set by the user is kept.
///
/// MLX keeps the kernels that it compiles in the data folder; by default it keeps them in the folder for temporary files, which
/// most systems empty when they start.
pub fn set_for_cuda(data_dir: &Path) {
    let Some(gpus) = gpus(Path::new("/proc/driver/nvidia/gpus")) else { return };
    if std::env::var_os(KERNELS).is_none() {
        // SAFETY: `main` calls this before it starts a thread; those that OpenBLAS has started do not read it.
        unsafe { std::env::set_var(KERNELS, kernels_of(data_dir, &gpus)) };
    }
}

/// MLX finds a kernel by its name alone, so other GPUs have another folder.
fn kernels_of(data_dir: &Path, gpus: &str) -> PathBuf {
    let digest = hex::encode(&Sha256::digest(gpus)[..8]);
    data_dir.join("kernels").join(format!("mlx-{}-{digest}", steersman_engine::MLX_VERSION))
}

/// The models of the GPUs that NVIDIA's driver lists in `folder`; `None` without one.
fn gpus(folder: &Path) -> Option<String> {
    let mut models: Vec<String> = Vec::new();
    for gpu in fs::read_dir(folder).ok()?.flatten() {
        let text = fs::read_to_string(gpu.path().join("information")).ok()?;
        let model = text.lines().find_map(|line| line.strip_prefix("Model:"));
        models.push(model?.trim().into());
    }
    models.sort();
    models.dedup();
    (!models.is_empty()).then(|| models.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_gpu_has_its_own_folder() {
        let driver = tempfile::tempdir().unwrap();
        assert_eq!(gpus(driver.path()), None);
        let list = |models: &[&str]| {
            for (i, model) in models.iter().enumerate() {
                let gpu = driver.path().join(format!("0000:0{i}:00.0"));
                fs::create_dir_all(&gpu).unwrap();
                fs::write(gpu.join("information"), format!("Model: \t\t {model}\nIRQ: 1\n"))
                    .unwrap();
            }
            gpus(driver.path()).unwrap()
        };
        assert_eq!(list(&["NVIDIA H200", "NVIDIA H200"]), "NVIDIA H200");
        assert_eq!(list(&["NVIDIA L4"]), "NVIDIA H200\nNVIDIA L4");
        let folder = |gpus| kernels_of(Path::new("/data"), gpus);
        assert_ne!(folder("NVIDIA H200"), folder("NVIDIA L4"));
        assert!(folder("NVIDIA L4").starts_with("/data/kernels"));
    }
}
