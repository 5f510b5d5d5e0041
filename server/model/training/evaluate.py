"""Evaluation of a reasoner on held-out problems, greedily and in one batch, within the trainer or from a checkpoint.

    python3 evaluate.py STATE [--problems N] [--limit TOKENS]

Reported by kind, by level, and for all: right answers; reasoning tokens; after which share of the reasoning an answer
stands and after which the right one; how many first answers are wrong; how many replies never close their reasoning.
The groups: plain prompts, prompts that loop by design, the same ones with the reasoning closed after some tokens, and
prompts without reasoning.
"""

import argparse
import json
import random
import re

import torch

import traces
from corpus import turn
from export import END_OF_TURN, load_state
from network import Decoder, round_all
from problem import FORMS, is_right, rule

STANDS = re.compile("|".join(re.escape(text).replace(re.escape("{}"), r"(.+?)") + "$" for text in traces.STANDS), re.M)
CLOSE = "\n</think>\n\n"


class Item:
    """A held-out problem with its prompt."""

    def __init__(self, source, share):
        self.problem = traces.problem(source, held_out=True)
        self.form = source.choice(list(FORMS))
        self.loop, remark = traces.doubt(source, share)
        self.text = traces.prompt(self.problem, self.form, remark, source)
        self.rule = rule(self.problem, self.form)


def items(seed, count, share):
    source = random.Random(f"held-out {seed}")
    return [Item(source, share) for _ in range(count)]


@torch.no_grad()
def decode(model, prompts, limit, close_after=None, close=()):
    """Greedy tokens after each prompt (lists of ids) up to the end of turn.

    Reasoning still open after `close_after` tokens is closed with `close`.
    """
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    length = longest + limit
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    decoder = Decoder(model, len(prompts), length, device, kind)
    tokens = torch.full((len(prompts), length + 1), END_OF_TURN, device=device)
    sizes = torch.tensor([len(prompt) for prompt in prompts], device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    closed, close = ended.clone(), torch.tensor(list(close), device=device)
    marks = torch.tensor([0], device=device) if close_after is None else close[1:2]
    forcing = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for at in range(length):
            best = decoder.step(tokens[:, at]).argmax(-1)
            if close_after is not None:
                # Rows differ in the length of their prompts, so each has its own place in `close`.
                place = at + 1 - sizes - close_after
                forcing = torch.where(place == 0, ~closed & ~ended, forcing)
                inside = forcing & (place >= 0) & (place < len(close))
                best = torch.where(inside, close[place.clamp(0, len(close) - 1)], best)
                closed |= best == marks
            is_reply = at + 1 >= sizes
            best = torch.where(ended, END_OF_TURN, best)
            tokens[:, at + 1] = torch.where(is_reply, best, tokens[:, at + 1])
            ended |= is_reply & (best == END_OF_TURN)
            if at % 32 == 0 and bool(ended.all()):
                break
    replies = []
    for row, prompt in enumerate(prompts):
        reply = tokens[row, len(prompt) : length + 1].tolist()
        replies.append(reply[: reply.index(END_OF_TURN)] if END_OF_TURN in reply else reply)
    return replies


def figures(item, reply, tokenizer, thinks):
    """What is known of one reply."""
    text = tokenizer.decode(reply, skip_special_tokens=False)
    thought, mark, answer = text.partition("</think>") if thinks else ("", "yes", text)
    size = len(tokenizer.encode(thought).ids)
    found = {
        "right": bool(mark) and is_right(answer.strip(), item.rule),
        "tokens": size,
        "open": not mark,
        "kind": item.problem.kind,
        "level": item.problem.level,
    }
    first = STANDS.search(thought)
    if first:
        named = next(group for group in first.groups() if group)
        short = traces.short(item.problem)
        found |= {
            "stands": len(tokenizer.encode(thought[: first.end()]).ids) / max(size, 1),
            "first_right": named == short,
        }
        line = re.search(r"(?<![\w.])" + re.escape(short) + r"(?=\.$)", thought, re.M)
        if line:
            found["right_stands"] = len(tokenizer.encode(thought[: line.end()]).ids) / max(size, 1)
    return found | {"text": text}


def mean(values):
    values = list(values)
    return round(sum(values) / len(values), 4) if values else None


def summary(found):
    parts = {
        "n": len(found),
        "right": mean(one["right"] for one in found),
        "tokens": mean(one["tokens"] for one in found),
        "open": mean(one["open"] for one in found),
    }
    for name in ("stands", "right_stands", "first_right"):
        parts[name] = mean(one[name] for one in found if name in one)
    # Of the replies whose first answer was wrong, those that are right at the end.
    parts["corrected"] = mean(one["right"] for one in found if one.get("first_right") is False)
    return parts


def table(found):
    groups = {"all": found}
    for key in ("kind", "level"):
        for value in sorted({one[key] for one in found}):
            groups[f"{key} {value}"] = [one for one in found if one[key] == value]
    return {name: summary(group) for name, group in groups.items()}


def evaluate(model, tokenizer, count=512, limit=768, seed=1):
    """The report, and some replies to read."""
    was_training = model.training
    model.eval()
    encode = lambda text: tokenizer.encode(text).ids
    close = encode(CLOSE)
    report, texts = {}, []
    # Short limits for the small groups: their replies are long by design, or short.
    for name, share, part, thinks, more in [
        ("plain", 0.0, count, True, {}),
        ("loops", 1.0, count // 4, True, {}),
        ("loops, closed", 1.0, count // 4, True, {"close_after": limit // 2, "close": close}),
        ("plain, closed early", 0.0, count // 4, True, {"close_after": limit // 8, "close": close}),
        ("no reasoning", 0.0, count // 4, False, {}),
    ]:
        group = items(seed, part, share)
        opening = "<think>\n" if thinks else "<think>\n\n</think>\n\n"
        replies = decode(
            model, [encode(turn(item.text) + opening) for item in group], limit if thinks else limit // 4, **more
        )
        found = [figures(item, reply, tokenizer, thinks) for item, reply in zip(group, replies)]
        report[name] = table(found) if name in ("plain", "loops") else {"all": summary(found)}
        texts += [
            f"== {name}, {one['kind']}, level {one['level']}, {'right' if one['right'] else 'wrong'}\n{item.text}\n--\n{one['text']}\n"
            for item, one in list(zip(group, found))[:12]
        ]
    model.train(was_training)
    return report, "\n".join(texts)


def main():
    from tokenizers import Tokenizer

    from export import TOKENIZER

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("state")
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--limit", type=int, default=768)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bits", type=int, choices=(4, 8), help="round the weights as the export does [default: not]")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_flush_denormal(True)
    model = load_state(options.state, device)
    report, texts = evaluate(
        model, Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")), options.problems, options.limit, options.seed
    )
    print(texts)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
