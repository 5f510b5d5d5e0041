"""Measures what a request costs through Steersman over asking its upstream directly.

    python3 tests/upstream_bench.py SERVER [SERVER ...] [--streams N] [--pieces N] [--pause MS] [--rounds N] [--alone N]

Each SERVER is a `steersman` binary. The upstream is a process of this script that answers at once, and then sends a piece
of each reply every MS milliseconds, each with the time at which it was written. In each round the upstream is asked
directly, and through each server with a profile without policies and with the policy `default`, in an order that turns:
N requests one after the other (--alone), and N streams at once (--streams), which begin MS milliseconds apart. Prints
medians over the rounds of the time to the first piece (p50), of the time from the upstream's write of a piece to the
client's read of it (p50, p99), and what servers add to both; and how many connections the upstream has got for how
many requests. No time is checked. All three processes share the cores: on few cores, the p99 of pieces that are
written at once has their wait for one another.
"""

import argparse
import asyncio
import json
import multiprocessing
import re
import selectors
import socket
import statistics
import tempfile
import time
import urllib.request

from prefix_bench import free_port, ours
from slow_policy import centile

STAMP = re.compile(rb'"content":\s?"(\d{6,}) ')
MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "vllm"}]}
END = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


async def answer(reader, writer, pause, counts):
    """Answers the requests of one connection."""
    counts["connections"] += 1
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = re.search(r"content-length: (\d+)", head)
            body = json.loads(await reader.readexactly(int(length[1]))) if length else None
            if body is None:
                text = json.dumps(counts if "/counts" in head.split("\r\n")[0] else MODELS).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text) + text)
                await writer.drain()
                continue
            counts["requests"] += 1
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for number in range(body["max_tokens"]):
                if number:
                    await asyncio.sleep(pause)
                delta = b'data: {"choices": [{"index": 0, "delta": {"content": "%d "}}]}\n\n' % time.perf_counter_ns()
                writer.write(chunk(delta))
            writer.write(chunk(END) + b"0\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, OSError):
        writer.close()


def upstream(port, pause):
    """The process of the upstream."""
    counts = {"connections": 0, "requests": 0}

    async def serve():
        server = await asyncio.start_server(lambda reader, writer: answer(reader, writer, pause, counts), "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(serve())


def request(model, pieces):
    body = json.dumps({
        "model": model, "messages": [{"role": "user", "content": "Write a story."}], "max_tokens": pieces, "stream": True,
    }).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def measure(port, model, count, pieces, pause):
    """Milliseconds to the first piece of each stream, and of all further pieces from their write to their read.

    One thread reads all sockets and looks for as little as it can: the others are on the same cores."""
    streams = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    poll, body = selectors.DefaultSelector(), request(model, pieces)
    firsts, times, begun, left = [], [], 0, count
    start = time.perf_counter()
    while left:
        now = time.perf_counter()
        if begun < count and now >= start + begun * pause:
            stream = streams[begun]
            poll.register(stream, selectors.EVENT_READ, [time.perf_counter(), False, b""])
            stream.sendall(body)
            begun += 1
        wait = max(0, start + begun * pause - time.perf_counter()) if begun < count else None
        for key, _ in poll.select(wait):
            part = key.fileobj.recv(1 << 16)
            read = time.perf_counter_ns()
            data = key.data
            for stamp in STAMP.findall(part):
                if data[1]:
                    times.append((read - int(stamp)) / 1e6)
                else:
                    data[1] = True
                    firsts.append(read / 1e6 - 1000 * data[0])
            data[2] = (data[2] + part)[-200:]
            if b"[DONE]" in data[2] or not part:
                assert part and data[1], data[2]
                poll.unregister(key.fileobj)
                key.fileobj.close()
                left -= 1
    return firsts, times


def config(port, path):
    """A configuration with the upstream, and the profiles `default` and `plain`."""
    with open(path, "w") as file:
        file.write(
            f'[upstreams.up]\nurl = "http://127.0.0.1:{port}"\nconcurrency = 1024\n'
            '[profiles.default]\nupstreams = ["up"]\n[profiles.plain]\npolicies = ["passthrough"]\nupstreams = ["up"]\n'
        )
    return path


def counts(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/counts") as reply:
        return json.load(reply)


def main(args):
    port, pause = free_port(), args.pause / 1000
    process = multiprocessing.Process(target=upstream, args=(port, pause), daemon=True)
    process.start()
    while True:
        try:
            counts(port)
            break
        except OSError:
            time.sleep(0.1)
    ways, servers = [("directly", port, "m")], []
    for path in args.servers:
        data = tempfile.mkdtemp()
        server = ours(path, data, "--config", config(port, f"{data}/steersman.toml"))
        servers.append(server)
        ways += [(f"{path}, no policy", server.port, "up/m@plain"), (f"{path}, default", server.port, "up/m")]
    found = {way: [] for way, _, _ in ways}
    connections = {}
    for round in range(-1, args.rounds):
        turn = round % len(ways)
        for way, at, model in ways[turn:] + ways[:turn]:
            before = counts(port)
            alone = [measure(at, model, 1, 1, 0)[0][0] for _ in range(args.alone)]
            firsts, times = measure(at, model, args.streams, args.pieces, pause)
            after = counts(port)
            time.sleep(0.3)
            if round >= 0:
                found[way].append([
                    statistics.median(alone), statistics.median(firsts), centile(times, 0.5), centile(times, 0.99)])
                seen = connections.setdefault(way, [0, 0])
                # One of the connections asks for the counts.
                seen[0] += after["connections"] - before["connections"] - 1
                seen[1] += after["requests"] - before["requests"]
    for server in servers:
        server.stop()
    process.terminate()
    print(f"{args.streams} streams of {args.pieces} pieces, {args.pause} ms apart, {args.rounds} rounds; milliseconds")
    print(f"{'':40} {'first, alone':>14} {'first, beside':>14} {'piece p50':>14} {'piece p99':>14}  connections")
    direct = [statistics.median(values) for values in zip(*found["directly"])]
    for way, _, _ in ways:
        values = [statistics.median(values) for values in zip(*found[way])]
        added = [f"{value:6.3f}" + ("" if way == "directly" else f" +{value - base:.3f}") for value, base in zip(values, direct)]
        print(f"{way:40} " + " ".join(f"{text:>14}" for text in added) + "  {} for {} requests".format(*connections[way]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="SERVER")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--pieces", type=int, default=150)
    parser.add_argument("--pause", type=float, default=20, metavar="MS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", type=int, default=100)
    main(parser.parse_args())
