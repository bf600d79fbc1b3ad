#!/usr/bin/env python3
"""Ctrl-C: the first finishes the token and prints what there is, the second leaves at once.

The signal must come while the program works, without waiting for a clock: its
output goes into a pipe of one page that nobody reads, so it can not finish.
"""
import json
import os
import signal

import harness as h


def start(*args, context="4000"):
    return h.start_unread("run", "-m", h.tiny("--context", context), "--raw", "-p", "x", "-n", "-1", "--ignore-eos", *args)


def finish(command, p, read_end, first=b""):
    out = first + h.read_all(read_end)
    err = p.stderr.read().decode(errors="replace")
    return h.watch(h.Result(command, p.wait(h.TIMEOUT_S), out, err))


@h.test
def interrupted_while_streaming():
    for sig in (signal.SIGINT, signal.SIGTERM):
        command, p, fd = start()
        first = os.read(fd, 1)  # it has begun
        p.send_signal(sig)
        r = finish(command, p, fd, first)
        h.equal(r.code, h.INTERRUPTED, f"exit after {sig.name}\n{r}")
        h.check(len(r.out) > 0, f"nothing printed\n{r}")


@h.test
def interrupted_json_is_whole():
    # The first line on stderr says that it runs; the context is far too long to be done meanwhile.
    command, p, fd = start("--json", "--receipt", context="200000")
    line = p.stderr.readline().decode()
    p.send_signal(signal.SIGINT)
    out = h.read_all(fd)
    err = line + p.stderr.read().decode(errors="replace")
    r = h.watch(h.Result(command, p.wait(h.TIMEOUT_S), out, err))
    h.equal(r.code, h.INTERRUPTED, f"exit\n{r}")
    if not out:
        h.skip("interrupted before the first token")
    value = json.loads(out)
    h.equal(value["stop_reason"], "interrupted")
    h.equal(value["generated_tokens"], len(value["tokens"]), "generated_tokens")


@h.test
def a_second_one_leaves_at_once():
    command, p, fd = start()
    os.read(fd, 1)
    p.send_signal(signal.SIGINT)
    h.wait_until(p, lambda: not h.pending(p, signal.SIGINT))  # two that wait are one
    p.send_signal(signal.SIGINT)
    # Not read any further: if it waited for the pipe to drain, this would hang.
    code = p.wait(h.TIMEOUT_S)
    os.close(fd)
    p.stderr.close()
    h.equal(code if code >= 0 else 128 - code, h.INTERRUPTED, "exit code")


h.main()
