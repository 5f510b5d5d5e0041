//! Wheels from PyPI: MLX, OpenBLAS and libclang, each pinned by version and sha256.
//!
//! `python3 -m pip download --require-hashes` fetches and checks, `python3 -m zipfile` unpacks. pip
//! gets the platform as an argument, so any Python 3 works.
//!
//! # Why OpenBLAS, and why from a wheel
//! MLX's Linux wheels contain the reference BLAS. With OpenBLAS instead (`shim/blas.h`), 128 rows
//! times a 2048 x 2048 matrix in f32 take 23 ms instead of 738, and one row takes 1.5 ms instead of
//! 3.5 (best of 20 on two busy x86-64 cores). A distribution's OpenBLAS would have to be installed
//! on every machine that the program is copied to; the wheel's is placed beside the program and
//! needs only libc.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Backend, Result, Target, run};

pub const MLX_VERSION: &str = "0.32.2";
const OPENBLAS_VERSION: &str = "0.3.34.481.3";
const LIBCLANG_VERSION: &str = "18.1.1";

struct Wheel {
    project: &'static str,
    version: &'static str,
    arch: &'static str,
    /// Lowest macOS that can load it; `None` for Linux.
    macos: Option<(u32, u32)>,
    /// pip's name for the platform.
    platform: &'static str,
    sha256: &'static str,
}

/// To change a version: `python3 -m pip download --no-deps --only-binary=:all: --platform PLATFORM
/// PROJECT==VERSION`, then `python3 -m pip hash FILE`.
///
/// The first matching row is used, so a project's highest macOS comes first: the wheel for macOS
/// 26.2 has kernels for the M5's matrix units, and older systems cannot load it.
#[rustfmt::skip]
const WHEELS: &[Wheel] = &[
    linux("mlx-cpu", MLX_VERSION, "x86_64", "manylinux_2_35_x86_64",
        "fc5d31b90fc4f457b2f9614ed45651a567d22a6a11a03d114a90a4e10bdd8878"),
    linux("mlx-cpu", MLX_VERSION, "aarch64", "manylinux_2_35_aarch64",
        "d0f94625588b51a878786dd51cec5617894ce586cf3c94645ce1b64e24c27c0b"),
    linux("mlx-cuda-13", MLX_VERSION, "x86_64", "manylinux_2_35_x86_64",
        "335094ccd1c0c6dc3e09c8caba207c8180602bacc0c38ba20c1d81e9456ab394"),
    linux("mlx-cuda-13", MLX_VERSION, "aarch64", "manylinux_2_35_aarch64",
        "49b1a25df9021f3b519a534fd39a32a5cdbf93a1b265a31e59671c2d9fc9f4a2"),
    macos("mlx-metal", MLX_VERSION, (26, 2), "macosx_26_0_arm64",
        "e6abeac9ac5265830c9c1541b6f96e9be37a85c2446763a46ad466c63a3837ab"),
    macos("mlx-metal", MLX_VERSION, (15, 0), "macosx_15_0_arm64",
        "55a369250d220b2cf10213a87a2ac1b1a420608c5b35b1df4e7147ac8e32f121"),
    macos("mlx-metal", MLX_VERSION, (14, 0), "macosx_14_0_arm64",
        "3825fff379dbc107dd3413e564a06caeaa24819910ec49c0439e454c06a1b9b8"),
    linux("scipy-openblas32", OPENBLAS_VERSION, "x86_64", "manylinux_2_28_x86_64",
        "0595f94cd58c1f8a0d90c975621f4587337a003916b1979e834ebdf2cb5d9504"),
    linux("scipy-openblas32", OPENBLAS_VERSION, "aarch64", "manylinux_2_28_aarch64",
        "e085dddbc5b9aa130f83def515d31c440e69f387a90c7e63b154a5575b4466bc"),
    linux("libclang", LIBCLANG_VERSION, "x86_64", "manylinux2010_x86_64",
        "c533091d8a3bbf7460a00cb6c1a71da93bffe148f172c7d03b1c31fbf8aa2a0b"),
    linux("libclang", LIBCLANG_VERSION, "aarch64", "manylinux2014_aarch64",
        "54dda940a4a0491a9d1532bf071ea3ef26e6dbaf03b5000ed94dd7174e8f9592"),
    macos("libclang", LIBCLANG_VERSION, (11, 0), "macosx_11_0_arm64",
        "0b2e143f0fac830156feb56f9231ff8338c20aecfe72b4ffe96f19e5a1dbb69a"),
];

const fn linux(
    project: &'static str,
    version: &'static str,
    arch: &'static str,
    platform: &'static str,
    sha256: &'static str,
) -> Wheel {
    Wheel { project, version, arch, macos: None, platform, sha256 }
}

const fn macos(
    project: &'static str,
    version: &'static str,
    lowest: (u32, u32),
    platform: &'static str,
    sha256: &'static str,
) -> Wheel {
    Wheel { project, version, arch: "aarch64", macos: Some(lowest), platform, sha256 }
}

/// The user's own MLX in MLX_ROOT, a folder with `lib` and `include`. Fails if it is not MLX or not
/// the version that mlx-c needs.
pub fn own_mlx(target: &Target) -> Result<Option<PathBuf>> {
    const VERSION_HEADER: &str = "include/mlx/version.h";
    println!("cargo::rerun-if-env-changed=MLX_ROOT");
    let Some(root) = env::var_os("MLX_ROOT").filter(|root| !root.is_empty()) else {
        return Ok(None);
    };
    let root = PathBuf::from(root);
    let wrong = |what: &str| {
        format!(
            "MLX_ROOT is {}, {what}. It must be a folder of MLX {MLX_VERSION} with include/ and \
             lib/{}, such as Python's site-packages/mlx. Unset it to fetch MLX with pip.",
            root.display(),
            target.libmlx()
        )
    };
    for needed in [VERSION_HEADER, &format!("lib/{}", target.libmlx())] {
        println!("cargo::rerun-if-changed={}", root.join(needed).display());
        if !root.join(needed).is_file() {
            return Err(wrong(&format!("and has no {needed}")));
        }
    }
    let header = fs::read_to_string(root.join(VERSION_HEADER)).unwrap_or_default();
    let number = |part| {
        let line = header.split(&format!("MLX_VERSION_{part} ")).nth(1)?;
        line.split_whitespace().next()
    };
    let version = ["MAJOR", "MINOR", "PATCH"].map(|part| number(part).unwrap_or("?")).join(".");
    if version != MLX_VERSION {
        return Err(wrong(&format!("which is MLX {version}")));
    }
    Ok(Some(root))
}

/// MLX's wheel for the target, as a folder with `lib` and `include`.
pub fn mlx(target: &Target) -> Result<PathBuf> {
    let project = match target.backend {
        Backend::Cpu => "mlx-cpu",
        Backend::Cuda => "mlx-cuda-13",
        Backend::Metal => "mlx-metal",
    };
    Ok(unpacked(target, project, &target.arch, target.macos)?.join("mlx"))
}

/// The folder of OpenBLAS's shared library; `None` on macOS, where MLX uses Accelerate.
pub fn openblas(target: &Target) -> Result<Option<PathBuf>> {
    if target.backend == Backend::Metal {
        return Ok(None);
    }
    let folder = unpacked(target, "scipy-openblas32", &target.arch, None)?;
    Ok(Some(folder.join("scipy_openblas32/lib")))
}

/// Makes libclang available to bindgen: the system's, else the wheel's.
pub fn libclang(target: &Target) -> Result<()> {
    println!("cargo::rerun-if-env-changed=LIBCLANG_PATH");
    if clang_sys::load().is_ok() {
        return Ok(());
    }
    // libclang runs on the host, whatever the target is.
    let macos = (env::consts::OS == "macos").then_some((11, 0));
    let folder = unpacked(target, "libclang", env::consts::ARCH, macos)?
        .join(format!("libclang-{LIBCLANG_VERSION}.data/platlib/clang/native"));
    #[allow(unsafe_code, reason = "clang-sys reads libclang's folder from the environment")]
    // SAFETY: this script has not started a thread yet, so nothing reads the environment.
    unsafe {
        env::set_var("LIBCLANG_PATH", &folder);
    }
    clang_sys::load()
        .map_err(|error| format!("cannot load libclang from {}: {error}", folder.display()))
}

/// The folder of `project`'s unpacked wheel, fetched on first use.
fn unpacked(
    target: &Target,
    project: &str,
    arch: &str,
    macos: Option<(u32, u32)>,
) -> Result<PathBuf> {
    let fits = |wheel: &&Wheel| {
        let os = match (wheel.macos, macos) {
            (Some(lowest), Some(version)) => lowest <= version,
            (lowest, version) => lowest == version,
        };
        wheel.project == project && wheel.arch == arch && os
    };
    let wheel = WHEELS.iter().find(fits).ok_or_else(|| match macos {
        Some((major, minor)) => {
            format!("{project} needs macOS 14 or newer; the target is {major}.{minor}")
        }
        None => format!("there is no {project} for {arch}"),
    })?;
    let name = format!("{project}-{}-{}", wheel.version, wheel.platform);
    target.cached(&name, |folder| fetch(wheel, folder))
}

fn fetch(wheel: &Wheel, folder: &Path) -> Result<()> {
    let Wheel { project, version, platform, sha256, .. } = wheel;
    check_pip(project)?;
    let purpose = format!("fetching {project} {version}");
    let fail = |error| format!("{purpose}: cannot write {}: {error}", folder.display());
    let (download, requirement) = (folder.join("download"), folder.join("requirement.txt"));
    let pinned = format!("{project}=={version} --hash=sha256:{sha256}\n");
    fs::write(&requirement, pinned).map_err(fail)?;
    let mut pip = python();
    pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"])
        .args(["--only-binary=:all:", "--platform", platform, "--require-hashes"])
        .args([Path::new("--requirement"), &requirement, Path::new("--dest"), &download]);
    run(&mut pip, &purpose)?;
    for file in fs::read_dir(&download).map_err(fail)? {
        let file = file.map_err(fail)?.path();
        run(python().args(["-m", "zipfile", "--extract"]).args([&file, folder]), &purpose)?;
    }
    fs::remove_dir_all(&download).map_err(fail)
}

fn python() -> Command {
    Command::new("python3")
}

fn check_pip(project: &str) -> Result<()> {
    let missing = match python().args(["-m", "pip", "--version"]).output() {
        Ok(output) if output.status.success() => return Ok(()),
        Ok(_) => "the `python3` on PATH has no pip",
        Err(_) => "there is no `python3` on PATH",
    };
    Err(format!(
        "python3 with pip is needed to fetch {project} from PyPI, but {missing}. Debian and \
         Ubuntu: `apt install python3-pip`; Fedora: `dnf install python3-pip`; macOS: \
         `xcode-select --install`. To build without pip, set MLX_ROOT to the folder of MLX \
         {MLX_VERSION} and LIBCLANG_PATH to the folder of libclang."
    ))
}
