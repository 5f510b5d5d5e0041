"""A hybrid of the Qwen3.5 kind in PyTorch: GatedDeltaNet layers, full attention in every fourth one, tied embeddings,
one MTP layer.

Parameters have the names of the published checkpoints, so `state_dict` is what `export.py` writes. Training runs whole
rows in chunks (`forward`); `Decoder` runs one token of many rows at a time, to evaluate.

Sources: Gated Delta Networks (arXiv:2412.06464), Hugging Face transformers `modeling_qwen3_5.py`.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

CHUNK = 64
# The decay at the beginning of a text within a packed row: what the state holds of the text before is below any
# rounding.
RESET = -30.0


@dataclass
class Config:
    """The keys of `text_config` in config.json."""

    vocab_size: int = 4096
    hidden_size: int = 512
    intermediate_size: int = 1536
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 3
    linear_num_value_heads: int = 6
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rotary_dims: int = 32

    def is_full(self, layer):
        return (layer + 1) % self.full_attention_interval == 0

    def text_config(self):
        """The configuration as the bundled model has it."""
        keys = asdict(self)
        theta, dims = keys.pop("rope_theta"), keys.pop("rotary_dims")
        # One third of the pairs for each axis, as published; for texts the axes are equal.
        third = dims // 2 // 3
        rope = {"type": "default", "rope_theta": theta, "partial_rotary_factor": dims / self.head_dim}
        rope |= {"mrope_section": [dims // 2 - 2 * third, third, third], "mrope_interleaved": True}
        kinds = ["full_attention" if self.is_full(i) else "linear_attention" for i in range(self.num_hidden_layers)]
        fixed = {
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "attention_bias": False,
        }
        return (
            keys
            | fixed
            | {
                "rope_parameters": rope,
                "layer_types": kinds,
                "mtp_num_hidden_layers": 1,
                "model_type": "qwen3_5_text",
                "dtype": "bfloat16",
            }
        )


# A size for the GPU, and one with which the whole path runs on a CPU in a minute.
SIZES = {
    "small": Config(),
    "micro": Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    ),
}


class Rounding:
    """Bits to which weights are rounded in the forward pass, as mlx rounds them; 0 for none."""

    bits = 0
    GROUP = 64


def affine(groups, bits):
    """Scales and biases of groups [.., GROUP], in f32, as `mlx.core.quantize` chooses them: one edge and 0 are
    exact."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    is_low = low.abs() > high.abs()
    scale = ((high - low) / (2**bits - 1)).clamp_min(1e-7)
    scale = torch.where(is_low, scale, -scale)
    edge = torch.where(is_low, low, high)
    steps = (edge / scale).round()
    scale = torch.where(steps != 0, edge / torch.where(steps != 0, steps, 1.0), scale)
    return scale, torch.where(steps != 0, edge, 0.0)


def rounded(weight):
    """The weight as quantization leaves it; its gradient is that of the weight."""
    if not Rounding.bits:
        return weight
    with torch.no_grad():
        groups = weight.reshape(-1, Rounding.GROUP).float()
        scale, bias = affine(groups, Rounding.bits)
        # Scales and biases are stored in bf16.
        scale, bias = scale.bfloat16().float(), bias.bfloat16().float()
        codes = ((groups - bias) / scale).round().clamp(0, 2**Rounding.bits - 1)
        change = (codes * scale + bias).reshape(weight.shape) - weight
    return weight + change


@torch.no_grad()
def round_all(model, bits):
    """Replaces all matrices by what quantization leaves of them."""
    before, Rounding.bits = Rounding.bits, bits
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.copy_(rounded(weight))
    Rounding.bits = before


class Linear(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x):
        return F.linear(x, rounded(self.weight))


class Norm(nn.Module):
    """RMS norm whose weight is stored without its 1, as published."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)).to(x.dtype)


class GatedNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x, gate):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return (y * F.silu(gate.float())).to(gate.dtype)


class UnitLowerInverse(torch.autograd.Function):
    """The inverse of I + L for strictly lower L [.., CHUNK, CHUNK] in f32: a product over repeated squares, since
    L^CHUNK = 0."""

    @staticmethod
    def forward(ctx, lower):
        power = -lower
        inverse = power + torch.eye(lower.shape[-1], device=lower.device)
        for _ in range(int(math.log2(lower.shape[-1])) - 1):
            power = power @ power
            inverse = inverse + inverse @ power
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, gradient):
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return -(turned @ gradient @ turned).tril(-1)


def unit(x):
    y = x.float()
    return y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6)


def within_chunks(q, k, v, g, beta):
    """What the chunks of the gated delta rule compute by themselves.

    `q`, `k` [B, T, Hk, D]; `v` [B, T, H, D]; `g`, `beta` [B, T, H] in f32, where `g` is the logarithm of the decay.
    Returns `u` [B, H, N, C, D], `wq` [B, H, N, 2C, D], `k` [B, H, N, C, D], `attention` [B, H, N, C, C], and the decays
    `grown` (to each position), `left` (from each position to the end) [B, H, N, C, 1].
    """
    kind, repeat = v.dtype, v.shape[2] // k.shape[2]
    chunks = lambda x: x.transpose(1, 2).unflatten(2, (-1, CHUNK))
    q, k = (chunks(unit(x).to(kind).repeat_interleave(repeat, 2)) for x in (q, k))
    v, g, beta = chunks(v), chunks(g), chunks(beta)
    q = q * q.shape[-1] ** -0.5
    g = g.cumsum(-1)
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(upper, float("-inf")).exp()
    grown, left = g.exp()[..., None], (g[..., -1:] - g).exp()[..., None]
    turned = k.transpose(-1, -2)
    attention = ((q @ turned).float() * decay).to(kind)
    lower = ((k @ turned).float() * decay * beta[..., None]).tril(-1)
    inverse = UnitLowerInverse.apply(lower)
    u = (inverse * beta[..., None, :]).to(kind) @ v
    w = (inverse * (beta * grown[..., 0])[..., None, :]).to(kind) @ k
    return u, torch.cat([w, q], -2), k, attention, grown, left


def across_chunks(u, wq, k, left, last):
    """The recurrence over chunks: new values and what the queries read from the state before their chunk.

    `last` [B, H, N, 1, 1] is the decay of a whole chunk. The state is kept in f32.
    """
    state = torch.zeros(*u.shape[:2], k.shape[-1], u.shape[-1], device=u.device)
    news, reads = [], []
    for i in range(u.shape[2]):
        both = wq[:, :, i] @ state.to(u.dtype)
        new = u[:, :, i] - both[:, :, :CHUNK]
        news.append(new)
        reads.append(both[:, :, CHUNK:])
        state = state * last[:, :, i] + (k[:, :, i].transpose(-1, -2) @ (new * left[:, :, i]).to(u.dtype)).float()
    return torch.stack(news, 2), torch.stack(reads, 2)


class GatedDeltaNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.key, self.value = (
            c.linear_num_key_heads * c.linear_key_head_dim,
            c.linear_num_value_heads * c.linear_value_head_dim,
        )
        self.in_proj_qkv = Linear(c.hidden_size, 2 * self.key + self.value)
        self.in_proj_z = Linear(c.hidden_size, self.value)
        self.in_proj_a = Linear(c.hidden_size, c.linear_num_value_heads)
        self.in_proj_b = Linear(c.hidden_size, c.linear_num_value_heads)
        self.conv1d = nn.Conv1d(
            2 * self.key + self.value,
            2 * self.key + self.value,
            c.linear_conv_kernel_dim,
            groups=2 * self.key + self.value,
            bias=False,
        )
        self.A_log = nn.Parameter(torch.empty(c.linear_num_value_heads).uniform_(1, 16).log())
        # Steps of 0.001 to 0.1, through the inverse of softplus.
        step = torch.exp(torch.empty(c.linear_num_value_heads).uniform_(math.log(0.001), math.log(0.1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = GatedNorm(c.linear_value_head_dim, c.rms_norm_eps)
        self.out_proj = Linear(self.value, c.hidden_size)

    def gates(self, x):
        """The logarithm of the decay and the strength of each write [B, T, H], in f32."""
        a, b = self.in_proj_a(x).float(), self.in_proj_b(x).float()
        a = a + self.dt_bias
        # Softplus from its parts: the compiled backward pass of `F.softplus` fails on turned gradients in PyTorch 2.11.
        return -self.A_log.exp() * (a.clamp_min(0) + torch.log1p(torch.exp(-a.abs()))), b.sigmoid()

    def heads(self, mixed):
        """Queries, keys and values from convolved projections [B, T, ..]."""
        c = self.c
        q, k, v = mixed.split([self.key, self.key, self.value], -1)
        return (
            q.unflatten(-1, (-1, c.linear_key_head_dim)),
            k.unflatten(-1, (-1, c.linear_key_head_dim)),
            v.unflatten(-1, (-1, c.linear_value_head_dim)),
        )

    def before(self, x, begins):
        """All that needs no state."""
        mixed, kernel = self.in_proj_qkv(x), self.conv1d.weight[:, 0]
        size = kernel.shape[-1]
        convolved = mixed * kernel[:, -1]
        for back in range(1, size):
            convolved = convolved + F.pad(mixed, (0, 0, back, 0))[:, : mixed.shape[1]] * kernel[:, size - 1 - back]
        g, beta = self.gates(x)
        q, k, v = self.heads(F.silu(convolved).to(mixed.dtype))
        z = self.in_proj_z(x).unflatten(-1, (-1, self.c.linear_value_head_dim))
        with torch.autocast(x.device.type, enabled=False):
            return (z, *within_chunks(q, k, v, g + begins[..., None] * RESET, beta))

    def after(self, z, news, reads, attention, grown):
        y = (attention @ news).float() + reads.float() * grown
        y = y.flatten(2, 3).transpose(1, 2)
        return self.out_proj(self.norm(y, z).flatten(-2))

    def forward(self, x, begins):
        z, u, wq, k, attention, grown, left = self.before(x, begins)
        with torch.autocast(x.device.type, enabled=False):
            news, reads = across_chunks(u, wq, k, left, grown[..., -1:, :])
        return self.after(z, news, reads, attention, grown)

    def step(self, x, memory):
        """One token of each row, x [B, 1, hidden]; `memory` holds the last inputs of the convolution and the state."""
        mixed = self.in_proj_qkv(x)
        window = torch.cat([memory["inputs"], mixed], 1)
        memory["inputs"] = window[:, 1:]
        convolved = F.silu((window * self.conv1d.weight[:, 0].T).sum(1, keepdim=True)).to(mixed.dtype)
        g, beta = self.gates(x)
        q, k, v = self.heads(convolved)
        repeat = v.shape[2] // k.shape[2]
        q, k = (unit(one)[:, 0].repeat_interleave(repeat, 1) for one in (q, k))
        # Products of elements, which autocast leaves in f32.
        state = memory["state"].mul_(g[:, 0].exp()[..., None, None])
        new = (v[:, 0].float() - (state * k[..., None]).sum(-2)) * beta[:, 0][..., None]
        state.add_(k[..., None] * new[..., None, :])
        y = (state * (q * q.shape[-1] ** -0.5)[..., None]).sum(-2)[:, None]
        z = self.in_proj_z(x).unflatten(-1, (-1, self.c.linear_value_head_dim))
        return self.out_proj(self.norm(y, z).flatten(-2))


class Attention(nn.Module):
    """Gated attention with norms of queries and keys and partial rotary positions."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.q_proj = Linear(c.hidden_size, 2 * c.num_attention_heads * c.head_dim)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.q_norm, self.k_norm = Norm(c.head_dim, c.rms_norm_eps), Norm(c.head_dim, c.rms_norm_eps)

    def rotate(self, x, positions):
        dims = self.c.rotary_dims
        rates = self.c.rope_theta ** (-torch.arange(0, dims, 2, device=x.device, dtype=torch.float32) / dims)
        angles = positions.float()[:, None] * rates
        cos, sin = angles.cos(), angles.sin()
        a, b = x[..., : dims // 2].float(), x[..., dims // 2 : dims].float()
        return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), x[..., dims:]], -1)

    def projected(self, x, positions):
        size = self.c.head_dim
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * size)).chunk(2, -1)
        k, v = self.k_proj(x).unflatten(-1, (-1, size)), self.v_proj(x).unflatten(-1, (-1, size))
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        return self.rotate(q, positions), self.rotate(k, positions), v, gate.flatten(-2)

    def attend(self, q, k, v, gate, is_causal):
        repeat = self.c.num_attention_heads // self.c.num_key_value_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=is_causal)
        return self.o_proj(y.transpose(1, 2).flatten(-2) * torch.sigmoid(gate))

    def forward(self, x, _begins=None):
        return self.attend(*self.projected(x, torch.arange(x.shape[1], device=x.device)), True)

    def step(self, x, memory):
        at = memory["length"]
        q, k, v, gate = self.projected(x, torch.tensor([at], device=x.device))
        memory["keys"][:, :, at : at + 1], memory["values"][:, :, at : at + 1] = k, v
        memory["length"] = at + 1
        return self.attend(q, memory["keys"][:, :, : at + 1], memory["values"][:, :, : at + 1], gate, False)


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj, self.up_proj = Linear(c.hidden_size, c.intermediate_size), Linear(
            c.hidden_size, c.intermediate_size
        )
        self.down_proj = Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c, is_full):
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = Mlp(c)
        if is_full:
            self.self_attn = Attention(c)
        else:
            self.linear_attn = GatedDeltaNet(c)

    @property
    def mixer(self):
        return self.self_attn if hasattr(self, "self_attn") else self.linear_attn

    def forward(self, x, begins):
        x = x + self.mixer(self.input_layernorm(x), begins)
        return x + self.mlp(self.post_attention_layernorm(x))

    def step(self, x, memory):
        x = x + self.mixer.step(self.input_layernorm(x), memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, c.is_full(i)) for i in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)


class Mtp(nn.Module):
    """From the state of token i and token i+1 it predicts token i+2."""

    def __init__(self, c):
        super().__init__()
        self.fc = Linear(2 * c.hidden_size, c.hidden_size)
        self.layers = nn.ModuleList([Layer(c, True)])
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(c.hidden_size, c.rms_norm_eps), Norm(
            c.hidden_size, c.rms_norm_eps
        )

    def forward(self, embedded, hidden):
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1))
        return self.norm(self.layers[0](x, None))


class Reasoner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.model, self.mtp = config, Body(config), Mtp(config)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # What writes into the residual stream starts smaller.
                is_output = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * config.num_hidden_layers) if is_output else 1))

    def embed(self, tokens):
        return F.embedding(tokens, rounded(self.model.embed_tokens.weight))

    def head(self, hidden):
        return F.linear(hidden, rounded(self.model.embed_tokens.weight))

    def hidden(self, tokens, end_of_text):
        """States after the final norm; a row holds several texts, each ended by `end_of_text`."""
        begins = F.pad(tokens[:, :-1] == end_of_text, (1, 0)).float()
        x = self.embed(tokens)
        for layer in self.model.layers:
            x = layer(x, begins)
        return self.model.norm(x)

    def losses(self, tokens, weights, end_of_text):
        """The weighted losses of the next token and of the MTP layer; `tokens` and `weights` [B, T + 1]."""

        def loss(hidden, targets, weights):
            each = F.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten(), reduction="none")
            return (each * weights.flatten()).sum() / weights.sum()

        hidden = self.hidden(tokens[:, :-1], end_of_text)
        main = loss(hidden, tokens[:, 1:], weights[:, 1:])
        ahead = self.mtp(self.embed(tokens[:, 1:-1]), hidden[:, :-1])
        return main, loss(ahead, tokens[:, 2:], weights[:, 2:])


class Decoder:
    """Decodes many rows, one token of each at a time."""

    def __init__(self, model, rows, limit, device, kind):
        c = model.config
        self.model, self.memories = model, []
        for i in range(c.num_hidden_layers):
            if c.is_full(i):
                shape = (rows, c.num_key_value_heads, limit, c.head_dim)
                self.memories.append(
                    {
                        "keys": torch.zeros(shape, device=device, dtype=kind),
                        "values": torch.zeros(shape, device=device, dtype=kind),
                        "length": 0,
                    }
                )
            else:
                width = model.model.layers[i].linear_attn.conv1d.weight.shape[0]
                inputs = torch.zeros(rows, c.linear_conv_kernel_dim - 1, width, device=device, dtype=kind)
                self.memories.append(
                    {
                        "inputs": inputs,
                        "state": torch.zeros(
                            rows,
                            c.linear_num_value_heads,
                            c.linear_key_head_dim,
                            c.linear_value_head_dim,
                            device=device,
                        ),
                    }
                )

    def step(self, tokens):
        """Logits [B, V] after one more token of each row."""
        x = self.model.embed(tokens[:, None])
        for layer, memory in zip(self.model.model.layers, self.memories):
            x = layer.step(x, memory)
        return self.model.head(self.model.model.norm(x))[:, 0].float()
