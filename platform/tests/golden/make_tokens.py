"""Makes small_tokens.json: what llama.cpp makes of the texts below with small vocabularies.

    python3 make_tokens.py

Needs llama-cpp-python (made with 0.3.36 and the llama.cpp in its source). The byte-level vocabulary
has merges across everything that a pre-tokenizer may cut, so that its cuts show in the ids; one
pre-tokenizer of each kind is asked. The SentencePiece vocabulary has scores with many ties, and few
characters, so that byte tokens are needed.
"""

import collections
import ctypes
import itertools
import json
import struct
import tempfile
import unicodedata
from pathlib import Path

from llama_cpp import llama_cpp as llama

TEXTS = [
    "Hello world, hello  again",
    "don't DON'T I'LLx they're they'REx 'Tis 's'S'Mx",
    "  leading,   inner and trailing   ",
    "a\n\nb\r\n\r\n c\n \n d \n\te\t\tf\u3000g\u00a0\u00a0h\u2003",
    "1234567 12 3.14 1,000,000 x86_64 ٣٤٥٦ ½²Ⅷ 7\n8  9",
    "x  1 y   22  z\t\t333",
    "camelCase HTTPServer ÉCOLE ÉCOLe éCOLE ПриВЕТ ABCdef's ABC'S",
    "a+b=c; x^2 ~y ~~ ~é `z` $5 €6 |p| <q> #r @s (t) [u] {v}",
    "...!!! ?! --\n\n//path/to\n /* c */\n",
    "日本語のテキストと中文混合，カタカナ。한국어 텍스트",
    "e\u0301a\u0308\u0323 नमस्ते हिन्दी ภาษาไทย \u0301\u0301 x\u0301",
    "🙂 👨\u200d👩\u200d👧 🇩🇪 ❤\ufe0f ∑∞≠ 𝔸𝟙",
    "\u0000\u0001\u007f\u0085\u00ad\u200b\ufeff\ufffd\u0378\ue000\U000323af",
    "<|im_start|>user\nHi<|im_end|> \n<|im_start|>x <tag> <tag>",
    "שלום עולם مرحبا بالعالم",
    "    def f(x):\n        return x**2  # ok\n",
    "<0x41>▁▁ ▁a<s></s> <unk> ",
    " ",
    "   ",
    "\n",
    " a",
    "ÉABC",
    "!\n?\r\n/\n%%\n\n x//\n",
    "字\u3000字\u2003\u2003字 カ字カ　ナ",
    "aaaaaaaaaaaaaaaaaaaaaaa",
    "“curly” ‘q’ don’t — … 「鍵」！",
]

# One of each kind, by the names in tokenizer.ggml.pre.
PRE = (
    "default gpt-2 smollm llama-bpe dbrx minicpm5 qwen2 qwen35 seed-coder tekken gpt-4o falcon "
    "deepseek-coder deepseek-v3"
).split()

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def string(value):
    value = value.encode()
    return struct.pack("<Q", len(value)) + value


def value(v):
    """A GGUF value with its type."""
    match v:
        case bool():
            return struct.pack("<IB", 7, v)
        case int():
            return struct.pack("<II", 4, v)
        case float():
            return struct.pack("<If", 6, v)
        case str():
            return struct.pack("<I", 8) + string(v)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(v)) + b"".join(map(string, v))
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(v)}f", 9, 6, len(v), *v)
        case _:
            return struct.pack(f"<IIQ{len(v)}i", 9, 5, len(v), *v)


def gguf(metadata):
    """A model without tensors."""
    architecture = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }
    pairs = (architecture | metadata).items()
    out = b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs))
    for key, v in pairs:
        out += string(key) + value(v)
    return out + bytes(-len(out) % 32)


def ids(metadata):
    """(text, mode, ids) for each text, plain, and where there is markup, with special tokens."""
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(gguf(metadata))
        file.flush()
        params = llama.llama_model_default_params()
        params.vocab_only = True
        model = llama.llama_model_load_from_file(file.name.encode(), params)
    assert model
    vocab = llama.llama_model_get_vocab(model)
    out = []
    for text in TEXTS:
        raw = text.encode()
        for special in (False, True) if "<" in text else (False,):
            room = (ctypes.c_int32 * (4 * len(raw) + 16))()
            n = llama.llama_tokenize(vocab, raw, len(raw), room, len(room), special, special)
            assert n >= 0
            mode = "special" if special else "plain"
            out.append((text, mode, " ".join(map(str, room[:n]))))
    llama.llama_model_free(model)
    return out


def alphabet():
    """The characters of byte-level BPE, by byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (chr(0x100 + n) for n in itertools.count())
    return [chr(b) if b in printable else next(others) for b in range(256)]


def kind(char):
    return unicodedata.category(char), char.isascii()


def byte_level():
    """Merges for the characters of the texts, then for pairs that a pre-tokenizer may part, whose
    two characters are of two kinds, then for whatever is frequent."""
    spelled = alphabet()
    spell = lambda text: [spelled[b] for b in text.encode()]
    special = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<tag>": USER_DEFINED}
    tokens, merges = list(spelled), []

    def add(pair):
        merges.append(pair)
        if (joined := "".join(pair)) not in tokens:
            tokens.append(joined)

    for char in sorted(set("".join(TEXTS))):
        for i in range(1, len(parts := spell(char))):
            add(("".join(parts[:i]), parts[i]))
    meet = collections.Counter(p for text in TEXTS for p in itertools.pairwise(text))
    for a, b in sorted(meet, key=lambda p: (-meet[p], p)):
        if kind(a) != kind(b):
            add(("".join(spell(a)), "".join(spell(b))))
    words = [spell(text) for text in TEXTS]
    for pair in merges:
        merge(words, pair)
    while pairs := collections.Counter(p for word in words for p in itertools.pairwise(word)):
        pair = max(sorted(pairs), key=lambda p: pairs[p] * (p[0] + p[1] not in special))
        if pairs[pair] == 1:
            break
        add(pair)
        merge(words, pair)
    types = [NORMAL] * len(tokens) + list(special.values())
    tokens += special
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }


def merge(words, pair):
    for word in words:
        for i in range(len(word) - 2, -1, -1):
            if tuple(word[i : i + 2]) == pair:
                word[i : i + 2] = ["".join(pair)]


def sentence_piece():
    special = {
        "<unk>": UNKNOWN,
        "<s>": CONTROL,
        "</s>": CONTROL,
        "<|im_start|>": CONTROL,
        "<|im_end|>": CONTROL,
        "<|endoftext|>": CONTROL,
        "<tag>": USER_DEFINED,
        "  ": USER_DEFINED,
    }
    seen = collections.Counter()
    for text in TEXTS:
        text = text.replace(" ", "▁")
        seen.update(text[i : i + n] for n in (1, 2, 3, 4, 6) for i in range(len(text) - n + 1))
    pieces = sorted(p for p, n in seen.items() if n > 1 and p not in special and "\0" not in p)
    tokens = [*special, *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    types = [*special.values(), *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [float(-(i * 7 % 40)) for i in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def main():
    bpe, spm = byte_level(), sentence_piece()
    variants = {pre: (bpe, {"tokenizer.ggml.pre": pre}) for pre in PRE} | {
        "llama": (spm, {}),
        "no prefix, EOS": (
            spm,
            {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_eos_token": True},
        ),
        "phi-3": (spm, {"general.name": "Phi-3 mini"}),
    }
    cases = {text: {"text": text, "plain": {}, "special": {}} for text in TEXTS}
    for name, (vocabulary, keys) in variants.items():
        for text, mode, row in ids(vocabulary | keys):
            # Names that give the same ids share them.
            same = cases[text][mode]
            same[row] = f"{same[row]}|{name}" if row in same else name
    names = {name: [v["tokenizer.ggml.model"], keys] for name, (v, keys) in variants.items()}
    dump = lambda v: json.dumps(v, ensure_ascii=False, separators=(",", ":"))
    Path(__file__).with_name("small_tokens.json").write_text(
        f'{{"gpt2":{dump(bpe)},\n"llama":{dump(spm)},\n"variants":{dump(names)},\n"cases":[\n'
        + ",\n".join(map(dump, cases.values()))
        + "\n]}\n"
    )


main()
