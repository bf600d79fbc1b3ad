#!/usr/bin/env python3
"""examples/: built with the rest, and they do what their first comment says."""
import os
import subprocess

import harness as h

def example(name, *args, expect=h.DONE):
    path = os.environ.get(name, "")
    if not os.access(path, os.X_OK):
        h.skip(f"environment variable {name} does not name the example")
    done = subprocess.run([path, *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=h.TIMEOUT_S)
    r = h.watch(h.Result([path, *map(str, args)], done.returncode, done.stdout, done.stderr.decode()))
    h.equal(r.code, expect, str(r))
    return r


def generate(*args, expect=h.DONE):
    return example("EXAMPLE_GENERATE", *args, expect=expect)


def locate(*args, expect=h.DONE):
    return example("EXAMPLE_LOCATE", *args, expect=expect)


@h.test
def generate_gives_the_text_and_receipt_of_the_program():
    r = h.kvd("run", "-m", h.tiny(), "--raw", "-p", "The cache is", "-n", 64, "--temp", 0, "--receipt", "--quiet", expect=h.DONE)
    h.equal(generate(h.tiny(), "The cache is").out.split(b", context")[0].split(), r.out.split(), "text and receipt")


@h.test
def generate_within_the_least_budget():
    prompt = "The cache is not the memory of the model. " * 12
    free, _, peak = generate(h.tiny(), prompt).out.rpartition(b"context memory at most ")
    refusal = generate(h.tiny(), prompt, 1000, expect=h.RESOURCES).err
    least = int(refusal.split(" need ")[1].split()[0])
    tight, _, tight_peak = generate(h.tiny(), prompt, least).out.rpartition(b"context memory at most ")
    h.equal(tight, free, "text and receipt")
    h.check(int(tight_peak.split()[0]) <= least, f"{tight_peak} is over the budget of {least}")
    h.check(least < int(peak.split()[0]), f"the least budget, {least}, saves nothing of {peak}")


@h.test
def generate_says_why_it_can_not():
    h.check("usage" in generate(expect=h.USAGE).err, "no usage")
    h.check("/nonexistent" in generate("/nonexistent", "x", expect=h.BAD_FILE).err, "the file is not named")
    h.check("budget" in generate(h.tiny(), "x", 1000, expect=h.RESOURCES).err, "no word of the budget")


PROMPT, OTHER = "Line 1 is the memory of the model", "Line 2 is the memory of the model"


def rows(r):
    """p after PROMPT, p after OTHER, and (subject, last) by layer."""
    lines = r.out.decode().splitlines()
    clean, plain = lines[0].split(": ")[1].split()[0], lines[0].split(", ")[1].split()[0]
    table = [line.split() for line in lines[3:] if line and line.split()[0].isdigit()]
    h.equal([int(t[0]) for t in table], list(range(len(table))), "layers")
    return clean, plain, [(t[1], t[2]) for t in table]


@h.test
def locate_begins_and_ends_at_what_must_be():
    for options, layers in (((), 4), (("--arch", "gemma3", "--window", "16", "--layers", "7"), 7)):
        clean, plain, table = rows(locate(h.tiny(*options), PROMPT, OTHER, "the"))
        h.equal(len(table), layers + 1, "rows")
        h.check(clean != plain, f"the prompts do not differ: {clean}")
        h.equal(table[0][0], clean, "the subject patched where it enters layer 0")
        h.equal(table[-1][1], clean, "the last token patched behind the last layer")
        h.equal(table[0][1], plain, "the last token, which is the same in both, patched at layer 0")
        h.equal(table[-1][0], plain, "the subject patched behind the last layer")
        h.check(len({p for row in table for p in row}) > 3, f"nothing happens between: {table}")


@h.test
def locate_finds_a_fact_in_the_real_model():
    """Above the middle of SmolLM2 the last token knows the capital, and the subject no longer matters."""
    r = locate(h.default_model(), "The capital of France is", "The capital of Italy is", " Paris")
    clean, plain, table = rows(r)
    h.check(float(clean) > 10 * float(plain), f"no fact: {clean}, {plain}")
    n = len(table) - 1
    half = float(clean) / 2
    h.check(float(table[n // 3][0]) > half and float(table[n // 3][1]) < half, f"a third of the way: {table[n // 3]}")
    h.check(float(table[n - 2][0]) < half and float(table[n - 2][1]) > half, f"near the end: {table[n - 2]}")


@h.test
def locate_says_why_it_can_not():
    h.check("usage" in locate(expect=h.USAGE).err, "no usage")
    h.check("tokens" in locate(h.tiny(), PROMPT, PROMPT + " and more of it", "x", expect=h.USAGE).err, "not of one length")
    h.check("/nonexistent" in locate("/nonexistent", PROMPT, OTHER, "x", expect=h.BAD_FILE).err, "the file is not named")


h.main()
