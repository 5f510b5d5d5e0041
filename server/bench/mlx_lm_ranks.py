#!/usr/bin/env python3
"""Times of mlx_lm's own sharding, beside `steersman bench model --ranks COUNT` on the same folder.

usage: mlx_lm_ranks.py FOLDER [RANKS] [PROMPT]    with mlx and mlx-lm; for several ranks, as many GPUs and NCCL

Prints the milliseconds of a prompt of PROMPT tokens until its first token, and of a step after 64 tokens: medians of five
rounds. mlx_lm's `sharded_load` sums on the CPU once, which NCCL cannot, so the model is loaded and cut here.
"""

import os
import statistics
import subprocess
import sys
import time


def measure(folder, prompt):
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model
    from pathlib import Path

    group = mx.distributed.init()
    model, _ = load_model(Path(folder), lazy=True, strict=False)
    if group.size() > 1:
        model.shard(group)
    mx.eval(model.parameters())

    def run(tokens, steps):
        """Seconds until the first token, and of a step after it."""
        ids = mx.array([7 * i % 1000 + 300 for i in range(tokens)])
        start = time.perf_counter()
        marks = []
        for _ in generate_step(ids, model, max_tokens=steps):
            marks.append(time.perf_counter() - start)
        return marks[0], (marks[-1] - marks[3]) / (len(marks) - 4) if steps > 4 else 0

    first, step = [], []
    for i in range(6):
        firsts, steps = run(prompt, 1)[0], run(64, 36)[1]
        if i > 0:
            first.append(1e3 * firsts)
            step.append(1e3 * steps)
    if group.rank() == 0:
        print(f"mlx_lm, {group.size()} ranks: prompt of {prompt}: {statistics.median(first):.1f} ms, "
              f"step: {statistics.median(step):.3f} ms [{min(step):.3f}-{max(step):.3f}]", flush=True)


def main():
    folder, ranks = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    prompt = int(sys.argv[3]) if len(sys.argv) > 3 else 2048
    if ranks == 1 or "MLX_RANK" in os.environ:
        return measure(folder, prompt)
    shared = {"MLX_WORLD_SIZE": str(ranks), "NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": "24017"}
    own = [{"MLX_RANK": str(rank), "CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(ranks)]
    processes = [subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **shared, **each}) for each in own]
    sys.exit(max(process.wait() for process in processes))


if __name__ == "__main__":
    main()
