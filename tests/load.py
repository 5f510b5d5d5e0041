"""Loads a server with many requests at once, and kills one that runs many. Linux only.

    python3 tests/load.py SERVER [--seconds S] [--clients N] [--kills K] [--port PORT]

SERVER is the `steersman` binary.

First, N clients send requests of mixed lengths without a pause, streams and whole replies, and hang up
now and then. Meanwhile `/health` is asked every 50 ms. Fails if a request ends with anything but 200 or
429, if resident memory at the end is over that of the first third by more than a tenth, or if `/health` takes
more than 50 ms at the 99th percentile.

Then 16 requests run, and the server is killed with SIGKILL at a random time, K times. The store must be whole
(`steersman cache verify` finds no damage), and the restarted server must give the replies of one that was
never killed.
"""

import argparse
import http.client
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter

from prefix_bench import ours, prose
from soak import resident

HEALTH_MS = 50
RUNNING = 16


def post(port, body, read=None, timeout=600):
    """The status and the bytes of a reply; at most `read` of them, then the client hangs up."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        return reply.status, reply.read(read)
    finally:
        connection.close()


def client(port, seed, end, statuses):
    pick = random.Random(seed)
    while time.time() < end:
        words = prose(pick.randrange(10**6), pick.choice([1, 4, 20, 80]))
        body = {"messages": [{"role": "user", "content": words}], "temperature": pick.choice([0, 1]),
                "seed": seed, "max_tokens": pick.choice([1, 8, 40, 160]), "stream": pick.random() < 0.5,
                "chat_template_kwargs": {"enable_thinking": pick.random() < 0.2}}
        hangs_up = pick.random() < 0.1
        try:
            status, _ = post(port, body, pick.randrange(1, 2000) if hangs_up else None)
        except (OSError, http.client.HTTPException) as error:
            status = repr(error)
        statuses[status] += 1
        if status == 429:
            time.sleep(0.2)


def health(port, end, times, seen):
    while time.time() < end:
        start = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/health")
        engine = json.load(connection.getresponse())["engines"][0]
        connection.close()
        times.append(1000 * (time.perf_counter() - start))
        seen.append(engine)
        time.sleep(0.05)


def overload(args):
    """Problems of a server that many clients use at once."""
    data = tempfile.mkdtemp()
    config = os.path.join(data, "load.toml")
    with open(config, "w") as file:
        file.write(f"[store]\nmemory_bytes = {64 << 20}\nbudget_bytes = {64 << 20}\n")
    server = ours(args.server, data, "--config", config, port=args.port)
    end = time.time() + args.seconds
    statuses, times, seen, sizes = Counter(), [], [], []
    threads = [threading.Thread(target=client, args=(server.port, seed, end, statuses)) for seed in range(args.clients)]
    threads.append(threading.Thread(target=health, args=(server.port, end, times, seen)))
    for thread in threads:
        thread.start()
    while time.time() < end and server.process.poll() is None:
        sizes.append(resident(server.process.pid))
        time.sleep(0.5)
    ended = server.process.poll()
    for thread in threads:
        thread.join(timeout=300)
    server.stop()
    shutil.rmtree(data)
    third = len(sizes) // 3
    first, last = (statistics.median(part) for part in (sizes[third // 2:third], sizes[-third // 2:]))
    slow = statistics.quantiles(times, n=100)[98]
    running = statistics.mean(engine["running"] for engine in seen)
    last_seen = seen[-1]
    print(f"{args.clients} clients, {args.seconds} s: {dict(statuses)}; /health p50 {statistics.median(times):.1f} ms, "
          f"p99 {slow:.1f} ms; resident {first:.0f} MiB in the first third, {last:.0f} at the end; "
          f"{running:.1f} running on average, {last_seen['tokens_per_second']} tokens/s, {last_seen['stalls']} stalls, "
          f"{last_seen['preemptions']} preemptions")
    failed = {status: count for status, count in statuses.items() if status not in (200, 429)}
    return [problem for is_one, problem in [
        (ended is not None, f"the server ended with {ended}"),
        (failed, f"requests failed: {failed}"),
        (not statuses[200], "no request succeeded"),
        (last > first * 1.1, "resident memory grows"),
        (slow > HEALTH_MS, f"/health takes {slow:.0f} ms at the 99th percentile, more than {HEALTH_MS}"),
    ] if is_one]


def conversation(i):
    return {"messages": [{"role": "system", "content": prose(1, 12)}, {"role": "user", "content": prose(i + 2, 6)}],
            "temperature": i % 2, "seed": i, "max_tokens": 60, "chat_template_kwargs": {"enable_thinking": False}}


def replies(server):
    """The replies to all conversations, sent at once."""
    found = [None] * RUNNING

    def ask(i):
        try:
            status, body = post(server.port, conversation(i))
            found[i] = json.loads(body)["choices"][0]["message"]["content"] if status == 200 else status
        except (OSError, http.client.HTTPException, ValueError) as error:
            found[i] = repr(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(RUNNING)]
    for thread in threads:
        thread.start()
    return threads, found


def kills(args):
    """Problems of a store whose server was killed while requests ran."""
    data = tempfile.mkdtemp()
    config = os.path.join(data, "kill.toml")
    with open(config, "w") as file:
        file.write(f"[engine]\nmax_running = {RUNNING}\n[store]\nmin_tokens = 16\n")
    start = lambda folder: ours(args.server, folder, "--config", config, port=args.port)
    finish = lambda pair: [thread.join() for thread in pair[0]] and pair[1]
    fresh = tempfile.mkdtemp()
    server = start(fresh)
    begun = time.time()
    expected = finish(replies(server))
    took = time.time() - begun
    server.stop()
    shutil.rmtree(fresh)
    problems, pick = [], random.Random(1)
    for kill in range(args.kills):
        server = start(data)
        running = replies(server)
        time.sleep(took * pick.uniform(0.2, 0.9))
        most = server.get("/health")["engines"][0]["running"]
        server.process.kill()
        server.process.wait()
        finish(running)
        verified = subprocess.run([args.server, "cache", "verify", "--data-dir", data, "--config", config],
                                  capture_output=True, text=True)
        server = start(data)
        found = finish(replies(server))
        cached = server.get("/v1/cache")["counts"]
        server.stop()
        print(f"kill {kill + 1}: {most} were running; {verified.stdout.strip()!r}; "
              f"{sum(a == b for a, b in zip(expected, found))} of {RUNNING} replies equal; "
              f"{cached['read_tokens']} tokens read from disk")
        if verified.returncode or "amaged" in verified.stderr:
            problems.append(f"kill {kill + 1}: {verified.stdout} {verified.stderr}")
        if found != expected:
            problems.append(f"kill {kill + 1}: {expected} became {found}")
    shutil.rmtree(data)
    return problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    found_problems = (overload(arguments) if arguments.seconds else []) + kills(arguments)
    sys.exit("\n".join(found_problems) if found_problems else 0)
