#!/usr/bin/env python3
"""The lossy policies against an independent implementation (plain_policies.py).

Tiny models with F32 weights are fed to the engine (tests/golden/kept, whose path the
build passes in KEPT) and to the plain implementation: a prompt, single tokens, a second
prompt behind them, single tokens again; then, from 0, short feeds of all sorts. After
every feed each KV head of each layer must keep the same positions, exactly, and the
logits of every token must agree within LOGITS of the largest.

Where two scores are nearly equal the engine's choice is accepted and counted; more than
one in a hundred such choices is a failure.

That the comparison can fail is a test as well: each rule of the document is turned into
a wrong one, and the comparison must notice.
"""
import json
import os
import random
import subprocess

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # tiny products: threads only wait for each other

import harness as h

try:
    import numpy as np
    import plain_policies as plain
except ImportError as e:
    np = plain = None
    MISSING = e.name

LOGITS = {"f32": 1e-3, "f16": 1e-2}
MOST_NEAR = 0.01
POLICIES = ("window", "streaming-llm", "h2o", "snapkv", "tova")

MODELS = {
    "llama": ("--type", "F32", "--heads", "8", "--kv-heads", "2"),
    "gemma3": ("--type", "F32", "--arch", "gemma3", "--heads", "4", "--kv-heads", "2", "--window", "40"),
    "qwen2": ("--type", "F32", "--arch", "qwen2", "--heads", "6", "--kv-heads", "2", "--d", "96"),
}
LONG = [90] + [1] * 60 + [30] + [1] * 20
SHORT = [1] * 12 + [5] + [1] * 8 + [2] + [1] * 3 + [40, 3] + [1] * 12

_models, _runs = {}, {}


def model(name):
    if plain is None:
        h.skip(f"Python package {MISSING} is not installed")
    if not os.access(os.environ.get("KEPT", ""), os.X_OK):
        h.skip("environment variable KEPT does not name tests/golden/kept")
    if name not in _models:
        _models[name] = plain.Model(h.tiny(*MODELS[name]))
    return _models[name]


def feeds(m, sizes):
    draw = random.Random(11)
    return [draw.choices(range(3, m.n_vocab), k=n) for n in sizes]


def engine(name, policy, budget, renumber, scenario, *options):
    """What the engine keeps and says after each feed of LONG or SHORT."""
    key = name, policy, budget, renumber, scenario, options
    if key in _runs:
        return _runs[key]
    m = model(name)
    lists = feeds(m, LONG if scenario == "long" else SHORT)
    if scenario == "short":
        lists = [[3, 4, 5, 6] * 10, []] + lists  # a session that was rewound is as good as a new one
    command = [os.environ["KEPT"], h.tiny(*MODELS[name]), policy, str(budget), "renumber" if renumber else "original", *options]
    done = subprocess.run(command, input="".join(" ".join(map(str, ids)) + "\n" for ids in lists), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=h.TIMEOUT_S)
    h.equal(done.returncode, 0, f"{' '.join(command)}: {done.stderr}")
    said = [json.loads(line) for line in done.stdout.splitlines()]
    if scenario == "short":
        lists, said = lists[2:], said[1:]
    h.equal(len(said), len(lists), "feeds answered")
    _runs[key] = list(zip(lists, said))
    return _runs[key]


def compare(name, policy, budget, renumber, scenario, kv_type="f32", r=None, options=()):
    """The plain session after the whole scenario, and the largest relative difference of a logit; or a failure."""
    what = f"{name} {policy}:{budget}{':renumber' if renumber else ''} {scenario} {kv_type}"
    m = model(name)  # or a skip
    s = plain.Session(m, policy, budget, renumber, kv_type, r)
    worst = 0.0
    for i, (ids, said) in enumerate(engine(name, policy, budget, renumber, scenario, "--kv-type", kv_type, *options)):
        at = f"{what}: feed {i}, tokens {s.n}..{s.n + len(ids) - 1}"
        for heads in said["kept"]:
            for pos in heads:
                h.check(len(pos) <= budget, f"{at}: {len(pos)} positions kept")
        try:
            expected = s.feed(ids, said["kept"])
        except plain.Differs as e:
            raise h.Failure(f"{at}: {e}")
        got = np.array(said["logits"])
        h.equal(got.shape, expected.shape, at)
        difference = np.abs(got - expected).max(1) / np.abs(expected).max(1)
        h.check(difference.max() <= LOGITS[kv_type],
                f"{at}: logits of token {difference.argmax()} differ by {difference.max():.3g} of the largest")
        worst = max(worst, difference.max())
    return s, worst


def compare_all(cases):
    choices = near = 0
    worst = 0.0
    for case in cases:
        s, difference = compare(*case[:6], options=case[6:])
        choices, near, worst = choices + s.choices, near + s.near, max(worst, difference)
    print(f"   {len(cases)} runs, {choices} choices, {near} by a near tie, logits within {worst:.2g} of the largest")
    h.check(choices > 100 * len(cases), f"{choices} choices in {len(cases)} runs: too few to say anything")
    h.check(near <= MOST_NEAR * choices, f"near ties decided {near} of {choices} choices")


BOTH = (False, True)
BUDGETS = (24,) if h.SANITIZED else (8, 24, 64)


def long_cases(name):
    return [(name, p, b, renumber, "long", "f32") for p in POLICIES for b in BUDGETS for renumber in BOTH]


@h.test
def llama_with_groups():
    compare_all(long_cases("llama"))


@h.test
def gemma3_with_a_sliding_window():
    compare_all(long_cases("gemma3"))


@h.test
def qwen2_with_biases():
    compare_all(long_cases("qwen2"))


@h.test
def short_feeds_in_a_rewound_session():
    compare_all([(name, p, 9, renumber, "short", "f32") for name in MODELS for p in POLICIES for renumber in BOTH])


@h.test
def f16_in_small_chunks_on_two_threads():
    compare_all([(name, p, 24, renumber, "short", "f16", "--chunk", "16", "--threads", "2")
                 for name in MODELS for p in POLICIES for renumber in BOTH])


@h.test
def near_ties_only_are_accepted():
    m = model("llama")
    s = plain.Session(m, "tova", 8)
    t = plain.Held(1)
    t.append(np.arange(4), np.zeros((4, 1)), np.zeros((4, 1)))
    t.score = np.array([0.2, 0.5, 0.5 + 1e-7, 0.5])
    ours, ballot = np.array([False, False, True, True]), np.array([False, True, True, True])
    for kept, accepted in (((2, 3), True), ((1, 3), True), ((1, 2), False), ((0, 2), False), ((2,), False), ((1, 2, 3), False)):
        theirs = np.isin(t.pos, kept)
        try:
            got = s.settle("", t, ballot, ours, theirs)
        except plain.Differs:
            h.check(not accepted, f"{kept} was refused")
        else:
            h.check(accepted and np.array_equal(got, theirs), f"{kept} was accepted")
    h.equal(s.near, 1, "near ties")


# What is wrong, where it should show, and the rule that makes it so.
WRONG = [
    ("B positions beside the new one", ("llama", "window", 8, False, "long"), {"count_new": False}),
    ("five sinks", ("llama", "streaming-llm", 24, False, "long"), {"sinks": 5}),
    ("three sinks", ("gemma3", "streaming-llm", 9, True, "short"), {"sinks": 3}),
    ("a third recent", ("llama", "h2o", 24, False, "long"), {"recent": 3}),
    ("the new token is not one of the last", ("llama", "h2o", 24, False, "long"), {"count_new": False}),
    ("h2o without the group's sum", ("llama", "h2o", 24, False, "long"), {"group_sum": False}),
    ("h2o forgets the prompt's queries", ("qwen2", "h2o", 24, False, "long"), {"prompt_scores": False}),
    ("16 queries vote", ("llama", "snapkv", 64, False, "long"), {"observe": 16}),
    ("snapkv without the group's sum", ("qwen2", "snapkv", 24, True, "long"), {"group_sum": False}),
    ("pooling of 5", ("llama", "snapkv", 24, False, "long"), {"reach": 2}),
    ("pooling of 9", ("llama", "snapkv", 24, False, "long"), {"reach": 4}),
    ("pooling by the mean", ("llama", "snapkv", 24, False, "long"), {"pool": "mean"}),
    ("pooling over the window's own positions", ("llama", "snapkv", 24, False, "long"), {"pool_last": True}),
    ("generated tokens may go", ("llama", "snapkv", 24, False, "long"), {"vote_late": True}),
    ("when no scored one is left the newest goes", ("qwen2", "snapkv", 8, False, "long"), {"oldest": False}),
    ("of equal scores the younger goes", ("llama", "snapkv", 24, False, "long"), {"younger": False}),
    ("tova for each KV head", ("llama", "tova", 24, False, "long"), {"all_heads": False}),
    ("a window one wider", ("gemma3", "window", 64, False, "long"), {"window_edge": 1}),
    ("a window one narrower", ("gemma3", "h2o", 64, True, "long"), {"window_edge": -1}),
    ("original positions for renumbered ones", ("llama", "streaming-llm", 24, True, "long"), {"renumber": False}),
    ("renumbered positions for original ones", ("llama", "h2o", 24, False, "long"), {"renumber": True}),
    ("queries numbered from 0", ("qwen2", "window", 24, True, "long"), {"behind": False}),
]


@h.test
def the_comparison_can_fail():
    """Every wrong rule shows. The right ones pass in the same runs: the tests above."""
    for what, case, change in WRONG:
        if "pool" in change:
            change = {"pool": getattr(np, change["pool"])}
        model(case[0])
        try:
            compare(*case, r=plain.rules(**change))
        except h.Failure as e:
            h.check(" keeps " in str(e) or " kept " in str(e) or "logits of token" in str(e), f"{what}: {e}")
        else:
            raise h.Failure(f"nobody noticed: {what}")


h.main()
