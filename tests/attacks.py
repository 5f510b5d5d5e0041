"""Attacks a server of its own and measures what other clients notice.

    python3 tests/attacks.py SERVER [--seconds 20] [--port 0]

SERVER is the `steersman` binary. It runs with at most 1,024 open files (`ulimit -n 1024`), listens on
127.0.0.1 and serves the bundled model. While each attack runs in a process of its own, one client
chats and another polls /health, each over a new connection for each request. Prints a table of their
times. No time is checked; the exit code is 1 if a request of these clients failed.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

KEY = "sk-attacks"
OPEN_FILES = 1024
CONFIG = f"""
[server]
api_keys = ["{KEY}"]
[store]
enabled = false
memory_bytes = 67108864
ahead = false
"""
CHAT = json.dumps({
    "messages": [{"role": "user", "content": "What is the capital of Italy?"}],
    "temperature": 0, "max_tokens": 8, "max_thinking_tokens": 0})
HEAD = ("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Authorization: Bearer {key}\r\nContent-Length: {length}\r\n")
PATIENCE = 60  # seconds until a request of the measured clients counts as failed


def connect(address):
    """A connection, or None if the server refuses it."""
    try:
        return socket.create_connection(address, timeout=2)
    except OSError:
        return None


def is_closed(connection):
    connection.setblocking(False)
    try:
        return connection.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(2)


def hold(address, end, count, first, then=b""):
    """Keeps `count` connections open that have sent `first` and send `then` once a second. Reopens those
    that the server closes, at most 200 a second."""
    held = []
    while time.time() < end:
        turn = time.time()
        opened = 0
        while len(held) < count and time.time() < min(end, turn + 1) and (len(held) < count // 2 or opened < 200):
            connection = connect(address)
            if connection is None:
                break
            try:
                connection.sendall(first)
                held.append(connection)
            except OSError:
                connection.close()
            opened += 1
        kept = []
        for connection in held:
            try:
                closed = is_closed(connection)
                if not closed and then:
                    connection.sendall(then)
            except OSError:
                closed = True
            if closed:
                connection.close()
            else:
                kept.append(connection)
        held = kept
        time.sleep(max(0.0, min(end, turn + 1) - time.time()))
    for connection in held:
        connection.close()


def slow_headers(address, end):
    hold(address, end, 500, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: ", b"a")


def silent(address, end):
    hold(address, end, 5000, b"")


def unfinished_bodies(address, end):
    hold(address, end, 200, (HEAD.format(key=KEY, length=1000) + "\r\n{").encode())


def in_threads(count, end, work):
    def repeat():
        while time.time() < end:
            try:
                work()
            except OSError:
                time.sleep(0.05)

    threads = [threading.Thread(target=repeat) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def huge_bodies(address, end, piece=b'{"":0},', size=15_000_000):
    body = b'{"messages":[' + piece * (size // len(piece)) + b"{}]}"

    def send():
        with socket.create_connection(address, timeout=PATIENCE) as connection:
            connection.sendall((HEAD.format(key=KEY, length=len(body)) + "\r\n").encode() + body)
            connection.recv(4096)

    in_threads(24, end, send)


def huge_texts(address, end):
    huge_bodies(address, end, b"x" * 1000 + b"\\n")


def guesses(address, end):
    def guess():
        with socket.create_connection(address, timeout=PATIENCE) as connection:
            connection.sendall((HEAD.format(key="sk-wrong", length=len(CHAT)) + "\r\n" + CHAT).encode())
            connection.recv(4096)

    in_threads(64, end, guess)


ATTACKS = [slow_headers, silent, unfinished_bodies, huge_bodies, huge_texts, guesses]


class Server:
    """The attacked server, in a child process."""

    def __init__(self, binary, port, folder):
        config = os.path.join(folder, "attacks.toml")
        with open(config, "w") as file:
            file.write(CONFIG)
        limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
        self.log = os.path.join(folder, "server.log")
        command = [binary, "serve", "--config", config, "--data-dir", folder, "--device", "cpu", "--port", str(port)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=open(self.log, "w"), text=True, preexec_fn=limit,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
        line = self.process.stdout.readline()
        if " at http://" not in line:
            sys.exit(open(self.log).read())
        host, port = line.split(" at http://")[1].split("/v1")[0].rsplit(":", 1)
        self.address = (host, int(port))

    def resident_mib(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) // 1024

    def open_files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


class Client(threading.Thread):
    """Repeats a request until `end`, and keeps its times in seconds."""

    def __init__(self, address, end, pause, method, path, body=None):
        super().__init__()
        self.times, self.failures = [], []
        self.request = (address, end, pause, method, path, body)

    def run(self):
        address, end, pause, method, path, body = self.request
        while time.time() < end:
            started = time.perf_counter()
            try:
                connection = http.client.HTTPConnection(*address, timeout=PATIENCE)
                headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", "Connection": "close"}
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                reply = response.read()
                if response.status != 200:
                    self.failures.append(f"{response.status} {reply[:200]}")
                connection.close()
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(repr(error))
            self.times.append(time.perf_counter() - started)
            time.sleep(pause)

    def row(self):
        quantiles = statistics.quantiles(self.times, n=100) if len(self.times) > 1 else self.times * 99
        return quantiles[49] * 1000, quantiles[98] * 1000, len(self.times), len(self.failures)


def measure(server, attack, seconds):
    """Times of both clients during the attack; most memory and open files of the server."""
    warm_up = min(5, seconds / 4)
    end = time.time() + warm_up + seconds
    process = attack and multiprocessing.Process(target=attack, args=(server.address, end))
    if process:
        process.start()
    time.sleep(warm_up)
    clients = [Client(server.address, end, 0.0, "POST", "/v1/chat/completions", CHAT),
               Client(server.address, end, 0.02, "GET", "/health")]
    for client in clients:
        client.start()
    memory, files = [], []
    while any(client.is_alive() for client in clients):
        memory.append(server.resident_mib())
        files.append(server.open_files())
        time.sleep(0.2)
    if process:
        process.join(PATIENCE)
        process.kill()
    time.sleep(1)
    return clients, max(memory), max(files)


def main(args):
    wanted = 8192
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        sys.exit(f"the attacks need {wanted} open files, the limit is {hard} (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    attacks = [attack for attack in ATTACKS if not args.only or attack.__name__ in args.only]
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        server = Server(args.server, args.port, folder)
        try:
            measure(server, None, 3)  # the first requests compile and load lazily
            print(f"{'times in ms':18} {'chat p50':>9} {'p99':>8} {'n':>5} {'failed':>6}"
                  f" {'health p50':>11} {'p99':>8} {'n':>5} {'failed':>6} {'MiB':>6} {'files':>6}")
            for attack in [None, *attacks, None]:
                name = attack.__name__.replace("_", " ") if attack else "idle"
                (chat, health), memory, files = measure(server, attack, args.seconds)
                columns = "{:9.1f} {:8.1f} {:5} {:6}".format
                print(f"{name:18} {columns(*chat.row())}   {columns(*health.row())} {memory:6} {files:6}", flush=True)
                failures += [f"{name}: {failure}" for failure in chat.failures + health.failures]
            for failure in failures[:20]:
                print(failure)
        finally:
            server.process.terminate()
            server.process.wait(30)
            if args.log:
                print(open(server.log).read())
    return 1 if failures else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="names of attacks")
    parser.add_argument("--log", action="store_true", help="print the log of the server at the end")
    sys.exit(main(parser.parse_args()))
