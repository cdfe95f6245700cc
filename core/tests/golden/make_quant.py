#!/usr/bin/env python3
"""Makes quant/*.bin: random blocks of each format and what they decode to.

Each file: u32 blocks, the blocks' bytes, then the decoded values as f32; all little endian.
The decoder is the Python package `gguf` (made with 0.19; `pip install gguf numpy`):
another implementation than ours, by ggml's authors. Scales are random but finite.

    make_quant.py [blocks-per-file [directory]]
"""
import pathlib
import sys

import gguf
import numpy as np

# Where a format keeps halves that must stay finite.
HALVES = {
    "F16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0],
    "F32": [], "BF16": [], "MXFP4": [],
}
ELEMENTWISE = {"F32": 64, "F16": 64, "BF16": 64}


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    out = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else pathlib.Path(__file__).parent / "quant")
    rng = np.random.default_rng(20240229)
    for name, halves in HALVES.items():
        ty = gguf.GGMLQuantizationType[name]
        _, size = gguf.GGML_QUANT_SIZES[ty]
        n = count * ELEMENTWISE.get(name, 1)
        blocks = rng.integers(0, 256, (n, size), dtype=np.uint8)
        # One block at the extremes: every field all ones.
        blocks[0, :] = 255
        for at in halves:
            scale = rng.normal(0, 0.05, n).astype(np.float16)
            blocks[:, at:at + 2] = scale.view(np.uint8).reshape(n, 2)
        if name in ("F32", "BF16"):
            # Random exponents below the infinities.
            blocks[:, -1] = rng.choice([0x3c, 0x3f, 0xbd, 0x00, 0x80, 0xc2], n)
        if name == "MXFP4":
            blocks[:, 0] = np.resize(np.array([0, 1, 2, 120, 127, 135], dtype=np.uint8), n)
        values = gguf.quants.dequantize(blocks, ty).astype("<f4").reshape(-1)
        assert np.isfinite(values).all(), name
        data = np.uint32(n).astype("<u4").tobytes() + blocks.tobytes() + values.tobytes()
        (out / f"{name.lower()}.bin").write_bytes(data)


main()
