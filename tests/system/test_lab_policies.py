#!/usr/bin/env python3
"""The experiments that compare policies: generation, multiturn, baselines, sweep. On
tiny models: that exact rows are exact, that windows lose, that every row is there, and
what a list of policies may be. That a row which is not exact is noticed at all is
tests/unit/test_lab_exact.c's matter: it needs a fault to be put in."""
import harness as h

GEMMA = ("--arch", "gemma3", "--window", "48")
LOSSY = ("window", "streaming-llm", "h2o", "snapkv", "tova")
BUDGETS = (32, 64, 128, 256, 384)


def lab(name, *args, model=None, expect=h.DONE):
    # One thread: what is tested is no matter of threads, and a busy machine is kind to it.
    return h.kvd("lab", name, "-m", model or h.tiny(), "--json", "--threads", 1, *args, expect=expect)


def table(result, name):
    """Rows as dictionaries by key."""
    for t in result["tables"]:
        if t["name"] == name:
            keys = [c["key"] for c in t["columns"]]
            for row in t["rows"]:
                h.equal(len(row), len(keys), f"cells of a row of {name}")
            return [dict(zip(keys, row)) for row in t["rows"]]
    raise h.Failure(f"no table {name} in {[t['name'] for t in result['tables']]}")


def run(name, *args, **options):
    r = lab(name, *args, **options).json()
    h.check("check_failed" not in r, f"{name}: {r['notes']}")
    for row in r["paper_rows"]:
        h.check(row["verdict"] in ("reproduced", "differs", "not comparable"), f"verdict of {row}")
        h.check(bool(row["why"]) or row["verdict"] == "reproduced", f"no reason: {row}")
    for plot in r["plots"]:
        keys = [c["key"] for t in r["tables"] if t["name"] == plot["table"] for c in t["columns"]]
        for axis in ("x", "y", "by", "z"):
            h.check(plot.get(axis) is None or plot[axis] in keys, f"plot {plot['name']}: no column {plot[axis]}")
    return r


def refused(policies, *names):
    h.refused(h.USAGE, "lab", "baselines", "-m", h.tiny(), "--policies", policies, names=names)


@h.test
def policies_are_checked():
    known = ("kv-direct", "full", "window", "streaming-llm", "h2o", "snapkv", "tova")
    refused("nope", "nope", *known)
    refused("window:32,kv_direct", "kv_direct", *known)
    refused("full,,window:32", *known)
    refused("full,", "comma")
    refused("window", "number")
    refused("window:7", "8")
    refused("window:32x", "32x")
    refused("window:-32", "-32")
    refused("window:32:64", "one number")
    refused("window:99999999999999999999", "number")
    refused("full:32", "full")
    refused("full:recompute", "recompute")
    refused("kv-direct:32:renumber", "renumber")
    refused("h2o:32:renumber:renumber", "once")
    refused("h2o:32:disk", "disk")
    refused("kv-direct:32:recompute:disk", "once")
    refused("kv-direct:32:tape", "tape")
    refused("window:" + "0" * 80 + "32", "too long")


@h.test
def three_ways_generate_the_same():
    for model in (h.tiny(), h.tiny(*GEMMA)):
        r = run("generation", "-n", 12, model=model)
        rows = table(r, "generation")
        h.equal([row["way"] for row in rows], ["cached", "kv-direct", "from scratch"])
        for row in rows:
            h.equal((row["tokens"], row["equal_tokens"], row["equal_bits"]), (12, 12, 12), row["way"])
        h.equal(rows[0]["recomputed"], 0, "recomputed with a cache")
        prompt = r["settings"]["prompt_tokens"]
        h.equal(rows[1]["recomputed"], sum(prompt + t for t in range(11)), "recomputed by kv-direct: all there is, for every token")
        h.check(rows[1]["peak_mb"] < rows[0]["peak_mb"], f"kv-direct took no less memory: {rows}")


def one_talk(model, *args):
    r = run("multiturn", "--quick", *args, model=model)
    ways = {row["way"]: row for row in table(r, "ways")}
    turns = table(r, "turns")
    h.equal(set(ways), {"full", "kv-direct recompute", "kv-direct disk", "kv-direct parked", "window"}, "ways")
    full = ways["full"]
    for name, row in ways.items():
        h.equal(row["turns"], 8, f"turns of {name}")
        h.equal(len([t for t in turns if t["way"] == name]), 8, f"turns of {name} in the table")
        if name != "window":
            h.equal(row["equal"], 8, f"turns of {name} equal to full's")
    for name in ("kv-direct recompute", "kv-direct disk"):
        h.check(ways[name]["peak_mb"] <= ways[name]["budget_mb"] < full["peak_mb"], f"{name}: {ways[name]}, full: {full}")
    h.check(ways["kv-direct recompute"]["recomputed"] > 0, "nothing was recomputed")
    h.check(ways["kv-direct disk"]["recomputed"] < 0.5 * ways["kv-direct recompute"]["recomputed"], f"the disk was of little use: {ways}")
    h.check(ways["kv-direct parked"]["after_mb"] < 0.1 * full["after_mb"], f"parked: {ways['kv-direct parked']}")
    h.check(ways["window"]["first_different"] is not None, "a window that forgets most of the talk said the same to its end")
    h.check(ways["window"]["peak_mb"] < full["peak_mb"], f"window: {ways['window']}")
    h.equal([t["context"] for t in turns if t["way"] == "full"], [t["context"] for t in turns if t["way"] == "kv-direct disk"], "context")


@h.test
def a_talk_within_a_budget():
    one_talk(h.tiny("--layers", "24"), "--spill-dir", h.folder())


@h.test
def a_talk_over_sliding_windows():
    one_talk(h.tiny(*GEMMA, "--layers", "24"), "--spill-dir", h.folder())


@h.test
def a_talk_that_outgrows_the_context_ends():
    r = run("multiturn", "--quick", "--spill-dir", h.folder(), model=h.tiny("--layers", "24", "--context", "400"))
    for row in table(r, "ways"):
        h.check(0 < row["turns"] < 8, f"turns: {row}")
    h.check(any("trained context" in note for note in r["notes"]), "no note")


def is_exact(row):
    return row["method"].startswith(("full", "kv-direct"))


def matrix(model):
    r = run("baselines", "--quick", "-n", 6, "--spill-dir", h.folder(), model=model)
    rows = table(r, "matrix")
    labels = ["full", "kv-direct recompute", "kv-direct disk"] + [x for m in LOSSY for x in (m, m + " renumbered")]
    h.equal(sorted((row["method"], row["budget"]) for row in rows), sorted((m, b) for m in labels for b in BUDGETS), "cells")
    full = next(row for row in rows if row["method"] == "full")
    for row in rows:
        what = f"{row['method']}:{row['budget']}"
        if is_exact(row):
            for key, value in (("match_free", 100), ("match_forced", 100), ("kl_free", 0), ("kl_forced", 0), ("same_bits", 6)):
                h.equal(row[key], value, f"{key} of {what}")
        else:
            h.check(row["kl_forced"] > 0, f"{what} forgot nothing: {row}")
            h.check(row["same_bits"] >= 1, f"{what}: the prompt's own logits differ: {row}")
        if not is_exact(row) and row["budget"] <= 64:
            h.check(row["held_mb"] < 0.6 * full["held_mb"], f"{what} holds {row['held_mb']} MB, full {full['held_mb']}")
    h.check(any(row["match_free"] < 100 for row in rows if row["budget"] == 32 and not is_exact(row)), "no method lost a token")
    h.equal(len(table(r, "prompts")), len(labels) * 5 - 4, "runs")
    h.equal([p["kind"] for p in r["plots"]], ["heat"] * 4)


@h.test
def all_methods_at_all_budgets():
    matrix(h.tiny())


@h.test
def all_methods_over_sliding_windows():
    matrix(h.tiny(*GEMMA))


@h.test
def policies_of_ones_own():
    r = run("baselines", "--quick", "-n", 4, "--policies", "full, h2o:40:renumber ,kv-direct:0")
    h.equal([(row["method"], row["budget"]) for row in table(r, "matrix")],
            [("full", 40), ("full", 0), ("h2o renumbered", 40), ("kv-direct recompute", 0)])


@h.test
def a_text_of_ones_own():
    text = "".join(f"{i} times {i + 1} is {i * (i + 1)}, and then the children counted on. " for i in range(60))
    r = run("baselines", "--quick", "-n", 3, "--policies", "window:64", "-f", h.write("own.txt", text))
    h.check("text_hash" in r["settings"], f"settings: {r['settings']}")
    other = run("baselines", "--quick", "-n", 3, "--policies", "window:64")
    h.check(r["settings"]["prompts_hash"] != other["settings"]["prompts_hash"], "the text was not used")
    h.refused(h.BAD_FILE, "lab", "baselines", "-m", h.tiny(), "--quick", "-f", h.write("short.txt", "too short"), names=("512",))


@h.test
def windows_swept():
    r = run("sweep", "--quick", "-n", 30)
    rows = {(row["method"], row["window"]): row for row in table(r, "windows")}
    h.equal(set(rows), {(m, b) for m in ("kv-direct", "window", "streaming-llm") for b in (8, 16, 32, 64, 128, 256)})
    for (method, b), row in rows.items():
        if method == "kv-direct":
            h.equal((row["match"], row["same_bits"], row["steps"]), (100, 30, 30), f"{method}:{b}")
        elif b >= 64:  # a prompt of 32 and 30 tokens
            h.equal((row["match"], row["free"]), (100, 30), f"{method}:{b} had nothing to forget")
        else:
            h.equal(row["free"], max(1, b - 31), f"{method}:{b}, tokens before anything is forgotten")
            h.check(row["first_different"] >= row["free"], f"{method}:{b} forgot too early: {row}")
    h.check(rows["window", 8]["match"] < 50, f"a window of 8: {rows['window', 8]}")
    h.equal(len(table(r, "lengths")), 18 * 3, "rows by length")


h.main()
