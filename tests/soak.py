"""Soaks a server with mixed requests and watches its resident memory. Linux only.

    python3 tests/soak.py SERVER [MINUTES] [--port PORT] [--allowance MIB]

SERVER is the `steersman` binary. Several clients send streams, whole replies, streams that they cancel,
conversations that grow turn by turn, and edits of earlier turns, to a server with 128 MiB for saved state
in memory and 64 MiB on disk. Every half minute a line of the table is printed.

Exits with 1 if resident memory exceeds what the server takes when it is ready, plus 128 MiB, plus the
allowance; if it keeps growing; or if the files exceed their budget. The allowance is for one running
request (its cache, and the arrays of one chunk of its prompt), MLX's cache of freed buffers (32 MiB), the
database's cache (32 MiB), and memory that the C library has not returned yet.
"""

import argparse
import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter

from prefix_bench import ours, prose

MEMORY = 128
DISK = 64
ALLOWANCE = 200
CLIENTS = 3
MIB = 1 << 20


class Client(threading.Thread):
    """Sends requests until `stop` is set, one at a time."""

    def __init__(self, server, seed, stop):
        super().__init__(daemon=True)
        self.server, self.pick, self.stop = server, random.Random(seed), stop
        self.turns, self.counts, self.failures = [], Counter(), []

    def run(self):
        kinds = [self.stream, self.whole, self.cancel, self.cancel, self.grow, self.grow, self.edit]
        while not self.stop.is_set():
            kind = self.pick.choice(kinds)
            try:
                status = kind()
            except (OSError, http.client.HTTPException) as error:
                status = repr(error)
            if status in (200, 429):
                self.counts[kind.__name__ if status == 200 else "refused"] += 1
            else:
                self.failures.append(f"{kind.__name__}: {status}")

    def ask(self, messages, read=None, **more):
        """The status, and the bytes of the reply; at most `read` of them, then the client hangs up."""
        body = {"model": self.server.model, "messages": messages, "temperature": 0, **more}
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=600)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            reply = connection.getresponse()
            return reply.status, reply.read(read)
        finally:
            connection.close()

    def new(self):
        return [{"role": "system", "content": prose(self.pick.randrange(12), self.pick.randrange(60))},
                {"role": "user", "content": prose(self.pick.randrange(10**6), self.pick.randrange(1, 30))}]

    def stream(self):
        return self.ask(self.new(), stream=True, max_tokens=self.pick.randrange(1, 80))[0]

    def whole(self):
        return self.ask(self.new(), max_tokens=self.pick.randrange(1, 80))[0]

    def cancel(self):
        return self.ask(self.new(), read=self.pick.randrange(1, 3000), stream=True, max_tokens=400)[0]

    def grow(self):
        """The next turn of this client's conversation."""
        if not self.turns or len(self.turns) > 24:
            self.turns = self.new()
        status, reply = self.ask(self.turns, max_tokens=self.pick.randrange(1, 60))
        if status == 200:
            answer = json.loads(reply)["choices"][0]["message"]["content"] or ""
            self.turns += [{"role": "assistant", "content": answer},
                           {"role": "user", "content": prose(self.pick.randrange(10**6), self.pick.randrange(1, 12))}]
        return status

    def edit(self):
        """Replaces an earlier message of the conversation, and continues from there."""
        users = [i for i, turn in enumerate(self.turns) if turn["role"] == "user"]
        if users:
            at = self.pick.choice(users)
            self.turns = self.turns[:at] + [{"role": "user", "content": prose(self.pick.randrange(10**6), 5)}]
        return self.grow()


def resident(pid):
    """Resident memory in MiB."""
    with open(f"/proc/{pid}/status") as status:
        return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) / 1024


def main(args):
    data = tempfile.mkdtemp()
    config = os.path.join(data, "soak.toml")
    with open(config, "w") as file:
        file.write(f"[store]\nmemory_bytes = {MEMORY * MIB}\nbudget_bytes = {DISK * MIB}\n")
    server = ours(args.server, data, "--config", config, port=args.port)
    pid = server.process.pid
    server.ask([{"role": "user", "content": "Hello"}], max_tokens=4)  # compiles and loads lazily
    ready = resident(pid)
    limit = ready + MEMORY + args.allowance
    print(f"ready at {ready:.0f} MiB; limit {limit:.0f} MiB = ready + {MEMORY} + {args.allowance}")
    print(f"{'minute':>6} {'requests':>8} {'cancelled':>9} {'resident':>8} {'highest':>8} {'counted':>8} {'disk':>6} {'files':>6}")

    stop = threading.Event()
    clients = [Client(server, seed, stop) for seed in range(CLIENTS)]
    for client in clients:
        client.start()
    begun = shown = time.time()
    sizes, disk = [], 0
    while server.process.poll() is None and time.time() < begun + 60 * args.minutes:
        time.sleep(0.5)
        sizes.append(resident(pid))
        if time.time() < shown + 30:
            continue
        shown = time.time()
        counts = sum((client.counts for client in clients), Counter())
        saved = sum(os.stat(os.path.join(data, name)).st_blocks * 512 / MIB
                    for name in os.listdir(data) if name.startswith("state.redb"))
        disk = max(disk, saved)
        counted = server.get("/v1/cache")["memory"]["bytes"] / MIB
        files = len(os.listdir(f"/proc/{pid}/fd"))
        print(f"{(shown - begun) / 60:6.1f} {counts.total():8} {counts['cancel']:9} {sizes[-1]:8.0f} {max(sizes):8.0f} "
              f"{counted:8.1f} {saved:6.1f} {files:6}", flush=True)
    ended = server.process.poll()
    stop.set()
    for client in clients:
        client.join(timeout=120)
    server.stop()

    failures = [failure for client in clients for failure in client.failures]
    third = len(sizes) // 3
    middle, last = statistics.median(sizes[third:2 * third]), statistics.median(sizes[2 * third:])
    print(dict(sum((client.counts for client in clients), Counter())))
    print(f"resident: {middle:.0f} MiB in the second third, {last:.0f} in the last, {max(sizes):.0f} at most")
    if args.minutes < 5:
        print("saved state does not fill its budget in less than 5 minutes; growth is not checked")
    problems = [
        (ended is not None, f"the server ended with {ended}"),
        (failures, f"{len(failures)} requests failed: {failures[:5]}"),
        (max(sizes) > limit, f"resident memory exceeded {limit:.0f} MiB"),
        (args.minutes >= 5 and last > middle * 1.05, "resident memory keeps growing"),
        (disk > DISK * 1.02, f"the files took {disk:.1f} of {DISK} MiB"),
    ]
    problems = [problem for is_one, problem in problems if is_one]
    sys.exit("\n".join(problems) if problems else 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server")
    parser.add_argument("minutes", type=float, nargs="?", default=30)
    parser.add_argument("--port", type=int)
    parser.add_argument("--allowance", type=int, default=ALLOWANCE, help="MiB; default %(default)s")
    main(parser.parse_args())
