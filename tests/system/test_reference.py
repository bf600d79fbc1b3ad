#!/usr/bin/env python3
"""Against a forward pass that is not ours.

Tokens, logits and losses of real files, made by a plain numpy implementation
with f32 activations, lie outside the project in ../shared/data/golden.json
(KVD_REFERENCE=folder names another place). Files of models are looked for where
tools/get-model puts them. What is not here is skipped, loudly.
"""
import json
import os
import subprocess

import harness as h

DATA = os.environ.get("KVD_REFERENCE") or os.path.join(os.path.dirname(h.ROOT), "shared", "data")
CACHE = os.environ.get("KVD_MODELS") or os.path.join(os.environ.get("XDG_CACHE_HOME") or
                                                     os.path.expanduser("~/.cache"), "kvd", "models")
PROBE = os.environ.get("KVD_PROBE", "")
# Files whose architecture or formats this build does not know yet are skipped; the default one may not be.
MUST = "smollm2-135m-instruct-q4_1"


def reference(name):
    if h.SANITIZED:
        h.skip("real models are too slow under a sanitizer")
    try:
        with open(os.path.join(DATA, "golden.json"), encoding="utf-8") as f:
            golden = json.load(f)["models"][name]
    except OSError:
        h.skip("no reference data (../shared/data/golden.json)")
    path = os.path.join(CACHE, name + ".gguf")
    if not os.path.exists(path):
        h.skip(f"{name}.gguf is not here")
    r = h.kvd("run", "-m", path, "--raw", "-p", "x", "-n", "1", "--quiet")
    if r.code != h.DONE:
        h.check(name != MUST, f"the default model does not run\n{r}")
        h.skip(r.err.strip())
    return golden, path


def probe(path, ids, activations):
    done = subprocess.run([PROBE, path, activations], input=" ".join(map(str, ids)), text=True, stdout=subprocess.PIPE,
                          timeout=h.TIMEOUT_S)
    h.equal(done.returncode, 0, "exit of logits_probe")
    return json.loads(done.stdout)


def prompts(golden):
    return {k: v for k, v in golden.items() if "prompt" in v}


def logits_of_prompts(name):
    golden, path = reference(name)
    for key, case in prompts(golden).items():
        got = probe(path, case["tokens"], "f32")["top8"]
        h.equal([i for i, _ in got], [i for i, _ in case["top8"]], f"{key}: ids of the eight best")
        for (_, a), (_, b) in zip(got, case["top8"]):
            h.check(abs(a - b) <= 0.01, f"{key}: logit {a}, expected {b}")


def greedy_tokens(name):
    golden, path = reference(name)
    for key, case in prompts(golden).items():
        r = h.run_json(path, "--raw", "-p", case["prompt"], "-n", 30, "--ignore-eos", "--temp", "0", "--activations", "f32")
        h.equal(r["prompt_tokens"], len(case["tokens"]), f"{key}: prompt tokens")
        for i, (got, expected, margin) in enumerate(zip(r["tokens"], case["greedy30"], case["greedy_margin"])):
            if got != expected:
                h.check(margin <= 0.05, f"{key}: token {i} is {got}, expected {expected} by a margin of {margin}")
                break  # after a tie the texts part


def losses(name):
    golden, path = reference(name)
    case = golden["wiki512"]
    f32 = probe(path, case["tokens"], "f32")["mean_nll"]
    h.check(abs(f32 - case["mean_nll"]) <= 0.001, f"f32 activations: mean loss {f32}, expected {case['mean_nll']}")
    auto = probe(path, case["tokens"], "auto")["mean_nll"]
    h.check(abs(auto / case["mean_nll"] - 1) <= 0.01, f"8-bit activations: mean loss {auto}, expected {case['mean_nll']}")


def perplexity(name):
    golden, path = reference(name)
    text = os.path.join(DATA, "wiki.test.raw")
    r = h.kvd("eval", "perplexity", "-m", path, "-f", text, "--chunks", "1", "--activations", "f32", "--json",
              expect=h.DONE).json()
    h.check(abs(r["mean_nll"] - golden["wiki512"]["mean_nll_257_511"]) <= 0.001,
            f"mean_nll {r['mean_nll']}, expected {golden['wiki512']['mean_nll_257_511']}")


for model in (MUST, "qwen2.5-coder-0.5b-instruct-q4_k_m", "gemma-3-270m-q4_k_m"):
    for check in (logits_of_prompts, greedy_tokens, losses, perplexity):
        def one(check=check, model=model):
            check(model)
        one.__name__ = f"{check.__name__}_{model.split('-')[0]}"
        h.test(one)

h.main()
