#!/usr/bin/env python3
"""kvd verify: it passes on a sound engine, it can fail, and it tells a fault of numbers from a mismatch."""
import array
import importlib.util
import os
import signal
import sys

import harness as h


def verify(*args, expect=h.DONE, model=None):
    return h.kvd("verify", "-m", model or h.tiny("--context", "512"), *args, expect=expect)


def exact_rows(value):
    return [r for r in value["reconstruction"] if r["must_be_exact"]]


@h.test
def a_sound_engine_passes():
    r = verify("--quick")
    for word in (b"PASS", b"bf16 cast", b"same bits", b"30 of 30", b"receipt"):
        h.check(word in r.out, f"no {word!r} in the table\n{r}")
    h.check(b"DIFFER" not in r.out and b"FAIL" not in r.out, f"{r}")


@h.test
def json_is_one_object_with_what_was_compared():
    value = verify("--quick", "--json").json()
    h.equal((value["verdict"], value["mismatches"], value["numeric_errors"]), ("pass", 0, 0), "verdict")
    h.check(value["matches"] > 30, f"only {value['matches']} comparisons")
    rows = exact_rows(value)
    for stream in ("f32", "f16", "bf16"):
        for kv in ("f16", "f32"):
            lengths = [r["tokens"] for r in rows if r["stream"] == stream and r["kv_type"] == kv]
            h.equal(lengths, [16, 64, 256], f"lengths of stream {stream}, KV {kv}")
    for r in rows:
        h.check(r["exact"] and r["rebuilt_equal"] and r["max_dk"] == r["max_dv"] == 0, f"{r}")
        h.equal([list(layer.values()) for layer in r["layers"]], [[0, 0]] * 4, "layers")
    g = value["generation"]
    h.equal((g["tokens"], g["equal_tokens"], g["equal_logits"], len(g["ids"])), (30, 30, 30, 30), "generation")
    for group in value["receipts"]:
        h.equal(len(set(group["receipts"].values())), len(group["receipts"]), "types that change bits have receipts of their own")
        h.check(any(run["recomputed_tokens"] > 0 for run in group["runs"]), "nothing was evicted")
        h.equal([run for run in group["runs"] if not run.get("equal", True)], [], "unequal runs")
        h.check(set(h.cpus()) <= {run["cpu"] for run in group["runs"]}, "an instruction set is missing")


@h.test
def a_bf16_copy_of_an_f32_stream_is_shown_not_to_be_exact():
    cast = [r for r in verify("--quick", "--json").json()["reconstruction"] if r["stream"] == "bf16 cast"]
    h.check(len(cast) == 6 and not any(r["exact"] or r["must_be_exact"] for r in cast), f"{cast}")
    h.check(all(r["max_dk"] > 0 for r in cast), "no difference in K")


@h.test
def all_lengths_and_settings_by_default():
    value = verify("--json").json()
    h.equal(value["verdict"], "pass")
    h.equal(sorted({r["tokens"] for r in value["reconstruction"]}), [16, 32, 64, 128, 256], "lengths")
    runs = [run for group in value["receipts"] for run in group["runs"]]
    h.check({128, 64, 48, 16, 0} <= {run.get("kv_tokens") for run in runs}, "budgets in tokens")
    h.check(any(run.get("budget_bytes") and run["recomputed_tokens"] for run in runs), "no byte budget that evicts")
    h.check({1, 7, 64, 512} <= {run["chunk"] for run in runs}, "chunks")
    h.check({1, 2, 3} <= {run["threads"] for run in runs}, "threads")
    h.equal({run["kv_type"] for run in runs}, {"f16", "bf16", "f32"}, "types of K and V")


@h.test
def local_layers_beyond_their_window():
    model = h.tiny("--arch", "gemma3", "--window", "200", "--context", "512")
    value = verify("--json", model=model).json()
    h.equal(value["verdict"], "pass")
    h.equal(max(r["tokens"] for r in exact_rows(value)), 264, "the longest")
    h.check(any(group["prompt_tokens"] > 200 for group in value["receipts"]), "no receipt of a prompt beyond the window")


@h.test
def every_family():
    for arch in ("qwen2", "qwen3", "gemma3"):
        verify("--quick", model=h.tiny("--arch", arch))


@h.test
def a_context_that_is_short():
    for n in (1, 2, 20):
        value = verify("--quick", "--json", model=h.tiny("--context", str(n))).json()
        h.equal((value["verdict"], max(r["tokens"] for r in exact_rows(value))), ("pass", min(n, 16)), f"context {n}")


# --- it can fail ---


@h.test
def one_ulp_is_found():
    for place in ("0:0", "1:5", "3:17", "2:255"):
        r = verify("--quick", "--inject", place, expect=h.CHECK)
        layer, pos = place.split(":")
        h.check(b"FAIL" in r.out and f"layer {layer}, position {pos}".encode() in r.out, f"not named: {place}\n{r}")


@h.test
def one_ulp_is_found_wherever_it_is():
    # The ends of layers, blocks, tiles, lengths and of the window.
    layers, places = 6, (0, 15, 16, 40, 63, 64, 127, 255)
    model = h.tiny("--arch", "gemma3", "--window", "40", "--context", "256")
    for i, pos in enumerate(places[::2] if h.SANITIZED else places):
        value = verify("--quick", "--json", "--inject", f"{i % layers}:{pos}", model=model, expect=h.CHECK).json()
        rows = [r for r in exact_rows(value) if r["tokens"] > pos]
        h.check(rows, f"position {pos} is not tested")
        for r in exact_rows(value):
            h.equal(r["exact"], r["tokens"] <= pos, f"{i % layers}:{pos}, {r['tokens']} tokens, stream {r['stream']}, KV {r['kv_type']}")
        for r in rows:
            h.equal((r["differing"]["layer_positions"], r["differing"]["first_layer"], r["differing"]["first_position"]),
                    (1, i % layers, pos), "where it differs")


@h.test
def one_ulp_is_found_beyond_the_window():
    model = h.tiny("--arch", "gemma3", "--window", "200", "--context", "512")
    verify("--inject", "0:263", model=model, expect=h.CHECK)
    h.refused(h.USAGE, "verify", "-m", model, "--inject", "0:264", names=("264", "0..263"))


@h.test
def one_ulp_is_found_in_json():
    value = verify("--quick", "--json", "--inject", "2:7", expect=h.CHECK).json()
    h.equal((value["verdict"], value["mismatches"] > 0), ("fail", True))


# --- numbers that are not finite ---


def scaled(factor):
    """A tiny model whose embedding, and so its residual stream, is that much larger."""
    spec = importlib.util.spec_from_file_location("make_tiny_gguf", os.path.join(h.ROOT, "tools", "make_tiny_gguf.py"))
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    o = tool.parse(["--type", "F32", "--untied", "-o", "-"])
    make = tool.tensors

    def larger(name, raw):
        if name != "token_embd.weight":
            return raw
        values = array.array("f", raw)
        if sys.byteorder == "big":
            values.byteswap()
        return tool.little(array.array("f", [v * factor for v in values]))
    tool.tensors = lambda options: [(n, shape, kind, larger(n, raw)) for n, shape, kind, raw in make(options)]
    return h.write(f"scaled{factor:g}.gguf", tool.build(o))


@h.test
def a_numeric_error_is_neither_match_nor_mismatch():
    value = verify("--quick", "--json", model=scaled(1e6)).json()
    h.equal((value["verdict"], value["mismatches"], value["numeric_errors"]), ("pass", 0, 6))
    for r in exact_rows(value):
        h.equal("numeric_error" in r, r["stream"] == "f16", f"{r}")
    h.check(b"numeric error: a value of layer" in verify("--quick", model=scaled(1e6)).out, "not in the table")


@h.test
def nothing_but_numeric_errors():
    value = verify("--quick", "--json", model=scaled(1e30), expect=h.NUMERIC).json()
    h.equal((value["verdict"], value["matches"], value["mismatches"]), ("numeric error", 0, 0))


# --- the rest ---


@h.test
def interrupted():
    for more in ((), ("--json",)):
        command, p = h.start("verify", "-m", h.tiny(), "--full", "--cpu", "scalar", *more)
        first = b"" if more else p.stdout.read(1)  # it has begun, and is far from done
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=h.TIMEOUT_S)
        if more and p.returncode == -signal.SIGINT:
            continue  # before it could listen
        r = h.watch(h.Result(command, p.returncode, first + out, err.decode()))
        h.equal(r.code, h.INTERRUPTED, f"{r}")
        h.check(b"interrupted" in r.out, f"{r}")


@h.test
def quick_and_full_exclude_each_other():
    h.refused(h.USAGE, "verify", "-m", h.tiny(), "--quick", "--full", names=("--quick", "--full"))


@h.test
def the_full_matrix_passes():
    if h.SANITIZED:
        h.skip("too slow under a sanitizer")
    value = verify("--full", "--json", model=h.tiny("--context", "32")).json()
    h.equal(value["verdict"], "pass")
    product = value["receipts"][-1]
    h.equal(len(product["runs"]), 4 * (1 + 7 * 4 * 3 * len(h.cpus())), "runs of the cross product")


h.main()
