#!/usr/bin/env python3
"""kvd eval: perplexity and HellaSwag, their rules checked against the probe's losses, and
that memory settings do not show in the numbers of policies that are exact."""
import json
import math
import os
import subprocess

import harness as h

TEXT = "".join(f"Line {i}: the quick brown fox jumps over {i * 7} lazy dogs, and again {i * i}.\n" for i in range(60))
PROBE = os.environ.get("PROBE", "")


def probe(model, lists):
    """Sum of -ln p of all tokens but the first, for each list of ids."""
    if not os.access(PROBE, os.X_OK):
        h.skip("environment variable PROBE does not name tests/golden/probe")
    text = "".join(" ".join(map(str, ids)) + "\n" for ids in lists)
    done = subprocess.run([PROBE, model], input=text, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=h.TIMEOUT_S)
    h.equal(done.returncode, 0, done.stderr)
    means = [json.loads(line)["mean_nll"] for line in done.stdout.splitlines()]
    return [0 if m is None else m * (len(ids) - 1) for m, ids in zip(means, lists)]


def tokens(model, text):
    return h.kvd("tokenize", "-m", model, "-f", h.write("tokens.txt", text), "--json", expect=h.DONE).json()["tokens"]


def table(result, name):
    """A table of a result as dicts by column."""
    for t in result["tables"]:
        if t["name"] == name:
            keys = [c["key"] for c in t["columns"]]
            return [dict(zip(keys, row)) for row in t["rows"]]
    raise h.Failure(f"no table {name!r} in {[t['name'] for t in result['tables']]}")


# --- perplexity ---


def perplexity(*args, model=None, text=TEXT, expect=h.DONE):
    return h.kvd("eval", "perplexity", "-m", model or h.tiny(), "-f", h.write("eval.txt", text), "--json", *args,
                 expect=expect)


@h.test
def the_number_is_the_mean_of_255_predictions_a_chunk():
    r = perplexity("--chunks", 2).json()
    h.equal(r["tokens"], 2 * 255, "scored tokens")
    h.check(abs(math.exp(r["mean_nll"]) - r["perplexity"]) < 1e-3 * r["perplexity"], f"{r}")


@h.test
def budgets_threads_and_chunks_do_not_show():
    base = perplexity("--chunks", 1).json()["mean_nll"]
    for args in (("--kv-tokens", 0, "--evict-to", "recompute"), ("--kv-tokens", 64, "--evict-to", "disk", "--spill-dir", h.folder()), ("--threads", 1), ("--threads", 3), ("--chunk", 7)):
        h.equal(perplexity("--chunks", 1, *args).json()["mean_nll"], base, f"mean_nll with {args}")


@h.test
def every_token_can_be_scored_in_chunks_of_any_size():
    for arch in ("llama", "gemma3"):
        model = h.tiny("--arch", arch)
        ids, n = tokens(model, TEXT), 96
        bos = tokens(model, "")  # nothing but BOS, where the model has one
        chunks = [bos[:1] + ids[i * n + len(bos[:1]):(i + 1) * n] for i in range(3)]
        r = perplexity("--chunks", 3, "--chunk-tokens", n, "--first-scored", 1, model=model).json()
        h.equal(r["tokens"], 3 * (n - 1), "scored tokens")
        expected = sum(probe(model, chunks)) / (3 * (n - 1))
        h.check(abs(r["mean_nll"] - expected) < 1e-9 * expected, f"{arch}: {r['mean_nll']}, the probe says {expected}")
        h.equal(perplexity("--chunks", 2, "--chunk-tokens", n, "--first-scored", 90, model=model).json()["tokens"], 2 * 6, "scored tokens")


@h.test
def policies_side_by_side():
    for model in (h.tiny(), h.tiny("--arch", "gemma3", "--window", "48", "--layers", "7")):
        r = perplexity("--policies", "full,kv-direct,kv-direct:96,window:24,streaming-llm:24,window:128", "--chunks", 3,
                       "--chunk-tokens", 128, model=model).json()
        rows = table(r, "perplexity")
        h.equal([t["policy"] for t in rows], ["full", "kv-direct", "kv-direct:96", "window:24", "streaming-llm:24", "window:128"], "policies")
        h.check("perplexity" not in r, "a number at the top, of which policy?")
        full, direct, direct96, window, sinks, wide = rows
        for t in rows:
            h.equal(t["tokens"], 3 * 63, f"scored tokens of {t}")
            h.check(0 < t["perplexity_error"] < t["perplexity"], f"standard error of {t}")
            h.check(abs(math.exp(t["mean_nll"]) - t["perplexity"]) < 1e-9 * t["perplexity"], f"{t}")
        for t in (direct, direct96):
            h.equal((t["same_as_full"], t["mean_nll"]), (True, full["mean_nll"]), t["policy"])
        # A window that holds all forgets nothing. (Where the model itself drops what has left
        # its own window, the rest moves together, and sums come in another order.)
        h.check(abs(wide["mean_nll"] - full["mean_nll"]) < 0.05, f"{wide}")
        h.equal(wide["same_as_full"], r["model"]["n_local_layers"] == 0, "window:128")
        h.equal(direct["recomputed_tokens"], 3 * 64, "recomputed tokens")
        h.equal(direct96["recomputed_tokens"], 3 * 16, f"{direct96}")
        h.equal(full["recomputed_tokens"], 0, "recomputed tokens of full")
        for t in (window, sinks):
            h.equal(t["same_as_full"], False, f"{t['policy']} forgets")
        h.check(window["mean_nll"] != sinks["mean_nll"], "sinks make no difference")
        h.check("check_failed" not in r, f"{r['notes']}")


@h.test
def a_text_without_a_whole_chunk_is_refused():
    h.check(perplexity(text="short", expect=None).code in (h.USAGE, h.BAD_FILE), "exit code")


@h.test
def chunks_that_can_not_be_are_refused():
    h.refused(h.USAGE, "eval", "perplexity", "-m", h.tiny(), "-f", h.write("eval.txt", TEXT), "--chunk-tokens", 64, "--first-scored", 64)
    h.refused(h.USAGE, "eval", "perplexity", "-m", h.tiny("--context", "100"), "-f", h.write("eval.txt", TEXT), names=("100",))


@h.test
def an_unknown_evaluation_is_refused():
    h.refused(h.USAGE, "eval", "frobnicate", "-m", h.tiny(), "-f", h.write("x", "x"))


# --- HellaSwag ---

TASKS = [
    ("Going down to the river: The children went down to the river. they", 1,
     ["counted the stones.", "counted the boats, one after the other.", "computed the cache.", "are evicted."]),
    ("The cache: What is computed twice in the same order is equal. the model", 0,
     ["computes them once more.", "throws the memory away and reads the stream again, token by token.", "sails away.", "sails."]),
    ("Boats: One, two, three, and then a large one came in from the other side. it", 3,
     ["has a red token.", "has a red layer and keys.", "is not in the stream.", "has a red sail."]),
    ("Memory: The memory is small and the old positions are evicted. the new ones", 2,
     ["stay.", "stay when they are needed.", "stay in the morning, and a large one with a red sail came in.", "stay a while."]),
]


def six_lines(tasks):
    return "".join(f"{context}\n{label}\n" + "".join(e + "\n" for e in endings) for context, label, endings in tasks)


def hellaswag(*args, model=None, text=None, expect=h.DONE):
    return h.kvd("eval", "hellaswag", "-m", model or h.tiny(), "-f", h.write("tasks.txt", six_lines(TASKS) if text is None else text),
                 "--json", *args, expect=expect)


@h.test
def answers_are_those_of_the_probes_losses():
    """acc and acc_norm by llama.cpp's rule, acc_norm_bytes by lm-evaluation-harness's."""
    for model in (h.tiny(), h.tiny("--arch", "gemma3", "--window", "16", "--layers", "7"), h.tiny("--arch", "qwen2", "--type", "Q8_0")):
        right = [0, 0, 0]
        for context, label, endings in TASKS:
            lists = [tokens(model, context + " " + e) for e in endings]
            n_context, prefix = len(tokens(model, context)), 0
            while prefix < min(map(len, lists)) - 1 and len({x[prefix] for x in lists}) == 1:
                prefix += 1
            sums = probe(model, lists + [lists[0][:prefix], lists[0][:min(n_context, prefix)]])
            per = [[], [], []]
            for ids, ending, s in zip(lists, endings, sums):
                per[0].append(sums[4] - s)
                per[1].append((sums[4] - s) / (len(ids) - prefix))
                per[2].append((sums[5] - s) / len(ending.encode()))
            for rule in range(3):
                right[rule] += max(range(4), key=lambda e: per[rule][e]) == label
        r = hellaswag(model=model).json()
        h.equal([r["acc"] * 4, r["acc_norm"] * 4, r["acc_norm_bytes"] * 4, r["tasks"]], [*right, 4], f"right answers of {model}")


@h.test
def exact_policies_answer_the_same():
    for model in (h.tiny(), h.tiny("--arch", "gemma3", "--window", "16", "--layers", "7")):
        r = hellaswag("--policies", "full,kv-direct,kv-direct:16,window:8,window:500", model=model).json()
        full, direct, direct16, window, wide = table(r, "hellaswag")
        for t in (direct, direct16, wide):
            same = t is not wide or r["model"]["n_local_layers"] == 0
            h.equal((t["same_as_full"], t["agree_acc"], t["agree_acc_norm"], t["acc"]), (same, 100, 100, full["acc"]), t["policy"])
        h.check(direct["recomputed_tokens"] > direct16["recomputed_tokens"] > 0, "recomputed tokens")
        h.equal(window["same_as_full"], False, "window:8 forgets")
        h.check("check_failed" not in r, f"{r['notes']}")
    for args in (("--threads", 1), ("--chunk", 5), ("--policy", "kv-direct", "--kv-tokens", 16, "--evict-to", "disk", "--spill-dir", h.folder())):
        h.equal(hellaswag(*args).json()["acc_norm"], hellaswag().json()["acc_norm"], f"{args}")


def jsonl(**changes):
    o = {"activity_label": "Roof [x] removal", "ctx_a": " A man  is sitting [title] on a roof.", "ctx_b": "he [step] Looks", "label": 3,
         "ctx": "not this one", "endings": ["is [a] here.", " stands up. ", "  falls [title] down", "x"], "ind": 24}
    o.update(changes)
    return json.dumps({k: v for k, v in o.items() if v is not None}) + "\n"


@h.test
def the_original_form_is_cleaned_as_lm_evaluation_harness_does():
    # (single pass over pairs of spaces; ctx_b gets a capital and loses its others)
    for text, context, endings in (
            (jsonl() + "\n", "Roof removal:  A man is sitting.  on a roof. He looks", ["is here.", "stands up.", "falls. down", "x"]),
            (jsonl(ctx_a=None, ctx="Ctx [all] of it", label="3"), "Roof removal: Ctx of it", ["is here.", "stands up.", "falls. down", "x"]),
            (jsonl(activity_label=None, ctx_b="", ctx_a="A\u00e9 B"), "A\u00e9 B ", ["is here.", "stands up.", "falls. down", "x"])):
        # what preprocess() there gives, written out once more
        import re

        def preprocess(s):
            return re.sub("\\[.*?\\]", "", s.strip().replace(" [title]", ". ")).replace("  ", " ")
        o = json.loads(text)
        query = o["ctx_a"] + " " + o["ctx_b"].capitalize() if "ctx_a" in o and "ctx_b" in o else o["ctx"]
        query = preprocess((o["activity_label"] + ": " if "activity_label" in o else "") + query)
        expected = six_lines([(query, 3, [preprocess(e) for e in o["endings"]])])
        a, b = hellaswag(text=text).json(), hellaswag(text=expected).json()
        h.equal(a["settings"]["form"], "JSONL", "form")
        h.equal(b["settings"]["form"], "six lines", "form")
        h.equal(a["settings"]["tasks_hash"], b["settings"]["tasks_hash"], f"tasks of {text!r}, expected {expected!r}")
        h.check(a["settings"]["tasks_hash"] != hellaswag().json()["settings"]["tasks_hash"], "the hash is always the same")


@h.test
def line_ends_and_limits():
    base = hellaswag().json()
    dos = hellaswag(text=six_lines(TASKS).replace("\n", "\r\n") + "\r\n\n").json()
    h.equal(dos["settings"]["tasks_hash"], base["settings"]["tasks_hash"], "CR LF")
    h.equal(hellaswag(text="\ufeff" + six_lines(TASKS)).json()["settings"]["tasks_hash"], base["settings"]["tasks_hash"], "a byte order mark")
    h.equal(hellaswag(text=six_lines(TASKS)[:-1]).json()["settings"]["tasks_hash"], base["settings"]["tasks_hash"], "no newline at the end")
    r = hellaswag("--tasks", 3).json()
    h.equal((r["tasks"], r["settings"]["tasks_in_file"]), (3, 4), "tasks")


@h.test
def bad_files_are_refused_by_line():
    good = six_lines(TASKS)
    lines = good.splitlines(keepends=True)
    cases = [
        ("", "no tasks"), ("\n\n", "no tasks"),
        ("".join(lines[:-1]), "line 23"),                      # an ending is missing
        ("".join(lines[:7] + ["x\n"] + lines[8:]), "line 8"),  # label
        ("".join(lines[:7] + ["4\n"] + lines[8:]), "line 8"), ("".join(lines[:7] + ["-1\n"] + lines[8:]), "line 8"),
        ("".join(lines[:9] + ["\n"] + lines[10:]), "line 10"), ("".join(lines[:6] + ["  \n"] + lines[6:]), "line 7"),
        (jsonl() + "{\n", "line 2"), (jsonl() + "[]\n", "line 2"), (jsonl() + "\x1b[2J\n", "line 2"), (jsonl(label=4), "line 1"), (jsonl(label=""), "line 1"), (jsonl(label=None), "line 1"),
        (jsonl(label=1.5), "line 1"), (jsonl(endings=["a", "b", "c"]), "line 1"), (jsonl(endings=["a", "b", "c", 4]), "line 1"),
        (jsonl(endings=["a", "b", "c", "[gone]"]), "line 1"), (jsonl(endings="abcd"), "line 1"), (jsonl(ctx_a=None, ctx=None), "line 1"),
        (jsonl(ctx_a="", ctx_b="", activity_label=None), "line 1"), (jsonl() + jsonl(ctx_b=7, ctx=7), "line 2"),
    ]
    for text, says in cases:
        r = h.refused(h.BAD_FILE, "eval", "hellaswag", "-m", h.tiny(), "-f", h.write("bad.txt", text), names=(says,))
        h.check("\x1b" not in r.err, f"the file commands the terminal: {r.err!r}")
    h.refused(h.USAGE, "eval", "hellaswag", "-m", h.tiny("--context", "32"), "-f", h.write("tasks.txt", good), names=("line 1",))


h.main()
