"""Sliding-window layers keep only their window's blocks, and no bit of the output
depends on it: against sessions that keep all of them (tests/golden/windows.c)."""
import json
import os
import subprocess

import harness as h

GEMMA = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvd", "models",
                     "gemma-3-270m-q4_k_m.gguf")


def windows(model, tokens):
    if not os.environ.get("WINDOWS"):
        h.skip("the program windows was not built")
    done = subprocess.run([os.environ["WINDOWS"], model, str(tokens)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=h.TIMEOUT_S)
    h.equal(done.returncode, 0, done.stderr.decode())
    r = json.loads(done.stdout)
    h.check(r["equal"], f"logits differ: {r}")
    h.equal(r["kv_bytes"], r["expected_bytes"], "bytes with the window's blocks only")
    h.equal(r["kept_bytes"], r["full_bytes"], "bytes with all blocks")
    h.check(r["kv_bytes"] < r["kept_bytes"], f"nothing was dropped: {r}")


@h.test
def a_tiny_model_beyond_its_window():
    for tokens in (80, 100, 333):
        windows(h.tiny("--arch", "gemma3", "--window", "48"), tokens)


@h.test
def gemma_3_at_2000_tokens():
    if h.SANITIZED:
        h.skip("real models are too slow under a sanitizer")
    if not os.path.exists(GEMMA):
        h.skip(f"no {os.path.basename(GEMMA)} in the models folder")
    windows(GEMMA, 2000)


h.main()
