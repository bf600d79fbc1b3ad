#!/usr/bin/env python3
"""Sum up Meson test logs, one check a count, and show what was skipped.

Meson counts a test program as one test. This reads what the programs themselves
printed: cmocka's lines, or a closing line "N passed, N failed[, N skipped]" as
checkasm and the system tests print it; anything else counts as one. A program
that Meson calls failed counts as at least one failure, so a crash after a
hundred good checks is not lost.

usage: count_tests.py LABEL BUILD/meson-logs/testlog.json
Prints the skips, and failures with the end of their output, then "passed failed skipped" as the last line.
"""
import json
import re
import sys

CLOSING = re.compile(r"^(?:.*: )?(\d+) passed, (\d+) failed(?:, (\d+) skipped)?\s*$", re.M)
CMOCKA = re.compile(r"^\[ +(OK|FAILED|SKIPPED) +\] (?!\d)(\S.*)$", re.M)
TAIL = 40  # lines of a failed test's output to show
SKIP = re.compile(r"^.*\bSKIP\b.*$", re.M)


def count(test):
    out = test.get("stdout", "")
    text = out + "\n" + test.get("stderr", "")
    result = test["result"]
    closing = CLOSING.findall(text)
    cmocka = [kind for kind, _ in CMOCKA.findall(out)]
    if closing:
        n = [int(x or 0) for x in closing[-1]]
    elif cmocka:
        n = [cmocka.count("OK"), cmocka.count("FAILED"), cmocka.count("SKIPPED")]
    else:
        n = [int(result == "OK"), 0, int(result == "SKIP")]
    if result not in ("OK", "EXPECTEDFAIL", "SKIP") and n[1] == 0:
        n[1] = 1
    return n, SKIP.findall(text)


def main():
    label, path = sys.argv[1:3]
    total = [0, 0, 0]
    with open(path, encoding="utf-8", errors="replace") as f:
        for line in f:
            test = json.loads(line)
            name = test["name"].split(" / ")[-1].strip()
            n, skips = count(test)
            total = [a + b for a, b in zip(total, n)]
            if n[2] and not skips:
                skips = [f"SKIP: {n[2]} check(s), no reason given"]
            for s in skips:
                print(f"  {label}/{name}: {s.strip()}")
            if n[1]:
                print(f"  {label}/{name}: {test['result']}: {n[1]} FAILED; the end of its output:")
                lines = (test.get("stdout", "") + test.get("stderr", "")).splitlines()
                # A failure may stand far above the end: show those lines too.
                early = [x for x in lines[:-TAIL] if x.startswith(("FAILED", "not ok", "[  FAILED"))]
                print("\n".join("    | " + x[:2000] for x in early[:TAIL] + lines[-TAIL:]))
    print(*total)
    return 0


if __name__ == "__main__":
    sys.exit(main())
