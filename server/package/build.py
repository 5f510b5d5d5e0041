#!/usr/bin/env python3
"""Makes the packages of the built programs: a wheel, and a tar.gz that runs from any folder.

    cargo build --bins
    server/package/build.py wheel cuda-wheel tar

Python's standard library and `strip` are all it needs; for programs of another platform, `STRIP` names another one. What
MLX the program is linked with, and for which platform, is read from the name of the file that the build of mlx-sys leaves
beside the libraries (engine/mlx-sys/build/place.rs): a program built with `--features steersman/cuda` becomes
`steersman-cuda`. The feature chooses the libraries beside the program, not the program: so `cuda-wheel` makes the wheel of
`steersman-cuda` of any program for Linux. Equal inputs give equal files.

The wheel has the programs in `steersman/bin/`, and MLX and OpenBLAS as dependencies. The server finds their libraries
in the same site-packages (engine/mlx-sys/rpath.rs). `launcher.py` checks them and starts the server.

The tar.gz has the programs in `bin/`, the libraries in `lib/`, and `launcher.sh`, which checks that they are there, as
`steersman`. `steersman policy`, `bench` and `eval` run the programs beside the server, which need no MLX.
"""

import argparse
import base64
import gzip
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
#: The versions of the wheels that builds use.
WHEELS = ROOT / "engine/mlx-sys/build/wheel.rs"
#: The server, and the programs that it runs (server/src/program.rs).
PROGRAMS = ["steersman", "steersman-bench", "steersman-policy"]
# Zip files have no earlier time.
EPOCH = int(os.environ.get("SOURCE_DATE_EPOCH", 315532800))
SUMMARY = "A programmable local LLM server: WebAssembly policies decide whether and how long a model reasons"
TARGETS = {
    "x86_64": "x86_64-unknown-linux-gnu",
    "aarch64": "aarch64-unknown-linux-gnu",
    "arm64": "aarch64-apple-darwin",
}
DESCRIPTION = """\
Steersman serves local models with OpenAI's, Anthropic's and Ollama's HTTP interfaces, on MLX. Sandboxed WebAssembly
policies decide whether a model reasons and for how long, and when a loop ends its reasoning.

    uv tool install {file}    # this wheel, of a release or built from a checkout
    steersman serve

serves a small demonstration model that is part of the package. `steersman serve --model OWNER/NAME` serves a model of
the Hugging Face hub, `steersman chat` talks to one, and `steersman doctor` explains what the server chooses on this
machine. Saved state, and nothing else, stays in `~/.local/share/steersman` when the package is removed.

`steersman` computes on CPUs, and on Apple's GPUs; `steersman-cuda` on NVIDIA's. Install one of them, in an environment
of its own: they need exactly this version of MLX.
"""


@dataclass
class Build:
    """The built programs."""

    #: The folder that they are in.
    folder: Path
    #: Libraries beside them.
    lib: Path
    #: Name of the packages: steersman or steersman-cuda.
    name: str
    version: str
    #: The wheel with MLX.
    mlx: str
    #: Versions of the wheels that the program is linked with.
    requirements: dict[str, str]
    #: Platform as in the names of wheels.
    platform: str

    @property
    def target(self) -> str:
        """Platform as in the names of Rust's targets."""
        return next(target for arch, target in TARGETS.items() if self.platform.endswith(f"_{arch}"))


def inspect(binary: Path) -> Build:
    """What `binary` is. Fails if it cannot be packaged."""
    folder = binary.parent
    missing = [str(file) for file in [binary, *(folder / name for name in PROGRAMS)] if not file.is_file()]
    if missing:
        sys.exit(f"{missing[0]} does not exist: build the programs with `cargo build --bins`, or name others with --binary")
    lib = folder / "lib"
    stamps = [re.fullmatch(r"(mlx-(?:cpu|metal|cuda-\d+))-([\d.]+)-(\w+)", file.name) for file in entries(lib)]
    stamps = [stamp.groups() for stamp in stamps if stamp]
    if len(stamps) != 1:
        sys.exit(f"{lib} is not of a wheel of MLX, so packages cannot depend on it: build without MLX_ROOT")
    mlx, mlx_version, platform = stamps[0]
    requirements = {mlx: mlx_version}
    if "manylinux" in platform:
        requirements["scipy-openblas32"] = find(r'OPENBLAS_VERSION: &str = "(.+)"', WHEELS)
    if b"/../../mlx/lib" not in binary.read_bytes():
        sys.exit(f"{binary} has no run path to MLX's wheel: build it from this checkout")
    for name in PROGRAMS:
        check_c_library(folder / name, platform)
    version = find(r'(?s)\[workspace\.package\].*?\nversion = "(.+?)"', ROOT / "Cargo.toml")
    name = "steersman-cuda" if "cuda" in mlx else "steersman"
    return Build(folder, lib, name, version, mlx, requirements, platform)


def for_cuda(build: Build) -> Build:
    """The same program, to run with the wheel of MLX for CUDA."""
    if "manylinux" not in build.platform:
        sys.exit(f"there is no CUDA for {build.platform}")
    mlx = find(r'linux\("(mlx-cuda-\d+)"', WHEELS)
    others = {project: version for project, version in build.requirements.items() if project != build.mlx}
    requirements = {mlx: build.requirements[build.mlx], **others}
    return replace(build, name="steersman-cuda", mlx=mlx, requirements=requirements)


def check_c_library(binary: Path, platform: str) -> None:
    """Fails if the program needs a newer C library than the platform has."""
    data = binary.read_bytes()
    if limit := re.match(r"manylinux_2_(\d+)_", platform):
        needed = max((int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", data)), default=0)
        if needed > int(limit[1]):
            sys.exit(f"{binary} needs glibc 2.{needed}, {platform} has 2.{limit[1]}: build it on an older system")


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def find(pattern: str, file: Path) -> str:
    found = re.search(pattern, file.read_text())
    if not found:
        sys.exit(f"{file} has no {pattern}")
    return found[1]


def stripped(binary: Path) -> bytes:
    """A program without symbols and debugging information, unless `STRIP` is empty: it names the program that strips."""
    strip = os.environ.get("STRIP", "strip")
    if not strip:
        return binary.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / binary.name
        subprocess.run([strip, "-o", copy, binary], check=True)
        return copy.read_bytes()


def make_wheel(build: Build, programs: dict[str, bytes], out: Path) -> Path:
    """Writes the wheel to the folder `out`."""
    name = build.name.replace("-", "_")
    tag = f"py3-none-{build.platform}"
    info = f"{name}-{build.version}.dist-info"
    path = out / f"{name}-{build.version}-{tag}.whl"
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {build.name}",
        f"Version: {build.version}",
        f"Summary: {SUMMARY}",
        "License: Apache-2.0",
        "Requires-Python: >=3.9",
        *(f"Requires-Dist: {project}=={version}" for project, version in build.requirements.items()),
        "Description-Content-Type: text/markdown",
    ]
    constants = f"DISTRIBUTION = {build.name!r}\nMLX = {build.mlx!r}\nREQUIREMENTS = {build.requirements!r}\n"
    files = {
        "steersman/__init__.py": b'"""The server is a program: run `steersman` or `python -m steersman`."""\n',
        "steersman/__main__.py": (HERE / "launcher.py").read_bytes(),
        "steersman/build.py": f'"""What this wheel was built with."""\n\n{constants}'.encode(),
        **{f"steersman/bin/{name}": program for name, program in programs.items()},
        f"{info}/METADATA": "\n".join([*metadata, "", DESCRIPTION.format(file=path.name)]).encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: build.py\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
        f"{info}/entry_points.txt": b"[console_scripts]\nsteersman = steersman.__main__:main\n",
        f"{info}/LICENSE": (ROOT / "LICENSE").read_bytes(),
    }
    records = [f"{path},sha256={digest(data)},{len(data)}" for path, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*records, f"{info}/RECORD,,", ""]).encode()
    when = time.gmtime(EPOCH)[:6]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file, data in files.items():
            entry = zipfile.ZipInfo(file, when)
            mode = 0o755 if file.startswith("steersman/bin/") else 0o644
            # A regular file.
            entry.external_attr = (0o100000 | mode) << 16
            wheel.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return path


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def make_tar(build: Build, programs: dict[str, bytes], out: Path) -> Path:
    """Writes the tar.gz to the folder `out`. All files are in one folder of the same name."""
    folder = f"{build.name}-{build.version}-{build.target}"
    path = out / f"{folder}.tar.gz"
    files = {
        "steersman": ((HERE / "launcher.sh").read_bytes(), 0o755),
        **{f"bin/{name}": (program, 0o755) for name, program in programs.items()},
        "LICENSE": ((ROOT / "LICENSE").read_bytes(), 0o644),
        # Units of services, a configuration, a dashboard and alert rules.
        **{f"configs/{file.name}": (file.read_bytes(), 0o644) for file in entries(ROOT / "configs")},
    }
    for file in sorted(build.lib.rglob("*")):
        if file.is_file():
            files[f"lib/{file.relative_to(build.lib)}"] = (file.read_bytes(), 0o644)
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, EPOCH) as packed:
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name, (data, mode) in files.items():
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size, entry.mode, entry.mtime = len(data), mode, EPOCH
                archive.addfile(entry, io.BytesIO(data))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="+", choices=["wheel", "cuda-wheel", "tar"], help="the packages to make")
    target = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    parser.add_argument("--binary", type=Path, default=target / "debug/steersman", help="the built server, with the other programs beside it")
    parser.add_argument("--out", type=Path, default=target / "packages", help="folder for the packages")
    options = parser.parse_args()
    build = inspect(options.binary)
    programs = {name: stripped(build.folder / name) for name in PROGRAMS}
    options.out.mkdir(parents=True, exist_ok=True)
    for kind in options.kinds:
        if kind == "tar":
            path = make_tar(build, programs, options.out)
        else:
            path = make_wheel(for_cuda(build) if kind == "cuda-wheel" else build, programs, options.out)
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
