#!/usr/bin/env python3
"""kvd report: the page, and that nothing is run twice.

The reports here are quick ones on tiny models. Numbers mean nothing there; what is
looked at is that every experiment is in the page, once, under its command.
"""
import html.parser
import json
import os
import re
import shutil
import signal
import subprocess

import harness as h

TEXT = "".join(f"Line {i}: the quick brown fox jumps over {i * 7} lazy dogs, and again {i * i}.\n" for i in range(120))
TASKS = "".join(f"Somebody counts to {i}\n{i % 4}\nand stops.\nand goes on to {i + 1}.\nand sings.\nand falls asleep.\n" for i in range(8))
VOID = {"meta", "br", "link", "img", "hr"}


class Page(html.parser.HTMLParser):
    """The text of a page; every element must be closed, in order."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.open, self.words, self.ids, self.tags, self.links = [], [], [], [], []
        self.feed(source)
        self.close()
        h.equal(self.open, [], "elements left open")

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href"):
                self.links.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        h.check(self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}")
        self.open.pop()

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def report(folder, *models, args=(), **options):
    options.setdefault("expect", h.DONE)
    return h.kvd("report", *(x for m in models for x in ("-m", m)), "-o", folder, "--quick", "--threads", "1", "-f", h.write("report.txt", TEXT), "--hellaswag",
                 h.write("tasks.txt", TASKS), *args, **options)


def page(folder):
    with open(os.path.join(folder, "index.html"), encoding="utf-8") as f:
        return f.read()


def data(folder):
    """{file name: (inode, content)} of the results."""
    found = {}
    for name in sorted(os.listdir(os.path.join(folder, "data"))):
        path = os.path.join(folder, "data", name)
        with open(path, encoding="utf-8") as f:
            found[name] = os.stat(path).st_ino, json.load(f)
    return found


def verdicts(folder):
    """The rows of verdicts.tsv, by column."""
    with open(os.path.join(folder, "tsv", "verdicts.tsv"), encoding="utf-8") as f:
        lines = [line.rstrip("\n").split("\t") for line in f]
    return [dict(zip(lines[0], line)) for line in lines[1:]]


_whole = _whole_run = None


def whole():
    """The folder of a report on one model; made once."""
    global _whole, _whole_run
    if _whole is None:
        _whole = os.path.join(h.folder(), "whole")
        _whole_run = report(_whole, h.tiny(), expect=None)
    return _whole


def copy(name):
    folder = os.path.join(h.folder(), name)
    shutil.copytree(whole(), folder)
    return folder


def jobs_run(result):
    return re.findall(r"^kvd: \[\d+ of \d+\] \S+: (\S+):", result.err, re.M)


@h.test
def every_experiment_is_in_the_page():
    folder = whole()
    h.equal(_whole_run.code, h.DONE, f"exit\n{_whole_run}")
    source = page(folder)
    p = Page(source)
    names = {content["experiment"] for _, content in data(folder).values()}
    h.equal(names, {"memory", "verify", "generation", "patch", "patch-all", "patch-kv", "perplexity", "hellaswag", "multiturn", "baselines", "sweep",
                    "rank", "truncate", "latency"}, "experiments")
    for file, (_, content) in data(folder).items():
        h.check("result" in content and "failed" not in content, f"{file}: {content.get('failed')}")
        if content["experiment"] != "memory":
            words = [w for w in content["command"] if w != "--json"]
            h.check(" ".join(words) in p.text, f"{file}: its command is not in the page")
        origin = [content["version"], content["machine"]["system"], content["model"]["fingerprint"]]
        origin += [content["data"]["file"], content["data"]["hash"]] if content["data"] else []
        h.check(content["machine"]["cpus"] > 0 and all(o and o in p.text for o in origin), f"{file}: where it is from is not in the page: {origin}")
        for t in content["result"].get("tables", []):
            h.check(t["title"] in p.text, f"{file}: no table {t['title']!r}")
        for note in content["result"].get("notes", []):
            h.check(" ".join(note.split()) in p.text, f"{file}: no note {note!r}")
    h.check("Not run" not in p.text, "something was not run")
    for row in verdicts(folder):
        h.check(all(" ".join(row[key].split()) in p.text for key in ("what", "paper", "ours", "verdict", "why")), f"no verdict {row}")


@h.test
def verdicts_are_made_with_the_page():
    folder = copy("judged")
    named = {(row["experiment"], row["what"]): row["verdict"] for row in verdicts(folder)}
    same = ("generation", "equal tokens"), ("multiturn", "replies of kv-direct equal to the unbounded cache's"), ("sweep", "token match of kv-direct at every B")
    h.equal([named.get(key) for key in same], ["reproduced"] * 3, "verdicts")
    # A measured number that is another one gives another verdict, and nothing is measured again.
    for name, (_, content) in data(folder).items():
        h.check(content["experiment"] == "memory" or "paper_rows" not in content["result"], f"{name} has verdicts of its own")
        table, key, value = {"generation": ("generation", "equal_tokens", 1), "multiturn": ("ways", "equal", 0), "sweep": ("windows", "match", 99.5)}.get(
            content["experiment"], (None, None, None))
        for t in content["result"].get("tables", []):
            if t["name"] == table:
                column = [c["key"] for c in t["columns"]].index(key)
                for row in t["rows"]:
                    row[column] = value
        with open(os.path.join(folder, "data", name), "w", encoding="utf-8") as f:
            json.dump(content, f)
    result = h.kvd("report", "-o", folder)
    h.equal((result.code, jobs_run(result)), (h.DONE, []), f"{result}")
    named = {(row["experiment"], row["what"]): row["verdict"] for row in verdicts(folder)}
    h.equal([named.get(key) for key in same], ["differs"] * 3, "verdicts of other numbers")


@h.test
def the_page_stands_alone():
    p = Page(page(whole()))
    h.equal(len(p.ids), len(set(p.ids)), "ids are unique")
    h.check("script" not in p.tags and "iframe" not in p.tags, "scripts")
    inside = {"#" + i for i in p.ids}
    for link in p.links:
        h.check(link in inside or link == "https://arxiv.org/abs/2603.19664" or os.path.isfile(os.path.join(whole(), link)), f"link to {link}")
    h.check('name="viewport"' in page(whole()) and "prefers-color-scheme" in page(whole()), "no phone, no dark")
    if shutil.which("gnuplot"):
        plots = sum(len(c["result"].get("plots", [])) for _, c in data(whole()).values())
        h.equal(p.tags.count("svg"), plots, "plots")
        h.equal(len(os.listdir(os.path.join(whole(), "png"))), plots, "PNG files")


@h.test
def nothing_tells_of_this_machine():
    for folder, _, names in os.walk(whole()):
        for name in names:
            with open(os.path.join(folder, name), "rb") as f:
                h.check(h.folder().encode() not in f.read(), f"{name} holds a path")


@h.test
def tables_are_also_tsv():
    tables = [t for _, c in data(whole()).values() for t in c["result"].get("tables", [])]
    files = os.listdir(os.path.join(whole(), "tsv"))
    h.check(len(files) >= len(tables) > 10, f"{len(files)} files, {len(tables)} tables")
    for name in files:
        with open(os.path.join(whole(), "tsv", name), encoding="utf-8") as f:
            lines = f.read().split("\n")[:-1]
        h.check(len({line.count("\t") for line in lines}) == 1, f"{name}: ragged")


@h.test
def what_is_there_is_not_run_again():
    folder = copy("twice")
    before, source = data(folder), page(folder)
    h.equal(jobs_run(report(folder, h.tiny())), [], "run again")
    h.equal(data(folder), before, "data")
    h.equal(page(folder), source, "page")
    os.unlink(os.path.join(folder, "index.html"))
    h.kvd("report", "-o", folder, expect=h.DONE)
    h.equal(page(folder), source, "page without a model")
    h.equal(jobs_run(report(folder, h.tiny(), args=("--again", "sweep"))), ["sweep"], "--again sweep")
    after = data(folder)
    h.equal([n for n in after if after[n][0] != before[n][0]], [n for n in after if n.endswith("-sweep.json")], "new files")


@h.test
def other_settings_are_run_again():
    folder = copy("settings")
    h.check("generation" in jobs_run(report(folder, h.tiny(), args=("--threads", "2"))), "another number of threads")
    h.equal(sorted(jobs_run(report(folder, h.tiny(), args=("--threads", "2", "-f", h.write("other.txt", TEXT + "x"))))),
            ["baselines", "perplexity", "sweep"], "another text")


@h.test
def another_model_costs_its_own_experiments_only():
    folder = copy("models")
    other = h.tiny("--arch", "gemma3", "--window", "32")
    before = data(folder)
    run = jobs_run(report(folder, other))
    h.equal(len(run), len(before), "experiments of the new model")
    after = data(folder)
    h.equal({n: after[n] for n in before}, before, "data of the old model")
    p = Page(page(folder))
    for model in (h.tiny(), other):
        h.check(os.path.basename(model)[:-5] in p.text, f"{model} is not in the page")


@h.test
def killed_and_run_again_it_goes_on():
    for sig in (signal.SIGKILL, signal.SIGINT):
        folder = os.path.join(h.folder(), f"killed{sig}")
        command = [h.KVD, "report", "-m", h.tiny(), "-o", folder, "--quick", "--threads", "1", "-f", h.write("report.txt", TEXT),
                   "--hellaswag", h.write("tasks.txt", TASKS)]
        p = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                             env=h.environment())
        for _ in range(3):
            h.check(p.stderr.readline().startswith("kvd: ["), "a line for each experiment")
        p.send_signal(sig)
        p.stderr.read()
        code = p.wait(h.TIMEOUT_S)
        h.equal(code, h.INTERRUPTED if sig == signal.SIGINT else -signal.SIGKILL, "exit")
        before = data(folder)
        h.check(3 <= len(before) < 14, f"{len(before)} results")
        left = [os.path.join(folder, where, f"x.part{pid}{end}") for pid in (p.pid, os.getpid())
                for where, end in (("tsv", ""), ("png", ".svg"), ("png", f".svg.part{pid}"), ("", ""))]
        for path in left:
            with open(path, "w", encoding="utf-8"):
                pass
        h.check(not os.path.exists(os.path.join(folder, "index.html")), "a page of half a report")
        run = jobs_run(report(folder, h.tiny()))
        h.equal([os.path.exists(path) for path in left], [False] * 4 + [True] * 4, "parts of who is gone, and of who is not")
        after = data(folder)
        h.equal(len(run) + len(before), len(after), "run again")
        h.equal({n: after[n] for n in before}, before, "what was there")
        h.equal(len(after), 14, "experiments")


@h.test
def what_a_model_calls_itself_is_only_text():
    evil = os.path.join(h.folder(), "<img src=x>&.gguf")
    shutil.copy(h.tiny("--set", "general.name=str:<script>alert('1')</script>\" & \x1b[2J"), evil)
    folder = os.path.join(h.folder(), "evil")
    report(folder, evil)
    p = Page(page(folder))
    h.check("script" not in p.tags and "img" not in p.tags, "markup of the model's")
    h.check("<script>alert('1')</script>\" &" in p.text and "<img src=x>&" in p.text, "its name as text")
    h.check("\x1b" not in page(folder), "control characters")
    for name in os.listdir(os.path.join(folder, "data")) + os.listdir(os.path.join(folder, "tsv")):
        h.check(re.fullmatch(r"[A-Za-z0-9._-]+", name), f"file {name!r}")


@h.test
def broken_data_is_shown_and_stops_nothing():
    folder = copy("broken")
    ours = next(n for n in data(folder) if n.endswith("-rank.json"))
    whole_file = os.path.join(folder, "data", ours)
    with open(whole_file, "r+b") as f:
        f.truncate(os.path.getsize(whole_file) // 2)
    for name, text in (("gone-rank.json", "{"), ("gone-sweep.json", "[]"), ("gone-latency.json", '{"report": 1, "experiment": "latency"}'),
                       ("gone-patch.json", '{"report": 1, "experiment": "patch", "model": {"file": "gone.gguf"}, "result": {"tables": [3, {"name": '
                                           '"../../x", "columns": 7, "rows": [[1]]}], "plots": [{"name": "p"}], "notes": [null], "paper_rows": [1]}}')):
        with open(os.path.join(folder, "data", name), "w", encoding="utf-8") as f:
            f.write(text)
    r = report(folder, h.tiny(), expect=h.CHECK)
    h.equal(jobs_run(r), ["rank"], "the broken one of ours is run again")
    p = Page(page(folder))
    for name in ("gone-rank.json", "gone-sweep.json", "gone-latency.json"):
        h.check(name in p.text, f"{name} is not spoken of")
    h.check(not os.path.exists(os.path.join(folder, "x.tsv")) and not os.path.exists(os.path.join(h.folder(), "x.tsv")), "a name led out of the folder")


@h.test
def one_failure_does_not_stop_the_others():
    folder = os.path.join(h.folder(), "failing")
    tasks = h.write("bad-tasks.txt", "no tasks\n")
    r = h.kvd("report", "-m", h.tiny(), "-o", folder, "--quick", "--threads", "1", "--hellaswag", tasks, expect=h.CHECK)
    h.check("hellaswag: FAILED" in r.err, f"not said\n{r}")
    found = data(folder)
    failed = [n for n in found if "failed" in found[n][1]]
    h.equal([n.rsplit("-", 1)[1] for n in failed], ["hellaswag.json"], "failed")
    p = Page(page(folder))
    h.check("This experiment failed" in p.text and "no text was given" in p.text, "the page hides it")
    again = h.kvd("report", "-m", h.tiny(), "-o", folder, "--quick", "--threads", "1", "--hellaswag", tasks, expect=h.CHECK)
    h.equal(jobs_run(again), ["hellaswag"], "tried again")


@h.test
def without_gnuplot_there_is_a_page():
    folder = copy("plain")
    report(folder, h.tiny(), env={"PATH": h.folder()})
    p = Page(page(folder))
    h.check("gnuplot was not found" in p.text and "svg" not in p.tags, "plots")


@h.test
def refusals():
    m = h.tiny()
    folder = os.path.join(h.folder(), "refused")
    for args in (("-o", folder), ("-m", m), ("-m", m, "-o", folder, "--quick", "--full"), ("-m", m, "-o", folder, "--again", "frobnicate"),
                 ("-m", m, "-m", m, "-o", folder), ("-m", m, "-o", folder, "--kv-budget", "1M")):
        h.refused(h.USAGE, "report", *args)
    for args in (("-m", "/nonexistent", "-o", folder), ("-m", m, "-o", folder, "-f", "/nonexistent"), ("-m", m, "-o", h.write("file", "x"))):
        h.refused(h.BAD_FILE, "report", *args)
    h.check(not os.path.exists(folder), "a folder was made")


h.main()
