"""Writes held-out problems as a suite for `steersman eval --suite FILE`: one JSON object a line.

    python3 suite.py FILE [--count 1000] [--seed 1] [--loops SHARE] [--kind NAME ...] [--level N ...]

Fields of a line: `task` (the kind), `about` (`level`, and `loops`: the prompt has a remark after which the reasoner does
not end its reasoning), `messages`, `grade` (the rule of `steersman eval` that decides, with its arguments). A seed gives
equal lines.
"""

import argparse
import json
import random
from pathlib import Path

import traces
from problem import FORMS, asked, rule

# Draws in a row that were drawn before; then a kind has no more.
MOST_REPEATED = 200


def lines(seed, count, loops, kinds, levels):
    """So many different problems, of each kind and level alike; every form of answer is equally likely."""
    source, seen, repeated = random.Random(f"suite {seed}"), set(), 0
    cells = [(kind, level) for kind in kinds for level in levels]
    while len(seen) < count:
        kind, level = cells[len(seen) % len(cells)]
        one = traces.problem(source, (kind,), (level,), held_out=True)
        form = source.choice(list(FORMS))
        loop, remark = traces.doubt(source, loops)
        text = asked(one, form, source)
        # A question that was drawn before is drawn again; kinds with few held-out problems come in several forms.
        if text in seen:
            repeated += 1
            if repeated > MOST_REPEATED:
                raise SystemExit(
                    f"{kind}, level {level}: fewer than {count // len(cells) + 1} held-out problems, ask for fewer"
                )
            continue
        seen.add(text)
        repeated = 0
        content = f"{remark} {text}" if remark else text
        message = {"role": "user", "content": content}
        about = {"level": level, "loops": loop is not None}
        yield {"task": kind, "about": about, "messages": [message], "grade": rule(one, form)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loops", type=float, default=0.0, help="share of prompts that loop by design [default: 0]")
    parser.add_argument("--kind", nargs="*", choices=traces.KINDS, default=list(traces.KINDS))
    parser.add_argument("--level", nargs="*", type=int, choices=traces.LEVELS, default=list(traces.LEVELS))
    o = parser.parse_args()
    with o.file.open("w") as out:
        for line in lines(o.seed, o.count, o.loops, o.kind, o.level):
            out.write(json.dumps(line, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
