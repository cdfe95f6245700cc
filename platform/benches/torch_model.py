"""The decoders of GGUF files in plain PyTorch, with LoRA: what torch_block.py and tune_peers.py compute with.

Architectures llama (SiLU, ReLU or GELU gate), gemma3 and arcee (ungated ReLU squared), as llama.cpp defines them:
query and key rows of llama and arcee stand in the file so that neighbouring elements form a rotary pair; gemma3 pairs
element i with i + n/2. Weights are decoded once, to f32, and then cast.

The numbers of A, B, inputs and output gradients come from `fill`, which anyone can repeat: see there.

Needs torch, numpy and gguf from PyPI.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGUFReader
from gguf.quants import dequantize

MASK = (1 << 64) - 1


def hash_name(name):
    """FNV-1a, 64 bits, over the name's UTF-8 bytes."""
    state = 0xCBF29CE484222325
    for byte in name.encode():
        state = (state ^ byte) * 0x100000001B3 & MASK
    return state


def mix(z):
    """The output function of SplitMix64 at state `z` (an array of u64); all arithmetic wraps."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def words(name, count):
    """`count` u64: element i is mix(mix(hash_name(name)) + i)."""
    with np.errstate(over="ignore"):
        seed = mix(np.array([hash_name(name)], np.uint64))
        return mix(seed + np.arange(count, dtype=np.uint64))


def fill(name, shape, scale):
    """f32 in [-scale, scale): element i (row-major) is ((word i >> 40) / 2^23 - 1) * scale, exact if scale is 2^n."""
    numbers = (words(name, math.prod(shape)) >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1.0
    return torch.from_numpy((numbers * scale).astype(np.float32).reshape(shape))


class Lora:
    """A (rank, in) and B (out, rank) of one linear; adds alpha / rank * B A x."""

    def __init__(self, a, b, scale):
        self.a, self.b, self.scale = a, b, scale

    def __call__(self, x):
        return F.linear(F.linear(x, self.a), self.b) * self.scale


class Model:
    """`weights` by their GGUF names; `lora` by the name of the weight that it goes with."""

    def __init__(self, path, dtype=torch.float32, layers=None):
        """Only the blocks in `layers` are read, if given, and then no head and no embedding."""
        reader = GGUFReader(path)
        self.arch = reader.fields["general.architecture"].contents()
        assert self.arch in ("llama", "gemma3", "arcee"), self.arch

        def key(name, default=None):
            field = reader.fields.get(f"{self.arch}.{name}")
            value = default if field is None else field.contents()
            assert value is not None, name
            return value

        gemma = self.arch == "gemma3"
        self.d, self.layers = key("embedding_length"), key("block_count")
        self.heads, self.kv_heads = key("attention.head_count"), key("attention.head_count_kv")
        self.head_dim = key("attention.key_length", self.d // self.heads)
        self.eps = key("attention.layer_norm_rms_epsilon")
        self.n_rot = key("rope.dimension_count", self.head_dim)
        self.base = key("rope.freq_base", 1e6 if gemma else 1e4)
        linear = key("rope.scaling.type", "none") == "linear"
        self.stretch = key("rope.scaling.factor", 1.0) if linear else 1.0
        self.window = key("attention.sliding_window", 0) if gemma else 0
        self.period = key("attention.sliding_window_pattern", 6) if gemma else 1
        self.softcap = key("final_logit_softcapping", 0.0) if gemma else 0.0
        # A factor like this is f32 in llama.cpp.
        self.embed_scale = float(np.float32(math.sqrt(self.d))) if gemma else 1.0
        self.act = {"gemma3": "gelu", "arcee": "relu2"}.get(self.arch) or key("hidden_activation", "silu")
        self.weights, self.lora = {}, {}
        wanted = None if layers is None else tuple(f"blk.{layer}." for layer in layers)
        for tensor in reader.tensors:
            if wanted is None or tensor.name.startswith(wanted) or tensor.name == "rope_freqs.weight":
                values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
                self.weights[tensor.name] = torch.from_numpy(values.copy()).to(dtype)
        self.factors = self.weights.pop("rope_freqs.weight", None)

    def linears(self):
        """Names of all matrices in blocks, in the file's order."""
        return [n for n, w in self.weights.items() if n.startswith("blk.") and w.dim() == 2]

    def add_lora(self, rank, alpha, a_scale, b_scale):
        """LoRA on every linear; A and B are `fill(name without ".weight" + ".lora_a" or ".lora_b", ...)`."""
        for name in self.linears():
            weight, stem = self.weights[name], name.removesuffix(".weight")
            out, wide = weight.shape
            a = fill(stem + ".lora_a", (rank, wide), a_scale).to(weight.dtype)
            b = fill(stem + ".lora_b", (out, rank), b_scale) if b_scale else torch.zeros(out, rank)
            self.lora[name] = Lora(a.requires_grad_(), b.to(weight.dtype).requires_grad_(), alpha / rank)

    def trained(self):
        """(name, tensor) of what LoRA trains; names as in the adapter's file."""
        for name, lora in self.lora.items():
            yield name + ".lora_a", lora.a
            yield name + ".lora_b", lora.b

    def linear(self, x, name):
        y = F.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))
        lora = self.lora.get(name + ".weight")
        return y if lora is None else y + lora(x)

    def norm(self, x, name):
        rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)
        return x * rstd * self.weights[name + ".weight"]

    def local(self, layer):
        """Whether a block sees only the last `window` positions."""
        return self.window > 0 and layer % self.period != self.period - 1

    def turn(self, x, layer):
        """`x` (heads, S, head_dim) turned by its position."""
        pairs = self.n_rot // 2
        base, stretch = (1e4, 1.0) if self.local(layer) else (self.base, self.stretch)
        rates = base ** (torch.arange(pairs, dtype=torch.float64) * -2 / self.n_rot) / stretch
        if self.factors is not None:
            rates = rates / self.factors.double()
        angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * rates
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        rotated, rest = x[..., : self.n_rot], x[..., self.n_rot :]
        if self.arch == "gemma3":
            a, b = rotated[..., :pairs], rotated[..., pairs:]
            rotated = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
        else:
            a, b = rotated[..., 0::2], rotated[..., 1::2]
            rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        return torch.cat((rotated, rest), -1)

    def attend(self, x, layer):
        """`x` (S, d) after the norm; the output projection's result."""
        at, size = f"blk.{layer}.attn_", x.shape[0]
        split = lambda y, heads: y.view(size, heads, self.head_dim).transpose(0, 1)
        q = split(self.linear(x, at + "q"), self.heads)
        k = split(self.linear(x, at + "k"), self.kv_heads)
        v = split(self.linear(x, at + "v"), self.kv_heads)
        if self.arch == "gemma3":
            q, k = self.norm(q, at + "q_norm"), self.norm(k, at + "k_norm")
        q, k = self.turn(q, layer), self.turn(k, layer)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        mask, causal = None, True
        if self.local(layer) and size > self.window:
            distance = torch.arange(size)[:, None] - torch.arange(size)
            mask, causal = (distance >= 0) & (distance < self.window), False
        # With a batch axis, or the fused kernel is not taken.
        o = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, is_causal=causal)[0]
        return self.linear(o.transpose(0, 1).reshape(size, -1), at + "output")

    def feed(self, x, layer):
        at = f"blk.{layer}.ffn_"
        up = self.linear(x, at + "up")
        if self.act == "relu2":
            return self.linear(F.relu(up).square(), at + "down")
        gate = self.linear(x, at + "gate")
        if self.act == "silu":
            gate = F.silu(gate)
        elif self.act == "relu":
            gate = F.relu(gate)
        else:
            gate = F.gelu(gate, approximate="tanh")
        return self.linear(gate * up, at + "down")

    def block(self, x, layer):
        """`x` (S, d) through one block."""
        at = f"blk.{layer}."
        y = self.attend(self.norm(x, at + "attn_norm"), layer)
        if self.arch == "gemma3":
            y = self.norm(y, at + "post_attention_norm")
        x = x + y
        y = self.feed(self.norm(x, at + "ffn_norm"), layer)
        if self.arch == "gemma3":
            y = self.norm(y, at + "post_ffw_norm")
        return x + y

    def hidden(self, tokens, block=None):
        """`tokens` (S) i64 to the head's input (S, d); `block` stands for self.block (checkpointing)."""
        x = F.embedding(tokens, self.weights["token_embd.weight"])
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        for layer in range(self.layers):
            x = (block or self.block)(x, layer)
        return self.norm(x, "output_norm")

    def head(self, x):
        logits = F.linear(x, self.weights.get("output.weight", self.weights["token_embd.weight"]))
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    def loss(self, tokens, block=None):
        """Mean cross-entropy of `tokens` (S + 1): S inputs, each predicting the next."""
        return F.cross_entropy(self.head(self.hidden(tokens[:-1], block)), tokens[1:])
