"""Measures what components that are expensive to compile cost the streams of a server.

    cargo run -p steersman-test-support --example bombs -- bombs
    python3 tests/bombs.py bombs SERVER [--tokens N] [--streams N]

SERVER is a `steersman` binary, and `bombs` a folder of components. Some streams run alone, then beside uploads of each
component, one after another, then alone again. Prints how each upload was refused, after which time and with how much
memory of the compiling process and of the server, and the time between two chunks of the streams. Fails if a component is
accepted or a stream ends early; no time is checked.
"""

import argparse
import glob
import os
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

from prefix_bench import ours
from slow_policy import centile, streams

KEY = "sk-bombs"


def upload(port, path):
    """Status and message of the server's answer to a component, and the seconds that it took."""
    with open(path, "rb") as file:
        body = file.read()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/policies/mine", body,
        {"content-type": "application/wasm", "authorization": f"Bearer {KEY}"})
    started = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            status, text = reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    return status, text, time.perf_counter() - started


def resident(pid):
    """Resident MiB of a process; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/status") as status:
            lines = [line for line in status if line.startswith("VmRSS:")]
        return int(lines[0].split()[1]) // 1024 if lines else 0
    except OSError:
        return 0


def children(pid):
    try:
        found = []
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += file.read().split()
        return found
    except OSError:
        return []


class Peak:
    """Largest resident memory of the server and of its children, while it is watched."""

    def __init__(self, pid):
        self.pid, self.server, self.child = pid, 0, 0
        self.done = threading.Event()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self):
        while not self.done.wait(0.02):
            self.server = max(self.server, resident(self.pid))
            self.child = max([self.child, *(resident(child) for child in children(self.pid))])


def report(name, gaps):
    print(f"{name:32} {len(gaps):6} gaps: p50 {centile(gaps, .5):7.2f}  p99 {centile(gaps, .99):7.2f}  "
          f"max {max(gaps):8.2f} ms", flush=True)


def main(args):
    data = tempfile.mkdtemp()
    mine = os.path.join(data, "mine.wasm")
    with open(os.path.join(os.path.dirname(__file__), "../policies/passthrough/passthrough.wasm"), "rb") as shipped:
        component = shipped.read()
    with open(mine, "wb") as file:
        file.write(component)
    config = os.path.join(data, "bombs.toml")
    with open(config, "w") as file:
        file.write(f'[server]\nadmin_keys = ["{KEY}"]\n[engine]\nmax_running = {args.streams}\n'
                   f'[profiles.mine]\npolicies = ["{mine}"]\n')
    server = ours(args.server, data, "--config", config)
    failed = False
    try:
        streams(server.port, args.tokens, args.streams)
        report("alone", streams(server.port, args.tokens, args.streams))
        for path in sorted(glob.glob(os.path.join(args.bombs, "*.wasm"))):
            name = os.path.splitext(os.path.basename(path))[0]
            gaps, done = [], threading.Event()

            def decode():
                # At least one round, and until the upload has been answered.
                while not done.is_set() or not gaps:
                    gaps.extend(streams(server.port, args.tokens, args.streams))

            decoding = threading.Thread(target=decode)
            decoding.start()
            time.sleep(1)
            peak = Peak(server.process.pid)
            status, text, seconds = upload(server.port, path)
            peak.done.set()
            done.set()
            decoding.join()
            print(f"{name}: {status} after {seconds:.2f} s, compiler {peak.child} MiB, server {peak.server} MiB: "
                  f"{text.strip()[:300]}")
            report("  beside it", gaps)
            failed |= status != 422
        report("alone", streams(server.port, args.tokens, args.streams))
    finally:
        server.stop()
    sys.exit(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bombs")
    parser.add_argument("server")
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--streams", type=int, default=8)
    main(parser.parse_args())
