#!/usr/bin/env python3
"""The two runs of tools/demo and their table.

usage: demo_runs.py KVD MODEL RECEIPTS.json
Exit 0 if both receipts are equal to each other and to the one checked in.
"""
import json
import os
import subprocess
import sys

BUDGET = "1M"


def run(kvd, model, case, *options):
    command = [kvd, "run", "-m", model, *case["args"], "--json", "--receipt", "--quiet", *options]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    if done.returncode:
        print("demo: failed:", " ".join(command), file=sys.stderr)
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def amount(n):
    return "none" if not n else f"{n / 2**20:.2f} MiB"


def main():
    kvd, model, receipts = sys.argv[1:4]
    with open(receipts, encoding="utf-8") as f:
        case = json.load(f)["demo"]
    expected = None if os.environ.get("KVD_MODEL") else case["receipt"]
    print(f"Generating twice with {os.path.basename(model)}; the second run rebuilds evicted tokens in each pass ...",
          flush=True)
    full = run(kvd, model, case, "--policy", "full")
    small = run(kvd, model, case, "--kv-budget", BUDGET, "--evict-to", "recompute")

    print(f"\n{small['text'].strip()}\n")
    rows = [("", "all in memory", f"--kv-budget {BUDGET}")]
    for label, key in (("evicted tokens at the end", "evicted_tokens"), ("recomputed tokens", "recomputed_tokens")):
        rows.append((label, *(f"{r['kv'][key]:,}" for r in (full, small))))
    rows.insert(1, ("budget", "none", amount(small["kv"]["budget_bytes"])))
    rows.insert(2, ("peak context memory", *(amount(r["kv"]["peak_bytes"]) for r in (full, small))))
    for label, key in (("prefill tokens/s", "prefill_tokens_per_s"), ("decode tokens/s", "decode_tokens_per_s")):
        rows.append((label, *(f"{r[key]:,.1f}" for r in (full, small))))
    rows.append(("receipt", full["receipt"], small["receipt"]))
    for a, b, c in rows:
        print(f"{a:<26} {b:>32}  {c:>32}")
    print(f"{'receipt checked in':<26} {expected or '(another model: not compared)':>32}")

    equal = full["receipt"] == small["receipt"] and full["tokens"] == small["tokens"]
    within = small["kv"]["peak_bytes"] <= small["kv"]["budget_bytes"]
    golden = expected is None or small["receipt"] == expected
    print()
    if equal and within and golden:
        print("Same tokens, same logits, bit for bit, inside the budget.")
        return 0
    for ok, text in ((equal, "the two runs differ"), (within, "the peak passed the budget"),
                     (golden, "the receipt is not the one checked in")):
        if not ok:
            print("FAILED:", text)
    return 1


if __name__ == "__main__":
    sys.exit(main())
