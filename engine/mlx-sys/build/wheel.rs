//! What comes from PyPI: MLX, OpenBLAS and libclang, each pinned by version and sha256.
//!
//! `python3 -m pip download --require-hashes` fetches and checks, `python3 -m zipfile` unpacks. Both are asked for the
//! target's platform by name, so the Python that happens to be there does not matter.
//!
//! # Why OpenBLAS from a wheel
//! MLX's CPU wheel brings reference BLAS. OpenBLAS ahead of it makes f32 matrix products several times faster (see
//! `shim/blas.cpp`). A distribution's OpenBLAS would have to be installed by hand, and again wherever the binary is moved
//! to; this one travels beside the binary and needs nothing but libc.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Backend, Result, Target, run};

pub const MLX_VERSION: &str = "0.32.2";

struct Wheel {
    project: &'static str,
    version: &'static str,
    arch: &'static str,
    /// Lowest macOS, as (major, minor); (0, 0) for Linux.
    macos: (u32, u32),
    /// pip's name for the platform.
    platform: &'static str,
    sha256: &'static str,
}

const fn linux(
    project: &'static str,
    version: &'static str,
    arch: &'static str,
    platform: &'static str,
    sha256: &'static str,
) -> Wheel {
    Wheel { project, version, arch, macos: (0, 0), platform, sha256 }
}

const fn macos(
    project: &'static str,
    version: &'static str,
    macos: (u32, u32),
    platform: &'static str,
    sha256: &'static str,
) -> Wheel {
    Wheel { project, version, arch: "aarch64", macos, platform, sha256 }
}

/// A version is changed here and nowhere else. sha256: `python3 -m pip download --no-deps --only-binary=:all:
/// --platform PLATFORM PROJECT==VERSION`, then `python3 -m pip hash FILE`. For one project and architecture, the highest
/// macOS first: the wheel for macOS 26 has kernels for the M5's matrix units, which older systems cannot load.
#[rustfmt::skip]
const WHEELS: &[Wheel] = &[
    linux("mlx-cpu", MLX_VERSION, "x86_64", "manylinux_2_35_x86_64", "fc5d31b90fc4f457b2f9614ed45651a567d22a6a11a03d114a90a4e10bdd8878"),
    linux("mlx-cpu", MLX_VERSION, "aarch64", "manylinux_2_35_aarch64", "d0f94625588b51a878786dd51cec5617894ce586cf3c94645ce1b64e24c27c0b"),
    linux("mlx-cuda-13", MLX_VERSION, "x86_64", "manylinux_2_35_x86_64", "335094ccd1c0c6dc3e09c8caba207c8180602bacc0c38ba20c1d81e9456ab394"),
    linux("mlx-cuda-13", MLX_VERSION, "aarch64", "manylinux_2_35_aarch64", "49b1a25df9021f3b519a534fd39a32a5cdbf93a1b265a31e59671c2d9fc9f4a2"),
    macos("mlx-metal", MLX_VERSION, (26, 2), "macosx_26_0_arm64", "e6abeac9ac5265830c9c1541b6f96e9be37a85c2446763a46ad466c63a3837ab"),
    macos("mlx-metal", MLX_VERSION, (15, 0), "macosx_15_0_arm64", "55a369250d220b2cf10213a87a2ac1b1a420608c5b35b1df4e7147ac8e32f121"),
    macos("mlx-metal", MLX_VERSION, (14, 0), "macosx_14_0_arm64", "3825fff379dbc107dd3413e564a06caeaa24819910ec49c0439e454c06a1b9b8"),
    linux("scipy-openblas32", "0.3.34.481.3", "x86_64", "manylinux_2_28_x86_64", "0595f94cd58c1f8a0d90c975621f4587337a003916b1979e834ebdf2cb5d9504"),
    linux("scipy-openblas32", "0.3.34.481.3", "aarch64", "manylinux_2_28_aarch64", "e085dddbc5b9aa130f83def515d31c440e69f387a90c7e63b154a5575b4466bc"),
    linux("libclang", "18.1.1", "x86_64", "manylinux2010_x86_64", "c533091d8a3bbf7460a00cb6c1a71da93bffe148f172c7d03b1c31fbf8aa2a0b"),
    linux("libclang", "18.1.1", "aarch64", "manylinux2014_aarch64", "54dda940a4a0491a9d1532bf071ea3ef26e6dbaf03b5000ed94dd7174e8f9592"),
    macos("libclang", "18.1.1", (11, 0), "macosx_11_0_arm64", "0b2e143f0fac830156feb56f9231ff8338c20aecfe72b4ffe96f19e5a1dbb69a"),
];

/// The user's own MLX, which MLX_ROOT names: `lib` holds libmlx, and `include` its headers.
pub fn own_mlx(target: &Target) -> Result<Option<PathBuf>> {
    println!("cargo::rerun-if-env-changed=MLX_ROOT");
    let Some(root) = env::var_os("MLX_ROOT").filter(|root| !root.is_empty()).map(PathBuf::from)
    else {
        return Ok(None);
    };
    for needed in [VERSION_HEADER, &format!("lib/{}", target.libmlx())] {
        println!("cargo::rerun-if-changed={}", root.join(needed).display());
        if !root.join(needed).is_file() {
            return Err(format!(
                "MLX_ROOT is {}, and there is no {needed} in it. It must be the folder of MLX {MLX_VERSION} with headers and shared \
                 library, such as site-packages/mlx after `pip install mlx`. Without MLX_ROOT, MLX is fetched with pip.",
                root.display()
            ));
        }
    }
    let version = version(&root);
    if version != MLX_VERSION {
        return Err(format!(
            "MLX_ROOT is {}, which is MLX {version}; mlx-c is for MLX {MLX_VERSION}, and MLX changes its C++ interface from version \
             to version. Without MLX_ROOT, the right one is fetched with pip.",
            root.display()
        ));
    }
    Ok(Some(root))
}

/// The wheel for the platform, as a folder with `lib` and `include`.
pub fn mlx(target: &Target) -> Result<PathBuf> {
    let project = match target.backend {
        Backend::Cpu => "mlx-cpu",
        Backend::Cuda => "mlx-cuda-13",
        Backend::Metal => "mlx-metal",
    };
    Ok(unpacked(target, project)?.join("mlx"))
}

const VERSION_HEADER: &str = "include/mlx/version.h";

/// "0.32.2", from `#define MLX_VERSION_MAJOR 0` and its like.
fn version(root: &Path) -> String {
    let header = std::fs::read_to_string(root.join(VERSION_HEADER)).unwrap_or_default();
    let number =
        |part| header.split(&format!("MLX_VERSION_{part} ")).nth(1)?.split_whitespace().next();
    ["MAJOR", "MINOR", "PATCH"].map(|part| number(part).unwrap_or("?")).join(".")
}

/// The folder with OpenBLAS's shared library; None on macOS, whose MLX uses Accelerate.
pub fn openblas(target: &Target) -> Result<Option<PathBuf>> {
    if target.backend == Backend::Metal {
        return Ok(None);
    }
    Ok(Some(unpacked(target, "scipy-openblas32")?.join("scipy_openblas32/lib")))
}

/// Makes libclang available to bindgen: the system's, else the wheel's.
pub fn libclang(target: &Target) -> Result<()> {
    println!("cargo::rerun-if-env-changed=LIBCLANG_PATH");
    if clang_sys::load().is_ok() {
        return Ok(());
    }
    let folder = unpacked(target, "libclang")?.join("libclang-18.1.1.data/platlib/clang/native");
    #[allow(unsafe_code, reason = "bindgen takes the path of libclang from the environment alone")]
    // SAFETY: this script has started no thread yet, so none reads the environment meanwhile.
    unsafe {
        env::set_var("LIBCLANG_PATH", &folder);
    }
    clang_sys::load()
        .map_err(|error| format!("cannot load libclang from {}: {error}", folder.display()))
}

/// The folder of the cache that holds `project`'s wheel for the target, fetched on first use.
fn unpacked(target: &Target, project: &str) -> Result<PathBuf> {
    let wheel = WHEELS
        .iter()
        .find(|wheel| {
            wheel.project == project && wheel.arch == target.arch && wheel.macos <= target.macos
        })
        .ok_or_else(|| {
            format!(
                "{project} needs macOS 14 or newer; this is {}.{}",
                target.macos.0, target.macos.1
            )
        })?;
    target.cached(&format!("{project}-{}-{}", wheel.version, wheel.platform), |folder| {
        fetch(wheel, folder)
    })
}

fn fetch(wheel: &Wheel, folder: &Path) -> Result<()> {
    let Wheel { project, version, platform, sha256, .. } = wheel;
    check_pip(project)?;
    let download = folder.join("download");
    let requirement = folder.join("requirement.txt");
    let write = |error| format!("cannot write {}: {error}", folder.display());
    std::fs::write(&requirement, format!("{project}=={version} --hash=sha256:{sha256}\n"))
        .map_err(write)?;
    run(
        python()
            .args([
                "-m",
                "pip",
                "download",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                "--only-binary=:all:",
            ])
            .args(["--platform", platform, "--require-hashes", "--requirement"])
            .arg(&requirement)
            .arg("--dest")
            .arg(&download),
        &format!("fetching {project} {version}"),
    )?;
    let wheel = std::fs::read_dir(&download)
        .and_then(|mut entries| entries.next().transpose())
        .ok()
        .flatten()
        .ok_or_else(|| {
            format!("fetching {project} {version}: pip left no file in {}", download.display())
        })?;
    run(
        python().args(["-m", "zipfile", "--extract"]).arg(wheel.path()).arg(folder),
        &format!("unpacking {project}"),
    )?;
    std::fs::remove_dir_all(&download).map_err(write)
}

fn python() -> Command {
    Command::new("python3")
}

fn check_pip(project: &str) -> Result<()> {
    let why = format!("python3 with pip is needed once, to fetch {project} from PyPI");
    let how = "Debian and Ubuntu: `apt install python3-pip`; Fedora: `dnf install python3-pip`; macOS: `xcode-select --install`. \
               Or point MLX_ROOT to an installed MLX and LIBCLANG_PATH to the folder of libclang.";
    match python().args(["-m", "pip", "--version"]).output() {
        Err(_) => Err(format!("{why}; `python3` is not on PATH. {how}")),
        Ok(output) if !output.status.success() => {
            Err(format!("{why}; the `python3` on PATH has no pip. {how}"))
        }
        Ok(_) => Ok(()),
    }
}
