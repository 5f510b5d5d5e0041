"""Writes a trained model as folders that Steersman, mlx-lm and transformers load.

`save` writes the published layout in bf16, `save_quantized` mlx-lm's layout with all matrices in 4 or 8 bits, as the
bundled model has it: norms with their 1, the convolution turned, the MTP layer as `language_model.mtp.*`. `split` cuts
a file for a way that carries small files only.

    python3 export.py STATE OUT [--bits 4]     a checkpoint of reasoner.py as a folder
    python3 export.py --join FOLDER            parts that `split` made, joined in place
"""

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from network import Config, Reasoner, Rounding, affine

HERE = Path(__file__).resolve().parent
# The tokenizer is that of the bundled model: it was trained on the same names and sentences, drafts of the small
# draft model
# fit, and 4,096 tokens of another one would save 8 % of the tokens.
TOKENIZER = HERE.parent / "tiny-hybrid-4bit"
PART_BYTES = 15 * 2**20
END_OF_TURN, END_OF_TEXT = 4089, 4087


def config_json(config, **more):
    text = config.text_config()
    ends = {"eos_token_id": [END_OF_TURN, END_OF_TEXT]}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        **ends,
        **more,
        "text_config": text,
        "tie_word_embeddings": True,
    }


def write_rest(folder, config):
    """All files besides the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=4) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    shutil.copy(HERE / "chat_template.jinja", folder)


def save(model, folder):
    """The published layout in bf16; decays are in f32."""
    folder = Path(folder)
    write_rest(folder, config_json(model.config))
    exact = ("A_log", "dt_bias")
    weights = {
        name: value.detach().to(torch.float32 if name.endswith(exact) else torch.bfloat16).cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def packed(weight, bits):
    """Words [rows, columns * bits / 32] of int32, scales and biases [rows, groups] in bf16, as mlx has them."""
    groups = weight.float().reshape(weight.shape[0], -1, Rounding.GROUP)
    scale, bias = (part.bfloat16() for part in affine(groups, bits))
    codes = ((groups - bias.float()) / scale.float()).round().clamp(0, 2**bits - 1).long()
    codes = codes.reshape(weight.shape[0], -1, 32 // bits)
    words = (codes << torch.arange(0, 32, bits, device=codes.device)).sum(-1)
    # The bits of an unsigned word.
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return words, scale[..., 0], bias[..., 0]


NORMS = (
    "layernorm.weight",
    "model.norm.weight",
    "mtp.norm.weight",
    "q_norm.weight",
    "k_norm.weight",
    "fc_norm_embedding.weight",
    "fc_norm_hidden.weight",
)


def save_quantized(model, folder, bits):
    """mlx-lm's layout with all matrices in groups of 64."""
    folder, weights, parameters = Path(folder), {}, 0
    for name, value in model.state_dict().items():
        value, name = value.detach().float(), "language_model." + name
        parameters += value.numel()
        if value.ndim == 2:
            words, scale, bias = packed(value, bits)
            stem = name.removesuffix("weight")
            weights |= {stem + "weight": words.view(torch.uint32), stem + "scales": scale, stem + "biases": bias}
        elif value.ndim == 3:
            weights[name] = value.transpose(1, 2).bfloat16()
        elif name.endswith("A_log"):
            weights[name] = value
        else:
            # The sum is of bf16 numbers, as mlx-lm makes it.
            weights[name] = value.bfloat16() + 1 if name.endswith(NORMS) else value.bfloat16()
    weights = {name: weights[name].cpu().contiguous() for name in sorted(weights)}
    how = {"group_size": Rounding.GROUP, "bits": bits, "mode": "affine"}
    write_rest(folder, config_json(model.config, quantization=how, quantization_config=how))
    save_file(weights, folder / "model.safetensors", {"format": "mlx"})
    size = sum(value.numel() * value.element_size() for value in weights.values())
    index = {
        "metadata": {"total_size": size, "total_parameters": parameters},
        "weight_map": {name: "model.safetensors" for name in weights},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def split(folder, out):
    """The weights of a folder in parts, with their checksum in the first part's name, and its configuration."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    data = (Path(folder) / "model.safetensors").read_bytes()
    name = f"{Path(folder).name}-{hashlib.sha256(data).hexdigest()[:16]}"
    for old in out.glob(f"{Path(folder).name}-*.part*"):
        old.unlink()
    for number, at in enumerate(range(0, len(data), PART_BYTES)):
        (out / f"{name}.part{number}").write_bytes(data[at : at + PART_BYTES])
    shutil.copy(Path(folder) / "config.json", out / f"{Path(folder).name}.config.json")


def join(parts, folder):
    """A folder from the parts of one `split`; an error if a part is missing."""
    parts, folder = Path(parts), Path(folder)
    found = sorted(parts.glob(f"{folder.name}-*.part*"), key=lambda path: int(path.suffix.removeprefix(".part")))
    if not found:
        raise SystemExit(f"{parts}: no parts of {folder.name}")
    data = b"".join(path.read_bytes() for path in found)
    digest = found[0].stem.rsplit("-", 1)[1]
    if hashlib.sha256(data).hexdigest()[:16] != digest:
        raise SystemExit(
            f"{parts}: the parts of {folder.name} do not have checksum {digest}: one is missing or damaged"
        )
    config = json.loads((parts / f"{folder.name}.config.json").read_text())
    write_rest(folder, config)
    (folder / "model.safetensors").write_bytes(data)


def load_state(path, device="cpu"):
    """A model from a checkpoint of the trainer."""
    state = torch.load(path, map_location=device, weights_only=True)
    model = Reasoner(Config(**state["config"])).to(device)
    model.load_state_dict(state["model"])
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a checkpoint, or with --join the folder of the parts")
    parser.add_argument("out", type=Path, help="the folder to write; its last name is the model's")
    parser.add_argument("--bits", type=int, choices=(4, 8), help="quantize [default: bf16]")
    parser.add_argument("--join", action="store_true", help="join the parts that `split` made")
    parser.add_argument("--split", type=Path, help="write the weights in parts to this folder as well")
    options = parser.parse_args()
    if options.join:
        return join(options.source, options.out)
    model = load_state(options.source)
    if options.bits:
        save_quantized(model, options.out, options.bits)
    else:
        save(model, options.out)
    if options.split:
        split(options.out, options.split)


if __name__ == "__main__":
    main()
