#!/usr/bin/env python3
"""What does it cost to leave out missing neurons, by what is known of them?

    leanstream tokenize -m MODEL.gguf -f TEXT --ids > IDS
    OMP_NUM_THREADS=2 platform/benches/leaving_out.py MODEL.gguf CALIBRATION_IDS IDS...

MODEL is of architecture llama with `hidden_activation` relu. A part of each layer's neurons is resident. A token uses the
active ones that are, and of the others only those among the most important share of the active ones, which are fetched;
the rest is left out. What is resident follows decayed frequency and the gate's output, as `refine` ranks them, with a
cache for each layer. Importance is the gate's output times the down column's norm times what is known of the up row's
product:

- `mean`: its mean size in the calibration's text, which is what leanstream goes by;
- `rank R`: the best approximation of that rank on the calibration's inputs (whitened), in 8 bits;
- `2 bit`: the up rows as Q2_K would have them;
- `exact`: the product itself. No run can know it before the row is read: this is the bound.

Printed: resident bytes a neuron for the estimate, what was fetched as a share of the active neurons, and how much
perplexity rises, on the second half of the first four windows of 512 tokens of each text. Needs numpy and gguf.
"""

import json
import sys

import numpy as np

from predictors import WINDOW, Model, bits_like_k, low_rank

WINDOWS = 4
BUDGETS, SHARES = (0.25, 0.5), (0.4, 0.5, 0.6, 0.7)
# How `refine` ranks (core/src/sparse/retain/refine.rs), and its decay.
FREQUENCY, SCORE, SCORE_MAX, DECAY = 0.76, 0.50, 4.0, 1 / 32


def read(path, windows):
    with open(path) as file:
        ids = np.array(json.load(file))
    windows = min(windows, len(ids) // WINDOW)
    return ids[: windows * WINDOW].reshape(windows, WINDOW)


class Layer:
    """A layer's feed-forward weights, and what a text says of them."""

    def __init__(self, model, number, u):
        part = lambda name: model.get(f"blk.{number}.ffn_{name}")
        self.gate, self.up, self.down = part("gate"), part("up"), part("down")
        self.norms = np.linalg.norm(self.down, axis=0)
        u = u.reshape(-1, u.shape[-1])
        gate, up = u @ self.gate.T, np.abs(u @ self.up.T)
        active = gate > 0
        self.frequency = active.mean(0) + 1e-5
        self.mean = (up * active).sum(0) / np.maximum(active.sum(0), 1)
        self.inputs = u
        self.known = {"mean": (4, None), "exact": (None, self.up)}

    def know(self, name):
        """Resident bytes a neuron, and a matrix whose product estimates the up row's."""
        if name not in self.known:
            if name == "2 bit":
                self.known[name] = self.up.shape[1] * 2.625 / 8, bits_like_k(self.up, 2)
            else:
                rank = int(name.split()[1])
                ahead, behind = low_rank(self.up, self.inputs, rank)
                shared = behind.size / len(self.up)
                self.known[name] = rank + 4 + shared, ahead @ behind
        return self.known[name]

    def sizes(self, name, u, up):
        _, matrix = self.know(name)
        if matrix is None:
            return self.mean
        estimate = u @ matrix.T
        # What the estimate leaves open is as large as it was on average.
        rest = np.abs(up - estimate).mean(0)
        return np.sqrt(estimate**2 + rest**2)


def use(layer, gate, importance, share, budget):
    """Which active neurons each token (tokens, ff) uses; active and fetched ones in all."""
    active = gate > 0
    units = active.shape[1]
    slots = int(units * budget)
    frequency = layer.frequency.astype(np.float64)
    resident = np.zeros(units, bool)
    resident[np.argsort(-frequency)[:slots]] = True
    scores = np.clip(gate / np.sqrt((gate**2).mean(-1, keepdims=True)), -SCORE_MAX, SCORE_MAX)
    used = np.zeros_like(active)
    fetched_all = 0
    for token, now in enumerate(active):
        missing = now & ~resident
        kept = int(now.sum() * share)
        least = np.sort(importance[token][now])[::-1][kept - 1 : kept]
        fetched = missing & (importance[token] >= (least if kept else np.inf))
        fetched_all += fetched.sum()
        used[token] = now & resident | fetched
        frequency *= 1 - DECAY
        frequency[now] += DECAY
        worth = FREQUENCY * np.log2(frequency) + SCORE * scores[token]
        there = np.flatnonzero(resident | fetched)
        least_worth = there[np.argsort(worth[there])[: len(there) - slots]]
        resident |= fetched
        resident[least_worth] = False
    return used, active.sum(), fetched_all


def perplexity(model, layers, ids, name=None, share=1.0, budget=0.0):
    """Perplexity, and the share of active neurons that was fetched. Without a name nothing is left out."""
    x = model.get("token_embd")[ids]
    active = fetched = 0
    for number, layer in enumerate(layers):
        x = model.attend(x, number)
        u = model.norm(x, model.get(f"blk.{number}.ffn_norm"))
        u = u.reshape(-1, u.shape[-1])
        gate, up = u @ layer.gate.T, u @ layer.up.T
        sums = np.maximum(gate, 0) * up
        if name:
            importance = np.maximum(gate, 0) * layer.norms * layer.sizes(name, u, up)
            used, more, read = use(layer, gate, importance, share, budget)
            sums *= used
            active, fetched = active + more, fetched + read
        x = x + (sums @ layer.down.T).reshape(x.shape)
    x = model.norm(x, model.get("output_norm"))[:, WINDOW // 2 - 1 : -1]
    logits = x @ model.get("output" if "output.weight" in model.tensors else "token_embd").T
    logits -= logits.max(-1, keepdims=True)
    total = np.log(np.exp(logits).sum(-1))
    true = np.take_along_axis(logits, ids[:, WINDOW // 2 :, None], -1)[..., 0]
    return np.exp((total - true).mean()), fetched / max(active, 1)


def main():
    model = Model(sys.argv[1])
    layers = [Layer(model, number, u) for number, u, _ in model.inputs(read(sys.argv[2], 16))]
    texts = [read(path, WINDOWS) for path in sys.argv[3:]]
    exact = [perplexity(model, layers, ids)[0] for ids in texts]
    print("perplexity with all:", ", ".join(f"{p:.2f}" for p in exact), flush=True)
    print("\n| resident | known of the up row | bytes | share | fetched | perplexity, by text |")
    print("| --- | --- | ---: | ---: | ---: | --- |")
    for budget in BUDGETS:
        for name in ("mean", "rank 16", "2 bit", "exact"):
            for share in SHARES if name in ("mean", "exact") else (0.5,):
                rows = [perplexity(model, layers, ids, name, share, budget) for ids in texts]
                rise = ", ".join(f"{100 * (p / e - 1):+.1f}%" for (p, _), e in zip(rows, exact))
                fetched = np.mean([f for _, f in rows])
                size = layers[0].know(name)[0]
                size = f"{size:.0f}" if size else ""
                print(f"| {budget:.0%} | {name} | {size} | {share} | {fetched:.3f} | {rise} |", flush=True)


if __name__ == "__main__":
    main()
