"""Compares a real server with its own description: examples, then requests that schemathesis generates.

    python tests/openapi.py target/debug/steersman [REQUESTS]

Starts the server with the bundled model, a data folder of its own, keys, and a hub that nobody answers. Fails on a
status 5xx, on a request without an answer, and on a reply that its schema does not allow. Needs `schemathesis`.
"""

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

KEY = "sk-fuzz-operator"
# Replies are short, so that thousands of requests take minutes.
CONFIG = """
[server]
api_keys = ["sk-fuzz-client"]
admin_keys = ["{key}"]
request_timeout_s = 60
[engine]
max_tokens = 4
[policy]
folder = "{folder}/policies"
[profiles.default.limits]
max_tokens = 4
"""
SCHEMATHESIS = """
[checks]
enabled = false
not_a_server_error.enabled = true
status_code_conformance.enabled = true
content_type_conformance.enabled = true
response_headers_conformance.enabled = true
response_schema_conformance.enabled = true
[[operations]]
include-path-regex = "/(pull|search)$"
# Without a hub a download or a search fails as it must: with 502, which says so.
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", 502]
"""
# Most generated names of models are wrong, and most requests would be refused for them.
HOOKS = """
import schemathesis

schemathesis.serializer.alias("application/wasm", "application/octet-stream")


@schemathesis.hook
def map_body(context, body):
    if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) % 4:
        return {name: value for name, value in body.items() if name != "model"}
    return body
"""
TIMEOUT_S = 90


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until_ready(server, url):
    for _ in range(1200):
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            if server.poll() is not None:
                sys.exit(f"the server ended with {server.returncode}")
            time.sleep(0.25)
    sys.exit("the server is not ready")


def run_examples(url):
    """Every example of the description gets a 200; returns how many there are."""
    with urllib.request.urlopen(f"{url}/openapi.json", timeout=TIMEOUT_S) as reply:
        description = json.load(reply)
    count = 0
    for path, methods in description["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        for name, example in content.get("examples", {}).items():
            # Only a server with a terminal has a link, and the cache is empty.
            if path.endswith(("/pull", "/serve", "/session")):
                continue
            headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
            body = json.dumps(example["value"]).encode()
            # The key that the example before has created.
            at = path.replace("/v1/keys/{name}/", "/v1/keys/laptop/")
            request = urllib.request.Request(url + at, body, headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                text = reply.read().decode()
            assert text.strip(), f"{path} {name}: no text"
            count += 1
    return count


def main():
    binary = Path(sys.argv[1]).resolve()
    requests = int(sys.argv[2]) if len(sys.argv) > 2 else 500
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        config = Path(folder, "steersman.toml")
        config.write_text(CONFIG.format(key=KEY, folder=folder))
        Path(folder, "policies").mkdir()
        Path(folder, "schemathesis.toml").write_text(SCHEMATHESIS)
        Path(folder, "hooks.py").write_text(HOOKS)
        environment = os.environ | {
            # Nobody listens there.
            "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}",
            "HF_HOME": f"{folder}/hub",
            "RUST_LOG": "warn",
        }
        command = [binary, "serve", "--config", config, "--data-dir", f"{folder}/data", "--port", str(port)]
        url = f"http://127.0.0.1:{port}"
        log = open(Path(folder, "server.log"), "w")
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            wait_until_ready(server, url)
            print(f"{run_examples(url)} examples answered")
            with urllib.request.urlopen(f"{url}/openapi.json", timeout=TIMEOUT_S) as reply:
                paths = json.load(reply)["paths"]
            operations = [operation for methods in paths.values() for operation in methods.values()]
            # The others have one request, and some of these few different ones.
            varied = [it for it in operations if "requestBody" in it or "parameters" in it]
            command = [
                "schemathesis", "--config-file", f"{folder}/schemathesis.toml", "run", f"{url}/openapi.json",
                "--phases", "examples,fuzzing", "--mode", "all", "--seed", "1",
                "--max-examples", str(math.ceil(1.2 * requests / len(varied))),
                "--request-timeout", str(TIMEOUT_S), "--workers", "4", "--no-color", "--continue-on-failure",
                "--header", f"Authorization: Bearer {KEY}", "--generation-database", "none",
                "--suppress-health-check", "all", "--warnings", "off",
            ]
            hooks = {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": folder}
            done = subprocess.run(command, cwd=folder, env=os.environ | hooks)
            if server.poll() is not None:
                sys.exit(f"the server ended with {server.returncode}")
            wait_until_ready(server, url)
        finally:
            server.terminate()
            server.wait(60)
            log.close()
            text = Path(folder, "server.log").read_text()
            print(text[-4000:])
        assert "panic" not in text, "the server panicked"
        sys.exit(done.returncode)


main()
