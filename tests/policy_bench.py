"""Measures what the default policy adds to the time per token: `python3 tests/policy_bench.py target/debug/steersman
[ROUNDS]`.

Decodes the same stories under `passthrough` and `default` in turns and compares the medians of seconds per token.
Speculation is off, since the variance of its acceptance rate is larger than the difference, and no state is saved.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

PROFILES = ("passthrough", "default")
TOKENS = 200
CONFIG = """
[server]
port = 0
[speculation]
drafts = []
[store]
enabled = false
memory_bytes = 0
[profiles.passthrough]
policies = ["passthrough"]
"""
STORIES = [
    "Write a story about a fox named Nora who lives near the river.",
    "Write a story about an owl named Otto who lives in the castle.",
    "Write a story about a bear named Bruno who lives near the bridge.",
]


def ask(url, profile, story):
    """Seconds per token of one reply."""
    body = {
        "model": f"tiny-hybrid-4bit@{profile}",
        "messages": [{"role": "user", "content": story}],
        "temperature": 1.5,
        "seed": 7,
        "max_tokens": TOKENS,
        "max_thinking_tokens": 0,
    }
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.perf_counter()
    with urllib.request.urlopen(request) as response:
        reply = json.load(response)
    return (time.perf_counter() - started) / reply["usage"]["completion_tokens"], reply["choices"][0]["message"]


def main():
    binary, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 15
    with tempfile.TemporaryDirectory() as folder:
        config = os.path.join(folder, "bench.toml")
        with open(config, "w") as file:
            file.write(CONFIG)
        command = [binary, "serve", "--config", config, "--data-dir", folder, "--device", "cpu"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
            try:
                url = server.stdout.readline().split(" at ")[1].split("/v1")[0]
                times = {profile: [] for profile in PROFILES}
                for round_ in range(rounds + 1):
                    for story in STORIES:
                        order = PROFILES if round_ % 2 else PROFILES[::-1]
                        replies = {}
                        for profile in order:
                            seconds, replies[profile] = ask(url, profile, story)
                            if round_:  # the first round warms up
                                times[profile].append(seconds)
                        assert replies["default"] == replies["passthrough"], "the replies differ"
                medians = {profile: statistics.median(taken) for profile, taken in times.items()}
                for profile, median in medians.items():
                    print(f"{profile:12} {median * 1000:8.3f} ms a token, median of {len(times[profile])} replies")
                print(f"default / passthrough: {medians['default'] / medians['passthrough']:.4f}")
            finally:
                server.terminate()


main()
