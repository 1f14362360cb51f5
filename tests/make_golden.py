#!/usr/bin/env python3
"""Makes golden values from a GGUF file, with plain f32 arithmetic on the dequantised weights.

    python3 tests/make_golden.py MODEL.gguf --like tests/data/golden-smollm2.json -o NEW.json
    python3 tests/make_golden.py MODEL.gguf --like tests/data/golden-smollm2.json --check

--like names a golden file whose texts and prompts are used again. Its token ids are used too if it was made from the same file;
for any other file the tokens come from llama-cpp-python, which is then needed. --check compares instead of writing: every log-probability
within 1e-4 (nats), every greedy token equal or its margin below 1e-3.

Needs numpy. Knows architectures llama and qwen2, tensors F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K.
"""

import argparse
import hashlib
import json
import mmap
import struct
import sys

import numpy as np

POSITIONS = [0, 1, 7, 31, 63, 127, 255, 383, 511]
TEXT_TOKENS = 512
GREEDY_STEPS = 48
TOP = 32


class Gguf:
    """Metadata and tensors of a GGUF file (little-endian, version 2 or 3)."""

    SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    # Code: name, values per block, bytes per block.
    TYPES = {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        30: ("BF16", 1, 2),
    }

    def __init__(self, path):
        with open(path, "rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self.data[:4] != b"GGUF":
            sys.exit(f"{path}: not a GGUF file")
        self.at = 4
        version, tensors, pairs = self.scalar("I"), self.scalar("Q"), self.scalar("Q")
        if version not in (2, 3):
            sys.exit(f"{path}: GGUF version {version}, expected 2 or 3")
        self.meta = {}
        for _ in range(pairs):
            key = self.text()
            self.meta[key] = self.value(self.scalar("I"))
        self.tensors = {}
        for _ in range(tensors):
            name = self.text()
            dims = [self.scalar("Q") for _ in range(self.scalar("I"))]
            code, offset = self.scalar("I"), self.scalar("Q")
            self.tensors[name] = (dims, code, offset)
        alignment = self.meta.get("general.alignment", 32)
        self.start = -(-self.at // alignment) * alignment

    def scalar(self, code):
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def text(self):
        length = self.scalar("Q")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind == 9:
            element, count = self.scalar("I"), self.scalar("Q")
            return [self.value(element) for _ in range(count)]
        return self.scalar(self.SCALARS[kind])

    def tensor(self, name):
        """A tensor in f32, `[rows][cols]` or `[values]`."""
        dims, code, offset = self.tensors[name]
        if code not in self.TYPES:
            sys.exit(f"tensor {name}: type {code} is not one this script can dequantise")
        kind, per_block, block_bytes = self.TYPES[code]
        count = int(np.prod(dims))
        raw = np.frombuffer(self.data, np.uint8, count // per_block * block_bytes, self.start + offset)
        return dequantise(kind, raw.reshape(-1, block_bytes)).reshape(dims[::-1])


def dequantise(kind, blocks):
    def half(first):
        return np.ascontiguousarray(blocks[:, first : first + 2]).view(np.float16).astype(np.float32)

    def nibbles(first):
        packed = blocks[:, first : first + 16]
        return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)

    if kind == "F32":
        return blocks.view(np.float32)
    if kind == "F16":
        return blocks.view(np.float16).astype(np.float32)
    if kind == "BF16":
        return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if kind == "Q8_0":
        return half(0) * blocks[:, 2:].view(np.int8).astype(np.float32)
    if kind == "Q4_0":
        return half(0) * (nibbles(2) - 8)
    if kind == "Q4_1":
        return half(0) * nibbles(4) + half(2)

    def fifth_bits(first):
        return 16.0 * np.unpackbits(blocks[:, first : first + 4], axis=1, bitorder="little").astype(np.float32)

    if kind == "Q5_0":
        return half(0) * (nibbles(6) + fifth_bits(2) - 16)
    if kind == "Q5_1":
        return half(0) * (nibbles(8) + fifth_bits(4)) + half(2)
    if kind == "Q6_K":
        return six_bits(blocks, half(208))

    # Q4_K and Q5_K: scale and minimum of eight runs of 32 in 6 bits each, then (Q5_K) the fifth bits, then nibbles of 64 values per 32 bytes.
    packed = blocks[:, 4:16]
    low = packed[:, :8] & 63
    high = (packed[:, 8:12] & 15) | (packed[:, :4] >> 6 << 4), (packed[:, 8:12] >> 4) | (packed[:, 4:8] >> 6 << 4)
    scales = np.concatenate([low[:, :4], high[0]], axis=1).astype(np.float32) * half(0)
    minima = np.concatenate([low[:, 4:], high[1]], axis=1).astype(np.float32) * half(2)
    codes = blocks[:, -128:].reshape(-1, 4, 1, 32)
    codes = np.concatenate([codes & 15, codes >> 4], axis=2).reshape(-1, 8, 32)
    if kind == "Q5_K":
        bits = blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
        codes = codes | (bits & 1) << 4
    return (scales[:, :, None] * codes.astype(np.float32) - minima[:, :, None]).reshape(-1, 256)


def six_bits(blocks, d):
    """Q6_K: 128 bytes of low nibbles, 64 of high pairs of bits, 16 signed scales of 16 values each, then the scale of scales."""
    low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    low = np.concatenate([low & 15, low >> 4], axis=2)
    pairs = high >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1) & 3
    codes = (low | pairs << 4).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * d
    return (codes.reshape(-1, 16, 16) * scales[:, :, None]).reshape(-1, 256)


class Model:
    """The transformer, all in f32."""

    def __init__(self, gguf):
        arch = gguf.meta["general.architecture"]
        if arch not in ("llama", "qwen2"):
            sys.exit(f"architecture {arch}: this script knows llama and qwen2")

        def key(name, default=None):
            return gguf.meta.get(f"{arch}.{name}", default)

        self.heads = key("attention.head_count")
        self.kv_heads = key("attention.head_count_kv", self.heads)
        self.embed = key("embedding_length")
        self.head_dim = key("attention.key_length", self.embed // self.heads)
        self.eps = np.float32(key("attention.layer_norm_rms_epsilon"))
        self.rope_dims = key("rope.dimension_count", self.head_dim)
        self.interleaved = arch == "llama"
        pairs = np.arange(self.rope_dims // 2)
        self.frequencies = key("rope.freq_base", 10000.0) ** (-2.0 * pairs / self.rope_dims)
        if key("rope.scaling.type", "none") == "linear":
            self.frequencies = self.frequencies / key("rope.scaling.factor", 1.0)
        if "rope_freqs.weight" in gguf.tensors:
            self.frequencies = self.frequencies / gguf.tensor("rope_freqs.weight")
        self.embedding = gguf.tensor("token_embd.weight")
        self.output = gguf.tensor("output.weight") if "output.weight" in gguf.tensors else self.embedding
        self.output_norm = gguf.tensor("output_norm.weight")
        self.layers = []
        for layer in range(key("block_count")):
            prefix = f"blk.{layer}."
            names = [name for name in gguf.tensors if name.startswith(prefix)]
            self.layers.append({name[len(prefix) :]: gguf.tensor(name) for name in names})

    def norm(self, x, weight):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32) + self.eps) * weight

    def rope(self, x, start):
        """Rotates `[tokens][heads][head_dim]`, whose first token is at position `start`."""
        angles = (start + np.arange(len(x)))[:, None, None] * self.frequencies
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        half = self.rope_dims // 2
        first, second = (
            (slice(0, self.rope_dims, 2), slice(1, self.rope_dims, 2))
            if self.interleaved
            else (slice(0, half), slice(half, self.rope_dims))
        )
        turned = x.copy()
        turned[..., first] = x[..., first] * cos - x[..., second] * sin
        turned[..., second] = x[..., first] * sin + x[..., second] * cos
        return turned

    def forward(self, ids, cache):
        """Logits `[tokens][vocab]` of `ids`, which follow what is in `cache` (one list per layer, extended)."""
        x = self.embedding[ids]
        start = len(cache[0][0]) if cache[0] else 0
        for layer, kept in zip(self.layers, cache):
            h = self.norm(x, layer["attn_norm.weight"])

            def project(part, heads):
                y = h @ layer[f"attn_{part}.weight"].T
                if f"attn_{part}.bias" in layer:
                    y = y + layer[f"attn_{part}.bias"]
                return y.reshape(len(ids), heads, self.head_dim)

            q = self.rope(project("q", self.heads), start)
            k = self.rope(project("k", self.kv_heads), start)
            v = project("v", self.kv_heads)
            if kept:
                k, v = np.concatenate([kept[0], k]), np.concatenate([kept[1], v])
            kept[:] = [k, v]
            x = x + self.attend(q, k, v, start) @ layer["attn_output.weight"].T
            h = self.norm(x, layer["ffn_norm.weight"])
            gate = h @ layer["ffn_gate.weight"].T
            gate = gate / (1 + np.exp(-gate))
            x = x + (gate * (h @ layer["ffn_up.weight"].T)) @ layer["ffn_down.weight"].T
        return self.norm(x, self.output_norm) @ self.output.T

    def attend(self, q, k, v, start):
        group = self.heads // self.kv_heads
        out = np.empty_like(q)
        later = np.arange(len(k))[None, :] > start + np.arange(len(q))[:, None]
        for head in range(self.heads):
            scores = q[:, head] @ k[:, head // group].T / np.float32(np.sqrt(self.head_dim))
            scores[later] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, head // group]
        return out.reshape(len(q), -1)

    def empty_cache(self):
        return [[] for _ in self.layers]


def log_softmax(logits):
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def greedy(model, prompt_ids, steps):
    cache, ids, margins = model.empty_cache(), [], []
    logits = model.forward(prompt_ids, cache)[-1]
    for _ in range(steps):
        second, first = np.partition(logits, -2)[-2:]
        ids.append(int(np.argmax(logits)))
        margins.append(round(float(first - second), 3))
        logits = model.forward([ids[-1]], cache)[-1]
    return ids, margins


def make(model, like, tokens, same_file):
    golden = {"tokenize": [{"text": case["text"], "ids": tokens(case)} for case in like["tokenize"]], "greedy": []}
    for case in like["greedy"]:
        prompt_ids = tokens({"text": case["prompt"], "ids": case["prompt_ids"]})
        ids, margins = greedy(model, prompt_ids, GREEDY_STEPS)
        made = {"prompt": case["prompt"], "prompt_ids": prompt_ids, "exact_ids": ids, "exact_margins": margins}
        # What another implementation said of the same file stays.
        golden["greedy"].append({**case, **made} if same_file else made)
        print(f"greedy: {case['prompt'][:40]!r}", file=sys.stderr)
    ids = tokens(like["logits"])[:TEXT_TOKENS]
    logprobs = log_softmax(model.forward(ids, model.empty_cache()))
    positions = [position for position in POSITIONS if position < len(ids)]
    top = [np.argsort(-logprobs[position], kind="stable")[:TOP] for position in positions]
    golden["logits"] = {
        **(like["logits"] if same_file else {}),
        "text": like["logits"]["text"],
        "ids": ids,
        "positions": positions,
        "exact_top32_logprobs": [
            [[int(token), round(float(logprobs[position][token]), 5)] for token in tokens]
            for position, tokens in zip(positions, top)
        ],
        "exact_argmax_all_positions": [int(token) for token in logprobs.argmax(axis=-1)],
        "exact_nll_next_token": [round(-float(row[token]), 5) for row, token in zip(logprobs, ids[1:])],
    }
    return golden


def check(found, expected):
    """Prints how far two sets of golden values are apart; true if that is only rounding."""
    good = all(a["ids"] == b["ids"] for a, b in zip(found["tokenize"], expected["tokenize"]))
    for a, b in zip(found["greedy"], expected["greedy"]):
        for step, (x, y) in enumerate(zip(a["exact_ids"], b["exact_ids"])):
            if x != y:
                margin = a["exact_margins"][step]
                print(f"greedy {a['prompt'][:30]!r}: token {step} is {x}, expected {y}; margin {margin}")
                good &= margin < 1e-3
                break
    a, b = found["logits"], expected["logits"]
    nll = np.abs(np.subtract(a["exact_nll_next_token"], b["exact_nll_next_token"])).max()
    both = [(dict(x), dict(y)) for x, y in zip(a["exact_top32_logprobs"], b["exact_top32_logprobs"])]
    top = max(abs(x[token] - y[token]) for x, y in both for token in x.keys() & y.keys())
    argmax = sum(x != y for x, y in zip(a["exact_argmax_all_positions"], b["exact_argmax_all_positions"]))
    print(f"largest difference: next-token log-probability {nll:.1e}, top-{TOP} log-probability {top:.1e}; {argmax} arg-max differ")
    return bool(good and nll < 1e-4 and top < 1e-4 and argmax == 0)


def write(golden, path):
    """One line per case: small, and a change shows as one line."""

    def line(value):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    parts = [f"{line(key)}:{line(golden[key])}" for key in ("model", "sha256", "made_with")]
    for key in ("tokenize", "greedy"):
        parts.append(f"{line(key)}:[\n" + ",\n".join(map(line, golden[key])) + "\n]")
    parts.append('"logits":{\n' + ",\n".join(f"{line(key)}:{line(value)}" for key, value in golden["logits"].items()) + "\n}")
    with open(path, "w", encoding="utf-8") as file:
        file.write("{" + ",\n".join(parts) + "}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--like", required=True, help="golden file whose texts and prompts are used")
    parser.add_argument("-o", "--output")
    parser.add_argument("--check", action="store_true", help="compare with --like instead of writing")
    args = parser.parse_args()
    if bool(args.output) == args.check:
        parser.error("expected one of --output and --check")

    with open(args.like, encoding="utf-8") as file:
        like = json.load(file)
    with open(args.model, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    same_file = sha256 == like["sha256"]
    made_with = "'exact': numpy, weights dequantised to f32, all arithmetic f32"
    try:
        import llama_cpp
    except ImportError:
        if not same_file:
            sys.exit(f"{args.model}: not the file that {args.like} was made from, and llama-cpp-python is not installed: no tokenizer")
        print("llama-cpp-python is not installed: token ids are taken over from --like, unchecked", file=sys.stderr)

        def tokens(case):
            return case["ids"]
    else:
        made_with += f"; token ids: llama.cpp through llama-cpp-python {llama_cpp.__version__}"
        vocabulary = llama_cpp.Llama(model_path=args.model, vocab_only=True, verbose=False)

        def tokens(case):
            return vocabulary.tokenize(case["text"].encode(), add_bos=False, special=True)

    gguf = Gguf(args.model)
    made_with = like["made_with"] if same_file else made_with
    golden = {"model": gguf.meta.get("general.name", ""), "sha256": sha256, "made_with": made_with}
    golden.update(make(Model(gguf), like, tokens, same_file))
    if args.check:
        sys.exit(0 if check(golden, like) else 1)
    write(golden, args.output)


if __name__ == "__main__":
    main()
