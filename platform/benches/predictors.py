#!/usr/bin/env python3
"""Which small predictor of a ReLU gate finds most active neurons for its bytes?

    leanstream tokenize -m MODEL.gguf -f TEXT --ids > IDS
    OMP_NUM_THREADS=1 platform/benches/predictors.py MODEL.gguf IDS [EVERY [margins]]

MODEL is of architecture llama with `hidden_activation` relu. A float32 forward pass gives the true inputs of every
EVERY-th layer's feed-forward network (default: 3). Of windows of 512 tokens every fourth is for testing, the others are
what predictors are fitted to. Printed: resident bytes for a neuron (what its layer shares included), and the share of
the truly active neurons among the 1, 1.25 and 1.5 times as many with the best scores: mean over layers, worst layer.

With `margins`: what a sketch misses when neurons are candidates whose estimate is above a margin below zero, in units of
the estimates' root mean square.

Needs numpy and gguf from PyPI.
"""

import json
import sys

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from gguf.quants import dequantize, quantize

WINDOW = 512
FETCHED = (1.0, 1.25, 1.5)
RNG = np.random.default_rng(1)


class Model:
    """Weights as float32, and the forward pass layer by layer."""

    def __init__(self, path):
        reader = GGUFReader(path)
        key = lambda name: reader.fields["llama." + name].contents()
        assert key("hidden_activation") == "relu"
        self.tensors = {t.name: t for t in reader.tensors}
        self.layers, self.heads = key("block_count"), key("attention.head_count")
        self.kv_heads, self.base = key("attention.head_count_kv"), key("rope.freq_base")
        self.eps = key("attention.layer_norm_rms_epsilon")

    def get(self, name):
        tensor = self.tensors[name + ".weight"]
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float32)

    def norm(self, x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * weight

    def attend(self, x, layer):
        """`x` (windows, tokens, d) plus its attention."""
        part = lambda name: self.get(f"blk.{layer}.{name}")
        u = self.norm(x, part("attn_norm"))
        q, k, v = (u @ part("attn_" + name).T for name in "qkv")
        windows, tokens, _ = x.shape
        turn = lambda z, heads: self.turn(z.reshape(windows, tokens, heads, -1)).swapaxes(1, 2)
        q, k = turn(q, self.heads), turn(k, self.kv_heads)
        v = v.reshape(windows, tokens, self.kv_heads, -1).swapaxes(1, 2)
        mask = np.triu(np.full((tokens, tokens), -np.inf, np.float32), 1)
        out = np.empty_like(q)
        for head in range(self.heads):
            of = head * self.kv_heads // self.heads
            score = q[:, head] @ k[:, of].swapaxes(1, 2) / np.sqrt(q.shape[-1]) + mask
            score = np.exp(score - score.max(-1, keepdims=True))
            out[:, head] = score / score.sum(-1, keepdims=True) @ v[:, of]
        out = out.swapaxes(1, 2).reshape(windows, tokens, -1)
        return x + out @ part("attn_output").T

    def turn(self, z):
        """Rotary embedding of neighbours, which is how GGUF's llama weights are permuted."""
        tokens, width = z.shape[1], z.shape[-1]
        angle = np.arange(tokens)[:, None] * self.base ** (-np.arange(0, width, 2) / width)
        cos, sin = (f(angle).astype(np.float32)[:, None] for f in (np.cos, np.sin))
        a, b = z[..., ::2], z[..., 1::2]
        return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(z.shape)

    def inputs(self, ids):
        """Of each layer its number, the input (windows, tokens, d) of its network, and its gate."""
        x = self.get("token_embd")[ids]
        for layer in range(self.layers):
            x = self.attend(x, layer)
            u = self.norm(x, self.get(f"blk.{layer}.ffn_norm"))
            gate = self.get(f"blk.{layer}.ffn_gate")
            yield layer, u, gate
            a = np.maximum(u @ gate.T, 0) * (u @ self.get(f"blk.{layer}.ffn_up").T)
            x = x + a @ self.get(f"blk.{layer}.ffn_down").T


def q4_0(gate):
    return dequantize(quantize(gate, Type.Q4_0), Type.Q4_0)


def bits_like_k(gate, bits):
    """Blocks of 16 with 4-bit scales and minimums of their row, as Q2_K has them."""
    w = gate.reshape(len(gate), -1, 16)
    top = 2**bits - 1
    low = np.minimum(w.min(-1), 0)
    scale = (w.max(-1) - low) / top
    # The best of a few narrower ranges, as quantizers of K types search for it.
    best = np.full(low.shape, np.inf)
    best_scale, best_low = scale, low
    for shrink in np.linspace(0.5, 1, 11):
        s, m = (coarse(z * shrink) for z in (scale, low))
        got = levels(w, s, m, top)
        error = ((got - w) ** 2).sum(-1)
        better = error < best
        best = np.where(better, error, best)
        best_scale, best_low = np.where(better, s, best_scale), np.where(better, m, best_low)
    return levels(w, best_scale, best_low, top).reshape(gate.shape)


def coarse(z):
    step = np.abs(z).max(-1, keepdims=True) / 15
    return np.round(z / step) * step


def levels(w, scale, low, top):
    safe = np.where(scale > 0, scale, 1)[..., None]
    q = np.clip(np.round((w - low[..., None]) / safe), 0, top)
    return q * scale[..., None] + low[..., None]


def signs(gate):
    return np.sign(gate) * np.abs(gate).mean(-1, keepdims=True)


def byte_rows(w):
    """Each row in 8 bits with a scale."""
    scale = np.abs(w).max(-1, keepdims=True) / 127
    return np.round(w / scale) * scale


def low_rank(gate, fit, rank):
    """The best approximation of that rank on the inputs: whitened, cut, in 8 bits."""
    root = np.linalg.cholesky(fit.T @ fit / len(fit) + 1e-4 * np.eye(fit.shape[1]))
    left, size, right = np.linalg.svd(gate @ root, full_matrices=False)
    ahead = left[:, :rank] * size[:rank]
    behind = np.linalg.solve(root.T, right[:rank].T).T
    return byte_rows(ahead).astype(np.float32), byte_rows(behind).astype(np.float32)


class Tables:
    """Signs of `bits` learned projections; each `wide` of them index a table of scores, which are added.

    Trained against the active set (logistic loss, Adam): the straight-through estimate of a sign's slope is the
    difference that flipping the bit makes, where the projection is within one of zero."""

    def __init__(self, gate, fit, bits, wide, epochs=16, batch=256):
        active = fit @ gate.T > 0
        _, behind = low_rank(gate, fit, bits)
        # Directions that matter, mixed so that each bit tells as much.
        mix = np.linalg.qr(RNG.standard_normal((bits, bits)))[0]
        self.ahead = (mix @ behind).T.astype(np.float32)
        self.ahead /= (fit @ self.ahead).std(0)
        self.shift = -(fit @ self.ahead).mean(0)
        self.wide, self.groups = wide, bits // wide
        self.tables = np.zeros((self.groups, 2**wide, len(gate)), np.float32)
        share = np.clip(active.mean(0), 1e-3, 1 - 1e-3)
        self.tables += np.log(share / (1 - share)).astype(np.float32) / self.groups
        values = [self.ahead, self.shift, self.tables]
        rates, moments = (3e-3, 3e-3, 3e-2), [(np.zeros_like(v), np.zeros_like(v)) for v in values]
        step, steps = 0, epochs * (len(fit) // batch)
        for _ in range(epochs):
            order = RNG.permutation(len(fit))
            for first in range(0, len(fit) - batch + 1, batch):
                step += 1
                part = order[first : first + batch]
                slopes = self.slopes(fit[part], active[part])
                for value, slope, (mean, square), rate in zip(values, slopes, moments, rates):
                    mean += 0.1 * (slope - mean)
                    square += 0.01 * (slope * slope - square)
                    size = rate * (1 - step / steps) / (1 - 0.9**step)
                    value -= size * mean / (np.sqrt(square / (1 - 0.99**step)) + 1e-8)
        # A byte for each score, with a scale for the neuron.
        scale = np.abs(self.tables).max((0, 1)) / 127
        self.tables = np.round(self.tables / scale) * scale

    def cells(self, u):
        z = u @ self.ahead + self.shift
        place = 1 << np.arange(self.wide)
        return z, ((z > 0).reshape(len(u), self.groups, -1) * place).sum(-1)

    def scores(self, u):
        _, cells = self.cells(u)
        return sum(self.tables[g][cells[:, g]] for g in range(self.groups))

    def slopes(self, u, active):
        z, cells = self.cells(u)
        score = sum(self.tables[g][cells[:, g]] for g in range(self.groups))
        off = (1 / (1 + np.exp(-score)) - active).astype(np.float32) / len(u)
        tables, bits = np.empty_like(self.tables), np.zeros_like(z)
        for g in range(self.groups):
            one_hot = (cells[:, g, None] == np.arange(2**self.wide)).astype(np.float32)
            tables[g] = one_hot.T @ off
            # What each cell would cost every token: the flips are differences of these.
            cost = off @ self.tables[g].T
            for b in range(self.wide):
                on, out = cells[:, g] | 1 << b, cells[:, g] & ~(1 << b)
                rows = np.arange(len(u))
                bits[:, g * self.wide + b] = cost[rows, on] - cost[rows, out]
        bits *= np.abs(z) < 1
        return u.T @ bits, bits.sum(0), tables


def predictors(gate, fit):
    """Name, bytes a neuron, scores."""
    ff, d = gate.shape
    matrix = lambda w: (lambda u: u @ w.T)
    yield "Q4_0", d * 4.5 / 8, matrix(q4_0(gate))
    yield "3 bit, as Q3_K", d * 3.4375 / 8, matrix(bits_like_k(gate, 3))
    yield "2 bit, as Q2_K", d * 2.625 / 8, matrix(bits_like_k(gate, 2))
    yield "signs and a scale", d / 8 + 2, matrix(signs(gate))
    for rank in (16, 32, 64, 128):
        ahead, behind = low_rank(gate, fit, rank)
        yield f"rank {rank}", (rank + 2) * (1 + d / ff), lambda u: u @ behind.T @ ahead.T
    for bits, wide in ((8, 4), (16, 4), (32, 4), (64, 4), (8, 8), (16, 8)):
        bytes_ = bits // wide * 2**wide + 2 + bits * d / ff
        yield f"{bits} bits, tables of {2**wide}", bytes_, Tables(gate, fit, bits, wide).scores


def recalls(scores, active):
    """Share of the active neurons among the best scores, by how many are fetched."""
    order = np.argsort(-scores, axis=1)
    hit = np.cumsum(np.take_along_axis(active, order, 1), 1)
    count = active.sum(1)
    rows = np.arange(len(scores))
    for fetched in FETCHED:
        last = np.clip(np.round(fetched * count).astype(int), 1, scores.shape[1]) - 1
        yield hit[rows, last].sum() / count.sum()


def margins(gate, u, weight):
    """Name of a sketch and margin; recall, candidates for each active neuron, share of importance missed."""
    exact = u @ gate.T
    active, importance = exact > 0, np.maximum(exact, 0) * weight
    for name, rows in (("Q4_0", q4_0(gate)), ("2 bit", bits_like_k(gate, 2))):
        estimate = u @ rows.T
        rms = np.sqrt((estimate**2).mean(1, keepdims=True))
        for margin in (0, 0.05, 0.1, 0.2, 0.3):
            chosen = estimate > -margin * rms
            missed = 1 - (importance * chosen).sum() / importance.sum()
            recall = (chosen & active).sum() / active.sum()
            yield (name, margin), (recall, chosen.sum() / active.sum(), missed)


def main():
    path, ids = sys.argv[1:3]
    every = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    ids = np.array(json.load(open(ids)))
    ids = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)
    test = np.arange(len(ids)) % 4 == 3
    found, share = {}, []
    model, by_margin = Model(path), sys.argv[4:] == ["margins"]
    for layer, u, gate in model.inputs(ids):
        if layer % every:
            continue
        flat = lambda part: np.ascontiguousarray(part.reshape(-1, part.shape[-1]))
        fit, held = flat(u[~test]), flat(u[test])
        active = held @ gate.T > 0
        share.append(active.mean())
        if by_margin:
            up, down = (model.get(f"blk.{layer}.ffn_{part}") for part in ("up", "down"))
            weight = np.abs(held @ up.T) * np.linalg.norm(down, axis=0)
            for key, row in margins(gate, held, weight):
                found.setdefault(key, []).append(row)
            continue
        for name, bytes_, scores in predictors(gate, fit):
            found.setdefault((name, bytes_), []).append(list(recalls(scores(held), active)))
        print(f"layer {layer}: {share[-1]:.1%} active", file=sys.stderr, flush=True)
    print(f"{len(ids)} windows, {test.sum()} of them for testing; {np.mean(share):.1%} active\n")
    if by_margin:
        print("| sketch | margin | recall, worst layer | candidates for an active neuron | importance missed |")
        print("| --- | ---: | --- | ---: | ---: |")
        for (name, margin), layers in found.items():
            (recall, chosen, missed), worst = np.mean(layers, 0), np.min(layers, 0)[0]
            print(f"| {name} | {margin} | {recall:.1%}, {worst:.1%} | {chosen:.2f} | {missed:.2%} |")
        return
    print("| predictor | bytes a neuron | 1.0x | 1.25x | 1.5x | worst layer at 1.0x, 1.25x |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for (name, bytes_), layers in found.items():
        mean, worst = np.mean(layers, 0) * 100, np.min(layers, 0) * 100
        cells = " | ".join(f"{x:.1f}%" for x in mean)
        print(f"| {name} | {bytes_:.0f} | {cells} | {worst[0]:.1f}%, {worst[1]:.1f}% |")


if __name__ == "__main__":
    main()
