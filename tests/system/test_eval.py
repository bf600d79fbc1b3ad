#!/usr/bin/env python3
"""kvd eval perplexity: the rule of chunks, and that memory settings do not show in the number."""
import math

import harness as h

TEXT = "".join(f"Line {i}: the quick brown fox jumps over {i * 7} lazy dogs, and again {i * i}.\n" for i in range(60))


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
def a_text_without_a_whole_chunk_is_refused():
    h.check(perplexity(text="short", expect=None).code in (h.USAGE, h.BAD_FILE), "exit code")


@h.test
def an_unknown_evaluation_is_refused():
    h.refused(h.USAGE, "eval", "frobnicate", "-m", h.tiny(), "-f", h.write("x", "x"))


h.main()
