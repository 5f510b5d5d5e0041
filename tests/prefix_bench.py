"""Measures reuse of saved state and time to the first token.

    python3 tests/prefix_bench.py table SERVER [--beside PYTHON MODEL]
    python3 tests/prefix_bench.py tools SERVER

SERVER is the `steersman` binary. `table` sends a conversation and its variations to a Steersman server
and, with --beside, to `PYTHON -m mlx_lm.server --model MODEL`, each request to both in turn. `tools`
sends a tool schema of 12,000 tokens cold, warm in memory, and warm after a restart. No time is checked.
tests/soak.py watches memory.
"""

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

ANIMALS = ["fox", "owl", "bear", "hare", "otter", "deer", "wolf"]
PLACES = ["forest", "river", "harbour", "village", "castle", "bridge", "garden"]


def prose(seed, sentences):
    pick = random.Random(seed)
    line = lambda: f"There are {pick.randrange(10, 99)} bells in the {pick.choice(PLACES)}. " \
                   f"The quiet {pick.choice(ANIMALS)} walked near the {pick.choice(PLACES)}."
    return " ".join(line() for _ in range(sentences))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A server in a child process."""

    def __init__(self, command, model=None, port=None):
        self.port = port or free_port()
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self.process = subprocess.Popen(
            [part.replace("PORT", str(self.port)) for part in command],
            stdout=self.log, stderr=subprocess.STDOUT)
        self.wait()
        self.model = model or self.get("/v1/models")["data"][0]["id"]

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=600) as answer:
            return json.load(answer)

    def wait(self):
        for _ in range(6000):  # 503 while it loads
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=600):
                    return
            except OSError:
                if self.process.poll() is not None:
                    sys.exit(open(self.log.name).read())
                time.sleep(0.1)
        sys.exit("the server does not answer")

    def ask(self, messages, tools=(), max_tokens=1, **more):
        """Prompt tokens, cached prompt tokens, seconds to the first token, answer."""
        body = {"model": self.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0,
                "stream": True, "stream_options": {"include_usage": True},
                "chat_template_kwargs": {"enable_thinking": False}, **more}
        if tools:
            body["tools"] = list(tools)
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions", json.dumps(body).encode(),
            {"content-type": "application/json"})
        start, first, text, usage = time.perf_counter(), None, "", {}
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                piece = json.loads(line[6:])
                usage = piece.get("usage") or usage
                for choice in piece.get("choices", []):
                    delta = choice.get("delta", {})
                    token = delta.get("content") or delta.get("reasoning_content")
                    if token and first is None:
                        first = time.perf_counter() - start
                    text += delta.get("content") or ""
        details = usage.get("prompt_tokens_details") or {}
        whole = time.perf_counter() - start
        return usage.get("prompt_tokens"), details.get("cached_tokens"), first or whole, text

    def stop(self):
        self.process.terminate()
        self.process.wait()


def ours(binary, data, *more, port=None):
    return Server([binary, "serve", "--data-dir", data, "--port", "PORT", *more], port=port)


def conversation():
    """Names and messages of requests, in order; `None` restarts the server."""
    system = {"role": "system", "content": prose(1, 16)}
    user = lambda words: {"role": "user", "content": words}
    assistant = lambda words: {"role": "assistant", "content": words}
    turns = [system]
    for i in range(6):
        turns += [user(f"{prose(i + 2, 3)} What do you think?"), assistant(prose(i + 20, 2))]
    last = user("What is the capital of Italy?")
    edited = list(turns)
    edited[9] = user(prose(99, 3))
    return [
        ("first", turns + [last]),
        ("exact repeat", turns + [last]),
        ("extend", turns + [last, assistant("The capital of Italy is Rome."), user("And of Peru?")]),
        ("edit at 75 %", edited + [last]),
        ("shorter prefix", turns[:7] + [last]),
        ("branch", turns[:11] + [user("Tell me something else."), ]),
        ("restart", None),
        ("extend, restarted", turns + [last, assistant("The capital of Italy is Rome."), user("And of Kenya?")]),
    ]


def table(args):
    data = tempfile.mkdtemp()
    mlx = lambda: Server([args.beside[0], "-m", "mlx_lm.server", "--model", args.beside[1], "--port", "PORT"],
                         model=args.beside[1])
    servers = {"steersman": ours(args.server, data)}
    if args.beside:
        servers["mlx_lm.server"] = mlx()
    for server in servers.values():
        server.ask([{"role": "user", "content": "Hello"}], max_tokens=4)  # compiles and loads lazily
    print(f"{'':20}" + "".join(f"{name:>32}" for name in servers))
    print(f"{'':20}" + f"{'cached of prompt, first token':>32}" * len(servers))
    short = []
    for name, messages in conversation():
        if messages is None:
            for which, server in list(servers.items()):
                server.stop()
                servers[which] = ours(args.server, data) if which == "steersman" else mlx()
                servers[which].ask([{"role": "user", "content": "Hello"}], max_tokens=4)
            continue
        row = f"{name:20}"
        for which, server in servers.items():
            prompt, cached, first, _ = server.ask(messages, max_tokens=8)
            row += f"{f'{cached} of {prompt}, {first * 1000:.0f} ms':>32}"
            if which == "steersman" and name != "first" and not cached:
                short.append(name)
        print(row, flush=True)
        time.sleep(1)
    for server in servers.values():
        server.stop()
    sys.exit(f"nothing was reused: {', '.join(short)}" if short else 0)


def schema(tools):
    """`tools` tools of some 120 tokens each."""
    pick = random.Random(4)
    field = lambda: (f"{pick.choice(ANIMALS)}_{pick.choice(PLACES)}_{pick.randrange(99)}",
                     {"type": "string", "description": prose(pick.randrange(10**6), 1)})
    return [{"type": "function", "function": {
        "name": f"tool_{i}", "description": prose(i, 1),
        "parameters": {"type": "object", "properties": dict(field() for _ in range(2))}}}
        for i in range(tools)]


def tools(args):
    user = lambda words: [{"role": "user", "content": words}]
    warm_up = lambda server: server.ask(user("Hello"), max_tokens=4)
    tools, times, counts = schema(args.tools), {"cold": [], "memory": [], "restart": []}, []
    for _ in range(args.rounds):
        data = tempfile.mkdtemp()
        server = ours(args.server, data)
        warm_up(server)
        for name, words in [("cold", "What is the capital of Italy?"), ("memory", "What is the capital of Peru?")]:
            prompt, cached, first, _ = server.ask(user(words), tools)
            times[name].append(first)
            counts.append((name, cached, prompt))
        time.sleep(3)
        server.stop()
        server = ours(args.server, data)
        warm_up(server)
        prompt, cached, first, _ = server.ask(user("What is the capital of Kenya?"), tools)
        times["restart"].append(first)
        counts.append(("restart", cached, prompt))
        server.stop()
    print(counts)
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, value in median.items():
        print(f"{name:8} {value * 1000:8.0f} ms to the first token, {median['cold'] / value:6.1f} times as fast as cold")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["table", "tools"])
    parser.add_argument("server")
    parser.add_argument("--beside", nargs=2, metavar=("PYTHON", "MODEL"))
    parser.add_argument("--tools", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    {"table": table, "tools": tools}[args.what](args)
