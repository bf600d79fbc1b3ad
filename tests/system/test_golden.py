#!/usr/bin/env python3
"""Receipts of the default model, checked in: any machine must give them.

usage: test_golden.py [slow]      slow: each case over the axes, one at a time
With KVD_UPDATE_GOLDEN=1 the file is written anew instead (a commit of its own, with the reason).
"""
import json
import os
import sys

import harness as h

PATH = os.path.join(h.ROOT, "tests", "golden", "receipts.json")
SLOW = "slow" in sys.argv[1:]
sys.argv = [a for a in sys.argv if a != "slow"]
with open(PATH, encoding="utf-8") as f:
    GOLDEN = json.load(f)
CASES = [name for name, case in GOLDEN.items() if isinstance(case, dict)]


def run(case, *more):
    return h.run_json(h.default_model(), *case["args"], *more, cwd=h.ROOT)


def check_case(name):
    case = GOLDEN[name]
    if h.SANITIZED:
        h.skip("the real model is too slow under a sanitizer")
    r = run(case, *case.get("fast", ()))
    if os.environ.get("KVD_UPDATE_GOLDEN"):
        case["receipt"] = r["receipt"]
        with open(PATH, "w", encoding="utf-8") as out:
            json.dump(GOLDEN, out, indent=2)
            out.write("\n")
    h.equal(r["receipt"], case["receipt"], name)
    if SLOW:
        for axis in [("--policy", "full")] + [("--evict-to", "recompute", "--kv-tokens", b) for b in case.get("kv_tokens", (0, 16, 48, 64, 128))] + \
                [("--threads", t) for t in (1, 2, 3)] + [("--chunk", c) for c in (1, 7, 64, 512)] + \
                [("--cpu", c) for c in h.cpus()]:
            h.equal(run(case, *axis)["receipt"], case["receipt"], f"{name} {' '.join(map(str, axis))}")


for case_name in CASES:
    def one(name=case_name):
        check_case(name)
    one.__name__ = "golden_" + case_name
    h.test(one)

h.main()
