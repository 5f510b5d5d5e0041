"""Real servers as upstreams, and a scripted one that speaks as vendors do, asked through Steersman with the packages of
OpenAI and Anthropic.

    python3 -m venv /tmp/peers
    /tmp/peers/bin/pip install openai==3.52.0 anthropic==2.12.0 mlx-lm==0.32.2 'mlx[cpu]==0.32.2' \\
        xllamacpp==2026.10.11549 gguf==0.19.0
    /tmp/peers/bin/python tests/upstreams.py target/debug/steersman [NAME ...]

NAME is `steersman`, `mlx-lm`, `llama.cpp` or `script`; all of them run otherwise. The real servers serve the bundled
model: another Steersman without policies, mlx_lm.server, and llama.cpp's server with a GGUF file of the same numbers.
The scripted ones also fail in every way of upstream_faults.py, and no key may be in what is left of it. Needs no
network.
"""

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import anthropic
import openai

import upstream_checks as checks
import upstream_faults as faults
from prefix_bench import free_port
from upstream_checks import Target
from upstream_script import FAULTS, VENDORS, Script

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "server/model/tiny-hybrid-4bit"
#: Keys of the upstreams. No part of one is a word, so that a part in any text is a leak.
KEYS = {
    "steersman": "QxZpWmKtRvBn7294cLhG", "mlx-lm": "jYwVzXqPkTmN5830rDsB", "llama.cpp": "HgFvXzQwJkPy6172mTnC",
    "vllm": "ZtKqPxWvYmRb9463hNsD", "claude": "wQpXkVzTjRgM2758yLcF", "gemini": "VbNxQzKwPtJh4936kRmS",
    "grok": "MzXvQwTkLpRj8514nYbG",
}
CLIENT, OPERATOR = "client-of-the-test", "operator-of-the-test"
#: The prompt of the README that makes the bundled model loop.
LOOP = [{"role": "user", "content": "Optimize this SQL query: SELECT * FROM items WHERE price = 26;"}]
LLAMA_CPP = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.api_keys = sys.argv[1], int(sys.argv[2]), [sys.argv[3]]
params.n_ctx, params.n_parallel, params.kv_unified, params.use_jinja, params.ui = 16384, 4, True, True, False
server = xllamacpp.Server(params)
print("ready", flush=True)
while True:
    time.sleep(3600)
"""
#: Everything that the server and the client of HTTP could log.
LOG = "info,steersman=trace,steersman_upstream=trace,hyper=trace,hyper_util=trace,rustls=trace"


@contextmanager
def process(command, log, is_ready, **environment):
    """Runs a server until the end of the block; `is_ready` gets what it has written."""
    with log.open("w") as output:
        running = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | environment)
    try:
        for _ in range(2400):
            found = is_ready(log.read_text(errors="replace"))
            if found:
                break
            assert running.poll() is None, log.read_text()
            time.sleep(0.25)
        else:
            raise AssertionError(f"{command[0]} is not ready: {log.read_text()}")
        yield found
    finally:
        running.terminate()
        try:
            running.wait(60)
        except subprocess.TimeoutExpired:
            running.kill()


def url_of(output):
    """The address in what Steersman writes when it is ready."""
    found = re.search(r" at (http://[\d.:]+)[/\s]", output)
    return found and found[1]


def steersman(binary, folder, name, config, **environment):
    """Serves with a configuration."""
    file = folder / f"{name}.toml"
    file.write_text(config)
    command = [binary, "serve", "--config", str(file), "--port", "0", "--data-dir", str(folder / f"{name}-data")]
    return process(command, folder / f"{name}.log", url_of, **environment)


def other_steersman(binary, folder):
    config = f'[server]\napi_keys = ["{KEYS["steersman"]}"]\n[profiles.default]\npolicies = ["passthrough"]\n'
    return steersman(binary, folder, "other", config)


def mlx_lm(binary, folder):
    port = free_port()
    command = [sys.executable, "-m", "mlx_lm", "server", "--host", "127.0.0.1", "--port", str(port), "--model", str(MODEL)]
    is_ready = lambda log: f"http://127.0.0.1:{port}" if "Starting httpd" in log else None
    return process(command, folder / "mlx.log", is_ready, HF_HUB_OFFLINE="1")


def llama_cpp(binary, folder):
    file, port = folder / "tiny-hybrid.gguf", free_port()
    subprocess.run([sys.executable, ROOT / "tests/fixtures/bundled_gguf.py", file], check=True)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", LLAMA_CPP, str(file), str(port), KEYS["llama.cpp"]]
    return process(command, folder / "llama.log", lambda log: url if "ready" in log else None)


#: `passthrough` has the hook on-step, although it does nothing there.
ENDS = 'without_continuation = "end"\n'
#: By name: how the server is started, its entry, and the model that is asked.
SERVERS = {
    "steersman": (other_steersman, "", "tiny-hybrid-4bit"),
    "mlx-lm": (mlx_lm, 'models = ["default_model"]\ncapabilities.kind = "mlx-lm"\n' + ENDS, "default_model"),
    "llama.cpp": (llama_cpp, "", None),
}
TARGETS = {
    "mlx-lm": dict(has_forms=False, obeys_choice=False),
    "gemini": dict(shows_reasoning=False, calls_twice=True),
    "vllm": dict(calls_twice=True), "claude": dict(calls_twice=True), "grok": dict(calls_twice=True),
}


def identifier(name):
    """The name of an upstream in the configuration, which has no dots."""
    return name.replace(".", "-")


def entry(folder, name, url, key, more=""):
    """`[upstreams.NAME]`"""
    file = folder / f"{key}.key"
    file.write_text(KEYS[key] + "\n")
    protocol = 'protocol = "anthropic"\n' if key == "claude" else ""
    return f'[upstreams.{identifier(name)}]\nurl = "{url}"\nkey_file = "{file}"\n{protocol}{more}'


def profiles(steered, plain):
    """`default` steers, `plain` does not."""
    lists = [", ".join(f'"{identifier(name)}"' for name in names) for names in (steered, plain)]
    return (
        f"[profiles.default]\nupstreams = [{lists[0]}]\n"
        f'[profiles.plain]\npolicies = ["passthrough"]\nupstreams = [{lists[1]}]\n'
    )


class Collector(BaseHTTPRequestHandler):
    """Takes spans as a collector of OpenTelemetry does."""

    spans = []

    def do_POST(self):
        self.spans.append(self.rfile.read(int(self.headers["content-length"])).decode())
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


class Front:
    """The Steersman that has upstreams, its clients, and all that it writes and shows."""

    def __init__(self, url, log):
        self.url, self.log, self.read = url, log, 0
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=CLIENT, max_retries=0, timeout=300)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key=CLIENT, max_retries=0, timeout=300)
        self.leaks = faults.Leaks(KEYS.values())

    def check_keys(self, said=""):
        """No key is in `said`, in the log and the spans since the last call, or on a page of the console."""
        with self.log.open(errors="replace") as log:
            log.seek(self.read)
            self.leaks.check("log", log.read())
            self.read = log.tell()
        spans, Collector.spans[:] = list(Collector.spans), []
        self.leaks.check("spans", "".join(spans))
        self.leaks.check("error", said)
        for page, text in faults.pages(self.url, OPERATOR):
            self.leaks.check(page, text)


def loop_is_broken(front, model):
    """Our policy closes the reasoning of a model that loops elsewhere, and the answer has the form of its hint."""
    reply = front.openai.chat.completions.create(model=model, messages=LOOP, temperature=0)
    message = reply.choices[0].message
    assert message.content.startswith("**Final SQL:**\n\n```sql\n"), reply
    assert "CREATE INDEX idx_items_price ON items (price);" in message.content, reply
    assert message.reasoning_content and "closed the reasoning" in str(reply.steersman), reply


def loop_ends_the_reply(front, model):
    """Where a message cannot be continued, the configuration lets the reply end with the loop."""
    reply = front.openai.chat.completions.create(model=model, messages=LOOP, temperature=0)
    assert not reply.choices[0].message.content and reply.choices[0].message.reasoning_content, reply
    assert "loop" in str(reply.steersman), reply


def missing_continuation_is_told_at_once(binary, folder, script):
    """A policy that may cut, over an upstream that cannot continue, is a problem of the configuration."""
    config = folder / "refused.toml"
    kind = 'capabilities.kind = "openai"\n'
    config.write_text(entry(folder, "grok", script.url("grok"), "grok", kind) + profiles(["grok"], []))
    serve = ["serve", "--config", str(config), "--port", "0", "--data-dir", str(folder / "refused")]
    for command in (["check", str(config)], serve):
        found = subprocess.run([binary, *command], capture_output=True, text=True, timeout=600)
        said = found.stdout + found.stderr
        assert found.returncode != 0 and "which needs an upstream that continues a message" in said, (command, said)
        assert "profiles.default.upstreams" in said and "`default`" in said, said


def main(binary, names):
    binary = str(Path(binary).resolve())
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    failures = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        script = Script(KEYS)
        starts = {name: start for name, (start, _, _) in SERVERS.items() if name in names}
        urls = {name: stack.enter_context(start(binary, folder)) for name, start in starts.items()}
        entries = [entry(folder, name, url, name, SERVERS[name][1]) for name, url in urls.items()]
        plain = list(urls)
        if "script" in names:
            entries += [entry(folder, vendor, script.url(vendor), vendor, ENDS) for vendor in VENDORS]
            for vendor, fault, client in faults.cases():
                name = faults.name(vendor, fault, client)
                url = script.url(vendor, f"{fault}.{client}")
                limits = 'models = ["big"]\nretries = 1\npiece_timeout_s = %d\n' % (2 if fault == "stalled" else 120)
                limits += ENDS
                entries.append(entry(folder, name, url, vendor, limits))
                plain.append(name)
            plain += VENDORS
        config = f'[server]\napi_keys = ["{CLIENT}"]\nadmin_keys = ["{OPERATOR}"]\n'
        config += profiles(urls, plain) + "".join(entries)
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}", "RUST_LOG": LOG}
        url = stack.enter_context(steersman(binary, folder, "front", config, **environment))
        front = Front(url, folder / "front.log")
        listed = [model.id for model in front.openai.models.list()]
        for name in [*urls, *(VENDORS if "script" in names else [])]:
            own = identifier(name) + "/"
            model = next((model for model in listed if model.startswith(own) and "@" not in model), None)
            wanted = SERVERS[name][2] if name in urls else "big"
            assert model and wanted in (None, model.removeprefix(own)), (name, listed)
            target = Target(f"{model}@plain", **TARGETS.get(name, {}))
            found = checks.run((front.openai, front.anthropic), target)
            if name in urls:
                try:
                    (loop_ends_the_reply if name == "mlx-lm" else loop_is_broken)(front, model)
                except Exception as error:
                    found.append(f"{model}: loop: {type(error).__name__}: {error}")
            count = len(checks.OPENAI) + len(checks.ANTHROPIC) + (name in urls)
            print(f"{name}: {count} checks, {len(found)} failed", flush=True)
            failures += found
            front.check_keys()
        if "script" in names:
            missing_continuation_is_told_at_once(binary, folder, script)
            found = []
            for vendor, fault, client in faults.cases():
                try:
                    front.check_keys(faults.check(front, script, vendor, fault, client))
                except Exception as error:
                    found.append(f"{vendor}, {fault}, {client}: {type(error).__name__}: {error}")
            print(f"faults of vendors: {len(faults.cases())} cases, {len(found)} failed", flush=True)
            failures += found
    print(f"looked for keys in {front.leaks.describe()}")
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    choices = [*SERVERS, "script"]
    if len(sys.argv) < 2 or set(sys.argv[2:]) - set(choices):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:] or choices))
