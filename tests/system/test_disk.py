#!/usr/bin/env python3
"""The disk tier and `kvd plan` from outside: the same answer wherever evicted K and V come from, nothing left behind,
and a folder that does not serve is said before the work."""
import contextlib
import ctypes
import glob
import json
import os
import resource
import shutil
import signal
import subprocess

import harness as h

PROMPT = "What leaves the budget is written once, and read back in every pass, layer by layer. " * 3
ARGS = ("--raw", "-p", PROMPT, "-n", "12", "--ignore-eos", "--threads", "2")


def in_memory(path):
    kind = subprocess.run(["stat", "-f", "-c", "%T", path], stdout=subprocess.PIPE, text=True).stdout.strip()
    return kind in ("tmpfs", "ramfs", "")


_spills = None


def spill_folder():
    """A folder on a disk, for spills and the cache; the test is skipped where there is none."""
    global _spills
    if _spills is None:
        if in_memory(h.folder()):
            h.skip(f"{h.folder()} is in memory: TMPDIR names a folder on a disk")
        _spills = os.path.join(h.folder(), "spills")
        os.mkdir(_spills)
    return _spills


def cache(name):
    path = os.path.join(spill_folder(), "..", name)
    os.makedirs(path, exist_ok=True)
    return {"XDG_CACHE_HOME": os.path.abspath(path)}


def empty(folder):
    h.equal(os.listdir(folder), [], "left in the folder")


def models():
    return h.tiny(), h.tiny("--arch", "gemma3", "--window", "48"), h.tiny("--arch", "qwen3", "--type", "Q4_0")


@h.test
def receipts_are_equal_on_all_tiers():
    env = cache("cache")
    for model in models():
        full = h.run_json(model, *ARGS, "--policy", "full")
        for tier in ("disk", "auto", "recompute"):
            r = h.run_json(model, *ARGS, "--kv-tokens", 32, "--evict-to", tier, "--spill-dir", spill_folder(), env=env)
            h.equal(r["receipt"], full["receipt"], f"receipt with --evict-to {tier}")
            h.equal(r["text"], full["text"], "text")
            if tier == "disk":
                disk = r["kv"]["disk"]
                h.check(disk["in_use"] and disk["written_bytes"] > 0 and disk["read_bytes"] > disk["written_bytes"], f"disk: {disk}")
                h.equal(disk["error"], None, "error")
                h.equal(r["kv"]["recomputed_tokens"], 0, "recomputed_tokens")
            if tier == "recompute":
                h.check("disk" not in r["kv"], "a disk without being asked")
        empty(spill_folder())


@h.test
def a_budget_holds_on_disk():
    model = h.tiny("--layers", "12")
    full = h.run_json(model, *ARGS, "--policy", "full")
    peak = full["kv"]["peak_bytes"]
    refused = False
    for percent in (95, 80, 65, 50):
        budget = peak * percent // 100
        r = h.kvd("run", "-m", model, "--json", "--receipt", *ARGS, "--kv-budget", budget, "--evict-to", "disk", "--spill-dir", spill_folder())
        if r.code == h.RESOURCES:
            refused = True
            continue
        h.check(not refused, "runs with less than was refused")
        h.equal(r.code, h.DONE, f"exit\n{r}")
        h.equal(r.json()["receipt"], full["receipt"], "receipt")
        h.check(r.json()["kv"]["peak_bytes"] <= budget, "the peak passes the budget")
        h.check("(disk)" in r.err.splitlines()[0], f"the first line does not name the tier\n{r}")
    empty(spill_folder())


@h.test
def a_folder_in_memory_is_refused_or_not_used():
    if not os.path.isdir("/dev/shm") or not in_memory("/dev/shm"):
        h.skip("/dev/shm is not in memory here")
    model, full = h.tiny(), h.run_json(h.tiny(), *ARGS, "--policy", "full")
    h.refused(h.RESOURCES, "run", "-m", model, *ARGS, "--kv-tokens", 32, "--evict-to", "disk", "--spill-dir", "/dev/shm",
              names=("/dev/shm",))
    r = h.run_json(model, *ARGS, "--kv-tokens", 32, "--evict-to", "auto", "--spill-dir", "/dev/shm", env=cache("cache"))
    h.equal(r["receipt"], full["receipt"], "receipt with auto")
    h.check(r["kv"]["recomputed_tokens"] > 0, "nothing recomputed")
    # With nothing to evict there is nothing to refuse.
    h.run_json(model, *ARGS, "--evict-to", "disk", "--spill-dir", "/dev/shm")


@h.test
def folders_that_can_not_be_are_refused():
    model, file = h.tiny(), h.write("a file", "x")
    fifo, loop = os.path.join(h.folder(), "a pipe"), os.path.join(h.folder(), "a loop")
    os.mkfifo(fifo)  # opening it must not wait for a writer
    os.symlink(loop, loop)
    folders = ["/nowhere/at/all", file, "/proc", "/sys", fifo, loop, "/dev/null"]
    if os.getuid():
        locked = os.path.join(h.folder(), "locked")
        os.makedirs(locked, 0o500, exist_ok=True)
        folders.append(locked)
    for folder in folders:
        h.refused(h.RESOURCES, "run", "-m", model, *ARGS, "--kv-tokens", 32, "--evict-to", "disk", "--spill-dir", folder, names=(folder,))
    # However long the name is, why it does not serve is said, in one line.
    for folder in ("/" + "x" * 200, "/" + "x/" * 1500, "/" + "x" * 5000, "a\nb\x1b[31m"):
        r = h.refused(h.RESOURCES, "run", "-m", model, *ARGS, "--kv-tokens", 32, "--evict-to", "disk", "--spill-dir", folder)
        h.check(r.err.rstrip().endswith(("No such file or directory", "File name too long")), f"the reason is cut off\n{r}")
    # Without the option it is the user's cache folder, for bench too.
    h.kvd("bench", "-p", "40", "-n", "4", "-r", "1", "-m", model, "--kv-tokens", 16, "--evict-to", "disk", env=cache("cache"), expect=h.DONE)


@h.test
def a_relative_folder_is_that_of_the_start():
    os.makedirs(os.path.join(spill_folder(), "below"))
    full = h.run_json(h.tiny(), *ARGS, "--policy", "full")
    for folder in ("below", "./below/", "below/../below", "."):
        r = h.run_json(h.tiny(), *ARGS, "--kv-tokens", 32, "--evict-to", "disk", "--spill-dir", folder, cwd=spill_folder())
        h.equal(r["receipt"], full["receipt"], f"receipt with {folder}")
        h.check(r["kv"]["disk"]["in_use"], "no disk in use")
    os.rmdir(os.path.join(spill_folder(), "below"))
    empty(spill_folder())


@h.test
def two_processes_share_a_folder():
    full = h.run_json(h.tiny(), *ARGS, "--policy", "full")
    args = ("run", "-m", h.tiny(), "--json", *ARGS, "--kv-tokens", "32", "--evict-to", "disk", "--spill-dir", spill_folder())
    both = [h.start(*args) for _ in range(2)]
    for _, p in both:
        out, err = p.communicate(timeout=h.TIMEOUT_S)
        h.equal(p.returncode, h.DONE, f"exit: {err}")
        h.equal(json.loads(out)["receipt"], full["receipt"], "receipt")
    empty(spill_folder())


@contextlib.contextmanager
def small_disk(megabytes, read_only=False):
    """A file system of its own, gone with this process: in a mount namespace, by way of a loop device."""
    libc = ctypes.CDLL(None, use_errno=True)
    image, folder = os.path.join(spill_folder(), "..", "disk.img"), os.path.join(h.folder(), "small disk")
    with open(image, "wb") as f:
        f.truncate(megabytes << 20)
    os.makedirs(folder, exist_ok=True)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
    if os.getuid() or not shutil.which("mkfs.ext4") or libc.unshare(0x20000):  # CLONE_NEWNS
        h.skip("no small file system: it needs root, a mount namespace and mkfs.ext4")
    subprocess.run(["mount", "--make-rprivate", "/"], **quiet)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", image], **quiet)
    if subprocess.run(["mount", "-o", "loop" + (",ro" if read_only else ""), image, folder], **quiet).returncode:
        h.skip("no small file system: a loop device can not be mounted")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], **quiet)
        os.unlink(image)


@h.test
def a_read_only_disk_is_refused_or_not_used():
    full = h.run_json(h.tiny(), *ARGS, "--policy", "full")
    with small_disk(8, read_only=True) as folder:
        h.refused(h.RESOURCES, "run", "-m", h.tiny(), *ARGS, "--kv-tokens", 32, "--evict-to", "disk", "--spill-dir", folder,
                  names=(folder, "Read-only"))
        r = h.run_json(h.tiny(), *ARGS, "--kv-tokens", 32, "--spill-dir", folder, env=cache("cache"))
        h.equal(r["receipt"], full["receipt"], "receipt with auto")
        h.check(r["kv"]["recomputed_tokens"] > 0, "nothing recomputed")


@h.test
def a_full_disk_is_refused_or_not_used():
    full = h.run_json(h.tiny(), *ARGS, "--policy", "full")
    with small_disk(8) as folder:
        filler = os.path.join(folder, "filler")
        with open(filler, "wb") as f, contextlib.suppress(OSError):
            while True:
                f.write(b"x" * 4096)
                f.flush()
        before = os.statvfs(folder).f_bavail
        h.refused(h.RESOURCES, "run", "-m", h.tiny(), *ARGS, "--kv-tokens", 32, "--evict-to", "disk", "--spill-dir", folder,
                  names=(folder, "No space"))
        r = h.run_json(h.tiny(), *ARGS, "--kv-tokens", 32, "--spill-dir", folder, env=cache("cache"))
        h.equal(r["receipt"], full["receipt"], "receipt with auto")
        h.check(r["kv"]["recomputed_tokens"] > 0, "nothing recomputed")
        h.equal(os.statvfs(folder).f_bavail, before, "free blocks afterwards")
        os.unlink(filler)
        free = os.statvfs(folder).f_bavail
        r = h.run_json(h.tiny(), *ARGS, "--kv-tokens", 32, "--evict-to", "disk", "--spill-dir", folder)
        h.equal(r["receipt"], full["receipt"], "receipt on disk")
        h.equal(os.statvfs(folder).f_bavail, free, "free blocks afterwards")


@h.test
def a_disk_that_fills_up_meanwhile_does_no_harm():
    """The space is reserved: what others write later takes nothing of it."""
    with small_disk(16) as folder:
        p, fd, first = begin(folder)
        with open(os.path.join(folder, "filler"), "wb") as f, contextlib.suppress(OSError):
            while True:
                f.write(b"x" * 4096)
                f.flush()
        out, err, code = end(p, fd, first)
        h.equal(code, h.DONE, f"exit\n{err}")
        h.check("given up" not in err, f"the disk tier was given up\n{err}")
        h.equal(out, whole_text(), "text")


@h.test
def a_folder_that_is_removed_does_no_harm():
    folder = os.path.join(spill_folder(), "to be removed")
    os.mkdir(folder)
    p, fd, first = begin(folder)
    os.rmdir(folder)
    out, err, code = end(p, fd, first)
    h.equal(code, h.DONE, f"exit\n{err}")
    h.check("given up" not in err, f"the disk tier was given up\n{err}")
    h.equal(out, whole_text(), "text")
    empty(spill_folder())


@h.test
def a_disk_without_room_is_refused():
    if h.SANITIZED:
        h.skip("RLIMIT_FSIZE under a sanitizer")
    r = h.kvd("run", "-m", h.tiny(), *ARGS, "--kv-tokens", 32, "--evict-to", "disk", "--spill-dir", spill_folder(), expect=h.RESOURCES,
              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)))
    h.equal(len(h.error_lines(r)), 1, f"lines of error\n{r}")
    h.equal(r.out, b"", "output")


# A run that is in the middle of it for as long as nobody reads: it has more to say than its pipe takes.
LONG = ("--raw", "-p", PROMPT, "-n", "3500", "--ignore-eos", "--threads", "2")
_whole = None


def long_model():
    return h.tiny("--context", "4000")


def whole_text():
    global _whole
    if _whole is None:
        _whole = h.kvd("run", "-m", long_model(), *LONG, "--quiet", "--policy", "full", expect=h.DONE).out
        h.check(len(_whole) > 6000, f"{len(_whole)} bytes of text: too short for the pipe")
    return _whole


def begin(folder, *args):
    """The process, the pipe's end and the first byte: it has begun, and written what the prompt left."""
    _, p, fd = h.start_unread("run", "-m", long_model(), *LONG, "--kv-tokens", "32", "--evict-to", "disk", "--spill-dir", folder, *args)
    return p, fd, os.read(fd, 1)


def end(p, fd, out):
    """All that it says, and how it ends."""
    out += h.read_all(fd)
    err = p.stderr.read().decode(errors="replace")
    p.stderr.close()
    return out, err, p.wait(h.TIMEOUT_S)


@h.test
def nothing_is_left_after_signals():
    folder = spill_folder()
    for sig, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, h.INTERRUPTED), (signal.SIGTERM, h.INTERRUPTED)):
        p, fd, first = begin(folder)
        spills = [f for f in (os.readlink(f) for f in glob.glob(f"/proc/{p.pid}/fd/*")) if f.startswith(folder)]
        h.equal(len(spills), 1, f"open files in the folder: {spills}")
        h.check("(deleted)" in spills[0], f"it has a name: {spills}")
        empty(folder)
        p.send_signal(sig)
        out, err, got = end(p, fd, first)
        h.equal(got, code, f"exit after {sig.name}\n{err}")
        # What there is was printed: a beginning of the answer, and a whole line.
        text = out[:-1] if sig != signal.SIGKILL and out.endswith(b"\n") else out
        h.check(0 < len(text) < len(whole_text()) and whole_text().startswith(text), f"after {sig.name}: {out[-60:]!r}")
        empty(folder)


# ---- plan ------------------------------------------------------------------------------

def plan(*args, env, **options):
    return h.kvd("plan", "-m", h.tiny(), "--context", 600, *args, env=env, **options)


@h.test
def plan_prints_tiers_and_curve():
    env = cache("plan")
    r = plan("--kv-budget", "200K", env=env, expect=h.DONE)
    text = r.out.decode()
    for word in ("full", "recompute", "disk", "T_max", "<- auto", "percent"):
        h.check(word in text, f"no {word!r}\n{r}")
    h.check("measuring" in r.err, f"measured without a word\n{r}")
    r = plan(env=env, expect=h.DONE)
    h.equal(r.err, "", "the second time: stderr")


@h.test
def plan_json_agrees_with_itself_and_with_runs():
    env = cache("plan")
    p = plan("--json", "--kv-budget", "200K", env=env, expect=h.DONE).json()
    h.equal([t["tier"] for t in p["tiers"]], ["full", "recompute", "disk"])
    h.equal(p["context_tokens"], 600)
    for entry in [{"budget_bytes": p["budget_bytes"], "tiers": p["tiers"]}] + p["curve"]:
        chosen = [t for t in entry["tiers"] if t["chosen"]]
        fits = [t for t in entry["tiers"] if t["fits"]]
        h.equal(len(chosen), 1 if fits else 0, "chosen tiers")
        for t in entry["tiers"]:
            h.equal(t["fits"], t["need_bytes"] <= entry["budget_bytes"], f"{t}")
            h.equal(t["decode_tokens_per_s"] > 0, t["fits"], f"{t}")
    # What plan says that recompute needs is what run needs.
    for tier in ("recompute", "disk"):
        need = next(t["need_bytes"] for t in p["tiers"] if t["tier"] == tier)
        n = 12
        q = h.kvd("plan", "-m", h.tiny(), "--context", len(run_tokens()) + n, "-n", n, "--json", env=env, expect=h.DONE).json()
        need = min(t["need_bytes"] for t in q["tiers"] if t["tier"] in (tier, "full"))
        args = ("run", "-m", h.tiny(), *ARGS, "--evict-to", tier, "--spill-dir", spill_folder(), "--kv-budget")
        h.kvd(*args, need, expect=h.DONE)
        h.refused(h.RESOURCES, *args, need - 1)


def run_tokens():
    return range(h.run_json(h.tiny(), *ARGS, "--policy", "full")["prompt_tokens"])


@h.test
def plan_writes_its_curve():
    env = cache("plan")
    path = os.path.join(h.folder(), "curve.tsv")
    for more in ((), ("--json",)):
        plan("-o", path, *more, env=env, expect=h.DONE)
        with open(path, encoding="ascii") as f:
            rows = [line.rstrip("\n").split("\t") for line in f]
        os.unlink(path)
        h.equal(rows[0], ["percent", "budget_bytes", "full", "recompute", "disk"])
        h.check(len(rows) > 5 and all(len(row) == 5 for row in rows), f"{rows}")
        for row in rows[1:]:
            for cell in row:
                h.check(cell == "-" or float(cell) > 0, f"{row}")
    r = plan("-o", "/nowhere/curve.tsv", env=cache("unmeasured"))
    h.equal(r.code, h.BAD_FILE, f"exit\n{r}")
    h.check("measuring" not in r.err, f"work before the refusal\n{r}")
    r = plan("-o", "/dev/full", env=env)
    h.equal(r.code, h.BAD_FILE, f"exit\n{r}")


class Rates:
    """The file of rates in a cache folder of its own."""

    def __init__(self, name):
        self.env = cache(name)

    def path(self):
        found = glob.glob(os.path.join(self.env["XDG_CACHE_HOME"], "kvd", "rates-*.json"))
        h.equal(len(found), 1, "files of rates")
        return found[0]

    def read(self):
        with open(self.path(), encoding="utf-8") as f:
            return json.load(f)

    def seen(self):
        return self.read()["seen"]

    def write(self, value):
        self.write_bytes(json.dumps(value).encode())

    def write_bytes(self, data):
        with open(self.path(), "wb") as f:
            f.write(data)


@h.test
def a_spoilt_cache_is_measured_again():
    rates = Rates("spoilt")
    env = rates.env
    plan(env=env, expect=h.DONE)
    good = rates.read()
    spoilt = [b"", b"{", b"[]", b"null", b"\xff\xfe", b"{}" * 9, json.dumps({**good, "key": "another"}).encode()]
    for change in ({"rows": [0, 1, 2, 3, 4]}, {"rows": [5, 4, 3, 2, 1]}, {"rows": [2, 4, 16, 64, 256]}, {"rows": []}, {"rows_s": [1, 2, 3, 4, 0]},
                   {"rows_s": [1e300] * 5}, {"rows_s": "x"}, {"head_s": -1}, {"disk_read_bytes_s": 1e300},
                   {"rows_s": [1e-300] * 5}, {"head_s": None}, {"disk_read_bytes_s": "x"}, {"seen": {}}, {"seen": [1, 1, 1]},
                   {"seen": {**good["seen"], "disk": 0}}, {"seen": {**good["seen"], "full": 1e9}}):
        spoilt.append(json.dumps({**good, **change}).encode())
    for data in spoilt:
        rates.write_bytes(data)
        r = plan(env=env, expect=h.DONE)
        h.check("measuring" in r.err, f"believed {data[:200]!r}\n{r}")
    h.equal(plan(env=env, expect=h.DONE).err, "", "stderr with a good cache")
    h.check("measuring" in plan("--recalibrate", env=env, expect=h.DONE).err, "--recalibrate did not measure")
    path = rates.path()
    os.unlink(path)
    os.mkfifo(path)
    h.check("measuring" in plan(env=env, expect=h.DONE).err, "a pipe was believed")


def times_slower(value, k):
    """Rates of a machine k times slower."""
    scaled = {name: x * k for name, x in value.items() if name.endswith("_s") and name != "rows_s" and "bytes" not in name}
    scaled |= {name: x / k for name, x in value.items() if name.endswith("bytes_s")}
    return {**value, **scaled, "rows_s": [x * k for x in value["rows_s"]]}


NOTHING_SEEN = {"full": 1, "recompute": 1, "disk": 1}


@h.test
def runs_teach_the_plan():
    full = h.run_json(h.tiny(), *ARGS, "--policy", "full")
    for budget in (full["kv"]["peak_bytes"] * 3 // 4, 1 << 30):
        rates = Rates(f"taught{budget}")
        # Measured first: by a plan of the same settings, for a context of the same length.
        args = ("--spill-dir", spill_folder(), "--kv-budget", budget)
        asked = ("plan", "-m", h.tiny(), "--threads", 2, "--context", full["prompt_tokens"] + 40, "-n", 40, *args, "--json")
        chosen = [t for t in h.kvd(*asked, env=rates.env, expect=h.DONE).json()["tiers"] if t["chosen"]][0]
        h.equal(rates.seen(), NOTHING_SEEN, "before")

        def run(n, *more, expect=h.DONE):
            h.kvd("run", "-m", h.tiny(), *ARGS, "-n", n, *args, *more, env=rates.env, expect=expect)

        run(8)
        h.equal(rates.seen(), NOTHING_SEEN, "after too few tokens")
        run(40)
        after = rates.seen()
        # One of them; none where the prediction does not depend on what took the time.
        changed = [t for t in after if after[t] != 1]
        h.check(changed in (["full"], [chosen["tier"]], [] if chosen["tier"] != "full" else None), f"{after} after {chosen['tier']}")
        run(40, "--policy", "full", expect=None)
        run(40, "--evict-to", "recompute")
        h.equal(rates.seen(), after, "by a run that follows no plan")
        # Slower runs, a slower prediction.
        rates.write({**rates.read(), "seen": {**NOTHING_SEEN, chosen["tier"]: 16}})
        now = {t["tier"]: t for t in h.kvd(*asked, env=rates.env, expect=h.DONE).json()["tiers"]}[chosen["tier"]]
        h.check(now["decode_tokens_per_s"] < chosen["decode_tokens_per_s"], f"{now} after {chosen}")


@h.test
def what_is_learnt_has_a_direction_and_a_limit():
    rates = Rates("learnt")
    args = ("run", "-m", h.tiny(), *ARGS, "-n", 40, "--spill-dir", spill_folder(), "--kv-budget", 1 << 30)
    h.kvd(*args, "--recalibrate", env=rates.env, expect=h.DONE)
    good = {**rates.read(), "seen": {"full": 1, "recompute": 2, "disk": 0.5}}
    for slower, factor in ((1e-4, 2 ** 0.5), (1e5, 0.5 ** 0.5)):
        rates.write(times_slower(good, slower))
        h.kvd(*args, env=rates.env, expect=h.DONE)
        got, wanted = rates.seen(), {"full": factor, "recompute": 2 ** 0.9, "disk": 0.5 ** 0.9}
        h.check(all(abs(got[t] / wanted[t] - 1) < 1e-6 for t in wanted), f"{got}, expected {wanted}")
    # Ten times over, at a machine that is far off all the time: no further than the limit.
    for _ in range(10):
        rates.write({**times_slower(good, 1e-4), "seen": rates.seen()})
        h.kvd(*args, env=rates.env, expect=h.DONE)
    h.check(15.9 < rates.seen()["full"] <= 16, f"{rates.seen()}")
    # Where nothing is evicted a run says nothing of those who evict.
    for more in (("--kv-tokens", 4000), ("--kv-tokens", 4000, "--evict-to", "auto")):
        rates.write({**good, "seen": NOTHING_SEEN})
        h.kvd(*args, *more, env=rates.env, expect=h.DONE)
        seen = rates.seen()
        h.equal((seen["recompute"], seen["disk"]), (1, 1), f"with {more}")
    # Forgotten on demand, also where all fits.
    h.check("measuring" in h.kvd(*args, "--recalibrate", env=rates.env, expect=h.DONE).err, "--recalibrate did not measure")
    h.check(0.5 <= rates.seen()["full"] <= 2, f"{rates.seen()}")


@h.test
def no_cache_folder_is_no_error():
    for home in ("/proc", "/dev/null/x"):
        r = plan(env={"XDG_CACHE_HOME": home, "HOME": home})
        h.equal(r.code, h.DONE, f"exit with {home}\n{r}")


@h.test
def auto_works_under_a_small_budget():
    # Calibration itself is not the budget's.
    model, full = h.tiny(), h.run_json(h.tiny(), *ARGS, "--policy", "full")
    for part in (2, 3):
        budget = full["kv"]["peak_bytes"] * part // 4
        r = h.kvd("run", "-m", model, "--json", "--receipt", *ARGS, "--kv-budget", budget, "--spill-dir", spill_folder(), "--recalibrate",
                  env=cache("cache"))
        if r.code == h.RESOURCES:
            h.check("calibration" not in r.err, f"{r}")
            continue
        h.equal(r.json()["receipt"], full["receipt"], "receipt")
        h.check(r.json()["kv"]["peak_bytes"] <= budget, "the peak passes the budget")


@h.test
def absurd_values_are_refused():
    env = cache("plan")
    for args in (("--context", "0"), ("--context", "-5"), ("--context", "x"), ("--context", "9" * 18), ("--context", "9" * 30), (),
                 ("--context", "100", "--kv-budget", "0"), ("--context", "100", "--kv-budget", "-1"), ("--context", "100", "--kv-budget", "9" * 25),
                 ("--context", "100", "--evict-to", "tape"), ("--context", "100", "--spill-dir", "")):
        h.refused(h.USAGE, "plan", "-m", h.tiny(), *args, env=env)
    for args in (("--context", "1"), ("--context", "2", "-n", "2"), ("--context", "100", "--kv-budget", "1"), ("--context", "2048", "-n", "2047"),
                 ("--context", "100", "--policy", "full"), ("--context", "100", "--kv-tokens", "0"), ("--context", "100", "--evict-to", "recompute"),
                 ("--context", "100", "--stream", "bf16", "--kv-type", "f32", "--threads", "1", "--chunk", "1")):
        p = h.kvd("plan", "-m", h.tiny(), *args, "--json", env=env, expect=h.DONE).json()
        h.check(all(t["need_bytes"] >= 0 for t in p["tiers"]), f"{args}: {p['tiers']}")


h.main()
