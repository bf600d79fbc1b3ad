#!/usr/bin/env python3
"""kvd run: the receipt is the same whatever does not belong to the question.

Tiny models, so that the whole product of the axes fits into a test; the real
model has test_golden.py.
"""
import itertools

import harness as h

# 120 bytes, about as many tokens of the tiny vocabulary: crosses two tiles with the tokens that follow.
PROMPT = "The sky is blue because air scatters short waves of light more than long ones, and the sun sends all of them to us."
N = 24
BUDGETS = [("--policy", "full")] + [("--evict-to", "recompute", "--kv-tokens", b) for b in (0, 16, 48, 64, 128)]
DISK = ("--evict-to", "disk", "--kv-tokens", 16)
ONE = h.SANITIZED  # one value per axis at a time instead of the product


def receipt(model, *args):
    return h.run_json(model, "--raw", "-p", PROMPT, "-n", N, "--ignore-eos", "--temp", "0", *args)["receipt"]


def same(model, variants, *common):
    """All variants give one receipt; returns it."""
    first = None
    for v in variants:
        r = receipt(model, *common, *v)
        if first is None:
            first = r
        h.equal(r, first, " ".join(map(str, v)))
    return first


@h.test
def one_receipt_over_the_product_of_all_axes():
    model = h.tiny()
    chunks, threads, cpus = [1, 7, 64, 512], [1, 2, 3], h.cpus()
    if ONE:
        variants = [b for b in BUDGETS] + [("--chunk", c) for c in chunks] + [("--threads", t) for t in threads] + \
                   [("--cpu", c) for c in cpus]
    else:
        variants = [(*b, "--chunk", c, "--threads", t, "--cpu", i)
                    for b, c, t, i in itertools.product(BUDGETS, chunks, threads, cpus)]
    same(model, variants)


@h.test
def odd_chunks_and_many_threads():
    for tier in ("recompute", "disk"):
        keep = ("--evict-to", tier, "--kv-tokens", "48")
        same(h.tiny(), [("--policy", "full")] + [(*keep, "--chunk", c) for c in (2, 3, 5, 16, 63, 65)] +
             [(*keep, "--threads", t) for t in (1, 4, 8)])


@h.test
def each_kv_type_has_one_receipt():
    model = h.tiny()
    got = {t: same(model, BUDGETS + [DISK], "--kv-type", t) for t in ("f16", "bf16", "f32")}
    h.equal(len(set(got.values())), 3, "distinct receipts of kv types")


@h.test
def each_stream_type_has_one_receipt():
    model = h.tiny()
    got = {t: same(model, BUDGETS + [DISK], "--stream", t) for t in ("f32", "bf16", "f16")}
    h.equal(len(set(got.values())), 3, "distinct receipts of stream types")


@h.test
def f32_activations_have_one_receipt():
    model = h.tiny()
    f32 = same(model, BUDGETS + [("--chunk", 7), ("--threads", 2)] + [("--cpu", c) for c in h.cpus()],
               "--activations", "f32")
    h.check(f32 != receipt(model), "--activations does not change the receipt")


@h.test
def byte_budgets_give_the_receipt_of_none():
    model = h.tiny()
    full = receipt(model, "--policy", "full")
    tight = h.run_json(model, "--raw", "-p", PROMPT, "-n", N, "--ignore-eos", "--policy", "full")["kv"]["peak_bytes"]
    evicting = 0
    for share in (0.62, 0.7, 0.8, 0.9, 1.0):
        r = h.run_json(model, "--raw", "-p", PROMPT, "-n", N, "--ignore-eos", "--kv-budget", int(tight * share),
                       "--evict-to", "recompute")
        h.equal(r["receipt"], full, f"budget {share} of full")
        h.check(r["kv"]["peak_bytes"] <= r["kv"]["budget_bytes"], f"peak passes the budget: {r['kv']}")
        evicting += r["kv"]["evicted_tokens"] > 0
    h.check(evicting > 0, "no budget evicted anything: the test tests nothing")


@h.test
def the_planner_s_choice_gives_the_receipt_of_none():
    model = h.tiny()
    same(model, [("--policy", "full"), ("--kv-tokens", 16, "--evict-to", "auto"), ("--kv-tokens", 16)])


@h.test
def weight_types_have_one_receipt_each():
    for t in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"):
        same(h.tiny("--type", t), [BUDGETS[0], BUDGETS[1], ("--chunk", 1), ("--threads", 2)] +
             [("--cpu", c) for c in h.cpus()])


@h.test
def sampling_with_a_seed_repeats():
    model = h.tiny()
    sampled = ("--temp", "0.8", "--seed", "7")
    got = [h.run_json(model, "--raw", "-p", PROMPT, "-n", N, "--ignore-eos", *sampled, *b) for b in BUDGETS]
    h.equal(len({r["receipt"] for r in got}), 1, "receipts over budgets")
    other = h.run_json(model, "--raw", "-p", PROMPT, "-n", N, "--ignore-eos", "--temp", "0.8", "--seed", "8")
    h.check(other["tokens"] != got[0]["tokens"], "another seed gives the same tokens")


@h.test
def what_belongs_to_the_question_changes_the_receipt():
    model = h.tiny()
    base = receipt(model)
    other_text = h.run_json(model, "--raw", "-p", PROMPT + "!", "-n", N, "--ignore-eos")["receipt"]
    shorter = h.run_json(model, "--raw", "-p", PROMPT, "-n", N - 1, "--ignore-eos")["receipt"]
    other_model = receipt(h.tiny("--seed", "5"))
    h.equal(len({base, other_text, shorter, other_model}), 4, "distinct receipts")


@h.test
def json_has_the_keys_of_the_contract():
    r = h.run_json(h.tiny(), "-p", "hello", "-n", 4, "--ignore-eos")
    keys = ("text tokens receipt prompt_tokens generated_tokens stop_reason prefill_tokens_per_s decode_tokens_per_s "
            "kv ledger process_peak_bytes model cpu threads").split()
    for k in keys:
        h.check(k in r, f"no key {k}")
    for k in "budget_bytes peak_bytes resident_tokens evicted_tokens recomputed_tokens passes drafted accepted".split():
        h.check(k in r["kv"], f"no key kv.{k}")
    for name, account in r["ledger"].items():
        h.equal(sorted(account), ["now_bytes", "peak_bytes"], f"keys of ledger.{name}")
    for name in ("weights", "kv", "stream", "layer", "checkpoint", "compute", "host"):
        h.check(name in r["ledger"], f"no account {name}")
    h.equal(sorted(r["model"]), ["architecture", "fingerprint", "name"], "keys of model")
    h.equal(len(r["receipt"]), 32, "hex digits of the receipt")
    h.equal(r["receipt"], r["receipt"].lower(), "case of the receipt")
    h.equal(len(r["tokens"]), r["generated_tokens"], "generated_tokens")
    h.equal(r["generated_tokens"], 4, "generated_tokens")
    h.check(r["process_peak_bytes"] > r["ledger"]["weights"]["peak_bytes"], "process_peak_bytes below the weights")


@h.test
def the_prompt_comes_from_argument_file_or_stdin():
    model = h.tiny()
    by_argument = receipt(model)
    path = h.write("prompt.txt", PROMPT)
    by_file = h.run_json(model, "--raw", "-f", path, "-n", N, "--ignore-eos")["receipt"]
    by_stdin = h.run_json(model, "--raw", "-n", N, "--ignore-eos", stdin=PROMPT.encode())["receipt"]
    h.equal((by_file, by_stdin), (by_argument, by_argument), "receipts of -f and stdin")


@h.test
def text_on_stdout_is_the_text_of_json():
    model = h.tiny()
    args = ("run", "-m", model, "--raw", "-p", PROMPT, "-n", N, "--ignore-eos")
    text = h.run_json(*args[2:3], *args[3:])["text"]
    plain = h.kvd(*args, expect=h.DONE)
    h.equal(plain.out.decode(errors="replace").rstrip("\n"), text.rstrip("\n"), "stdout")
    h.check(plain.err.strip() != "", "no first line on stderr")
    quiet = h.kvd(*args, "--quiet", expect=h.DONE)
    h.equal(quiet.err, "", "stderr with --quiet")


@h.test
def receipt_without_json():
    model = h.tiny()
    r = h.kvd("run", "-m", model, "--raw", "-p", PROMPT, "-n", N, "--ignore-eos", "--temp", "0", "--receipt",
              expect=h.DONE)
    h.check(receipt(model) in r.err + r.out.decode(errors="replace"), f"no receipt printed\n{r}")


@h.test
def stop_strings_end_the_text():
    model = h.tiny()
    full = h.run_json(model, "--raw", "-p", PROMPT, "-n", 60, "--ignore-eos")
    text = full["text"]
    ascii_at = next((i for i in range(4, len(text) - 2) if text[i:i + 2].isascii() and text[i:i + 2].isprintable()), None)
    if ascii_at is None:
        h.skip("the tiny model's text has no two ASCII characters in a row")
    stop = text[ascii_at:ascii_at + 2]
    r = h.run_json(model, "--raw", "-p", PROMPT, "-n", 60, "--ignore-eos", "--stop", stop)
    h.equal(r["stop_reason"], "stop")
    h.equal(r["text"], text[:text.index(stop)], "text before the stop string")


@h.test
def n_ends_by_length():
    r = h.run_json(h.tiny(), "--raw", "-p", PROMPT, "-n", 1, "--ignore-eos")
    h.equal((r["generated_tokens"], r["stop_reason"]), (1, "length"))


@h.test
def n_minus_one_runs_to_the_context():
    r = h.run_json(h.tiny("--context", "160"), "--raw", "-p", PROMPT, "-n", -1, "--ignore-eos")
    h.equal(r["stop_reason"], "context")
    h.check(r["prompt_tokens"] + r["generated_tokens"] in (160, 161), f"{r['prompt_tokens']} + {r['generated_tokens']}")


@h.test
def chat_template_wraps_the_prompt():
    model = h.tiny()
    raw = h.run_json(model, "--raw", "-p", "hello", "-n", 2, "--ignore-eos")
    chat = h.run_json(model, "-p", "hello", "-n", 2, "--ignore-eos")
    h.check(chat["prompt_tokens"] > raw["prompt_tokens"], "the template adds no tokens")


h.main()
