#!/usr/bin/env python3
"""kvd lab, patch and eval: the form of what experiments give, and what is refused."""
import json
import os
import shutil
import signal

import harness as h

EXPERIMENTS = ("generation", "patch", "perplexity", "hellaswag", "multiturn", "baselines", "sweep", "rank", "truncate", "latency")
TEXT = "".join(f"Line {i}: the quick brown fox jumps over {i * 7} lazy dogs, and again {i * i}.\n" for i in range(60))


def lab(name, *args, expect=h.DONE, model=None):
    return h.kvd("lab", name, "-m", model or h.tiny(), "--quick", *args, expect=expect)


def check_form(r, name):
    """What lab.h says of a result."""
    h.equal(r["experiment"], name)
    h.check(r["tables"] and r["seconds"] >= 0, f"{name}: no tables")
    h.check(len(r["model"]["fingerprint"]) == 32 and r["machine"]["threads"] >= 1, f"{name}: {r['model']}, {r['machine']}")
    columns = {}
    for t in r["tables"]:
        columns[t["name"]] = [c["key"] for c in t["columns"]]
        h.check(t["rows"], f"{name}: table {t['name']} has no rows")
        h.equal(len(set(columns[t["name"]])), len(columns[t["name"]]), f"{name}, {t['name']}: keys")
        for row in t["rows"]:
            h.equal(len(row), len(t["columns"]), f"{name}, {t['name']}: cells of {row}")
            h.check(all(c is None or isinstance(c, (int, float, str, bool)) for c in row), f"{name}: {row}")
            h.check(any(c is not None for c in row), f"{name}, {t['name']}: a row of nothing")
    h.equal(len(columns), len(r["tables"]), f"{name}: names of tables")
    for p in r["plots"]:
        for key in ("x", "y", "by", "z"):
            h.check(p[key] is None or p[key] in columns[p["table"]], f"{name}: plot {p}")
    for row in r["paper_rows"]:
        h.check(row["verdict"] in ("reproduced", "differs", "not comparable"), f"{name}: {row}")
        h.check(row["what"] and row["paper"] and row["ours"], f"{name}: {row}")
        h.check(row["why"] or row["verdict"] == "reproduced", f"{name}: no reason: {row}")


@h.test
def help_lists_all_experiments():
    r = h.kvd("lab", "--help", expect=h.DONE)
    for name in EXPERIMENTS:
        h.check(f"  {name} " in r.out.decode(), f"no {name}\n{r}")


@h.test
def what_can_not_be_is_refused_before_work():
    m, text = h.tiny(), h.write("lab.txt", TEXT)
    for args in (("lab", "-m", m), ("lab", "frobnicate", "-m", m), ("lab", "rank"), ("lab", "generation", "-m", m, "-n", "0"),
                 ("lab", "generation", "-m", m, "-n", "-1"), ("lab", "rank", "-m", m, "-o", "x.gif"), ("lab", "rank", "-m", m, "-o", ".tsv"),
                 ("lab", "sweep", "-m", m, "--policies", "lru:3"), ("lab", "sweep", "-m", m, "--policies", "window"),
                 ("lab", "rank", "-m", m, "--policy", "full"), ("eval", "perplexity", "-m", m), ("eval", "-m", m, "-f", text),
                 ("eval", "perplexity", "-m", m, "-f", text, "--policies", "full", "--kv-tokens", "8"),
                 ("eval", "perplexity", "-m", m, "-f", text, "--first-scored", "512"), ("patch", "-m", m, "--layer", "99"),
                 ("patch", "-m", m, "--layer", "-1"), ("patch", "-m", m, "--head", "0"), ("patch", "-m", m, "--what", "kv", "--head", "99"),
                 ("patch", "-m", m, "--at", "first")):
        h.refused(h.USAGE, *args)
    h.refused(h.BAD_FILE, "lab", "rank", "-m", m, "-o", os.path.join(h.folder(), "absent", "x.tsv"))
    h.refused(h.BAD_FILE, "eval", "perplexity", "-m", m, "-f", "/nonexistent/text")
    h.refused(h.BAD_FILE, "lab", "rank", "-m", "/nonexistent/model")
    # Too short a text is one that does not serve, for each that takes one.
    short = h.write("short.txt", "too short")
    for args in (("eval", "perplexity"), ("lab", "baselines"), ("lab", "sweep"), ("lab", "truncate"), ("lab", "latency")):
        h.refused(h.BAD_FILE, *args, "-m", m, "-f", short, names=("tokens",))


@h.test
def lossy_policies_say_so():
    r = h.kvd("run", "-m", h.tiny(), "--raw", "-p", TEXT[:300], "-n", "4", "--policy", "window", "--kv-tokens", "16", expect=h.DONE)
    first = r.err.splitlines()[0]
    h.check("window" in first and "LOSSY" in first and "16" in first, f"the first line hides it\n{r}")
    for args in (("--policy", "window"), ("--policy", "h2o", "--kv-tokens", "7"), ("--positions", "renumber"), ("--policy", "lru"),
                 ("--policy", "tova", "--kv-tokens", "16", "--evict-to", "disk")):
        h.refused(h.USAGE, "run", "-m", h.tiny(), "-p", "x", *args)


@h.test
def results_have_their_form():
    text = h.write("lab.txt", TEXT)
    for name, more in (("generation", ()), ("patch", ()), ("perplexity", ("-f", text)), ("baselines", ("-f", text))):
        check_form(lab(name, "--json", *more).json(), name)


@h.test
def tables_for_people_and_as_files():
    out = os.path.join(h.folder(), "generation.json")
    r = lab("generation", "-o", out)
    with open(out, encoding="utf-8") as f:
        result = json.load(f)
    check_form(result, "generation")
    for t in result["tables"]:
        h.check(t["title"] in r.out.decode(), f"no table {t['title']}\n{r}")
    lab("generation", "-o", os.path.join(h.folder(), "generation.tsv"))
    files = sorted(n for n in os.listdir(h.folder()) if n.startswith("generation") and n.endswith(".tsv"))
    h.equal(len(files), len(result["tables"]), "TSV files")
    for t in result["tables"]:
        name = "generation.tsv" if len(files) == 1 else f"generation-{t['name']}.tsv"
        with open(os.path.join(h.folder(), name), encoding="utf-8") as f:
            lines = f.read().split("\n")
        h.equal(lines[0].split("\t"), [c["key"] for c in t["columns"]], "header")
        h.equal(len(lines) - 2, len(t["rows"]), "rows")


@h.test
def plots_are_drawn_for_any_background():
    if not shutil.which("gnuplot"):
        h.skip("no gnuplot")
    path = os.path.join(h.folder(), "plan.svg")
    args = ("plan", "-m", h.tiny(), "--context", "100", "--evict-to", "recompute")
    h.kvd(*args, "-o", path, expect=h.DONE)
    with open(path, encoding="utf-8") as f:
        svg = f.read()
    h.check("currentColor" in svg, "nothing takes the page's colour")
    for black in ("'black'", '"black"', "rgb(0,0,0)", "rgb(  0,   0,   0)"):
        h.check(black not in svg, f"{black} is not legible on a dark page")
    h.check("budget, % of full KV" in svg and "recompute" in svg, "no titles")
    h.kvd(*args, "-o", os.path.join(h.folder(), "plan.png"), expect=h.DONE)
    with open(os.path.join(h.folder(), "plan.png"), "rb") as f:
        h.equal(f.read(8), b"\x89PNG\r\n\x1a\n", "PNG")


@h.test
def an_option_that_means_nothing_is_refused():
    # Nothing is loaded first: there is no such model.
    for option, value, with_it in (("-f", "x", "baselines"), ("-n", 3, "generation"), ("--policies", "full", "sweep")):
        h.refused(h.USAGE, "lab", "rank", "-m", "absent.gguf", option, value, names=(option, "rank"))
        h.refused(h.BAD_FILE, "lab", with_it, "-m", "absent.gguf", option, h.write("some.txt", TEXT) if option == "-f" else value, names=("absent",))
    for data, option in (("perplexity", "--tasks"), ("hellaswag", "--chunks"), ("hellaswag", "--chunk-tokens"), ("hellaswag", "--first-scored")):
        h.refused(h.USAGE, "eval", data, "-m", "absent.gguf", "-f", "x", option, 2, names=(option, data))


@h.test
def without_gnuplot_nothing_is_begun():
    empty = {"PATH": h.folder()}
    for args in (("lab", "generation", "-m", h.tiny(), "-o", os.path.join(h.folder(), "x.svg")),
                 ("plan", "-m", h.tiny(), "--context", "100", "-o", os.path.join(h.folder(), "x.png"))):
        h.refused(h.RESOURCES, *args, env=empty, names=("gnuplot",))


@h.test
def interrupted():
    # The text comes through a pipe with a name: it is read when the program listens to signals.
    fifo = os.path.join(h.folder(), "text.fifo")
    os.mkfifo(fifo)
    command, p = h.start("lab", "truncate", "-m", h.tiny(), "-f", fifo)
    with open(fifo, "wb") as f:
        f.write(TEXT.encode())
        f.flush()
        p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=h.TIMEOUT_S)
    r = h.watch(h.Result(command, p.returncode, out, err.decode(errors="replace")))
    h.equal(r.code, h.INTERRUPTED, f"exit\n{r}")
    h.equal(r.out, b"", "output")


h.main()
