#!/usr/bin/env python3
"""The engine against an independent one: a plain numpy forward pass of the same files.

  real models   recorded tokens, logits and losses (golden.json); models as `sh tools/get-model` stores them
  tiny models   the numpy pass itself (ref.py, with the Python packages numpy and gguf)

Neither is part of this project. Both are looked for in the folder that the
environment variable KVD_SHARED names, else in shared/ beside the checkout, and
what is missing is skipped. The program under test is tests/golden/probe, whose
path the build passes in PROBE.

With 32-bit activations the two do the same arithmetic but for the order of sums
and the rounding of K and V, so logits agree closely and a token may differ only
where the two best are nearly equal. With the default 8-bit activations the mean
loss is the measure.

usage: test_reference.py [slow]      slow: the larger real models, and nothing else
"""
import json
import os
import random
import subprocess
import sys

import harness as h

PROBE = os.environ.get("PROBE", "")
SHARED = os.environ.get("KVD_SHARED") or os.path.join(os.path.dirname(h.ROOT), "shared")
MODELS = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvd", "models")
SLOW = "slow" in sys.argv[1:]
sys.argv = [a for a in sys.argv if a != "slow"]

# name: largest difference of a logit, margin above which a token must agree,
# difference of mean loss with f32 activations, ratio of it with 8-bit ones
REAL = {
    "smollm2-135m-instruct-q4_1": (0.01, 0.05, 0.001, 0.01),
    "gemma-3-270m-q4_k_m": (0.02, 0.1, 0.002, 0.015),
    "qwen2.5-coder-0.5b-instruct-q4_k_m": (0.02, 0.1, 0.002, 0.015),
}
DEFAULT = "smollm2-135m-instruct-q4_1"


def probe(model, lists, *args):
    """What probe prints for each list of ids."""
    if not os.access(PROBE, os.X_OK):
        h.skip("environment variable PROBE does not name tests/golden/probe")
    text = "".join(" ".join(map(str, ids)) + "\n" for ids in lists)
    done = subprocess.run([PROBE, model, *args], input=text, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          timeout=3600)
    if done.returncode:
        raise h.Failure(f"probe {model} {' '.join(args)}: exit {done.returncode}, {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


# --- real models ---


def golden(name):
    """Path of the model and what golden.json says of it, or a skip."""
    path, data = os.path.join(MODELS, name + ".gguf"), os.path.join(SHARED, "data", "golden.json")
    if h.SANITIZED:
        h.skip("real models are too slow under a sanitizer")
    if not os.path.exists(data):
        h.skip(f"no {data} (KVD_SHARED names the folder above it)")
    if not os.path.exists(path):
        h.skip(f"no {path}")
    with open(data, encoding="utf-8") as f:
        return path, json.load(f)["models"][name]


def compare_logits(name):
    path, cases = golden(name)
    most, margin, loss, _ = REAL[name]
    wiki = cases["wiki512"]
    prompts = {k: v for k, v in cases.items() if "greedy30" in v}
    lists = [wiki["tokens"]]
    for case in prompts.values():
        lists += [case["tokens"], case["tokens"] + case["greedy30"]]
    got_wiki, *got = probe(path, lists, "--activations", "f32")
    for key, at_prompt, along in zip(prompts, got[0::2], got[1::2]):
        case = prompts[key]
        h.equal([i for i, _ in at_prompt["top8"]], [i for i, _ in case["top8"]], f"{key}: ids of the top 8")
        for (i, logit), (_, expected) in zip(at_prompt["top8"], case["top8"]):
            h.check(abs(logit - expected) <= most, f"{key}: logit of {i} is {logit}, expected {expected}")
        begin = len(case["tokens"]) - 1
        for step, (token, m) in enumerate(zip(case["greedy30"], case["greedy_margin"])):
            if m > margin:
                h.equal(along["argmax"][begin + step], token, f"{key}: token {step}, margin {m}")
    for what in ("mean_nll", "mean_nll_257_511"):
        h.check(abs(got_wiki[what] - wiki[what]) <= loss, f"wiki512: {what} {got_wiki[what]}, expected {wiki[what]}")


def compare_default_loss(name):
    path, cases = golden(name)
    ratio = REAL[name][3]
    got, expected = probe(path, [cases["wiki512"]["tokens"]])[0], cases["wiki512"]["mean_nll"]
    h.check(abs(got["mean_nll"] / expected - 1) <= ratio, f"wiki512: mean loss {got['mean_nll']}, expected {expected}")


def compare_program(name):
    """The program's own way to the same numbers: text to tokens, generation, eval."""
    path, cases = golden(name)
    _, margin, loss, _ = REAL[name]
    case = cases["sky"]
    r = h.run_json(path, "--raw", "-p", case["prompt"], "-n", 30, "--ignore-eos", "--temp", 0, "--activations", "f32")
    h.equal(r["prompt_tokens"], len(case["tokens"]), "tokens of the prompt")
    for step, (token, expected, m) in enumerate(zip(r["tokens"], case["greedy30"], case["greedy_margin"])):
        if token != expected:
            h.check(m <= margin, f"token {step} is {token}, expected {expected} by a margin of {m}")
            break  # after a near tie the texts part
    text = os.path.join(SHARED, "data", "wiki.test.raw")
    if os.path.exists(text):
        r = h.kvd("eval", "perplexity", "-m", path, "-f", text, "--chunks", 1, "--activations", "f32", "--json",
                  expect=h.DONE).json()
        expected = cases["wiki512"]["mean_nll_257_511"]
        h.check(abs(r["mean_nll"] - expected) <= loss, f"kvd eval: mean loss {r['mean_nll']}, expected {expected}")


for real in REAL:
    if (real != DEFAULT) != SLOW:
        continue
    for check in (compare_logits, compare_default_loss, compare_program):
        def one(name=real, run=check):
            run(name)
        one.__name__ = f"{check.__name__}_{real}"
        h.test(one)


# --- tiny models ---


def reference():
    """The module ref.py with numpy, or a skip."""
    folder = os.path.join(SHARED, "reference")
    if not os.path.exists(os.path.join(folder, "ref.py")):
        h.skip(f"no ref.py in {folder} (KVD_SHARED names the folder above it)")
    try:
        import gguf  # noqa: F401  (ref.py needs it)
        import numpy
    except ImportError as e:
        h.skip(f"Python package {e.name} is not installed")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import ref
    return ref, numpy


def tiny_test(function):
    return function if SLOW else h.test(function)


def compare_tiny(*options):
    """All logits that matter of 100 random tokens; beyond the window where there is one."""
    ref, numpy = reference()
    path = h.tiny(*options)
    model = ref.Model(path)
    n_vocab = len(model.w["token_embd.weight"])
    ids = random.Random(7).choices(range(n_vocab), k=100)
    logits = model.forward(ids).astype(numpy.float64)
    order = numpy.argsort(-logits, axis=1, kind="stable")
    # K and V unrounded, as the reference has them: then only the order of sums differs.
    got = probe(path, [ids], "--activations", "f32", "--kv-type", "f32")[0]
    for i, logit in got["top8"]:
        h.check(abs(logit - logits[-1][i]) <= 0.002, f"logit of {i} is {logit}, expected {logits[-1][i]}")
    for pos, token in enumerate(got["argmax"]):
        first, second = (logits[pos][i] for i in order[pos][:2])
        if first - second > 0.01:
            h.equal(token, int(order[pos][0]), f"argmax at {pos}, margin {first - second}")
    log_sum = numpy.log(numpy.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    loss = float(numpy.mean([log_sum[i] - logits[i][ids[i + 1]] for i in range(len(ids) - 1)]))
    h.check(abs(got["mean_nll"] - loss) <= 0.0005, f"mean loss {got['mean_nll']}, expected {loss}")
    # And as stored by default, f16.
    got = probe(path, [ids], "--activations", "f32")[0]
    h.check(abs(got["mean_nll"] - loss) <= 0.005, f"f16 KV: mean loss {got['mean_nll']}, expected {loss}")


@tiny_test
def tiny_llama():
    compare_tiny()


@tiny_test
def tiny_llama_with_llama3_rope():
    compare_tiny("--rope-freqs")


@tiny_test
def tiny_llama_with_linear_rope():
    compare_tiny("--rope-scaling", "linear:4")


@tiny_test
def tiny_llama_with_a_head_of_its_own():
    compare_tiny("--mix", "--untied")


@tiny_test
def tiny_qwen2():
    compare_tiny("--arch", "qwen2")


@tiny_test
def tiny_qwen3():
    compare_tiny("--arch", "qwen3")


@tiny_test
def tiny_qwen3_of_256_element_blocks():
    compare_tiny("--arch", "qwen3", "--type", "Q4_K")


@tiny_test
def tiny_gemma3():
    compare_tiny("--arch", "gemma3")


@tiny_test
def tiny_gemma3_with_linear_rope():
    compare_tiny("--arch", "gemma3", "--rope-scaling", "linear:4")


h.main()
