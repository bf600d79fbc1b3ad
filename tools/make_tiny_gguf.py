#!/usr/bin/env python3
"""Write a tiny random model as a GGUF file, for tests.

Needs the standard library only. The same options give the same bytes on every
machine. Keys and tensor names are those that llama.cpp writes. Weights are random
valid blocks of the asked type, not quantised floats: their scales are chosen so
that a row of K weights has a standard deviation of about 1/sqrt(K), activations
stay finite, and greedy text does not fall into a loop at once. The vocabulary is a usable one: byte-level BPE or a
SentencePiece-like one, with merges learned from the text below, and a chat
template.

usage: make_tiny_gguf.py -o FILE [options]      (--help lists them)
"""
import argparse
import array
import math
import random
import struct
import sys

TEXT = """The cache is not the memory of the model. The cache is what the model would
compute again from the tokens, and so it may be thrown away and made again. A token
goes in, the layers read it one after the other, and each adds to the stream what it
has to say. There is nothing in the keys and values that is not in the stream, and
there is nothing in the stream that is not in the tokens. When the memory is small the
old positions are evicted and the new ones stay; when they are needed the model
computes them once more, in the same order, with the same result. What is computed
twice in the same order is equal, not nearly equal. This is the whole of the method.
In the morning the children went down to the river and counted the boats: one, two,
three, and then a large one with a red sail that came in from the other side."""

# GGUF value types
U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
PACK = {U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?",
        U64: "<Q", I64: "<q", F64: "<d"}
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9}
SET_TYPES = {"u32": (U32, int), "i32": (I32, int), "u64": (U64, int), "f32": (F32, float), "f64": (F64, float),
             "bool": (BOOL, lambda s: s in ("1", "true")), "str": (STR, str)}

# --- weights: n blocks of a type as bytes, of standard deviation about std ---

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ4_RMS = math.sqrt(sum(v * v for v in IQ4_VALUES) / 16)
NO_MINUS_128 = bytes([*range(128), 0x81, *range(129, 256)])  # no quantiser writes it
Q6_SCALES = bytes((16 + (b & 31)) if b & 32 else 256 - 16 - (b & 31) for b in range(256))


def f16(x):
    return struct.pack("<e", x)


def scales(d, signed=False):
    """256 encodings around d, to be picked by a random byte."""
    return [f16(d * (0.5 + i / 255) * (-1 if signed and i & 1 else 1)) for i in range(256)]


def pairs(d, m):
    """The same with a minimum beside each scale."""
    return [f16(d * (0.5 + i / 255)) + f16(m * d * (0.5 + i / 255) * (0.95 + i % 11 / 100)) for i in range(256)]


def blocks(rng, n, fields):
    """Join blocks; a field is a palette (256 encodings) or a size or (size, translation)."""
    columns = []
    for f in fields:
        if isinstance(f, list):
            columns.append([f[b] for b in rng.randbytes(n)])
        else:
            size, table = f if isinstance(f, tuple) else (f, None)
            raw = rng.randbytes(n * size)
            if table:
                raw = raw.translate(table)
            columns.append([raw[i:i + size] for i in range(0, n * size, size)])
    return b"".join(part for block in zip(*columns) for part in block)


def little(a):
    if sys.byteorder == "big":
        a.byteswap()
    return a.tobytes()


def uniform(rng, n, std, mean=0.0):
    h = array.array("H", rng.randbytes(2 * n))
    if sys.byteorder == "big":
        h.byteswap()
    s = std / 18918.0  # of 0..65535
    return array.array("f", [mean + s * (v - 32767.5) for v in h])


def make_f32(rng, n, std):
    return little(uniform(rng, n, std))


def make_f16(rng, n, std):
    return struct.pack("<%de" % n, *uniform(rng, n, std))


def make_bf16(rng, n, std):
    raw = make_f32(rng, n, std)
    return b"".join([raw[i + 2:i + 4] for i in range(0, 4 * n, 4)])


# name: number in the file, elements per block, bytes per block, maker(rng, blocks, std)
TYPES = {
    "F32": (0, 1, 4, make_f32),
    "F16": (1, 1, 2, make_f16),
    "BF16": (30, 1, 2, make_bf16),
    "Q4_0": (2, 32, 18, lambda r, n, s: blocks(r, n, [scales(s / 4.64, True), 16])),
    "Q4_1": (3, 32, 20, lambda r, n, s: blocks(r, n, [pairs(s / 4.61, -7.5), 16])),
    "Q5_0": (6, 32, 22, lambda r, n, s: blocks(r, n, [scales(s / 9.25, True), 20])),
    "Q5_1": (7, 32, 24, lambda r, n, s: blocks(r, n, [pairs(s / 9.23, -15.5), 20])),
    "Q8_0": (8, 32, 34, lambda r, n, s: blocks(r, n, [scales(s / 73.5), (32, NO_MINUS_128)])),
    "Q2_K": (10, 256, 84, lambda r, n, s: blocks(r, n, [80, pairs(s / 13.9, 1.5)])),
    "Q3_K": (11, 256, 110, lambda r, n, s: blocks(r, n, [108, scales(s / 43.4, True)])),
    "Q4_K": (12, 256, 144, lambda r, n, s: blocks(r, n, [pairs(s / 258, 7.5), 140])),
    "Q5_K": (13, 256, 176, lambda r, n, s: blocks(r, n, [pairs(s / 527, 15.5), 172])),
    "Q6_K": (14, 256, 210, lambda r, n, s: blocks(r, n, [192, (16, Q6_SCALES), scales(s / 609, True)])),
    "IQ4_NL": (20, 32, 18, lambda r, n, s: blocks(r, n, [scales(s / IQ4_RMS, True), 16])),
    "IQ4_XS": (23, 256, 136, lambda r, n, s: blocks(r, n, [scales(s / IQ4_RMS / 18.5, True), 134])),
}

# --- vocabularies ---


def learn(words, n_merges):
    """Byte-pair merges of a list of words (tuples of symbols); ties: first in text."""
    merges = []
    while len(merges) < n_merges:
        count = {}
        for w in words:
            for pair in zip(w, w[1:]):
                count[pair] = count.get(pair, 0) + 1
        if not count:
            break
        best = max(count, key=lambda p: count[p])  # dicts keep the order of insertion
        merges.append(best)
        for i, w in enumerate(words):
            out = []
            for s in w:
                if out and (out[-1], s) == best:
                    out[-1] += s
                else:
                    out.append(s)
            words[i] = tuple(out)
    return merges


def byte_alphabet():
    """GPT-2's printable stand-in for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) if b in plain else chr(256 + sum(1 for x in range(b) if x not in plain)) for b in range(256)]


def pad(tokens, types, n):
    for i in range(len(tokens), n):
        tokens.append(f"[PAD{i}]")
        types.append(5)


CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
          "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")

GEMMA_CHAT = ("{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = "
              "'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + "
              "message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}"
              "{{'<start_of_turn>model\n'}}{% endif %}")


def bpe_vocabulary(n, pre):
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet()]
    types = [3] * 3 + [1] * 256
    if n < len(tokens):
        sys.exit(f"--vocab: at least {len(tokens)}")
    words = [tuple(("Ġ" if i else "") + w) for i, w in enumerate(TEXT.split())]
    seen, merges = set(tokens), []
    for a, b in learn(words, n - len(tokens)):
        merges.append(f"{a} {b}")
        if a + b not in seen:
            seen.add(a + b)
            tokens.append(a + b)
            types.append(1)
    pad(tokens, types, n)
    qwen = pre != "smollm"
    return [
        ("tokenizer.ggml.model", STR, "gpt2"),
        ("tokenizer.ggml.pre", STR, pre),
        ("tokenizer.ggml.tokens", ARR, (STR, tokens)),
        ("tokenizer.ggml.token_type", ARR, (I32, types)),
        ("tokenizer.ggml.merges", ARR, (STR, merges)),
        ("tokenizer.ggml.bos_token_id", U32, 0 if qwen else 1),
        ("tokenizer.ggml.eos_token_id", U32, 2),
        ("tokenizer.ggml.unknown_token_id", U32, 0),
        ("tokenizer.ggml.padding_token_id", U32, 0 if qwen else 2),
        ("tokenizer.ggml.add_space_prefix", BOOL, False),
        ("tokenizer.ggml.add_bos_token", BOOL, False),
        ("tokenizer.chat_template", STR, CHATML),
    ]


def spm_vocabulary(n):
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    types = [3, 3, 3, 2, 3, 3]
    tokens += [f"<0x{b:02X}>" for b in range(256)]
    types += [6] * 256
    scores = [-1000.0] * len(tokens)
    words = [tuple(("▁" if i else "") + w) for i, w in enumerate(TEXT.split())]
    letters = sorted({c for w in words for c in w} | {"▁"})
    if n < len(tokens) + len(letters):
        sys.exit(f"--vocab: at least {len(tokens) + len(letters)}")
    pieces = []
    for a, b in learn(words, n - len(tokens) - len(letters)):
        if a + b not in pieces:
            pieces.append(a + b)
    for i, piece in enumerate(pieces + letters):
        tokens.append(piece)
        types.append(1)
        scores.append(-float(i))
    pad(tokens, types, n)
    scores += [-1000.0] * (n - len(scores))
    return [
        ("tokenizer.ggml.model", STR, "llama"),
        ("tokenizer.ggml.pre", STR, "default"),
        ("tokenizer.ggml.tokens", ARR, (STR, tokens)),
        ("tokenizer.ggml.scores", ARR, (F32, scores)),
        ("tokenizer.ggml.token_type", ARR, (I32, types)),
        ("tokenizer.ggml.bos_token_id", U32, 2),
        ("tokenizer.ggml.eos_token_id", U32, 1),
        ("tokenizer.ggml.unknown_token_id", U32, 3),
        ("tokenizer.ggml.padding_token_id", U32, 0),
        ("tokenizer.ggml.add_bos_token", BOOL, True),
        ("tokenizer.ggml.add_eos_token", BOOL, False),
        ("tokenizer.ggml.add_space_prefix", BOOL, False),
        ("tokenizer.chat_template", STR, GEMMA_CHAT),
    ]


# --- the model ---


def metadata(o):
    a = o.arch
    keys = [
        ("general.architecture", STR, a),
        ("general.type", STR, "model"),
        ("general.name", STR, f"tiny {a}"),
        ("general.file_type", U32, FILE_TYPES.get(o.type, 15)),
        ("general.quantization_version", U32, 2),
        (f"{a}.block_count", U32, o.layers),
        (f"{a}.context_length", U32, o.context),
        (f"{a}.embedding_length", U32, o.d),
        (f"{a}.feed_forward_length", U32, o.ffn),
        (f"{a}.attention.head_count", U32, o.heads),
        (f"{a}.attention.head_count_kv", U32, o.kv_heads),
        (f"{a}.attention.layer_norm_rms_epsilon", F32, o.eps),
        (f"{a}.rope.freq_base", F32, o.rope_base),
    ]
    if o.alignment != 32:
        keys.append(("general.alignment", U32, o.alignment))
    if a in ("qwen3", "gemma3") or o.heads * o.head_dim != o.d:
        keys.append((f"{a}.attention.key_length", U32, o.head_dim))
        keys.append((f"{a}.attention.value_length", U32, o.head_dim))
    if a == "llama":
        keys.append(("llama.vocab_size", U32, o.vocab))
        keys.append(("llama.rope.dimension_count", U32, o.head_dim))
    if a == "gemma3":
        keys.append(("gemma3.attention.sliding_window", U32, o.window))
    if o.rope_scaling:
        kind, _, factor = o.rope_scaling.partition(":")
        keys.append((f"{a}.rope.scaling.type", STR, kind))
        keys.append((f"{a}.rope.scaling.factor", F32, float(factor or 2)))
    keys += spm_vocabulary(o.vocab) if a == "gemma3" else bpe_vocabulary(o.vocab, o.pre)
    for item in o.set:
        name, _, typed = item.partition("=")
        kind, _, text = typed.partition(":")
        if kind not in SET_TYPES:
            sys.exit(f"--set {item}: KEY=TYPE:VALUE with TYPE one of {' '.join(SET_TYPES)}")
        number, convert = SET_TYPES[kind]
        keys = [k for k in keys if k[0] != name] + [(name, number, convert(text))]
    return [k for k in keys if k[0] not in o.drop]


class Tensors:
    def __init__(self, options):
        self.o, self.turn, self.list = options, 0, []

    def rng(self, name):
        return random.Random(f"{self.o.seed}/{name}")  # of a string: hashed, the same everywhere

    def add(self, name, shape, number, data):
        if name not in self.o.drop:
            self.list.append((name, shape, number, data))

    def vector(self, name, n, std=0.1, mean=0.0):
        self.add(name, [n], 0, little(uniform(self.rng(name), n, std, mean)))

    def norm(self, name, n, mean=1.0):
        self.vector(name, n, 0.1, mean)

    def matrix(self, name, k, n, std, kind=None):
        """[n][k] weights: in the file's order of dimensions [k, n]."""
        if not kind and self.o.mix:
            fitting = [t for t in self.o.mix if k % TYPES[t][1] == 0]
            kind = fitting[self.turn % len(fitting)] if fitting else None
            self.turn += 1
        kind = kind or self.o.type
        number, elems, size, make = TYPES[kind]
        if k % elems:
            sys.exit(f"{name}: rows of {k} cannot be {kind}, which needs a multiple of {elems}")
        data = make(self.rng(name), k // elems * n, std)
        assert len(data) == k // elems * n * size
        self.add(name, [k, n], number, data)


def tensors(o):
    t, d, q, kv = Tensors(o), o.d, o.heads * o.head_dim, o.kv_heads * o.head_dim
    # Gemma scales the embedding by sqrt(d): a small one and a large last norm keep
    # the next token from being the last one.
    gemma = o.arch == "gemma3"
    t.matrix("token_embd.weight", d, o.vocab, (0.5 if gemma else 2) / math.sqrt(d), o.embd_type)
    for layer in range(o.layers):
        p = f"blk.{layer}."
        t.norm(p + "attn_norm.weight", d)
        t.matrix(p + "ffn_down.weight", o.ffn, d, 1 / math.sqrt(o.ffn))
        t.matrix(p + "ffn_gate.weight", d, o.ffn, 1 / math.sqrt(d))
        t.matrix(p + "ffn_up.weight", d, o.ffn, 1 / math.sqrt(d))
        t.norm(p + "ffn_norm.weight", d)
        for name, n in (("attn_k", kv), ("attn_output", d), ("attn_q", q), ("attn_v", kv)):
            if o.arch == "qwen2" and name != "attn_output":
                t.vector(p + name + ".bias", n, 0.3)
            # Sharp attention, or the next token hangs on the last one only.
            gain = {"attn_k": 2.5, "attn_q": 2.5, "attn_v": 2, "attn_output": 1}[name]
            if o.arch in ("qwen3", "gemma3") and name in ("attn_k", "attn_q"):
                t.norm(p + name + "_norm.weight", o.head_dim, gain)
            k = q if name == "attn_output" else d
            t.matrix(p + name + ".weight", k, n, gain / math.sqrt(k))
        if gemma:
            t.norm(p + "post_attention_norm.weight", d)
            t.norm(p + "post_ffw_norm.weight", d)
    t.norm("output_norm.weight", d, 4.0 if gemma else 1.0)
    if o.untied:
        t.matrix("output.weight", d, o.vocab, (0.5 if gemma else 2) / math.sqrt(d), o.head_type or o.embd_type)
    if o.rope_freqs:  # 1 for the fast pairs, up to 8 for the slow ones, as in Llama 3
        n = o.head_dim // 2
        f = [1 + 7 * min(1, max(0, (i - n / 3) / (n / 3))) for i in range(n)]
        t.add("rope_freqs.weight", [n], 0, little(array.array("f", f)))
    return t.list


# --- the file ---


def string(s):
    raw = s.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind, v):
    if kind == STR:
        return string(v)
    if kind == ARR:
        elem, items = v
        return struct.pack("<IQ", elem, len(items)) + b"".join(value(elem, i) for i in items)
    return struct.pack(PACK[kind], v)


def build(o):
    """The whole file as bytes, from options as parse() returns them."""
    keys = metadata(o)
    table = [] if o.vocab_only else tensors(o)
    head = [b"GGUF", struct.pack("<IQQ", o.gguf_version, len(table), len(keys))]
    for name, kind, v in keys:
        head += [string(name), struct.pack("<I", kind), value(kind, v)]
    at, data = 0, []
    for name, shape, number, raw in table:
        head += [string(name), struct.pack("<I%dQIQ" % len(shape), len(shape), *shape, number, at)]
        gap = -len(raw) % o.alignment
        data += [raw, bytes(gap)]
        at += len(raw) + gap
    head = b"".join(head)
    if table:
        head += bytes(-len(head) % o.alignment)
    return head + b"".join(data)


def types(text):
    names = list(TYPES) if text == "all" else text.split(",")
    for n in names:
        if n not in TYPES:
            raise argparse.ArgumentTypeError(f"{n}: one of {' '.join(TYPES)}")
    return names


def parse(argv):
    p = argparse.ArgumentParser(description="Write a tiny random model as a GGUF file.")
    add = p.add_argument
    add("-o", "--output", required=True, metavar="FILE")
    add("--seed", type=int, default=1)
    add("--arch", default="llama", choices=("llama", "qwen2", "qwen3", "gemma3"))
    add("--type", default="Q4_1", choices=TYPES, metavar="T", help="of the layers' matrices; one of " + " ".join(TYPES))
    add("--mix", type=types, nargs="?", const=list(TYPES), metavar="T,T,...",
        help="another type for each matrix, in turn (default: all)")
    add("--embd-type", choices=TYPES, metavar="T",
        help="of token_embd.weight; Q8_0, with --mix in turn, with a float --type the same")
    add("--head-type", choices=TYPES, metavar="T", help="of output.weight; implies --untied")
    add("--untied", action="store_true", help="an output.weight of its own")
    add("--layers", type=int, help="4; gemma3: 6, the last one global; with 256-element types 2")
    add("--d", type=int, help="64; with 256-element types 256")
    add("--heads", type=int, default=4)
    add("--kv-heads", type=int, help="2; gemma3: 1")
    add("--head-dim", type=int, help="d/heads; qwen3 and gemma3: 32 (64 with 256-element types)")
    add("--ffn", type=int, help="160; with 256-element types 512")
    add("--vocab", type=int, help="320; gemma3: 384")
    add("--context", type=int, default=2048)
    add("--eps", type=float, help="1e-5; others than llama: 1e-6")
    add("--rope-base", type=float, help="10000; others than llama: 1000000")
    add("--rope-scaling", metavar="KIND:FACTOR", help="e.g. linear:4")
    add("--rope-freqs", action="store_true", help="write rope_freqs.weight")
    add("--window", type=int, default=40, help="sliding window of gemma3's local layers")
    add("--pre", help="pre-tokeniser of the byte-level vocabulary; smollm, or qwen2 for qwen2 and qwen3")
    add("--alignment", type=int, default=32)
    add("--gguf-version", type=int, default=3)
    add("--vocab-only", action="store_true", help="no tensors")
    add("--set", action="append", default=[], metavar="KEY=TYPE:VALUE",
        help="set or replace a key; TYPE: " + " ".join(SET_TYPES))
    add("--drop", action="append", default=[], metavar="NAME", help="leave out a key or a tensor")
    o = p.parse_args(argv)

    wide = bool(o.mix and any(TYPES[t][1] == 256 for t in o.mix)) or \
        any(t and TYPES[t][1] == 256 for t in (o.type, o.embd_type, o.head_type))
    gemma, own_dim = o.arch == "gemma3", o.arch in ("qwen3", "gemma3")

    def default(name, v):
        if getattr(o, name) is None:
            setattr(o, name, v)
    default("layers", 6 if gemma else 2 if wide else 4)
    default("d", 256 if wide else 64)
    default("kv_heads", 1 if gemma else 2)
    default("head_dim", (64 if wide else 32) if own_dim else o.d // o.heads)
    default("ffn", 512 if wide else 160)
    default("vocab", 384 if gemma else 320)
    default("eps", 1e-5 if o.arch == "llama" else 1e-6)
    default("rope_base", 1e4 if o.arch == "llama" else 1e6)
    default("pre", "smollm" if o.arch == "llama" else "qwen2")
    if not o.embd_type and not o.mix:
        o.embd_type = o.type if TYPES[o.type][1] == 1 else "Q8_0"
    o.untied = o.untied or o.head_type is not None
    return o


def main():
    o = parse(sys.argv[1:])
    data = build(o)
    with open(o.output, "wb") as f:
        f.write(data)


if __name__ == "__main__":
    main()
