"""Measures what long prompts cost other streams, and short prompts behind long ones.

    python3 tests/stall_bench.py SERVER [SERVER ...] [--rounds N] [--tokens N] [--prompt TOKENS] [--model MODEL]

Each SERVER is a `steersman` binary. In each round and for each server, four streams run alone, and then while prompts of
about TOKENS tokens (8,000 by default) are read one after another. Prints the time between two chunks of the streams,
the time to the first token of the long prompts, and of a short prompt that is sent right after a long one. No time is
checked.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time

from prefix_bench import ours, prose
from slow_policy import centile, streams


def first_token(server, seed, tokens):
    """Seconds to the first token of a prompt of about that many tokens that no other request has."""
    # A pair of sentences has about 19 tokens.
    words = f"{seed} {time.time()} " + prose(seed, max(1, tokens // 19))
    return server.ask([{"role": "user", "content": words}], max_tokens=1)[2]


def beside(server, tokens, prompt):
    """The gaps of four streams while long prompts are read, and the long prompts' times to the first token."""
    done, times = threading.Event(), []

    def read():
        while not done.is_set():
            times.append(first_token(server, len(times), prompt))

    other = threading.Thread(target=read)
    other.start()
    time.sleep(0.2)
    gaps = streams(server.port, tokens)
    done.set()
    other.join()
    return gaps, times


def behind(server, prompt):
    """Seconds to the first token of a short prompt right after a long one."""
    long = threading.Thread(target=first_token, args=(server, 1, prompt))
    long.start()
    time.sleep(0.3)
    short = first_token(server, 2, 19)
    long.join()
    return short


def main(args):
    servers = []
    for path in args.servers:
        more = ["--model", args.model] if args.model else []
        server = ours(path, tempfile.mkdtemp(), *more)
        servers.append((os.path.basename(path), server, {"alone": [], "beside": []}, [], []))
        first_token(server, 1, 1000)
        streams(server.port, 20)
    for _ in range(args.rounds):
        for _, server, gaps, long, short in servers:
            gaps["alone"] += streams(server.port, args.tokens)
            found, times = beside(server, args.tokens, args.prompt)
            gaps["beside"] += found
            long += times
            short.append(behind(server, 4 * args.prompt if args.prompt < 8000 else 30_000))
    for name, server, gaps, long, short in servers:
        print(name)
        for kind, found in gaps.items():
            print(f"  {kind:7} {len(found):6} gaps: mean {statistics.mean(found):7.2f}  p50 {centile(found, .5):7.2f}  "
                  f"p99 {centile(found, .99):7.2f}  max {max(found):7.2f} ms")
        print(f"  long prompts: {len(long)}, first token after {statistics.median(long):.2f} s; "
              f"short ones behind a longer one: {1000 * statistics.median(short):.0f} ms")
        server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--model")
    main(parser.parse_args())
