"""Tests of the network, the evaluation and the export.

They need PyTorch, tokenizers and safetensors, and mlx-lm for the last.
"""

import json
import random
import tempfile
import unittest
from pathlib import Path

try:
    import torch

    import evaluate
    import export
    import network
    import reasoner
    from rows import packed as packed_rows
except ImportError as error:
    raise unittest.SkipTest(f"needs the packages of README.md: {error}") from error
try:
    import mlx.core as mx
    from mlx_lm.utils import load_model
except ImportError:
    mx = None
from tokenizers import Tokenizer

TOKENIZER = Tokenizer.from_file(str(export.TOKENIZER / "tokenizer.json"))


def micro(seed=0):
    """A micro network whose weights are far from their start, so that each part of it counts."""
    torch.manual_seed(seed)
    model = network.Reasoner(network.SIZES["micro"])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.mul_(4)
            elif name.endswith("norm.weight") and weight.ndim == 1:
                # With and without the 1 these are exact in bf16.
                weight.add_((20 * torch.randn_like(weight)).round() / 64)
            if not name.endswith("A_log"):
                weight.copy_(weight.bfloat16())
    return model


def tokens(*shape, seed=1):
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4000, shape, generator=source)


class Network(unittest.TestCase):
    def tearDown(self):
        network.Rounding.bits = 0

    def test_chunks_equal_one_token_at_a_time(self):
        model, row = micro(), tokens(2, 192)
        with torch.no_grad():
            whole = model.head(model.hidden(row, export.END_OF_TEXT))
            decoder = network.Decoder(model, 2, 192, torch.device("cpu"), torch.float32)
            single = torch.stack([decoder.step(row[:, i]) for i in range(192)], 1)
        self.assertLess((whole - single).abs().max(), 2e-3 * whole.abs().max())

    def test_compiled_parts_are_whole_graphs_and_compiled_once_for_all_layers(self):
        # Graph breaks and a compilation for each layer would cost most of the time on a GPU; to trace needs none.
        from torch._dynamo.utils import counters

        model, row = micro(), tokens(2, 129)
        plain = network.GatedDeltaNet.before
        with torch.no_grad():
            expected = torch.stack(model.losses(row, torch.ones(2, 129), export.END_OF_TEXT))
        torch._dynamo.reset()
        counters.clear()
        with reasoner.compiled_parts("aot_eager"):
            for bits in (0, 4):
                network.Rounding.bits = bits
                losses = torch.stack(model.losses(row, torch.ones(2, 129), export.END_OF_TEXT))
                losses.sum().backward()
                if bits == 0:
                    self.assertLess((losses - expected).abs().max(), 1e-4)
        self.assertTrue(all(weight.grad is not None for weight in model.parameters()))
        self.assertEqual(sum(counters["graph_break"].values()), 0, counters["graph_break"])
        # Two of the three linear layers, the MTP layer and the second norm of a layer find what the first one compiled.
        self.assertLess(counters["stats"]["unique_graphs"], 2 * 12)
        self.assertIs(network.GatedDeltaNet.before, plain)

    def test_a_text_forgets_the_state_of_the_one_before_it(self):
        layer = micro().model.layers[0].linear_attn
        one, other = torch.randn(1, 128, 128), torch.randn(1, 128, 128)
        other[:, 40:] = one[:, 40:]
        begins = torch.zeros(1, 128)
        begins[0, 40] = 1
        with torch.no_grad():
            apart = (layer(one, begins) - layer(other, begins))[:, 40 + 3 :].abs().max()
            joined = (layer(one, 0 * begins) - layer(other, 0 * begins))[:, 40 + 3 :].abs().max()
        # Only the convolution, three tokens wide, looks across; the state that those three write stays.
        self.assertGreater(joined, 1e-4)
        self.assertLess(apart, joined)

    def test_gradient_of_the_inverse_is_that_of_the_inverse(self):
        lower = (0.1 * torch.randn(2, network.CHUNK, network.CHUNK, dtype=torch.double)).tril(-1)
        weight = torch.randn_like(lower)
        mine, theirs = lower.clone().requires_grad_(), lower.clone().requires_grad_()
        (network.UnitLowerInverse.apply(mine) * weight).sum().backward()
        inverse = torch.linalg.inv(torch.eye(network.CHUNK, dtype=torch.double) + theirs.tril(-1))
        (inverse * weight).sum().backward()
        self.assertLess((mine.grad - theirs.grad).abs().max(), 1e-9)

    def test_a_step_learns_and_a_checkpoint_goes_on_where_it_was(self):
        model = micro()
        row, weights = tokens(2, 129).numpy(), torch.ones(2, 129).numpy()
        for kind in ("muon", "adamw"):
            optimizers = reasoner.Optimizers(model, 3e-3, kind)
            step = reasoner.Step(model, 2, 128, torch.device("cpu"))
            losses = []
            for i in range(6):
                losses.append(step.run(row, weights)[0].item())
                optimizers.step(1.0)
            self.assertLess(losses[-1], losses[0])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.pt"
            reasoner.write_state(path, model, optimizers, {"step": 7, "seconds": 1.0, "starts": 1})
            again = export.load_state(path)
            for name, weight in model.state_dict().items():
                self.assertTrue(torch.equal(weight, again.state_dict()[name]), name)
            self.assertEqual([one.name for one in Path(folder).iterdir()], ["state.pt"])

    def test_rounding_is_what_the_export_stores(self):
        weight = torch.randn(8, 128)
        for bits in (4, 8):
            network.Rounding.bits = bits
            words, scale, bias = export.packed(weight, bits)
            codes = (words.long()[..., None] >> torch.arange(0, 32, bits)) & (2**bits - 1)
            groups = codes.reshape(8, -1, 64).float() * scale.float()[..., None] + bias.float()[..., None]
            self.assertLess((groups.reshape(8, 128) - network.rounded(weight)).abs().max(), 1e-5)

    def test_rounding_once_equals_rounding_in_each_pass(self):
        model, row = micro(), tokens(1, 64)
        with torch.no_grad():
            network.Rounding.bits = 4
            expected = model.head(model.hidden(row, export.END_OF_TEXT))
            network.Rounding.bits = 0
            plain = model.head(model.hidden(row, export.END_OF_TEXT))
            network.round_all(model, 4)
            found = model.head(model.hidden(row, export.END_OF_TEXT))
        self.assertEqual(network.Rounding.bits, 0)
        self.assertLess((found - expected).abs().max(), 1e-4 * expected.abs().max())
        self.assertGreater((found - plain).abs().max(), 1e-2 * expected.abs().max())


class Data(unittest.TestCase):
    def test_rows_hold_whole_texts_with_weights_on_replies(self):
        rows, weights = next(packed_rows("test", TOKENIZER, 1024, export.END_OF_TEXT))
        self.assertEqual(rows.shape, (16, 1025))
        text = TOKENIZER.decode(rows[0].tolist(), skip_special_tokens=False)
        self.assertIn("<|endoftext|><|im_start|>", text)
        self.assertTrue(((0 <= weights) & (weights <= 2)).all() and (weights > 0).mean() > 0.3)

    def test_segments_join_to_the_text_that_was_cut(self):
        import traces

        for segments in (traces.sample(random.Random(seed)) for seed in range(50)):
            ids = [i for text, _ in segments for i in TOKENIZER.encode(text, add_special_tokens=False).ids]
            joined = TOKENIZER.decode(ids, skip_special_tokens=False)
            self.assertEqual(joined, "".join(text for text, _ in segments))


class Evaluation(unittest.TestCase):
    def test_reasoning_is_closed_where_it_is_asked_and_never_twice(self):
        model, close = micro(), TOKENIZER.encode(evaluate.CLOSE).ids
        prompts = [TOKENIZER.encode(text).ids for text in ("<think>\n", "What is 3 + 4?<think>\n")]
        replies = evaluate.decode(model, prompts, 24, close_after=5, close=close)
        for reply in replies:
            if len(reply) > 8:
                self.assertEqual(reply[5:8], close)
        free = evaluate.decode(model, prompts, 24)
        for reply, other in zip(replies, free):
            self.assertEqual(reply[:5], other[:5])

    def test_figures_find_where_an_answer_first_stands(self):
        item = evaluate.items(1, 1, 0.0)[0]
        item.problem.answer, item.problem.short, item.problem.cases, item.form = 42, "", [], "bare"
        item.rule = {"rule": "exactly", "expected": "42", "is_loose": True}
        text = (
            "6 * 7 = 41.\nSo it is 41.\nWait, 6 * 7 = 42.\nThat is not 41: wrong. So the answer is 42.\n</think>\n\n42"
        )
        found = evaluate.figures(item, TOKENIZER.encode(text).ids, TOKENIZER, True)
        self.assertTrue(found["right"] and not found["open"] and found["first_right"] is False)
        self.assertTrue(0.2 < found["stands"] < 0.5 < found["right_stands"] <= 1.0, found)
        looping = evaluate.figures(item, TOKENIZER.encode("So it is 42.\nAgain. Again.").ids, TOKENIZER, True)
        self.assertTrue(looping["open"] and not looping["right"])


@unittest.skipUnless(mx, "needs mlx-lm")
class Export(unittest.TestCase):
    def tearDown(self):
        network.Rounding.bits = 0

    def check(self, folder, bits, most):
        """mlx-lm computes the same logits from the folder as the network."""
        model, row = micro(), tokens(1, 128)
        if bits:
            export.save_quantized(model, folder, bits)
        else:
            export.save(model, folder)
        network.Rounding.bits = bits
        with torch.no_grad():
            mine = model.head(model.hidden(row, export.END_OF_TEXT))
        theirs, _ = load_model(Path(folder))
        theirs.set_dtype(mx.float32)
        logits = torch.tensor(theirs(mx.array(row.numpy())).tolist())
        self.assertLess((logits - mine).abs().max(), most * mine.abs().max())
        self.assertEqual(json.loads((Path(folder) / "config.json").read_text())["model_type"], "qwen3_5")

    def test_mlx_lm_loads_what_was_trained(self):
        for bits, most in ((0, 0.01), (8, 0.01), (4, 0.01)):
            with self.subTest(bits=bits), tempfile.TemporaryDirectory() as folder:
                self.check(folder, bits, most)

    def test_names_and_types_are_those_of_the_bundled_model(self):
        import re

        from safetensors import safe_open

        def layout(folder):
            with safe_open(Path(folder) / "model.safetensors", "pt") as file:
                kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}
            return {re.sub(r"layers\.\d+", "layers", name): kind for name, kind in kinds.items()}

        with tempfile.TemporaryDirectory() as folder:
            export.save_quantized(micro(), folder, 4)
            self.assertEqual(layout(folder), layout(export.TOKENIZER))
            names = {path.name for path in Path(folder).iterdir()}
            self.assertEqual(names, {path.name for path in export.TOKENIZER.iterdir()})

    def test_parts_join_to_the_folder_and_a_missing_one_is_told(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            export.save_quantized(micro(), folder / "model-8bit", 8)
            size, export.PART_BYTES = export.PART_BYTES, 2**19
            try:
                export.split(folder / "model-8bit", folder / "parts")
            finally:
                export.PART_BYTES = size
            export.join(folder / "parts", folder / "joined" / "model-8bit")
            one, other = (folder / name / "model.safetensors" for name in ("model-8bit", "joined/model-8bit"))
            self.assertEqual(one.read_bytes(), other.read_bytes())
            next((folder / "parts").glob("*.part1")).unlink()
            with self.assertRaisesRegex(SystemExit, "missing or damaged"):
                export.join(folder / "parts", folder / "broken" / "model-8bit")


if __name__ == "__main__":
    unittest.main()
