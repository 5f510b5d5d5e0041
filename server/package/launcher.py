"""Starts the server's program, after a check of the libraries that it is linked with.

Without the check, a missing or another MLX is an error of the dynamic loader, which names symbols but no package.
"""

import os
import sys
from importlib import metadata
from pathlib import Path

from .build import DISTRIBUTION, MLX, REQUIREMENTS

#: Distributions that contain the same file, the library of MLX. pip lets one replace the other's.
OF_MLX = {"mlx-cpu", "mlx-cuda", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal"}
#: Distributions of this program.
OF_STEERSMAN = {"steersman", "steersman-cuda"}
#: Where each library is, below site-packages.
FOLDERS = {MLX: "mlx/lib", "scipy-openblas32": "scipy_openblas32/lib"}


def installed(project):
    """The version of a distribution, or None."""
    try:
        return metadata.version(project)
    except metadata.PackageNotFoundError:
        return None


def problem(site_packages):
    """What is wrong with the libraries, and what to do, or None."""
    alone = f"install {DISTRIBUTION} in an environment of its own, for instance with `uv tool install` and the file of its wheel"
    for other in sorted(OF_STEERSMAN - {DISTRIBUTION}):
        if installed(other):
            return f"{other} is installed beside {DISTRIBUTION}, and has files of the same names: uninstall both, then install one"
    for other in sorted(OF_MLX - {MLX}):
        if installed(other):
            return f"{other} is installed beside {MLX}, and replaces its library: {alone}"
    for project, needed in REQUIREMENTS.items():
        version = installed(project)
        if version is None:
            return f"{project} is not installed: `pip install {project}=={needed}`"
        if version != needed:
            return f"{project} is {version}, and {DISTRIBUTION} needs {needed}: {alone}"
        folder = site_packages / FOLDERS[project]
        if not any(folder.glob("lib*.so")) and not any(folder.glob("lib*.dylib")):
            return f"{project} is installed, but {folder} has no library: `pip install --force-reinstall {project}=={needed}`"
    return None


def main():
    package = Path(__file__).resolve().parent
    wrong = problem(package.parent)
    if wrong:
        sys.exit(f"steersman: {wrong}")
    program = str(package / "bin" / "steersman")
    try:
        os.execv(program, ["steersman", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"steersman: {program} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main()
