#!/usr/bin/env python3
"""Model files that are cut, changed or not models at all; output that can not be written."""
import json
import os
import resource
import subprocess

import harness as h


def data():
    with open(h.tiny(), "rb") as f:
        return f.read()


@h.test
def truncated_at_many_lengths():
    whole = data()
    header = [0, 1, 3, 4, 8, 15, 16, 23, 24, 25, 40, 100, 1000, 4000]
    tail = [len(whole) - 1, len(whole) - 31, len(whole) - 33, len(whole) // 2]
    step = 5003 if h.SANITIZED else 1009
    for n in header + tail + list(range(5000, len(whole) - 1, step)):
        path = h.write("cut.gguf", whole[:n])
        h.refused(h.BAD_FILE, "run", "-m", path, "--raw", "-p", "x", "-n", "1")
        h.refused(h.BAD_FILE, "info", "-m", path)


@h.test
def files_of_another_kind():
    for name, content in (("empty", b""), ("text", b"Not a model.\n" * 100), ("zeros", bytes(100000)),
                          ("elf", open(h.KVD, "rb").read(100000)), ("big-endian", b"FUGG" + bytes(1000))):
        h.refused(h.BAD_FILE, "info", "-m", h.write(name, content))


@h.test
def versions():
    whole = bytearray(data())
    for version in (0, 1, 4, 0x03000000, 0xffffffff):
        whole[4:8] = version.to_bytes(4, "little")
        h.refused(h.BAD_FILE, "info", "-m", h.write("version.gguf", bytes(whole)))


@h.test
def counts_that_the_file_can_not_back():
    whole = bytearray(data())
    for at in (8, 16):  # tensors, keys
        for count in (2**63, 2**64 - 1, 2**32, 10**6):
            changed = bytearray(whole)
            changed[at:at + 8] = count.to_bytes(8, "little")
            h.refused(h.BAD_FILE, "info", "-m", h.write("count.gguf", bytes(changed)))


@h.test
def the_name_of_a_file_may_be_odd():
    path = h.write("a model\nwith 'odd' name.gguf", data())
    h.kvd("info", "-m", path, expect=h.DONE)
    h.refused(h.BAD_FILE, "info", "-m", path + "?")


@h.test
def a_full_disk_is_an_error():
    if not os.path.exists("/dev/full"):
        h.skip("no /dev/full")
    for args in (("run", "-m", h.tiny(), "--raw", "-p", "x", "-n", "4", "--ignore-eos"),
                 ("run", "-m", h.tiny(), "--raw", "-p", "x", "-n", "4", "--ignore-eos", "--json"),
                 ("info", "-m", h.tiny()), ("info", "-m", h.tiny(), "--json"),
                 ("tokenize", "-m", h.tiny(), "-p", "x"), ("tokenize", "-m", h.tiny(), "-p", "x", "--json"),
                 ("verify", "-m", h.tiny(), "--quick"), ("--help",), ("--version",)):
        with open("/dev/full", "wb") as full:
            r = h.kvd(*args, stdout=full)
        h.check(r.code in (h.BAD_FILE, h.RESOURCES), f"exit {r.code}\n{r}")
        h.check(r.err.strip() != "", f"silent\n{r}")


@h.test
def a_closed_stdout_is_an_error():
    for args in (("run", "-m", h.tiny(), "--raw", "-p", "x", "-n", "4", "--ignore-eos", "--json"),
                 ("info", "-m", h.tiny())):
        r = h.kvd(*args, preexec_fn=lambda: os.close(1), stdout=None)
        h.check(r.code in (h.BAD_FILE, h.RESOURCES), f"exit {r.code}\n{r}")


@h.test
def closed_streams_lend_their_numbers_to_nobody():
    """A message to a closed stderr must not land in a spill file or a result, which would be opened under its number."""
    text = h.write("closed.txt", "hello " * 60)
    wanted = h.run_json(h.tiny(), "--raw", "-f", text, "-n", "8")["receipt"]
    for closed in ((0,), (2,), (0, 2), (0, 1, 2)):
        out = os.path.join(h.folder(), "closed.json")
        h.kvd("lab", "generation", "-m", h.tiny(), "--quick", "--threads", "1", "-o", out, stdin=subprocess.DEVNULL,
              preexec_fn=lambda: [os.close(fd) for fd in closed], expect=h.BAD_FILE if 1 in closed else h.DONE)
        with open(out, encoding="utf-8") as f:
            h.equal(json.load(f)["experiment"], "generation", f"closed: {closed}")
        os.unlink(out)
    r = h.kvd("run", "-m", h.tiny(), "--raw", "-f", text, "-n", "8", "--json", "--kv-tokens", "32", stdin=subprocess.DEVNULL,
              preexec_fn=lambda: [os.close(fd) for fd in (0, 2)], expect=h.DONE)
    h.equal(r.json()["receipt"], wanted, "receipt")


@h.test
def a_limit_of_file_size_is_an_error():
    """ulimit -f: neither killed (SIGXFSZ) nor half a file, and what was there stays."""
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    folder = os.path.join(h.folder(), "limited")
    os.mkdir(folder)
    cache = os.path.join(h.folder(), "limited-cache")
    lab, plan = ("lab", "generation", "-m", h.tiny(), "--quick", "--threads", "1"), ("plan", "-m", h.tiny(), "--context", "300", "--threads", "1", "--quiet")
    names = {"x.json": lab, "x-generation.tsv": lab, "curve.tsv": plan}
    for name, command in names.items():
        path = os.path.join(folder, name)
        with open(path, "w", encoding="utf-8") as f:
            f.write("old")
        r = h.refused_late(h.BAD_FILE, *command, "-o", path.replace("-generation", ""), preexec_fn=limited, env={"XDG_CACHE_HOME": cache})
        h.check("File too large" in r.err, f"why?\n{r}")
        with open(path, encoding="utf-8") as f:
            h.equal(f.read(), "old", name)
    h.equal(sorted(os.listdir(folder)), sorted(names), "left behind")
    h.equal(os.listdir(os.path.join(cache, "kvd")), [], "left in the cache")
    with open(os.path.join(h.folder(), "limited-out"), "wb") as out:
        h.kvd(*lab, "--json", stdout=out, preexec_fn=limited, expect=h.BAD_FILE)


@h.test
def links_stay_links():
    target, link = h.write("target.json", "old"), os.path.join(h.folder(), "link.json")
    os.symlink(target, link)
    h.kvd("lab", "generation", "-m", h.tiny(), "--quick", "--threads", "1", "-o", link, expect=h.DONE)
    h.check(os.path.islink(link), "the link was replaced")
    with open(target, encoding="utf-8") as f:
        h.equal(json.load(f)["experiment"], "generation", "what it leads to")


@h.test
def a_reader_that_goes_away_is_no_crash():
    command, p = h.start("run", "-m", h.tiny(), "--raw", "-p", "x", "-n", "1500", "--ignore-eos")
    p.stdout.close()
    err = p.stderr.read().decode(errors="replace")
    h.watch(h.Result(command, p.wait(h.TIMEOUT_S), b"", err))


@h.test
def a_closed_stdin_is_no_prompt():
    r = h.kvd("run", "-m", h.tiny(), "--raw", "-n", "2", stdin=subprocess.DEVNULL, preexec_fn=lambda: os.close(0))
    h.check(r.code in (h.DONE, h.USAGE, h.BAD_FILE), f"exit {r.code}\n{r}")
    with_prompt = h.kvd("run", "-m", h.tiny(), "--raw", "-p", "x", "-n", "2", "--json", stdin=subprocess.DEVNULL,
                        preexec_fn=lambda: os.close(0), expect=h.DONE)
    with_prompt.json()


h.main()
