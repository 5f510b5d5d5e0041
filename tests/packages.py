#!/usr/bin/env python3
"""Makes the packages of the built programs, installs them, moves them, and serves from them in an empty environment.

    cargo build --bins
    tests/packages.py

The wheel's dependencies come from pip's index or cache. Takes about a minute.
"""

import json
import os
import plistlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "server/package/build.py"
PIP = ["-m", "pip", "--quiet", "--disable-pip-version-check"]


def run(*command, env=None, status=0) -> str:
    """The output of a command that ends with `status`."""
    done = subprocess.run(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == status, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def is_there(tool: str) -> bool:
    """Whether `tool` is on PATH, which CI demands on Linux."""
    found = shutil.which(tool) is not None
    if not found:
        assert not (sys.platform == "linux" and os.environ.get("CI") == "true"), f"{tool} is not on PATH"
        print(f"left out: {tool} is not on PATH")
    return found


def files(folder: Path) -> set[str]:
    """Files of an environment but those that Python compiles. pip leaves empty folders of MLX's wheel."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {str(path.relative_to(folder)) for path in found if "__pycache__" not in path.parts}


def empty_environment(work: Path) -> dict[str, str]:
    """No PATH, no settings: a home and a folder for temporary files."""
    env = {"HOME": str(work / "home"), "TMPDIR": str(work / "tmp")}
    for folder in env.values():
        Path(folder).mkdir(exist_ok=True)
    return env


def serve(command: list[str], work: Path) -> None:
    """Serves with `command` on a free port, asks the README's question, and stops the server."""
    readme = (ROOT / "README.md").read_text()
    ask = re.search(r"<!-- ci: ask -->\n```sh\n(.*?)```", readme, re.S)[1]
    body = re.search(r"-d '(.*)'", ask, re.S)[1].encode()
    log = (work / "serve.log").open("w+")
    env = empty_environment(work)
    server = subprocess.Popen([*command, "serve", "--port", "0"], env=env, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        line = server.stdout.readline()
        address = re.search(r"http://127.0.0.1:\d+/v1", line)
        assert address, f"{line}\n{(work / 'serve.log').read_text()}"
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address[0]}/chat/completions", body, headers)
        answer = urllib.request.urlopen(request, timeout=60).read().decode()
        assert "The capital of Italy is Rome." in answer, answer
    finally:
        server.send_signal(signal.SIGINT)
        status = server.wait(30)
    assert status == 0, (work / "serve.log").read_text()


def fails_in_one_line(command: list[str], work: Path, words: str) -> None:
    said = run(*command, "--version", env=empty_environment(work), status=1)
    assert words in said and said.count("\n") == 1, said
    print(f"  {said}", end="")


def other_programs_run(command: list[str], work: Path) -> None:
    """Commands that are programs beside the server."""
    env = empty_environment(work)
    tested = run(*command, "policy", "test", "default", env=env)
    assert tested.endswith(" cases pass\n"), tested
    assert "--against" in run(*command, "bench", "suite", "--help", env=env)
    assert "--items" in run(*command, "eval", "--help", env=env)


def wheel_runs_where_it_is_moved(wheel: Path, work: Path) -> None:
    first, moved = work / "venv", work / "moved venv"
    run(sys.executable, "-m", "venv", str(first))
    python = str(first / "bin/python")
    before = files(first)
    run(python, *PIP, "install", str(wheel))
    assert "steersman" in run(str(first / "bin/steersman"), "--version", env=empty_environment(work))
    first.rename(moved)
    # pip writes the environment's first folder into scripts, so that only `-m` works in another.
    python = str(moved / "bin/python")
    serve([python, "-m", "steersman"], work)
    env = empty_environment(work) | {"HF_HUB_OFFLINE": "1"}
    other_programs_run([python, "-m", "steersman"], work)
    report = json.loads(run(python, "-m", "steersman", "doctor", "--json", env=env))
    assert report["speed"]["product_flops"] > 0 and report["hub"]["reachable"] is None, report
    assert report["mlx"]["version"] == re.search(r"mlx-cpu==([\d.]+)", metadata_of(wheel))[1], report
    [packages] = moved.glob("lib/python*/site-packages")
    problems_of_libraries_are_one_line([python, "-m", "steersman"], packages, work)
    run(python, *PIP, "uninstall", "-y", "steersman")
    left = {file for file in files(moved) - before if "steersman" in file}
    assert not left, left
    run(python, *PIP, "uninstall", "-y", "mlx-cpu", "scipy-openblas32")
    assert files(moved) == before, files(moved) ^ before


def metadata_of(wheel: Path) -> str:
    """What pip reads of a wheel."""
    with zipfile.ZipFile(wheel) as packed:
        [info] = [name for name in packed.namelist() if name.endswith("/METADATA")]
        return packed.read(info).decode()


def problems_of_libraries_are_one_line(command: list[str], packages: Path, work: Path) -> None:
    run(*command, "--version", env=empty_environment(work))
    [info] = packages.glob("mlx_cpu-*.dist-info")
    # Missing.
    hidden = info.rename(work / "hidden")
    fails_in_one_line(command, work, "mlx-cpu is not installed")
    # Another version.
    other = packages / "mlx_cpu-0.1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-cpu\nVersion: 0.1.0\n")
    fails_in_one_line(command, work, "mlx-cpu is 0.1.0, and steersman needs")
    shutil.rmtree(other)
    hidden.rename(info)
    # Two.
    second = packages / "mlx_cuda_13-0.32.2.dist-info"
    second.mkdir()
    (second / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-cuda-13\nVersion: 0.32.2\n")
    fails_in_one_line(command, work, "mlx-cuda-13 is installed beside mlx-cpu")
    shutil.rmtree(second)
    # What is left when the second of two is removed.
    library = packages / "mlx/lib/libmlx.so"
    hidden = library.rename(work / "libmlx.so")
    fails_in_one_line(command, work, "mlx/lib has no library")
    hidden.rename(library)
    run(*command, "--version", env=empty_environment(work))


def tar_runs_from_any_folder(archive: Path, work: Path) -> None:
    place = work / "some folder"
    with tarfile.open(archive) as packed:
        packed.extractall(place, filter="data")
    [folder] = place.iterdir()
    link = work / "link to steersman"
    link.symlink_to(folder / "steersman")
    # The shell's commands, and nothing else.
    command = ["/usr/bin/env", "PATH=/usr/bin:/bin", str(link)]
    serve(command, work)
    other_programs_run(command, work)
    (folder / "lib").rename(work / "hidden lib")
    fails_in_one_line(command, work, "lib/mlx/lib is missing")


def services_are_valid(archive: Path, work: Path) -> None:
    """Checks the unit of systemd where its tools are, and that of launchd."""
    with tarfile.open(archive) as packed:
        packed.extractall(work / "opt", filter="data")
    [folder] = (work / "opt").iterdir()
    unit = work / "steersman.service"
    unit.write_text((ROOT / "configs/steersman.service").read_text().replace("/opt/steersman/", f"{folder}/"))
    if is_there("systemd-analyze"):
        said = run("systemd-analyze", "verify", "--man=no", str(unit))
        assert str(unit) not in said, said
    service = plistlib.loads((ROOT / "configs/steersman.plist").read_bytes())
    assert service["ProgramArguments"][:2] == ["/opt/steersman/steersman", "serve"], service


def cuda_wheel_depends_on_other_wheels(wheel: Path, cuda_wheel: Path) -> None:
    platform = "-py3-none-manylinux_2_35_x86_64.whl"
    assert cuda_wheel.name.endswith(platform), cuda_wheel
    needs = {}
    for name, path in [("steersman", wheel), ("steersman-cuda", cuda_wheel)]:
        metadata = metadata_of(path)
        assert f"\nName: {name}\n" in metadata, metadata
        # No index of packages has them: the description names the file.
        assert f"uv tool install {path.name}" in metadata, metadata
        needs[name] = dict(re.findall(r"^Requires-Dist: (.+)==(.+)$", metadata, re.M))
    ours, cuda = needs["steersman"], needs["steersman-cuda"]
    assert set(ours) == {"mlx-cpu", "scipy-openblas32"} and set(cuda) == {"mlx-cuda-13", "scipy-openblas32"}, needs
    # One program runs with both.
    assert ours["mlx-cpu"] == cuda["mlx-cuda-13"], needs


def only_the_data_folder_stays(work: Path) -> None:
    left = {path.relative_to(work / "home") for path in (work / "home").rglob("*") if path.is_file()}
    data = Path(".local/share/steersman")
    assert left and all(data in path.parents for path in left), left
    assert not list((work / "tmp").iterdir()), list((work / "tmp").iterdir())


def main() -> None:
    target = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    binary = Path(sys.argv[1]) if len(sys.argv) > 1 else target / "debug/steersman"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        start = time.monotonic()

        def step(name: str, function, *arguments):
            print(f"{time.monotonic() - start:5.1f} s  {name}", flush=True)
            return function(*arguments)

        build = [sys.executable, str(BUILD), "--binary", str(binary), "--out", folder]
        print(step("build the packages", run, *build, "wheel", "cuda-wheel", "tar"), end="")
        [wheel], [cuda_wheel] = work.glob("steersman-*.whl"), work.glob("steersman_cuda-*.whl")
        [archive] = work.glob("steersman-*.tar.gz")
        step("cuda wheel depends on other wheels", cuda_wheel_depends_on_other_wheels, wheel, cuda_wheel)
        step("wheel runs where it is moved", wheel_runs_where_it_is_moved, wheel, work)
        step("tar runs from any folder", tar_runs_from_any_folder, archive, work)
        step("services are valid", services_are_valid, archive, work)
        step("only the data folder stays", only_the_data_folder_stays, work)
        step("done", lambda: None)


if __name__ == "__main__":
    main()
