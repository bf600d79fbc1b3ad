"""Frame of the system tests: the program from outside, plain standard library.

A test file holds functions marked @test and ends with main(). The build passes
the program in the environment variable KVD; models are tiny random ones that
tools/make_tiny_gguf.py writes into a folder of this run. What every call of the
program is held to, without being asked: no crash, no sanitizer report, one line
of error on stderr when it fails, and an exit code of the list.

No test sleeps or measures time; the timeout only ends what hangs.

    import harness as h

    @h.test
    def a_prompt_gives_tokens():
        r = h.run_json("-p", "hello", "-n", "4")
        h.equal(len(r["tokens"]), 4)

    h.main()

Prints "ok NAME", "FAILED NAME: why" or "SKIP NAME: why", then the counts that
tools/count_tests.py reads. Exit 0, 1, or 77 when all was skipped.
"""
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
KVD = os.environ.get("KVD", "")
# A sanitizer build is slow and lives in a huge address space: fewer
# combinations, no RLIMIT_AS.
SANITIZED = os.environ.get("KVD_SANITIZED", "") not in ("", "0")
TIMEOUT_S = 600

# Exit codes of the program (README).
DONE, CHECK, USAGE, BAD_FILE, RESOURCES, NUMERIC, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130
SANITIZER_EXIT = 99

_tests = []
_folder = None
_models = {}


class Failure(Exception):
    pass


class Skip(Exception):
    pass


def test(function):
    _tests.append(function)
    return function


def skip(why):
    raise Skip(why)


def check(condition, message):
    if not condition:
        raise Failure(message)


def equal(got, expected, what=""):
    if got != expected:
        raise Failure(f"{what + ': ' if what else ''}got {got!r}, expected {expected!r}")


def folder():
    """A folder of this run, removed at its end."""
    global _folder
    if _folder is None:
        _folder = tempfile.TemporaryDirectory(prefix="kvd-test-")
    return _folder.name


def write(name, data):
    """Write bytes or text to a file of this run; returns its path."""
    path = os.path.join(folder(), name)
    with open(path, "wb") as f:
        f.write(data.encode() if isinstance(data, str) else data)
    return path


def tiny(*options):
    """Path of a tiny model made with these options of tools/make_tiny_gguf.py; made once."""
    if options not in _models:
        path = os.path.join(folder(), f"tiny{len(_models)}.gguf")
        subprocess.run([sys.executable, os.path.join(ROOT, "tools", "make_tiny_gguf.py"), *options, "-o", path],
                       check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        _models[options] = path
    return _models[options]


def default_model():
    """The real default model, or a skip."""
    done = subprocess.run(["sh", os.path.join(ROOT, "tools", "get-model"), "--have"], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if done.returncode:
        skip("default model not here: sh tools/get-model")
    if os.environ.get("KVD_MODEL"):
        skip("KVD_MODEL names another model than the default one")
    return done.stdout.strip()


class Result:
    def __init__(self, command, code, out, err):
        self.command, self.code, self.out, self.err = command, code, out, err

    def __str__(self):
        return f"{' '.join(self.command)}\n  exit {self.code}\n  stdout {self.out[-300:]!r}\n  stderr {self.err[-1500:]}"

    def json(self):
        """The one JSON object on stdout, and nothing else there."""
        try:
            text = self.out.decode()
            value, end = json.JSONDecoder().raw_decode(text)
        except ValueError as e:
            raise Failure(f"not one JSON object: {e}\n{self}")
        check(text[end:].strip() == "", f"more than one JSON object on stdout\n{self}")
        return value


def watch(result):
    """What holds for every call."""
    for mark in ("AddressSanitizer", "runtime error:", "LeakSanitizer", "ThreadSanitizer", "Assertion `"):
        if mark in result.err:
            raise Failure(f"{mark}\n{result}")
    if result.code < 0:
        raise Failure(f"killed by signal {-result.code}\n{result}")
    check(result.code in (DONE, CHECK, USAGE, BAD_FILE, RESOURCES, NUMERIC, INTERRUPTED),
          f"exit code {result.code} is not of the list\n{result}")
    return result


def environment(more=None):
    """Ours with a cache folder that is not the user's: rates of this machine, spill files."""
    return {**os.environ, "XDG_CACHE_HOME": os.path.join(folder(), "cache"), **(more or {})}


def kvd(*args, stdin=b"", env=None, expect=None, **popen):
    """Run the program to its end. expect: the exit code; a refusal must then be one line on stderr."""
    command = [KVD, *map(str, args)]
    if isinstance(stdin, bytes):
        popen["input"] = stdin
    else:
        popen["stdin"] = stdin
    popen.setdefault("stdout", subprocess.PIPE)
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, env=environment(env), timeout=TIMEOUT_S, **popen)
    except subprocess.TimeoutExpired:
        raise Failure(f"hangs: {' '.join(command)}")
    result = watch(Result(command, done.returncode, done.stdout or b"", done.stderr.decode(errors="replace")))
    if expect is not None and result.code != expect:
        raise Failure(f"exit {result.code}, expected {expect}\n{result}")
    return result


def start(*args):
    """Start the program with pipes at its output: the command, the process."""
    command = [KVD, *map(str, args)]
    return command, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())


def start_unread(*args, stdin=subprocess.DEVNULL):
    """Start the program with its output in a pipe of one page that nobody reads yet, so that a
    longer answer can not end by itself: the command, the process, the pipe's end. Nothing is read
    ahead on our side either, where select() would not see it."""
    command = [KVD, *map(str, args)]
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, 1031, 4096)  # F_SETPIPE_SZ
    p = subprocess.Popen(command, stdin=stdin, stdout=write_end, stderr=subprocess.PIPE, bufsize=0, env=environment())
    os.close(write_end)
    return command, p, read_end


def wait_until(p, condition):
    """Until it holds or the process has ended."""
    give_up = time.monotonic() + TIMEOUT_S
    while p.poll() is None and not condition():
        check(time.monotonic() < give_up, "hangs")
        os.sched_yield()


def pending(p, sig):
    """Was a signal sent and not delivered yet?"""
    with open(f"/proc/{p.pid}/status", encoding="ascii", errors="replace") as f:
        masks = [int(line.split()[1], 16) for line in f if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (sig - 1) & 1 for mask in masks)


def read_all(fd):
    """What else comes out of the pipe; closes it."""
    parts = []
    while part := os.read(fd, 65536):
        parts.append(part)
    os.close(fd)
    return b"".join(parts)


def error_lines(result):
    """What stderr holds beside the first line of a run, which says tier, budget and T_max."""
    return [line for line in result.err.splitlines()
            if line.strip() and not (line.startswith("kvd: ") and ", budget " in line and "T_max" in line)]


def refused(code, *args, names=(), **options):
    """The call fails with this code, one line of error that names the given words, and nothing on stdout."""
    r = kvd(*args, expect=code, **options)
    lines = error_lines(r)
    check(len(lines) == 1, f"{len(lines)} lines of error, expected one\n{r}")
    for name in names:
        check(name in r.err, f"the error does not name {name!r}\n{r}")
    check(r.out == b"", f"output on stdout\n{r}")
    return r


def refused_late(code, *args, **options):
    """The call fails with this code and one line of error, after its work."""
    r = kvd(*args, expect=code, **options)
    check(len(error_lines(r)) == 1, f"expected one line of error\n{r}")
    return r


def run_json(model, *args, **options):
    """kvd run -m MODEL --json --receipt ..., which must succeed."""
    return kvd("run", "-m", model, "--json", "--receipt", *args, expect=DONE, **options).json()


def cpus():
    """Values of --cpu that this machine can run."""
    flags = set()
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as f:
            for line in f:
                if line.lower().startswith(("flags", "features")):
                    flags = set(line.split(":", 1)[1].split())
                    break
    except OSError:
        pass
    found = ["scalar"]
    if {"avx2", "fma", "f16c"} <= flags:
        found.append("avx2")
    if set(found) >= {"avx2"} and {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"} <= flags:
        found.append("avx512")
    if "asimddp" in flags:
        found.append("neon")
    return found


def main():
    if not KVD or not os.access(KVD, os.X_OK):
        print(f"SKIP {os.path.basename(sys.argv[0])}: environment variable KVD does not name the program")
        sys.exit(77)
    wanted = sys.argv[1:]
    passed = failed = skipped = 0
    for function in _tests:
        name = function.__name__
        if wanted and name not in wanted:
            continue
        try:
            function()
        except Skip as e:
            skipped += 1
            print(f"SKIP {name}: {e}")
        except Failure as e:
            failed += 1
            print(f"FAILED {name}: {e}")
        except Exception:
            failed += 1
            print(f"FAILED {name}: {traceback.format_exc()}")
        else:
            passed += 1
            print(f"ok {name}")
        sys.stdout.flush()
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    if _folder is not None:
        _folder.cleanup()
    sys.exit(1 if failed else 77 if passed == 0 and skipped else 0)
