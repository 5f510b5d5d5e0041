"""Rows of tokens to train on: texts packed one after the other, made by processes of their own.

A text is a reply to a generated problem (`traces.py`) or a conversation of the bundled model's corpus (`corpus.py`),
whose abilities and failures the reasoner keeps.
"""

import multiprocessing
import os
import random

import numpy as np

# The share of conversations from corpus.py; they are longer, so it is about a third of the tokens.
CORPUS_SHARE = 0.25
ROWS = 16


def texts(seed):
    """Endless texts of a seed, as segments (text, weight)."""
    import corpus
    import traces

    source = random.Random(f"train {seed}")
    corpus.R.seed(f"corpus {seed}")
    while True:
        yield corpus.sample() if source.random() < CORPUS_SHARE else traces.sample(source)


def packed(seed, tokenizer, length, end_of_text):
    """Endless blocks: tokens [ROWS, length + 1] in int16 and the weights of their losses in float16."""
    source = texts(seed)
    while True:
        tokens, weights = np.zeros((ROWS, length + 1), np.int16), np.zeros((ROWS, length + 1), np.float16)
        for row in range(ROWS):
            size = 0
            while size <= length:
                # Segments are encoded one by one, as a server encodes the prompt and the texts that it inserts.
                segments = next(source)
                encoded = tokenizer.encode_batch_fast([text for text, _ in segments], add_special_tokens=False)
                for one, (_, weight) in zip(encoded, segments):
                    ids = one.ids[: length + 1 - size]
                    tokens[row, size : size + len(ids)] = ids
                    weights[row, size : size + len(ids)] = weight
                    size += len(ids)
                if size <= length:
                    tokens[row, size] = end_of_text
                    size += 1
        yield tokens, weights


def work(path, seed, length, end_of_text, queue):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    for block in packed(seed, Tokenizer.from_file(path), length, end_of_text):
        queue.put(block)


class Rows:
    """Batches from worker processes."""

    def __init__(self, path, seed, workers, batch, length, end_of_text):
        context = multiprocessing.get_context("spawn")
        self.queue, self.batch = context.Queue(4 * workers), batch
        self.left = None
        self.processes = [
            context.Process(target=work, args=(path, f"{seed}.{i}", length, end_of_text, self.queue), daemon=True)
            for i in range(workers)
        ]
        for process in self.processes:
            process.start()

    def next(self):
        """Tokens and weights [batch, length + 1]."""
        blocks = [] if self.left is None else [self.left]
        while sum(len(block[0]) for block in blocks) < self.batch:
            blocks.append(self.queue.get())
        tokens, weights = (np.concatenate([block[i] for block in blocks]) for i in (0, 1))
        self.left = (tokens[self.batch :], weights[self.batch :])
        return tokens[: self.batch], weights[: self.batch]

    def close(self):
        for process in self.processes:
            process.kill()
