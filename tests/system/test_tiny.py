#!/usr/bin/env python3
"""Receipts of tiny models of every family and weight format, checked in.

The models are random, but tools/make_tiny_gguf.py writes the same bytes
everywhere, so any machine, compiler, instruction set and build must give these
receipts; a change of one bit of arithmetic shows here first, with the format or
family in its name. No download is needed.

With KVD_UPDATE_GOLDEN=1 the file is written anew instead (a commit of its own, with the reason).
"""
import json
import os

import harness as h

PATH = os.path.join(h.ROOT, "tests", "golden", "tiny.json")
UPDATE = bool(os.environ.get("KVD_UPDATE_GOLDEN"))
RUN = ("--raw", "-p", "Whatever is derived may be dropped, if what is rebuilt is the same; and 2 + 2 = 4.", "-n", "12",
       "--ignore-eos")
TYPES = ("F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS").split()
MODELS = {f"llama_{t}": ("--type", t) for t in TYPES}
MODELS.update({
    "llama_mix": ("--mix",),
    "llama_untied": ("--untied",),
    "llama_rope_freqs": ("--rope-freqs",),
    "llama_rope_linear": ("--rope-scaling", "linear:4"),
    "qwen2": ("--arch", "qwen2"),
    "qwen3": ("--arch", "qwen3"),
    "gemma3": ("--arch", "gemma3", "--window", "32"),
    "gemma3_rope_linear": ("--arch", "gemma3", "--window", "32", "--rope-scaling", "linear:8"),
})
SETTINGS = [("--policy", "full"), ("--evict-to", "recompute", "--kv-tokens", "0"),
            ("--evict-to", "recompute", "--kv-tokens", "16", "--chunk", "7", "--threads", "2")]

if os.path.exists(PATH):
    with open(PATH, encoding="utf-8") as f:
        golden = json.load(f)
else:
    golden = {}


def receipts(name):
    expected = golden.get(name)
    for cpu in h.cpus():
        for settings in SETTINGS:
            r = h.run_json(h.tiny(*MODELS[name]), *RUN, "--cpu", cpu, *settings)["receipt"]
            if UPDATE and expected is None:
                expected = golden[name] = r
            h.equal(r, expected, f"{name} {cpu} {' '.join(settings)}")


if UPDATE:
    golden = {}
for model in MODELS:
    def one(model=model):
        receipts(model)
    one.__name__ = "receipt_" + model
    h.test(one)


@h.test
def every_receipt_has_its_model():
    h.equal(sorted(golden), sorted(MODELS), "names in tests/golden/tiny.json")
    h.equal(len(set(golden.values())), len(golden), "distinct receipts")
    if UPDATE:
        with open(PATH, "w", encoding="utf-8") as out:
            json.dump(golden, out, indent=2)
            out.write("\n")


h.main()
