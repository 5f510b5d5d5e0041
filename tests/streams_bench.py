"""Measures tokens a second of one stream and of several at once.

    python3 tests/streams_bench.py SERVER [SERVER ...] [--streams N ...] [--tokens N] [--rounds N] [--prefix N]
                                   [--model MODEL]
    python3 tests/streams_bench.py --beside SERVER [SERVER ...] [--rounds N]

Each SERVER is a `steersman` binary. In each round and for each server, each number of streams is measured, with prompts
of about 20 words that no other request has and replies of exactly that many tokens, at temperature 0 and without
reasoning. Prints medians and ranges of the tokens a second of all streams together, from the first request to the last
token, the ratio to one stream, the times between two chunks, and the most bytes of running requests and the prefix cache.
With --prefix, the requests of a measurement begin with the same N sentences, which no other measurement has. No time is
checked.

With --beside, small requests of one profile run alone, and then beside a request of another profile at its largest: a
chat with n = 32, a completion of 4 prompts with n = 32, 256 texts of an embedding, 256 documents to rank. Prints their
seconds (p50, p99), the ratio of p99 to that alone, and how many had no reply within a minute. On two cores that are busy
anyway, the steps themselves take longer beside 31 other sequences; `decode/tests/turns.rs` counts them.
"""

import argparse
import json
import os
import selectors
import socket
import statistics
import tempfile
import time
import urllib.request

from prefix_bench import ours, prose
from slow_policy import centile


def request(seed, tokens, prefix):
    words = f"Write a story. {seed} {prose(seed, 1)}"
    system = [{"role": "system", "content": prefix}] if prefix else []
    body = json.dumps({
        "messages": [*system, {"role": "user", "content": words}], "temperature": 0, "max_tokens": tokens, "min_tokens": tokens,
        "stream": True, "chat_template_kwargs": {"enable_thinking": False}}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n" \
           f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def held(port):
    """Bytes of running requests and the prefix cache."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as reply:
        accounts = json.load(reply)["engines"][0]["bytes"]
    return accounts["running"] + accounts["prefix_cache"]


def measure(port, count, seed, tokens, sentences=0):
    """Tokens a second of `count` streams, their milliseconds between two chunks, and the most bytes that they held.

    One thread reads all sockets and looks for as little as it can: the server is on the same cores."""
    prefix = prose(-seed, sentences)
    requests = [request(1000 * seed + i, tokens, prefix) for i in range(count)]
    poll = selectors.DefaultSelector()
    start = time.perf_counter()
    for body in requests:
        stream = socket.create_connection(("127.0.0.1", port))
        stream.sendall(body)
        poll.register(stream, selectors.EVENT_READ, [None, b""])
    gaps, left, last, started, most = [], count, start, 0, 0
    while left:
        for key, _ in poll.select():
            part = key.fileobj.recv(1 << 16)
            if not part:
                poll.unregister(key.fileobj)
                key.fileobj.close()
                left -= 1
                if b"[DONE]" not in key.data[1]:
                    raise SystemExit(f"a stream ended with {key.data[1]}")
                continue
            now = time.perf_counter()
            key.data[1] = (key.data[1] + part)[-400:]
            if b'"content"' in part:
                if key.data[0] is not None:
                    gaps.append(1000 * (now - key.data[0]))
                else:
                    started += 1
                    # All of them run.
                    most = held(port) if started == count else most
                key.data[0] = last = now
    return count * tokens / (last - start), gaps, most


def post(port, path, body, timeout):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        return reply.read()


def hold(port, path, body):
    """Sends a request whose reply nobody reads; closing the connection ends it."""
    body = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def largest():
    """Bodies of every kind that fans out."""
    endless = {"max_tokens": 16000, "ignore_eos": True, "temperature": 1}
    texts = [prose(i, 60) for i in range(256)]
    return {
        "alone": None,
        "n": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Write."}], "n": 32, **endless}),
        "prompts": ("/v1/completions", {"prompt": texts[:4], "n": 32, **endless}),
        "embeddings": ("/v1/embeddings", {"input": texts}),
        "rerank": ("/v1/rerank", {"query": "Where are the bells?", "documents": texts}),
    }


def beside(path, rounds):
    """Prints how long small requests of the profile `other` take beside each of `largest`."""
    data = tempfile.mkdtemp()
    config = f"{data}/steersman.toml"
    with open(config, "w") as file:
        file.write("[profiles.default]\n[profiles.default.limits]\nrequests = 1\n[profiles.other]\n")
    server = ours(path, data, "--config", config)
    small = {"model": f"{server.model}@other", "max_tokens": 12, "temperature": 0,
             "chat_template_kwargs": {"enable_thinking": False}}
    alone = None
    for kind, large in largest().items():
        held, times, missing = large and hold(server.port, *large), [], 0
        time.sleep(1)
        for i in range(10 * rounds):
            start = time.perf_counter()
            try:
                post(server.port, "/v1/chat/completions",
                     {**small, "messages": [{"role": "user", "content": f"Number {i}?"}]}, 60)
                times.append(time.perf_counter() - start)
            except OSError:
                missing += 1
                if missing == 2:
                    break
        if held:
            held.close()
            time.sleep(1)
        p50, p99 = (centile(times, share) if times else float("nan") for share in (0.5, 0.99))
        alone = alone or p99
        print(f"{path}: {kind}: p50 {p50:.3f} s, p99 {p99:.3f} s, {p99 / alone:.1f} times alone; {missing} without a reply")
    server.stop()


def main(args):
    if args.beside:
        for path in args.servers:
            beside(path, args.rounds)
        return
    servers = []
    for path in args.servers:
        more = ["--model", args.model] if args.model else []
        servers.append((path, ours(path, tempfile.mkdtemp(), *more)))
    rates, gaps, sizes, seed = {}, {}, {}, 0
    for round in range(-1, args.rounds):
        for path, server in servers if round % 2 else servers[::-1]:
            for count in args.streams:
                seed += 1
                rate, own, most = measure(server.port, count, seed, args.tokens, args.prefix)
                # What the server does after a reply is not the next measurement's time.
                time.sleep(0.3)
                if round >= 0:
                    rates.setdefault((path, count), []).append(rate)
                    gaps.setdefault((path, count), []).extend(own)
                    sizes.setdefault((path, count), []).append(most)
    for path, server in servers:
        server.stop()
        one = statistics.median(rates[path, args.streams[0]])
        print(f"\n{path}, {args.tokens} tokens, {args.rounds} rounds")
        for count in args.streams:
            own, times = rates[path, count], gaps[path, count]
            print(f"{count:>3} streams: {statistics.median(own):6.0f} tok/s [{min(own):.0f}-{max(own):.0f}], "
                  f"{statistics.median(own) / one:.2f} times {args.streams[0]}; gap p50 {centile(times, 0.5):.1f} ms, "
                  f"p99 {centile(times, 0.99):.1f} ms; {statistics.median(sizes[path, count]) / 1e6:.0f} MB")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("servers", nargs="+", metavar="SERVER")
parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 8, 32])
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--prefix", type=int, default=0)
parser.add_argument("--model")
parser.add_argument("--beside", action="store_true")

if __name__ == "__main__":
    main(parser.parse_args())
