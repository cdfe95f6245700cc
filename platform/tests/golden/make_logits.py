"""Makes logits.bin: what llama.cpp computes for the models of tests/common/cases.rs.

    cargo run --release --example golden_models -- DIR > DIR/cases.txt
    python3 make_logits.py DIR/cases.txt DIR

Needs llama-cpp-python (made with 0.3.36 and the llama.cpp in its source). On the CPU, with the KV cache
in single precision and no flash attention, so that the rest is the model's own arithmetic:
llama.cpp quantizes activations to 8 bits against quantized weights, rounds them to F16 and BF16
against such weights, and looks GELU up in a table of halves.
"""

import ctypes
import hashlib
import struct
import sys
from pathlib import Path

from llama_cpp import llama_cpp as llama


def logits(path, tokens, positions):
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(str(path).encode(), params)
    assert model, path
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = 0
    params.flash_attn_type = 0
    context = llama.llama_init_from_model(model, params)
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i] = token
        batch.pos[i] = i
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = 0
        batch.logits[i] = i >= len(tokens) - positions
    assert llama.llama_decode(context, batch) == 0
    out = b""
    for i in range(len(tokens) - positions, len(tokens)):
        row = llama.llama_get_logits_ith(context, i)
        out += ctypes.string_at(row, 4 * vocab)
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    llama.llama_model_free(model)
    return vocab, out


def main(cases, directory):
    records = b""
    for line in Path(cases).read_text().splitlines():
        name, positions, tokens = line.split()
        tokens = [int(token) for token in tokens.split(",")]
        path = Path(directory) / f"{name}.gguf"
        vocab, values = logits(path, tokens, int(positions))
        records += struct.pack("<I", len(name)) + name.encode()
        records += hashlib.sha256(path.read_bytes()).digest()
        records += struct.pack("<II", int(positions), vocab) + values
    Path(__file__).with_name("logits.bin").write_bytes(records)


main(*sys.argv[1:])
