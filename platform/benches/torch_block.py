#!/usr/bin/env python3
"""Golden gradients and losses of fine-tuning, from PyTorch: platform/tests/golden/tune_*.

    cargo build --release --example synth
    OMP_NUM_THREADS=1 platform/benches/torch_block.py block SMOLLM2.gguf
    OMP_NUM_THREADS=1 platform/benches/torch_block.py steps SMOLLM2.gguf GEMMA3.gguf RELU.gguf

SMOLLM2 is SmolLM2-135M-Instruct.Q4_1.gguf, GEMMA3 gemma-3-270m-q4_k_m.gguf, RELU smollm2-135m-relu.gguf; text becomes
tokens with target/release/leanstream. Made with torch 2.8.0 and gguf 0.19.0 on a CPU.

All made-up numbers are `fill(name, shape, scale)` of torch_model.py:
    word(name, i) = mix(mix(fnv1a64(name)) + i), mix = SplitMix64's output function, all in wrapping u64
    fill(name)[i] = ((word(name, i) >> 40) / 2^23 - 1) * scale, i row-major; scales are powers of two, so exact in f32
    tokens of made-up models: word("tokens", i) mod the vocabulary's size

tune_block.json + tune_block.bin: one block of SmolLM2 in f64, LoRA of rank 8 on all seven linears, no dropout.
    x = fill("x", (64, 576), 1), positions 0..63; dy = fill("dy", (64, 576), 1), the loss's gradient by the block's output
    A = fill("blk.L.NAME.lora_a", (8, in), a_scale), B = fill("blk.L.NAME.lora_b", (out, 8), b_scale)
    y = W x + alpha / 8 * B (A x)
The binary file is f32, little-endian, row-major; the JSON's `tensors` name shape and offset (in f32 elements) of dx,
y_rows (every eighth row of the block's output, from row 0) and `NAME.lora_a`, `NAME.lora_b` (gradients of A and B); `l2`
is a norm in f64, and `f32_cosine` the cosine of the same tensor computed by PyTorch in f32.

tune_steps.json: losses of whole models. `tokens` holds S + 1 ids: the first S are the input, loss is the mean
cross-entropy of predicting the last S. One step = one such sequence, AdamW (PyTorch's, decoupled decay, bias
correction). `train` is `lora` (rank 8 on all linears of all blocks, A as above, B = 0) or `full` (every tensor, a tied
embedding once). `losses` has steps + 1 values, before each step and after the last; `grad_norms` the global L2 norm
before each step; both in f64, and in f32 as PyTorch computes it. `first_gradients`: L2 norms at the first step, f64.
Made-up models are what `synth` makes of the arguments in `synth`, f32 weights.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from torch_model import Model, fill, words

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "platform/tests/golden"
LAYER, SIZE, RANK, ALPHA = 7, 64, 8, 16.0
A_SCALE, B_SCALE = 2.0**-5, 2.0**-3


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def block_gradients(path, dtype):
    """Named results of the block, in the order of the file."""
    model = Model(path, dtype, [LAYER])
    model.add_lora(RANK, ALPHA, A_SCALE, B_SCALE)
    x = fill("x", (SIZE, model.d), 1.0).to(dtype).requires_grad_()
    y = model.block(x, LAYER)
    y.backward(fill("dy", (SIZE, model.d), 1.0).to(dtype))
    results = {"dx": x.grad, "y_rows": y.detach()[::8]}
    results |= {name.replace(".weight", ""): tensor.grad for name, tensor in model.trained()}
    return {name: tensor.double() for name, tensor in results.items()}


def block(path):
    exact, single = (block_gradients(path, dtype) for dtype in (torch.float64, torch.float32))
    tensors, data = {}, b""
    for name, tensor in exact.items():
        cosine = torch.cosine_similarity(tensor.flatten(), single[name].flatten(), 0).item()
        tensors[name] = {
            "shape": list(tensor.shape),
            "offset": len(data) // 4,
            "l2": tensor.norm().item(),
            "f32_cosine": cosine,
        }
        data += tensor.numpy().astype("<f4").tobytes()
    index = {
        "model_sha256": sha256(path),
        "layer": LAYER,
        "tokens": SIZE,
        "rank": RANK,
        "alpha": ALPHA,
        "a_scale": A_SCALE,
        "b_scale": B_SCALE,
        "generator": "((mix(mix(fnv1a64(name)) + i) >> 40) / 2^23 - 1) * scale; mix: SplitMix64's output function",
        "check": {"x": fill("x", (4,), 1.0).tolist(), "dy": fill("dy", (4,), 1.0).tolist()},
        "bin_sha256": hashlib.sha256(data).hexdigest(),
        "tensors": tensors,
    }
    (GOLDEN / "tune_block.bin").write_bytes(data)
    write("tune_block.json", index)


def write(name, value):
    """JSON with short lists on one line."""
    lines = json.dumps(value, indent=1).split("\n")
    out, row = [], None
    for line in lines:
        if row is not None:
            row += line.strip() + (" " if line.endswith(",") else "")
            if line.strip().startswith("]"):
                out.append(row.rstrip())
                row = None
        elif line.endswith("["):
            row = line
        else:
            out.append(line)
    (GOLDEN / name).write_text("\n".join(out) + "\n")


def train(path, tokens, mode, steps, lr, decay, dtype):
    """Losses, gradient norms, and the norms of each tensor's first gradient."""
    model = Model(path, dtype)
    if mode == "lora":
        model.add_lora(RANK, ALPHA, A_SCALE, 0.0)
        trained = dict(model.trained())
    else:
        trained = {name: weight.requires_grad_() for name, weight in model.weights.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=lr, weight_decay=decay)
    tokens = torch.tensor(tokens)
    losses, norms, first = [], [], {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        each = {name: tensor.grad.double().norm().item() for name, tensor in trained.items()}
        first = first or each
        losses.append(loss.item())
        norms.append(sum(norm**2 for norm in each.values()) ** 0.5)
        optimizer.step()
    with torch.no_grad():
        losses.append(model.loss(tokens).item())
    return losses, norms, first


def case(path, name, tokens, mode, steps, **more):
    decay = 0.01 if mode == "lora" else 0.0
    result = {
        "name": name,
        **more,
        "model_sha256": sha256(path),
        "train": mode,
        "steps": steps,
        "lr": 1e-3,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": decay,
        "tokens": tokens,
    }
    for dtype, suffix in ((torch.float64, ""), (torch.float32, "_f32")):
        losses, norms, first = train(path, tokens, mode, steps, 1e-3, decay, dtype)
        result["losses" + suffix], result["grad_norms" + suffix] = losses, norms
        if dtype == torch.float64:
            result["first_gradients"] = {n: float(f"{norm:.9g}") for n, norm in first.items() if norm > 0}
    print(name, mode, result["losses"], result["losses_f32"], flush=True)
    return result


SYNTH = {
    "arcee": "--arch arcee --d 64 --layers 2 --ff 160 --heads 4 --kv-heads 2 --seed 11",
    "gemma3": "--arch gemma3 --d 64 --layers 7 --ff 96 --heads 4 --kv-heads 1 --head-dim 32 --window 16 --seed 12",
    "llama": "--arch llama --d 64 --layers 2 --ff 96 --heads 6 --kv-heads 2 --head-dim 16 --bias --rope-scaling llama3"
    " --seed 13",
}


def steps(smollm2, gemma3, relu):
    cases = []
    for name, path, size, count in (("smollm2", smollm2, 128, 5), ("relu", relu, 64, 3), ("gemma3", gemma3, 64, 3)):
        text = ROOT / "platform/src/pack/calibration.txt"
        ids = subprocess.run(
            [ROOT / "target/release/leanstream", "tokenize", "-m", path, "-f", text, "--ids"],
            check=True,
            capture_output=True,
        )
        cases.append(case(path, name, json.loads(ids.stdout)[: size + 1], "lora", count))
    with tempfile.TemporaryDirectory() as directory:
        for name, args in SYNTH.items():
            path = Path(directory) / f"{name}.gguf"
            run = [ROOT / "target/release/examples/synth", *args.split(), "--type", "f32", "-o", path]
            subprocess.run(run, check=True)
            vocab = Model(path).weights["token_embd.weight"].shape[0]
            tokens = (words("tokens", 65) % np.uint64(vocab)).tolist()
            for mode in ("lora", "full"):
                cases.append(case(path, "synth-" + name, tokens, mode, 3, synth=args + " --type f32"))
    index = {"rank": RANK, "alpha": ALPHA, "a_scale": A_SCALE, "cases": cases}
    write("tune_steps.json", index)


if __name__ == "__main__":
    {"block": block, "steps": steps}[sys.argv[1]](*sys.argv[2:])
