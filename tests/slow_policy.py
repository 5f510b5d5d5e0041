"""Measures what a slow policy costs other streams.

    cargo run -p steersman-test-support --example counting -- counting.wasm
    python3 tests/slow_policy.py counting.wasm SERVER [SERVER ...] [--rounds N] [--tokens N] [--threads N ...]

Each SERVER is a `steersman` binary. In each round and for each server, four streams with the default policy run
alone, and then beside a stream whose policy uses nearly all of its fuel at every step. Prints the time between
two chunks of the four streams, and the time of a single stream without others. No time is checked.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
import urllib.request

from prefix_bench import ours, prose

STREAMS = 4


def stream(port, profile, seed, tokens, until=None):
    """Milliseconds between two chunks of a reply; it is left when `until` is set."""
    body = {"messages": [{"role": "user", "content": f"Write a story. {prose(seed, 2)}"}], "temperature": 1,
            "seed": seed, "max_tokens": tokens, "min_tokens": tokens, "stream": True,
            "chat_template_kwargs": {"enable_thinking": False}}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(),
        {"content-type": "application/json", "x-steersman-profile": profile})
    gaps, last = [], None
    with urllib.request.urlopen(request, timeout=600) as reply:
        for line in reply:
            if not line.startswith(b"data: {") or b'"content"' not in line:
                continue
            now = time.perf_counter()
            if last is not None:
                gaps.append(1000 * (now - last))
            last = now
            if until is not None and until.is_set():
                break
    return gaps


def streams(port, tokens, count=STREAMS):
    """The gaps of some streams at once."""
    found = [None] * count

    def run(i):
        found[i] = stream(port, "default", i, tokens)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [gap for gaps in found for gap in gaps]


def beside(port, tokens):
    """The gaps of four streams beside one with the slow policy, and the gaps of that one."""
    done, slow = threading.Event(), []
    other = threading.Thread(target=lambda: slow.extend(stream(port, "slow", 9, 4 * tokens, done)))
    other.start()
    time.sleep(0.5)
    gaps = streams(port, tokens)
    done.set()
    other.join()
    return gaps, slow


def centile(gaps, share):
    return sorted(gaps)[min(len(gaps) - 1, int(share * len(gaps)))]


def main(args):
    variants = []
    for path in args.servers:
        for threads in args.threads or [None]:
            data = tempfile.mkdtemp()
            config = os.path.join(data, "slow.toml")
            with open(config, "w") as file:
                if threads is not None:
                    file.write(f"[engine]\npolicy_threads = {threads}\n")
                file.write(f"[profiles.slow]\npolicies = [\"{os.path.abspath(args.guest)}\"]\n")
            server = ours(path, data, "--config", config)
            name = os.path.basename(path) + (f" policy_threads={threads}" if threads is not None else "")
            variants.append((name, server, {"one": [], "four": [], "beside": [], "slow": []}))
            stream(server.port, "default", 1, args.tokens)
    for _ in range(args.rounds):
        for _, server, found in variants:
            found["one"].append(statistics.mean(stream(server.port, "default", 1, args.tokens)))
            found["four"] += streams(server.port, args.tokens)
            gaps, slow = beside(server.port, args.tokens)
            found["beside"] += gaps
            found["slow"] += slow
    for name, server, found in variants:
        print(f"{name}: one stream {statistics.median(found['one']):.3f} ms a token (median of {args.rounds} runs)")
        for kind in ["four", "beside", "slow"]:
            gaps = found[kind]
            print(f"  {kind:7} {len(gaps):6} gaps: p50 {centile(gaps, .5):7.2f}  p90 {centile(gaps, .9):7.2f}  "
                  f"p99 {centile(gaps, .99):7.2f}  max {max(gaps):7.2f} ms")
        server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("guest")
    parser.add_argument("servers", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--threads", type=int, nargs="*")
    main(parser.parse_args())
