"""Runs the commands of the documentation.

    python tests/book.py target/debug/steersman [PAGE ...]
    python tests/book.py --check

The second form runs nothing: it reports every block whose comment is missing or unknown. The comment before a block of a page says what to do with it:

    <!-- ci: run -->              run it; it fails with its first command
    <!-- ci: start -->            run it in the background until the server answers; it is stopped at the end of the page
    <!-- ci: file NAME -->        write it to this file
    <!-- ci: append NAME -->      append it to this file
    <!-- ci: not run: REASON -->  do nothing
    <!-- ci: NAME -->             `.ci/run` runs it by this name

Each block of `sh` must have such a comment. Each page has a folder of its own, with `steersman` on the path and a data
folder there.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

BLOCK = re.compile(r"(?:^<!-- ci: ([^\n]+) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEALTH = "http://127.0.0.1:11436/health"
TIMEOUT_S = 600


def is_ready():
    try:
        return urllib.request.urlopen(HEALTH, timeout=5).status == 200
    except (urllib.error.URLError, OSError):
        return False


class Page:
    """A page whose blocks run in `folder`."""

    def __init__(self, folder, binary):
        self.folder = Path(folder)
        self.environment = os.environ | {
            "PATH": f"{binary.parent}:{os.environ['PATH']}",
            "STEERSMAN_DATA_DIR": f"{folder}/data",
            "HF_HOME": f"{folder}/hub",
            "HF_HUB_OFFLINE": "1",
            # A policy in Rust is built in its own folder.
            "CARGO_TARGET_DIR": f"{folder}/target",
        }
        self.server = None

    def process(self, text, **options):
        command = ["bash", "-euo", "pipefail", "-c", text]
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, **options)

    def run(self, text):
        status = self.process(text).wait(TIMEOUT_S)
        assert status == 0, f"exit status {status}"

    def start(self, text):
        self.stop()
        assert not is_ready(), f"another server answers at {HEALTH}"
        self.server = self.process(text, start_new_session=True)
        end = time.time() + TIMEOUT_S
        while not is_ready():
            assert self.server.poll() is None, f"exit status {self.server.returncode}"
            assert time.time() < end, f"no answer at {HEALTH}"
            time.sleep(0.2)

    def stop(self):
        if self.server:
            os.killpg(self.server.pid, signal.SIGTERM)
            self.server.wait(TIMEOUT_S)
            self.server = None


def checked_pages(root, names):
    """The blocks of each page with a comment, as `(verb, argument, text)`. Reports all faults of all pages at once."""
    script = (root / ".ci/run").read_text()
    pages, faults = {}, []
    for name in names:
        pages[name] = []
        for mark, language, text in BLOCK.findall((root / name).read_text()):
            verb, _, argument = mark.partition(": " if mark.startswith("not run: ") else " ")
            if not mark:
                if language == "sh":
                    faults.append(f"{name}: no comment says whether CI runs this block:\n{text}")
                continue
            is_known = bool(argument) if verb in ("file", "append", "not run") else mark in ("run", "start")
            if not is_known and f"readme {mark})" not in script:
                faults.append(f"{name}: .ci/run has no block {mark!r}")
            pages[name].append((verb, argument, text))
    assert not faults, "\n".join(faults)
    return pages


def main():
    root = Path(__file__).resolve().parents[1]
    # Templates are pages of folders that do not exist yet.
    listed = subprocess.run(["git", "ls-files", "*.md", ":!*/template/*"], cwd=root, check=True, capture_output=True, text=True)
    pages = checked_pages(root, sys.argv[2:] or listed.stdout.split())
    if sys.argv[1] == "--check":
        return
    binary = Path(sys.argv[1]).resolve()
    counts = {}
    for name, blocks in pages.items():
        with tempfile.TemporaryDirectory() as folder:
            page = Page(folder, binary)
            try:
                for verb, argument, text in blocks:
                    print(f"== {name}: {verb} {argument}\n{text}", flush=True)
                    counts[verb] = counts.get(verb, 0) + 1
                    if verb in ("file", "append"):
                        path = page.folder / argument
                        path.parent.mkdir(parents=True, exist_ok=True)
                        with path.open("w" if verb == "file" else "a") as file:
                            file.write(text)
                    elif verb == "run":
                        page.run(text)
                    elif verb == "start":
                        page.start(text)
            finally:
                page.stop()
    print("blocks:", ", ".join(f"{count} {verb}" for verb, count in sorted(counts.items())))
    assert counts.get("run"), "no block was run"


main()
