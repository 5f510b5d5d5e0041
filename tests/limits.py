"""Runs a server under ten memory limits and reports what becomes of it.

    python3 tests/limits.py SERVER [--port 21050] [--words 30000]

SERVER is the `steersman` binary, which serves its bundled model. It runs without a limit first, to learn
how much it takes, and then under `prlimit --as` and `--data` from less than that to 1 GiB more. Each time
it gets a short request, long ones of up to --words words, and the short one again. The server may refuse
to start or to serve a request, with an error that says so; it must not end by a signal, and not at all
once it has started. Exits with 1 otherwise. Linux only.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

MIB = 1 << 20

# Bytes more than what the server takes without a request.
ROOM = [-64 * MIB, 100 * MIB, 200 * MIB, 400 * MIB, 1024 * MIB]


class Server:
    def __init__(self, options, port, limit=None):
        self.url = f"http://127.0.0.1:{port}"
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self.data = tempfile.TemporaryDirectory()
        command = [options.server, "serve", "--data-dir", self.data.name, "--port", str(port)]
        if limit:
            command = ["prlimit", f"--{limit[0]}={limit[1]}", "--core=0", *command]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)

    def is_ready(self):
        """Waits for the server; false if it has ended."""
        for _ in range(1200):
            if self.process.poll() is not None:
                return False
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=60)
                return True
            except OSError:
                time.sleep(0.1)
        sys.exit("the server does not answer")

    def ask(self, words):
        """Status and message of a request with a prompt of about `words` tokens."""
        text = "fox river castle owl " * (words // 4)
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4,
                "chat_template_kwargs": {"enable_thinking": False}}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(),
            {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=1200) as answer:
                return answer.status, ""
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]["message"]
        except OSError as error:
            return 0, f"no answer: {error}"

    def status(self, name):
        """A number of bytes in /proc/PID/status."""
        with open(f"/proc/{self.process.pid}/status") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

    def last_line(self):
        with open(self.log.name) as log:
            return ([line.strip() for line in log if line.strip()] or ["no output"])[-1]

    def stop(self):
        self.process.terminate()
        return self.process.wait()


def outcome(code):
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"


def run(options, limit):
    """Prints what happens under a limit; true if all of it is allowed."""
    server = Server(options, options.port, limit)
    print(f"{limit[0]} {limit[1] // MIB} MiB: ", end="", flush=True)
    if not server.is_ready():
        code = server.process.wait()
        print(f"does not start, {outcome(code)}: {server.last_line()}")
        return code == 1
    allowed = True
    for words in [8, options.words // 8, options.words // 3, options.words, 8]:
        status, message = server.ask(words)
        print(f"{words} words {status}{': ' + message if message else ''}; ", end="", flush=True)
        allowed &= status in (200, 503)
    # A process that dies may still write its core.
    time.sleep(1)
    ended = server.process.poll()
    code = server.stop()
    print("runs on" if ended is None else f"ENDED with {outcome(code)}: {server.last_line()}")
    return allowed and ended is None and code == 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("server")
    parser.add_argument("--port", type=int, default=21050)
    parser.add_argument("--words", type=int, default=30000)
    options = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    server = Server(options, options.port)
    if not server.is_ready():
        sys.exit(server.last_line())
    server.ask(8)
    taken = {"as": server.status("VmSize:"), "data": server.status("VmData:")}
    server.stop()
    print(f"without a limit: {taken['as'] // MIB} MiB of addresses, {taken['data'] // MIB} MiB of data")
    results = [run(options, (kind, taken[kind] + room)) for kind in taken for room in ROOM]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
