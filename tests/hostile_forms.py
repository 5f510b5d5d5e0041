"""Sends generated forms that are made to take time, memory or stack, and measures what another client notices.

    python3 tests/hostile_forms.py SERVER [--forms 10000] [--clients 2] [--seed 0] [--model MODEL]

SERVER is the `steersman` binary, which serves its bundled model. Some clients send forms (chains, intersections, enums,
choices, nested quantifiers, Lark, GBNF), half of them streamed, while another one sends small requests without a form.
After every 250 forms the small requests run alone for some seconds, so that both are measured on the same machine at the
same time. Each form that ends in an error behind its first token is sent again, streamed and whole: both must end with an
error that names the field. At the end, memory is read after a pause, and the server gets SIGTERM while forms are compiled.
Exits with 1 if the server ends, a reply has no clear end, a small request fails or takes a second longer than the slowest
one alone, or SIGTERM does not end the process within `server.shutdown_s`.
"""

import argparse
import collections
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

from prefix_bench import ours
from slow_policy import centile

GRACE = 10  # server.shutdown_s
# A small prefix cache, so that memory shows what forms take.
CONFIG = f"""
[server]
shutdown_s = {GRACE}
[store]
enabled = false
memory_bytes = 33554432
"""
PAUSE_AFTER = 250  # forms
ALONE = 25  # small requests
TOKENS = 60
PATIENCE = 120  # seconds until a request counts as endless


def expression(pick, depth):
    if depth == 0:
        return pick.choice(["a", "b", ".", "[ab]", "[^a]", "\\w", "\\s", "é", "(a|b)", "[a-m]", "[g-z0-9]", "\\p{L}", "\\d"])
    inner = expression(pick, depth - 1)
    return [
        lambda: f"({inner})*",
        lambda: f"({inner}){{{1 + pick.randrange(60)}}}",
        lambda: f"({inner}){{{pick.randrange(9)},}}",
        lambda: f"({inner}|{expression(pick, depth - 1)})",
        lambda: inner + expression(pick, depth - 1),
        lambda: f".*{inner}.{{{pick.randrange(30)}}}",
        lambda: f"({inner})+({expression(pick, depth - 1)})?",
        lambda: f"({inner}){{{pick.randrange(50)},{50 + pick.randrange(2000)}}}",
    ][pick.randrange(8)]()


def chain(length, part):
    definitions = {f"d{i}": part({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "string"}}}


def schema(pick, depth):
    """A schema whose parts apply together, refer to one another, and are many."""
    number = 1 + pick.randrange(300 if pick.randrange(9) == 0 else 6)
    nested = lambda: schema(pick, max(depth - 1, 0))
    few = lambda: [nested() for _ in range(2 + pick.randrange(4))]
    kinds = [
        lambda: {"type": "string", "pattern": expression(pick, 3)},
        lambda: {"enum": [f"value {i} {i * 7}" for i in range(number * 9)]},
        lambda: {"type": "string", "minLength": pick.randrange(2000), "maxLength": 2000 + pick.randrange(9000)},
        lambda: {"type": "string", "format": pick.choice(["date-time", "email", "uri", "uuid", "ipv6"]),
                 "pattern": expression(pick, 2)},
        lambda: {"type": "number", "multipleOf": 0.01, "minimum": -5, "maximum": 1e9},
        lambda: {"type": "string", "allOf": [{"pattern": expression(pick, 2)} for _ in range(number)]},
        lambda: {"allOf": few()},
        lambda: {"anyOf": few(), "type": ["string", "object"]},
        lambda: {"oneOf": [{"properties": {"kind": {"const": i}, "a": nested()}, "type": "object", "required": ["kind"]}
                           for i in range(min(number, 40))]},
        lambda: {"type": "object", "patternProperties":
                 {f"^{i}{expression(pick, 1)}": {"type": "integer"} for i in range(number)}},
        lambda: {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(number)},
                 "minProperties": pick.randrange(3)},
        lambda: {"type": "array", "items": nested(), "minItems": pick.randrange(1000)},
        lambda: chain(number * 3, [
            lambda inner: {"allOf": [inner, {"pattern": "a.*b"}]},
            lambda inner: {"anyOf": [inner, {"type": "null"}]},
            lambda inner: {"type": "array", "items": inner, "maxItems": 3}][number % 3]),
        lambda: {"$ref": "#", "allOf": [nested()]},
    ]
    return kinds[pick.randrange(5 if depth == 0 else len(kinds))]()


def lark(pick):
    expressions = [f"/{expression(pick, 3)}/" for _ in range(1 + pick.randrange(9))]
    count = 1 + pick.randrange(500)
    rules = lambda length: "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(length)) + f'r{length}: "b"\n'
    return [
        lambda: "start: T\nT: " + " & ".join(expressions),
        lambda: 'start: "x" T "y"\nT: ' + " & ".join(expressions),
        lambda: f'start: "x" (T ",")*\nT: /a*/ {expressions[0]} | ~({" | ".join(expressions)})',
        lambda: rules(count * 4),
        lambda: "start: " + " | ".join(f'"w{i}"' for i in range(count)),
        lambda: 'start: s\ns: s s | s "a" s | "b"? s? | "c"',
        lambda: f'start: a{{{count}}}\na: {expressions[0]} | ("x" a)~{1 + pick.randrange(9)}',
        lambda: f'start: "x" %json {json.dumps(schema(pick, 2))}',
    ][pick.randrange(8)]()


def gbnf(pick):
    count = 1 + pick.randrange(400)
    atoms = ["[a-z]+", '"x\\\\x1"', '[^"\\\\]*', '"é"{0,40}', "."]
    rule = lambda i: pick.randrange(count) if pick.randrange(9) == 0 else i + 1
    rules = "".join(f'r{i} ::= {pick.choice(atoms)} r{rule(i)} | "{i}"\n' for i in range(count))
    return f'root ::= r0\n{rules}r{count} ::= "end"\n'


def hostile(number):
    """Fields of a chat with a form, by its number alone."""
    pick = random.Random(number)
    kind = pick.randrange(10)
    if kind < 4:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema(pick, 3)}}}
    if kind == 4:
        return {"guided_regex": expression(pick, 6)}
    if kind == 5:
        size = pick.randrange(3000)
        return {"guided_choice": [f"{i}{'lorem ' * (size // 30 + i)}" for i in range(1 + pick.randrange(60))]}
    if kind < 8:
        return {"guided_grammar": lark(pick)}
    if kind == 8:
        return {"grammar": gbnf(pick)}
    return {"structured_outputs": {"regex": "|".join(expression(pick, 2) for _ in range(1 + pick.randrange(40)))}}


def send(port, fields, stream, seed=0):
    """How a request ended (a word), the error's message and field, and its seconds."""
    body = {"messages": [{"role": "user", "content": "Write."}], "max_tokens": TOKENS, "temperature": 1.3, "seed": seed,
            "chat_template_kwargs": {"enable_thinking": False}, "stream": stream, **fields}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    start, error, end, has_text = time.perf_counter(), None, None, False
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            if stream:
                for line in reply:
                    if line.startswith(b"data: {"):
                        piece = json.loads(line[6:])
                        error = error or piece.get("error")
                        has_text |= any(choice["delta"].get("content") for choice in piece.get("choices", []))
                        end = end or next((c["finish_reason"] for c in piece.get("choices", [])), None)
                end = "error in the stream" if error else end or "cut off"
            else:
                end = json.load(reply)["choices"][0]["finish_reason"]
    except urllib.error.HTTPError as failure:
        error = json.loads(failure.read())["error"]
        end = f"status {failure.code}"
    except TimeoutError:
        end = "endless"
    except OSError as failure:
        end = f"no reply: {failure}"
    return end, error, time.perf_counter() - start


class Plain(threading.Thread):
    """Small requests one after another, until `stop`."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self.port, self.stop, self.alone, self.beside, self.failed = port, False, [], [], []
        self.is_alone = threading.Event()

    def run(self):
        number = 0
        while not self.stop:
            number += 1
            alone = self.is_alone.is_set()
            end, error, took = send(self.port, {"max_tokens": 8, "temperature": 0, "messages": [
                {"role": "user", "content": f"Number {number}?"}]}, number % 2 == 0)
            if end not in ("stop", "length"):
                self.failed.append((end, error))
            # What ran partly beside forms counts as beside them.
            (self.alone if alone and self.is_alone.is_set() else self.beside).append(took)
            time.sleep(0.05)


def memory(process, name):
    with open(f"/proc/{process.pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) >> 10


def main(options):
    sys.stdout.reconfigure(line_buffering=True)
    more = ["--model", options.model] if options.model else []
    data = tempfile.mkdtemp()
    with open(f"{data}/steersman.toml", "w") as config:
        config.write(CONFIG)
    server = ours(options.server, data, "--config", f"{data}/steersman.toml", *more)
    plain = Plain(server.port)
    ends, slowest, late, lock, numbers = collections.Counter(), [], [], threading.Lock(), iter(range(options.forms))
    gate = threading.Event()
    running = [0]
    bad = []

    def client():
        while True:
            gate.wait()
            with lock:
                number = next(numbers, None)
                if number is None:
                    return
                running[0] += 1
                if (number + 1) % PAUSE_AFTER == 0:
                    gate.clear()
            fields = hostile(options.seed + number)
            end, error, took = send(server.port, fields, number % 2 == 0, number)
            with lock:
                running[0] -= 1
                ends[end] += 1
                slowest.append((took, number, end))
                if end in ("endless", "cut off") or end.startswith("no reply") or error and not error.get("message"):
                    bad.append((number, end, error))
                # A whole reply that ends in an error, too, has its status behind the first token.
                if error and (end != "status 400" or "the reply" in error["message"]):
                    late.append((number, end, error["message"][:160], error.get("param")))

    def pause():
        """Small requests run alone."""
        while running[0]:
            time.sleep(0.05)
        count = len(plain.alone)
        plain.is_alone.set()
        while len(plain.alone) < count + ALONE and plain.is_alive():
            time.sleep(0.05)
        plain.is_alone.clear()

    start = time.perf_counter()
    for i in range(20):
        send(server.port, {"max_tokens": 8}, False)
    rss = memory(server.process, "VmRSS")
    plain.start()
    pause()
    threads = [threading.Thread(target=client, daemon=True) for _ in range(options.clients)]
    for thread in threads:
        thread.start()
    gate.set()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.2)
        if server.process.poll() is not None:
            print(f"the server ended with {server.process.returncode}: {open(server.log.name).read()[-2000:]}")
            sys.exit(1)
        if not gate.is_set():
            pause()
            print(f"{sum(ends.values())} forms, {time.perf_counter() - start:.0f} s, rss {memory(server.process, 'VmRSS')} MiB; "
                  f"small: alone p99 {centile(plain.alone, .99):.2f}, beside p99 {centile(plain.beside, .99):.2f}, "
                  f"most {max(plain.beside):.2f} s")
            gate.set()
    pause()
    plain.stop = True
    plain.join()
    elapsed = time.perf_counter() - start

    print(f"{options.forms} forms by {options.clients} clients in {elapsed:.0f} s: {dict(ends.most_common())}")
    for took, number, end in sorted(slowest, reverse=True)[:3]:
        print(f"  form {options.seed + number}: {took:.1f} s, {end}")
    for name, times in (("alone", plain.alone), ("beside", plain.beside)):
        print(f"small requests {name}: {len(times)}, p50 {centile(times, .5):.3f} s, p99 {centile(times, .99):.3f} s, "
              f"most {max(times):.3f} s")
    over = [took for took in plain.beside if took > max(plain.alone) + 1]
    print(f"small requests a second later than the slowest alone: {len(over)}; failed: {len(plain.failed)} {plain.failed[:3]}")
    kinds = collections.Counter((end, "".join(c for c in message if not c.isdigit())[-90:]) for _, end, message, _ in late)
    print(f"ended behind their start by an error: {len(late)}")
    for (end, message), count in kinds.most_common(12):
        print(f"  {count} times {end}: ..{message}")
    for number, end, message, param in late[:options.again]:
        for stream in (False, True):
            again, error, _ = send(server.port, hostile(options.seed + number), stream, number)
            if not error or not error.get("param") or not error.get("message"):
                bad.append((number, again, error))
    print(f"sent again, streamed and whole: {min(len(late), options.again)}; without a clear end: {len(bad)} {bad[:3]}")
    # An idle server looks every ten seconds whether there are pages to return.
    time.sleep(30)
    print(f"rss: {rss} MiB at the start, {memory(server.process, 'VmRSS')} at the end, most {memory(server.process, 'VmHWM')}")

    for i in range(16):
        slow = sorted(slowest, reverse=True)[i % len(slowest)][1]
        fields = hostile(options.seed + slow)
        # Another form at each time, as those that were compiled are remembered.
        threading.Thread(target=send, args=(server.port, fields | {"seed": i}, True), daemon=True).start()
    hard = {"guided_grammar": "start: T\nT: " + " & ".join(f"/((([g-z0-9])*)*)+(((é)+(\\s)?){{{8 + i},}})?/" for i in range(3))}
    for i in range(8):
        threading.Thread(target=send, args=(server.port, {"guided_grammar": hard["guided_grammar"] + f" & /.{{{i + 1},}}/"}, False),
                         daemon=True).start()
    time.sleep(0.5)
    start = time.perf_counter()
    server.process.send_signal(signal.SIGTERM)
    try:
        code = server.process.wait(GRACE + 20)
    except Exception:
        code = None
        server.process.kill()
    took = time.perf_counter() - start
    print(f"SIGTERM while forms are compiled: ended with {code} in {took:.1f} s")
    sys.exit(bool(bad or over or plain.failed or code != 0 or took > GRACE + 1))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("server", metavar="SERVER")
parser.add_argument("--forms", type=int, default=10000)
parser.add_argument("--clients", type=int, default=2)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--again", type=int, default=40, help="late errors that are sent again")
parser.add_argument("--model")

if __name__ == "__main__":
    main(parser.parse_args())
