#!/usr/bin/env python3
"""LoRA fine-tuning by PyTorch on the same model and data: seconds per step, peak memory, loss.

    leanstream tokenize -m MODEL.gguf -f TEXT --ids > IDS
    platform/benches/tune_peers.py MODEL.gguf --tokens IDS --steps 8 --threads 2 [--variants eager,checkpoint+chunked,...]

Rank 8 on all linears, f32, batch 1, AdamW. Every variant runs in a process of its own and prints one line of JSON:

    eager            plain PyTorch (torch_model.py), everything saved
    checkpoint       the same, torch.utils.checkpoint around each block (non-reentrant): a block's input is saved
    int8, int4       the same as eager, but what blocks save goes through saved_tensors_hooks into groups of 256 with
                     bf16 minimum and scale, nearest rounding; a tensor saved by several operations is packed once
    peft             transformers' Llama with PEFT's LoRA, everything saved (architecture llama with SiLU only)
    peft-checkpoint  the same with its gradient checkpointing (non-reentrant)

`+chunked` after a name: the loss and its gradient 64 tokens at a time instead of all logits at once.

`s_per_step` is the median without the first step; `peak_rss_bytes` VmHWM of the steps (reset after loading: Python,
libraries and f32 weights are in it, what loading took for a while is not); `imported_rss_bytes` and
`loaded_rss_bytes` VmRSS after the imports (PyPI's torch brings CUDA's libraries along: about 500 MB) and with weights;
`saved_bytes` what blocks keep for the backward pass, `saved_loss_bytes` what the head and the loss keep (storages,
weights not counted); `loss` after `steps - 1` updates.

Up to half of the peak is what glibc's allocator keeps in pieces: MALLOC_MMAP_THRESHOLD_=262144 in the environment gives
it back to the system, for some time per step. State both; `malloc` names what was set.

Without --tokens they are made up: time is the same, loss means nothing.

Needs torch, numpy, gguf from PyPI; peft and transformers for their variants (made with 2.8.0, 0.21.2, 5.24.0).
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from torch_model import Model, fill, words

RANK, ALPHA, A_SCALE = 8, 16.0, 2.0**-5
GROUP, CHUNK = 256, 64
VARIANTS = "eager,checkpoint,checkpoint+chunked,int8+chunked,int4+chunked,peft,peft-checkpoint,peft-checkpoint+chunked"


def status(field):
    """A size from /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


class Keep:
    """Saves tensors as they are, and counts the bytes of their storages once each."""

    def __init__(self, fixed):
        self.fixed, self.seen, self.bytes = fixed, {}, 0

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if at not in self.fixed and (at not in self.seen or self.seen[at].expired()):
            self.seen[at] = StorageWeakRef(storage)
            self.bytes += storage.nbytes()
        return tensor

    def unpack(self, tensor):
        return tensor


class Codec(Keep):
    """Saves float tensors as integers of 4 or 8 bits by groups; small ones (log-sum-exp, rstd) as they are."""

    def __init__(self, fixed, bits):
        super().__init__(fixed)
        self.bits, self.packed = bits, {}

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.fixed or tensor.numel() < 16384 or not tensor.is_floating_point():
            return super().pack(tensor)
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor._version)
        known = self.packed.get(key)
        if known is not None and not known[0].expired():
            return known[1]
        flat = tensor.reshape(-1)
        groups = F.pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)
        low = groups.amin(1, keepdim=True).bfloat16()
        scale = ((groups.amax(1, keepdim=True) - low) / (2**self.bits - 1)).bfloat16()
        codes = ((groups - low) / scale.float().clamp_min(1e-30)).round_().clamp_(0, 2**self.bits - 1).byte()
        if self.bits == 4:
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        self.bytes += codes.nbytes + low.nbytes + scale.nbytes
        packed = (codes, low, scale, tensor.shape)
        self.packed[key] = (StorageWeakRef(storage), packed)
        return packed

    def unpack(self, packed):
        if not isinstance(packed, tuple):
            return packed
        codes, low, scale, shape = packed
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        return (codes * scale.float()).add_(low).view(-1)[: shape.numel()].view(shape)


class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy of a frozen head, its gradient made in the forward pass, CHUNK rows at a time."""

    @staticmethod
    def forward(ctx, x, head, targets):
        gradient, total = torch.empty_like(x), 0.0
        for start in range(0, len(x), CHUNK):
            rows = slice(start, start + CHUNK)
            logits = torch.log_softmax(x[rows] @ head.T, 1)
            right = targets[rows, None]
            total -= logits.gather(1, right).sum()
            logits.exp_().scatter_add_(1, right, torch.full(right.shape, -1.0))
            torch.matmul(logits, head, out=gradient[rows])
        ctx.save_for_backward(gradient.div_(len(x)))
        return total / len(x)

    @staticmethod
    def backward(ctx, d_loss):
        return ctx.saved_tensors[0] * d_loss, None, None


class Plain:
    """torch_model.py's decoder."""

    def __init__(self, path, checkpointed):
        self.model = Model(path)
        self.model.add_lora(RANK, ALPHA, A_SCALE, 0.0)
        self.trained = [tensor for _, tensor in self.model.trained()]
        self.fixed = {w.untyped_storage().data_ptr() for w in [*self.model.weights.values(), *self.trained]}
        again = lambda x, layer: checkpoint(self.model.block, x, layer, use_reentrant=False)
        self.block = again if checkpointed else None
        self.head = self.model.weights.get("output.weight", self.model.weights["token_embd.weight"])

    def hidden(self, tokens):
        return self.model.hidden(tokens, self.block)


class Peft:
    """transformers and PEFT, with the file's weights and our A."""

    def __init__(self, path, checkpointed):
        import peft
        import transformers

        source = Model(path)
        assert (source.arch, source.act, source.factors, source.stretch) == ("llama", "silu", None, 1.0)
        config = transformers.LlamaConfig(
            vocab_size=len(source.weights["token_embd.weight"]),
            hidden_size=source.d,
            intermediate_size=len(source.weights["blk.0.ffn_up.weight"]),
            num_hidden_layers=source.layers,
            num_attention_heads=source.heads,
            num_key_value_heads=source.kv_heads,
            head_dim=source.head_dim,
            rms_norm_eps=source.eps,
            rope_parameters={"rope_type": "default", "rope_theta": source.base},
            tie_word_embeddings="output.weight" not in source.weights,
            use_cache=False,
        )
        base = transformers.LlamaForCausalLM(config)
        self.head = base.lm_head.weight
        with torch.no_grad():
            self.copy(source, base)
            every = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
            self.model = peft.get_peft_model(base, every)
            if checkpointed:
                self.model.gradient_checkpointing_enable({"use_reentrant": False})
            for name, parameter in self.model.named_parameters():
                if "lora_A" in name:
                    parameter.copy_(fill(self.file_name(name) + ".lora_a", parameter.shape, A_SCALE))
        self.model.train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.fixed = {p.untyped_storage().data_ptr() for p in self.model.parameters()}

    NAMES = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }

    def file_name(self, name):
        """A parameter's name in the GGUF file, without its end."""
        layer, rest = name.split("layers.")[1].split(".", 1)
        return f"blk.{layer}." + next(ours for theirs, ours in self.NAMES.items() if rest.startswith(theirs + "."))

    def copy(self, source, base):
        for name, parameter in base.named_parameters():
            whole = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}
            whole["lm_head.weight"] = "output"
            value = source.weights[(whole.get(name) or self.file_name(name)) + ".weight"]
            if "q_proj" in name or "k_proj" in name:
                # From neighbouring pairs to halves.
                value = value.view(-1, source.head_dim // 2, 2, source.d).transpose(1, 2).reshape(value.shape)
            parameter.copy_(value)

    def hidden(self, tokens):
        return self.model.base_model.model.model(input_ids=tokens[None]).last_hidden_state[0]


def measure(args):
    """One variant, in this process."""
    torch.set_num_threads(args.threads)
    imported = status("VmRSS")
    name, _, loss_kind = args.only.partition("+")
    assert loss_kind in ("", "chunked"), args.only
    family = Peft if name.startswith("peft") else Plain
    net = family(args.model, name.endswith("checkpoint"))
    optimizer = torch.optim.AdamW(net.trained, lr=args.lr, weight_decay=0.0)
    if args.tokens:
        ids = np.array(json.loads(Path(args.tokens).read_text()))
    else:
        ids = (words("tokens", 8 * args.seq + 1) % np.uint64(len(net.head))).astype(np.int64)
    windows = (len(ids) - 1) // args.seq
    assert windows, f"{args.tokens} has fewer than {args.seq + 1} tokens"
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    loaded = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")

    losses, seconds = [], []
    for step in range(args.steps):
        at = step % windows * args.seq
        tokens = torch.from_numpy(ids[at : at + args.seq + 1])
        codec = Codec(net.fixed, int(name[3:])) if name in ("int8", "int4") else Keep(net.fixed)
        head_keep = Keep(net.fixed)
        # Counting changes nothing but takes a little: in the first step only, which isn't timed.
        hooks = lambda keep: saved_tensors_hooks(keep.pack, keep.unpack)
        counted = step == 0
        start = time.perf_counter()
        optimizer.zero_grad()
        with hooks(codec) if counted or isinstance(codec, Codec) else contextlib.nullcontext():
            hidden = net.hidden(tokens[:-1])
        with hooks(head_keep) if counted else contextlib.nullcontext():
            if loss_kind:
                loss = ChunkedLoss.apply(hidden, net.head, tokens[1:])
            else:
                loss = F.cross_entropy(F.linear(hidden, net.head), tokens[1:])
        if counted:
            saved, saved_loss = codec.bytes, head_keep.bytes
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        del hidden, loss, codec
        seconds.append(time.perf_counter() - start)
    result = {
        "variant": args.only,
        "seq": args.seq,
        "threads": args.threads,
        "steps": args.steps,
        "malloc": {k: v for k, v in os.environ.items() if k.startswith("MALLOC_") or k == "LD_PRELOAD"},
        "s_per_step": round(statistics.median(seconds[1:] or seconds), 3),
        "peak_rss_bytes": status("VmHWM"),
        "imported_rss_bytes": imported,
        "loaded_rss_bytes": loaded,
        "saved_bytes": saved,
        "saved_loss_bytes": saved_loss,
        "trained": sum(t.numel() for t in net.trained),
        "loss_first": losses[0],
        "loss": losses[-1],
    }
    print(json.dumps(result), flush=True)


def main():
    parser = argparse.ArgumentParser(description="See the head of this file.")
    parser.add_argument("model")
    parser.add_argument("--tokens", help="a JSON list of ids")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--variants", default=VARIANTS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        measure(args)
        return
    for variant in args.variants.split(","):
        subprocess.run([sys.executable, "-W", "ignore", *sys.argv, "--only", variant], check=True)


main()
