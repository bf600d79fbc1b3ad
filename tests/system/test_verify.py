#!/usr/bin/env python3
"""kvd verify: it passes on a sound engine, and it can fail."""
import harness as h


def verify(*args, expect=h.DONE, model=None):
    return h.kvd("verify", "-m", model or h.tiny("--context", "512"), *args, expect=expect)


@h.test
def a_sound_engine_passes():
    r = verify("--quick")
    h.check(r.out.strip() != b"", f"no table\n{r}")


@h.test
def json_is_one_object():
    value = verify("--quick", "--json").json()
    h.check(isinstance(value, dict), "not an object")


@h.test
def one_ulp_is_found():
    for place in ("0:0", "1:5", "3:17"):
        r = verify("--quick", "--inject", place, expect=h.CHECK)
        h.check(r.out.strip() != b"", f"no table\n{r}")


@h.test
def one_ulp_is_found_in_json():
    verify("--quick", "--json", "--inject", "2:7", expect=h.CHECK).json()


@h.test
def the_full_matrix_passes():
    if h.SANITIZED:
        h.skip("too slow under a sanitizer")
    verify("--full")


h.main()
