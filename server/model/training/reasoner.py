"""Trains the small reasoner on one GPU, or a micro one on a CPU to try the whole path.

    python3 reasoner.py WORK --minutes 18                    from the beginning
    python3 reasoner.py WORK --minutes 18 --resume           goes on from WORK/state.pt, if there is one
    python3 reasoner.py WORK --size micro --minutes 1        the whole path on a CPU

`--minutes` is the whole training, over all commands; `--stop` ends this command earlier. Every two minutes
WORK/state.pt is replaced, so a run that was killed can be used or resumed. At the end of the training, WORK has the
evaluation (`report.json`, `replies.txt`), the model as `tiny-reasoner-bf16`, `-8bit` and `-4bit`, and each of them in
parts of 15 MiB.

The run depends on the seed and on how many steps the machine does in the time: two runs are alike, not equal.
"""

import argparse
import json
import os
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from tokenizers import Tokenizer

import network
from evaluate import evaluate
from export import END_OF_TEXT, TOKENIZER, save, save_quantized, split
from rows import Rows

NAME = "tiny-reasoner"
CHECKPOINT_SECONDS = 120
WARMUP_STEPS = 80
# From this share of the training on, the learning rate falls to `LAST` of its peak.
FALLS_AT, LAST = 0.35, 0.02
# From this share on, weights are rounded to 4 bits in the forward pass, so that the model fits to its quantization.
ROUNDS_AT = 0.8
MTP_WEIGHT = 0.3


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--size", choices=network.SIZES, default="small")
    parser.add_argument("--minutes", type=float, default=18.0)
    parser.add_argument("--stop", type=float, help="end this command after so many minutes, with a checkpoint")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=48, help="rows of a batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate of matrices")
    parser.add_argument(
        "--optimizer", choices=("muon", "adamw"), default="muon", help="for matrices; the rest has AdamW"
    )
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--problems", type=int, default=512, help="held-out problems of the evaluation")
    parser.add_argument("--limit", type=int, default=768, help="most tokens of a reply in the evaluation")
    parser.add_argument("--eager", action="store_true", help="without torch.compile, which only a GPU has by default")
    return parser.parse_args()


class Optimizers:
    """Muon or AdamW for matrices, AdamW for embeddings, norms and decays."""

    def __init__(self, model, rate, kind):
        matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
        ids = {id(weight) for weight in matrices}
        rest = [weight for weight in model.parameters() if id(weight) not in ids]
        is_cuda = rest[0].is_cuda
        self.all = [torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=is_cuda)]
        if kind == "muon":
            self.all.append(
                torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
            )
        else:
            self.all.append(torch.optim.AdamW(matrices, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=is_cuda))
        self.rate = rate

    def step(self, scale):
        for one in self.all:
            for group in one.param_groups:
                group["lr"] = self.rate * scale
            one.step()

    def state(self):
        return [one.state_dict() for one in self.all]

    def load(self, states):
        for one, state in zip(self.all, states):
            one.load_state_dict(state)


class Step:
    """Forward and backward of one batch.

    A step of 100,000 tokens keeps a GPU busy while the next kernels are launched.
    """

    def __init__(self, model, rows, length, device):
        self.model, self.device = model, device
        self.tokens = torch.zeros(rows, length + 1, dtype=torch.long, device=device)
        self.weights = torch.zeros(rows, length + 1, device=device)

    def run(self, tokens, weights):
        """Losses of the next token and of MTP, and the norm of the gradient; gradients are in the parameters."""
        self.tokens.copy_(torch.from_numpy(tokens.astype(np.int64)))
        self.weights.copy_(torch.from_numpy(weights.astype(np.float32)))
        self.model.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            main, ahead = self.model.losses(self.tokens, self.weights, END_OF_TEXT)
        (main + MTP_WEIGHT * ahead).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return torch.stack([main.detach(), ahead.detach(), norm.detach()])


COMPILED = [
    (network.GatedDeltaNet, "before"),
    (network.GatedDeltaNet, "after"),
    (network.Attention, "projected"),
    (network.Mlp, "forward"),
    (network.Norm, "forward"),
]


@contextmanager
def compiled_parts(backend="inductor"):
    """Within it, what the layers do besides the recurrence is compiled, once for all layers.

    Evaluation has other shapes and runs without.
    """
    torch._dynamo.config.recompile_limit = 64
    plain = [getattr(kind, name) for kind, name in COMPILED]
    try:
        for (kind, name), function in zip(COMPILED, plain):
            setattr(kind, name, torch.compile(function, dynamic=False, backend=backend))
        yield
    finally:
        for (kind, name), function in zip(COMPILED, plain):
            setattr(kind, name, function)


def scale_at(share, step):
    """The learning rate as a share of its peak."""
    fall = 1.0 if share < FALLS_AT else 1 - (1 - LAST) * (share - FALLS_AT) / (1 - FALLS_AT)
    return min(1.0, (step + 1) / WARMUP_STEPS) * max(fall, LAST)


def write_state(path, model, optimizers, progress):
    """Replaces the checkpoint at once: a killed run leaves the one before."""
    temporary = path.with_suffix(".new")
    torch.save(
        {"config": asdict(model.config), "model": model.state_dict(), "optimizers": optimizers.state(), **progress},
        temporary,
    )
    temporary.replace(path)


def train(o, device):
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(o.seed)
    model = network.Reasoner(network.SIZES[o.size]).to(device)
    optimizers = Optimizers(model, o.rate, o.optimizer)
    progress = {"step": 0, "seconds": 0.0, "starts": 0}
    state = o.work / "state.pt"
    if o.resume and state.exists():
        saved = torch.load(state, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizers.load(saved["optimizers"])
        progress = {name: saved[name] for name in progress}
    progress["starts"] += 1
    count = sum(weight.numel() for weight in model.parameters())
    print(
        f"{o.size}: {count / 1e6:.1f} M parameters on {device}, step {progress['step']}, {progress['seconds']:.0f} s done",
        flush=True,
    )
    # Each start has other rows: those of the start before would come again.
    rows = Rows(
        str(TOKENIZER / "tokenizer.json"), f"{o.seed}.{progress['starts']}", o.workers, o.rows, o.length, END_OF_TEXT
    )
    step = Step(model, o.rows, o.length, device)
    whole, begin, saved_at, before = o.minutes * 60, None, time.time(), progress["seconds"]
    log = open(o.work / "train.log", "a", buffering=1)
    command_end = time.time() + o.stop * 60 if o.stop else float("inf")
    steps_timed, timed_from = 0, time.time()
    while progress["seconds"] < whole and time.time() < command_end:
        tokens, weights = rows.next()
        share = progress["seconds"] / whole
        network.Rounding.bits = 4 if share >= ROUNDS_AT else 0
        losses = step.run(tokens, weights)
        optimizers.step(scale_at(share, progress["step"]))
        progress["step"] += 1
        steps_timed += 1
        # The first step compiles; its time is not training.
        if begin is None:
            losses.tolist()
            begin = timed_from = time.time()
            steps_timed = 0
        if progress["step"] % 20 == 0 or progress["step"] <= 3:
            main, ahead, norm = losses.tolist()
            speed = steps_timed * o.rows * o.length / max(time.time() - timed_from, 1e-9)
            line = f"step {progress['step']} {progress['seconds']:.0f} s loss {main:.4f} mtp {ahead:.4f} norm {norm:.2f} {speed:.0f} tokens/s queue {rows.queue.qsize()}"
            print(line, flush=True)
            print(line, file=log)
            steps_timed, timed_from = 0, time.time()
            if not np.isfinite(main):
                raise SystemExit("the loss is not finite: resume from the last checkpoint with a lower --rate")
        progress["seconds"] = before + time.time() - begin
        if time.time() - saved_at > CHECKPOINT_SECONDS:
            write_state(state, model, optimizers, progress)
            saved_at = time.time()
    rows.close()
    write_state(state, model, optimizers, progress)
    return model, progress["seconds"] >= whole


def main():
    o = options()
    o.work.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # States that decay become numbers with which a CPU computes a hundred times slower.
    torch.set_flush_denormal(True)
    with compiled_parts() if device.type == "cuda" and not o.eager else nullcontext():
        model, is_done = train(o, device)
    if not is_done:
        print("stopped before the end: go on with --resume", flush=True)
        return
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    network.Rounding.bits = 0
    save(model, o.work / f"{NAME}-bf16")
    for bits in (4, 8):
        save_quantized(model, o.work / f"{NAME}-{bits}bit", bits)
    for form in ("bf16", "8bit", "4bit"):
        split(o.work / f"{NAME}-{form}", o.work / f"parts-{form}")
    # The folder that ships has 4 bits: it is what is evaluated.
    network.round_all(model, 4)
    report, texts = evaluate(model, tokenizer, o.problems, o.limit)
    (o.work / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (o.work / "replies.txt").write_text(texts)
    for name, groups in report.items():
        for group, figures in groups.items():
            print(f"{name}: {group}: {figures}", flush=True)
    (o.work / "DONE").write_text("\n")


if __name__ == "__main__":
    main()
