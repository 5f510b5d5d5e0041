"""Runs the commands of the documentation: each block after `<!-- ci: run -->` in a page of the repository.

    python tests/book.py target/debug/steersman

Each page has a folder of its own, in which its blocks run one after another, with `steersman` on the path and a data folder
there. A block fails with its first command. The README's blocks are run by `.ci/run`.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(r"^<!-- ci: run -->\n```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 300


def main():
    binary, root = Path(sys.argv[1]).resolve(), Path(__file__).resolve().parents[1]
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=root, check=True, capture_output=True, text=True)
    count = 0
    for page in listed.stdout.split():
        text = (root / page).read_text()
        blocks = BLOCK.findall(text)
        assert len(blocks) == text.count("<!-- ci: run -->"), f"{page}: a mark without a block of sh"
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {
                "PATH": f"{binary.parent}:{os.environ['PATH']}",
                "STEERSMAN_DATA_DIR": f"{folder}/data",
                "HF_HOME": f"{folder}/hub",
                "HF_HUB_OFFLINE": "1",
            }
            for block in blocks:
                print(f"== {page}\n{block}", flush=True)
                command = ["bash", "-euo", "pipefail", "-c", block]
                subprocess.run(command, cwd=folder, env=environment, check=True, timeout=TIMEOUT_S)
                count += 1
    assert count, "no block is marked"
    print(f"{count} blocks ran")


main()
