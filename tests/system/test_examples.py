#!/usr/bin/env python3
"""examples/: built with the rest, and they do what their first comment says."""
import os
import subprocess

import harness as h

GENERATE = os.environ.get("EXAMPLE_GENERATE", "")


def generate(*args, expect=h.DONE):
    if not os.access(GENERATE, os.X_OK):
        h.skip("environment variable EXAMPLE_GENERATE does not name the example")
    done = subprocess.run([GENERATE, *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=h.TIMEOUT_S)
    r = h.watch(h.Result([GENERATE, *map(str, args)], done.returncode, done.stdout, done.stderr.decode()))
    h.equal(r.code, expect, str(r))
    return r


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


h.main()
