#!/usr/bin/env python3
"""The memory budget: what docs/memory.md says, held against what the program reports.

The formula is written here once more, from the page and not from the code.
"""
import contextlib
import os
import resource
import signal

import harness as h

# Shape of the tiny default model (tools/make_tiny_gguf.py).
L, D, N_KV, D_HEAD = 4, 64, 2, 16
N = 40
PROMPT = "One budget holds all context memory, and whatever does not fit is dropped and built again, bit by bit." * 2


def ceil(a, b):
    return -(-a // b)


class Pass:
    """Bytes of one pass from n0 to n0 + new tokens; [start0, n0) was resident, [start, n) will be."""

    def __init__(self, n0, start0, new, start, b=2, s=4):
        n = n0 + new
        self.evicted = min(max(start, start0), n0)
        block = 2 * N_KV * D_HEAD * 16 * b
        first = start // 16 if start < n else ceil(n, 16)
        self.kv = (ceil(n, 16) - first) * block * L
        self.layer = (first if self.evicted else max(0, first - n0 // 16)) * block
        self.stream = (self.evicted + new) * D * s
        capacity = ceil(n, 256) * 256
        self.checkpoint = capacity * 4 + capacity // 16 * 8
        self.bytes = self.kv + self.layer + self.stream + self.checkpoint


def start_of(n, keep):
    """Where --kv-tokens keeps from, at n tokens."""
    return n if keep == 0 else max(0, n - keep) // 16 * 16


def run(*args, n=N, model=None):
    return h.run_json(model or h.tiny(), "--raw", "-p", PROMPT, "-n", n, "--ignore-eos", "--evict-to", "recompute", *args)


def walk(prompt, generated, keep):
    """The passes of a run with --kv-tokens, none of which fits as a whole: prompt, then token by token.

    The last generated token is fed to no pass."""
    passes, n, start = [], 0, 0
    for new in [prompt] + [1] * (generated - 1):
        to = start_of(n + new, keep)
        passes.append(Pass(n, start, new, to))
        n, start = n + new, to
    return passes


@h.test
def recomputed_tokens_are_the_evicted_positions_of_all_passes():
    for keep in (0, 16, 48, 64):
        r = run("--kv-tokens", keep)
        passes = walk(r["prompt_tokens"], r["generated_tokens"], keep)
        h.equal(r["kv"]["passes"], len(passes), f"passes with {keep} kept")
        h.equal(r["kv"]["recomputed_tokens"], sum(p.evicted for p in passes), f"recomputed_tokens with {keep} kept")


@h.test
def peak_is_the_formula_to_the_byte():
    for keep in (0, 16, 48, 64):
        for kv_type, b in (("f16", 2), ("f32", 4)):
            r = run("--kv-tokens", keep, "--kv-type", kv_type)
            n, start, peak = 0, 0, 0
            for new in [r["prompt_tokens"]] + [1] * (r["generated_tokens"] - 1):
                to = start_of(n + new, keep)
                peak = max(peak, Pass(n, start, new, to, b).bytes)
                n, start = n + new, to
            h.equal(r["kv"]["peak_bytes"], peak, f"peak with {keep} kept as {kv_type}")


@h.test
def resident_and_evicted_add_up():
    for keep in (0, 16, 64):
        r = run("--kv-tokens", keep)
        total = r["prompt_tokens"] + r["generated_tokens"] - 1
        kv = r["kv"]
        h.equal(kv["resident_tokens"] + kv["evicted_tokens"], total, f"with {keep} kept")
        h.equal(kv["evicted_tokens"], start_of(total, keep), f"evicted with {keep} kept")


@h.test
def full_policy_evicts_nothing():
    kv = run("--policy", "full")["kv"]
    h.equal((kv["evicted_tokens"], kv["recomputed_tokens"]), (0, 0), "evicted, recomputed")


@h.test
def the_peak_never_passes_the_budget():
    full = run("--policy", "full")["kv"]["peak_bytes"]
    for budget in range(full, full // 3, -997):
        r = h.kvd("run", "-m", h.tiny(), "--json", "--raw", "-p", PROMPT, "-n", 8, "--ignore-eos",
                  "--evict-to", "recompute", "--kv-budget", budget)
        if r.code == h.RESOURCES:
            break
        h.equal(r.code, h.DONE, f"exit at budget {budget}")
        kv = r.json()["kv"]
        h.check(kv["peak_bytes"] <= budget, f"peak {kv['peak_bytes']} passes {budget}")
        h.equal(kv["budget_bytes"], budget, "budget_bytes")


@h.test
def a_budget_too_small_is_refused_before_the_first_token():
    r = h.refused(h.RESOURCES, "run", "-m", h.tiny(), "--raw", "-p", PROMPT, "-n", 200,
                  "--evict-to", "recompute", "--kv-budget", "16K")
    digits = [w.strip(".,:;()") for w in r.err.replace("=", " ").split()]
    h.check(any(w.isdigit() and int(w) > 16384 for w in digits), f"no bytes needed in the error\n{r}")


@h.test
def what_the_refusal_asks_for_is_enough_and_no_byte_too_much():
    model, args = h.tiny(), ("--evict-to", "recompute", "--raw", "-p", PROMPT, "-n", "100", "--ignore-eos")
    low, high = 1, 1 << 30  # low fails, high runs
    h.kvd("run", "-m", model, *args, "--kv-budget", high, expect=h.DONE)
    r = h.refused(h.RESOURCES, "run", "-m", model, *args, "--kv-budget", low)
    needs = sorted({int(w) for w in "".join(c if c.isdigit() else " " for c in r.err).split() if int(w) > 4096})
    for need in needs:
        if h.kvd("run", "-m", model, *args, "--kv-budget", need).code == h.DONE:
            h.refused(h.RESOURCES, "run", "-m", model, *args, "--kv-budget", need - 1)
            return
    raise h.Failure(f"no number of the error is a sufficient budget\n{r}")


@h.test
def full_policy_refuses_what_kv_direct_runs():
    model, args = h.tiny(), ("--evict-to", "recompute", "--raw", "-p", PROMPT, "-n", "100", "--ignore-eos", "--kv-budget", "96K")
    h.refused(h.RESOURCES, "run", "-m", model, *args, "--policy", "full")
    h.kvd("run", "-m", model, *args, expect=h.DONE)


@h.test
def context_beyond_the_trained_one_is_refused():
    h.refused(h.USAGE, "run", "-m", h.tiny("--context", "64"), "--raw", "-p", PROMPT, "-n", 100)


@h.test
def the_stricter_of_budget_and_kv_tokens_holds():
    full = run("--policy", "full")["kv"]["peak_bytes"]
    r = run("--kv-tokens", 16, "--kv-budget", full * 2)
    h.equal(r["kv"]["evicted_tokens"], start_of(r["prompt_tokens"] + r["generated_tokens"] - 1, 16), "B is stricter")
    tight = run("--kv-budget", full * 2 // 3)
    h.check(tight["kv"]["evicted_tokens"] > 0, "nothing evicted")
    both = run("--kv-tokens", 4096, "--kv-budget", full * 2 // 3)
    h.equal(both["kv"]["evicted_tokens"], tight["kv"]["evicted_tokens"], "the budget is stricter")


@h.test
def address_space_just_above_load_and_budget_suffices():
    if h.SANITIZED:
        h.skip("RLIMIT_AS under a sanitizer")
    model = h.tiny("--layers", "8", "--d", "256", "--context", "8192")
    prompt = h.write("long.txt", PROMPT * 20)
    # few threads and a small chunk: their stacks and scratch are not what is measured
    args = ("run", "-m", model, "--evict-to", "recompute", "--json", "--raw", "-f", prompt, "-n", "2", "--ignore-eos",
            "--threads", "1", "--chunk", "32")
    full = h.kvd(*args, "--policy", "full", expect=h.DONE).json()
    need, budget = full["kv"]["peak_bytes"], full["kv"]["peak_bytes"] // 2

    def limited(limit, *more):
        return h.kvd(*args, *more,
                     preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))

    # The address space of the program without its context: the least limit at which --kv-budget runs,
    # by bisection; with it, full must fail cleanly and kv-direct give the same tokens.
    low, high = 0, 1 << 33
    while high - low > 1 << 20:
        middle = (low + high) // 2
        r = limited(middle, "--kv-budget", budget)
        if r.code == h.DONE:
            high = middle
        else:
            h.equal(r.code, h.RESOURCES, f"exit under {middle} bytes of address space\n{r}")
            low = middle
    fits = limited(high, "--kv-budget", budget)
    h.equal(fits.json()["tokens"], full["tokens"], "tokens")
    too_much = limited(high, "--policy", "full")
    h.check(need - budget > 1 << 21, "the model is too small for the test to tell")
    h.equal(too_much.code, h.RESOURCES, f"exit of --policy full\n{too_much}")


# ---- a cgroup -----------------------------------------------------------------------------


def write_to(path, value):
    with open(path, "w", encoding="ascii") as f:
        f.write(str(value))


def groups():
    """Folders of memory cgroups in which another one might be made, and the version: this process's own, and the root."""
    found = []
    with open("/proc/self/cgroup", encoding="utf-8") as f:
        for line in f:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            version = 1 if "memory" in controllers.split(",") else 2 if not controllers else 0
            root = {0: None, 1: "/sys/fs/cgroup/memory", 2: "/sys/fs/cgroup"}[version]
            if root:
                found += [(root + path.rstrip("/"), version), (root, version)]
    return found


def make_group(limit):
    """A new memory cgroup with this limit and no swap, or a skip."""
    for parent, version in groups():
        folder = f"{parent}/kvd-test-{os.getpid()}"
        try:
            os.mkdir(folder)
        except OSError:
            continue
        try:
            write_to(folder + ("/memory.max" if version == 2 else "/memory.limit_in_bytes"), limit)
            with contextlib.suppress(OSError):  # where swap is not counted there may be none
                write_to(folder + ("/memory.swap.max" if version == 2 else "/memory.memsw.limit_in_bytes"), 0 if version == 2 else limit)
            return folder
        except OSError:
            os.rmdir(folder)
    return h.skip("no memory cgroup can be made here (it needs root, or a delegated cgroup)")


@h.test
def a_cgroup_that_holds_base_and_budget_suffices():
    if h.SANITIZED:
        h.skip("a cgroup's limit under a sanitizer")
    model = h.tiny("--layers", "16", "--d", "256", "--context", "8192")
    prompt = h.write("longer.txt", PROMPT * 16)
    args = ("run", "-m", model, "--evict-to", "recompute", "--json", "--raw", "-f", prompt, "-n", "2", "--ignore-eos",
            "--kv-type", "f32", "--threads", "1", "--chunk", "32")
    full = h.kvd(*args, "--policy", "full", expect=h.DONE).json()
    need, slack = full["kv"]["peak_bytes"], 8 << 20  # beside what is loaded: page tables, the pages of files
    budget = need // 2
    limit = full["process_loaded_bytes"] + slack + budget
    h.check(need - budget > 2 * slack, f"{need} bytes: the model is too small for the test to tell")
    group = make_group(limit)

    def join():
        write_to(group + "/cgroup.procs", os.getpid())

    try:
        r = h.kvd(*args, "--kv-budget", budget, preexec_fn=join, expect=h.DONE).json()
        h.equal(r["tokens"], full["tokens"], "tokens")
        h.check(r["kv"]["peak_bytes"] <= budget, "the peak passes the budget")
        # Left to itself it sees the group's limit and not the machine's memory.
        r = h.kvd(*args, preexec_fn=join, expect=h.DONE).json()
        h.equal(r["tokens"], full["tokens"], "tokens without --kv-budget")
        h.check(0 < r["kv"]["budget_bytes"] <= limit // 2, f"a budget of {r['kv']['budget_bytes']}, the group has {limit}")
        h.refused(h.RESOURCES, *args, "--policy", "full", preexec_fn=join)
        # And the limit is real: to keep more than that is the end of the process.
        try:
            r = h.kvd(*args, "--policy", "full", "--kv-budget", "8G", preexec_fn=join)
            h.equal(r.code, h.RESOURCES, f"exit of a process that keeps everything\n{r}")
        except h.Failure as e:
            h.check(f"killed by signal {int(signal.SIGKILL)}" in str(e), f"{e}")
    finally:
        os.rmdir(group)


h.main()
