"""Token ids of real vocabularies, through the program.

The data are not part of the project: the folder data/ in what the environment
variable KVD_SHARED names, else in shared/ beside the checkout, has tokenizer/*.gguf, .inp and .out (llama.cpp's vectors: texts separated
by a line of __ggml_vocab_test__, and one line of ids for each), with golden.json
(prompts and their ids) and with wiki.test.raw; KVD_MODELS, or else
~/.cache/kvd/models, one with the models that golden.json is about. What is not
there is skipped, and said.
"""
import glob
import json
import os

import harness as h

DATA = os.path.join(os.environ.get("KVD_SHARED") or os.path.join(os.path.dirname(h.ROOT), "shared"), "data")
MODELS = os.environ.get("KVD_MODELS") or os.path.join(os.path.expanduser("~"), ".cache", "kvd", "models")


def data(*parts):
    path = os.path.join(DATA, *parts)
    if not os.path.exists(path):
        h.skip(f"no {path} (KVD_SHARED names the folder above data/)")
    return path


def read(path):
    with open(path, "rb") as f:
        return f.read()


def ids(model, text, *options):
    path = h.write("text", text)
    return h.kvd("tokenize", "-m", model, "-f", path, "--json", *options, expect=h.DONE).json()["tokens"]


def vectors(name):
    model = data("tokenizer", f"ggml-vocab-{name}.gguf")
    texts = read(model + ".inp").split(b"\n__ggml_vocab_test__\n")
    lines = read(model + ".out").decode().split("\n")
    h.check(len(lines) >= len(texts) > 1, f"{len(texts)} texts, {len(lines)} lines of ids")
    for text, line in zip(texts, lines):
        h.equal(ids(model, text, "--no-bos"), [int(i) for i in line.split()], f"{name}: {text!r}")


@h.test
def llama_bpe():
    vectors("llama-bpe")


@h.test
def qwen2():
    vectors("qwen2")


@h.test
def llama_spm():
    vectors("llama-spm")


def golden(stem):
    cases = json.loads(read(data("golden.json")))["models"][stem]
    wiki = read(data("wiki.test.raw"))
    found = glob.glob(os.path.join(MODELS, stem + ".gguf"))
    if not found:
        h.skip(f"no {stem}.gguf in the folder of models")
    for key, case in cases.items():
        text = case["prompt"].encode() if "prompt" in case else wiki
        h.equal(ids(found[0], text)[:len(case["tokens"])], case["tokens"], f"{stem}: {key}")


@h.test
def golden_smollm2():
    golden("smollm2-135m-instruct-q4_1")


@h.test
def golden_gemma3():
    golden("gemma-3-270m-q4_k_m")


@h.test
def golden_qwen25():
    golden("qwen2.5-coder-0.5b-instruct-q4_k_m")


h.main()
