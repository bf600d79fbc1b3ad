#!/usr/bin/env python3
"""Check the layers of the source tree by its #include lines.

docs/architecture.md draws the picture; this file is the same picture as a table
that can fail. It reads text, not a build, so it runs in a second on any machine:

  layers      who may include whom (ROOMS below), resolved per #include "..."
  fences      intrinsics only in src/kern/<isa>/, sockets only in
              programs/serve/, allocation only in src/base/, no <math.h>, no
              getenv, no printing and no exit in src/
  names       a file name is used once in the tree
  headers     each header compiles alone and without warnings; a public one as plain C17

tools/check_symbols.py asks the object files the same questions; the two together
are hard to get around by accident.

usage: check_layers.py [--root DIR] [--cc CC]     exit 1 on a breach
       check_layers.py --self-test                prove that each rule can fail
"""
import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile

# Room -> rooms it may include besides itself. "api" is include/kvd; the one
# header kvd/kvd_error.h is open to all. A room that is not listed is a breach:
# the picture is changed on purpose, here and in docs/architecture.md.
LOW = ["base", "gguf", "quant", "kern", "token"]
ROOMS = {
    "base": [],
    "gguf": ["base"],
    "quant": ["base"],
    "kern": ["base", "quant"],
    "token": ["base"],
    "kv": LOW,
    "model": LOW + ["kv"],
    "gen": LOW + ["kv", "model", "api"],
    "store": LOW + ["kv", "model", "gen", "api"],
    "sched": LOW + ["kv", "model", "gen", "api"],
    "api": [],
    "lab": ["api"],
    "programs": ["api", "lab"],
    "examples": ["api"],
}
OPEN_HEADER = "kvd/kvd_error.h"

INTRINSICS = re.compile(r"^(\w*intrin|arm_neon|arm_sve|arm_acle)\.h$")
SOCKETS = re.compile(r"^(sys/socket|sys/un|netinet/.*|arpa/inet|netdb|microhttpd)\.h$")
LIBM = re.compile(r"^(math|tgmath|complex)\.h$")
ALLOCATION = ("malloc calloc realloc reallocarray free aligned_alloc posix_memalign memalign valloc alloca "
              "strdup strndup asprintf vasprintf mmap munmap mremap sbrk").split()
# Not in src/ at all: environment, printing, ending the process.
FORBIDDEN = ("getenv secure_getenv setenv putenv printf vprintf fprintf vfprintf dprintf puts fputs putc putchar fputc "
             "perror exit _exit _Exit quick_exit abort").split()
LIBM_BUILTIN = re.compile(r"__builtin_(exp|log|pow|sin|cos|tan|tanh|sinh|cosh|atan|cbrt|erf)\w*$")

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.M)
# A call or a taken address by bare name: not a member (a.free, a->exp), not part
# of a longer name.
WORD = re.compile(r"(?<![\w.])(?<!->)([A-Za-z_]\w*)")


def strip(text):
    """Blank comments and string literals, keeping line numbers."""
    def blank(m):
        s = m.group(0)
        return s if s.startswith("#") else re.sub(r"[^\n]", " ", s)
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text, flags=re.S)


def room_of(path):
    parts = path.split("/")
    if parts[0] == "src":
        return parts[1] if len(parts) > 2 else "src"
    return "api" if parts[:2] == ["include", "kvd"] else parts[0]


def is_isa_file(path):
    parts = path.split("/")
    return parts[:2] == ["src", "kern"] and len(parts) == 4


class Tree:
    def __init__(self, root):
        self.root = root
        self.files = []
        for top in ("src", "include", "lab", "programs", "examples", "tests", "fuzz", "bench"):
            for folder, folders, names in os.walk(os.path.join(root, top)):
                folders.sort()
                for name in sorted(names):
                    if name.endswith((".c", ".h")):
                        self.files.append(os.path.relpath(os.path.join(folder, name), root))
        self.breaches = []

    def breach(self, path, line, text):
        self.breaches.append(f"{path}:{line}: {text}" if line else f"{path}: {text}")

    def check_text(self, path):
        with open(os.path.join(self.root, path), encoding="utf-8", errors="replace") as f:
            raw = f.read()
        room = room_of(path)
        for m in INCLUDE.finditer(re.sub(r"/\*.*?\*/", lambda c: re.sub(r"[^\n]", " ", c.group(0)), raw, flags=re.S)):
            self.check_include(path, room, raw.count("\n", 0, m.start()) + 1, m.group(1) == '"', m.group(2))
        if path.startswith("src/"):
            self.check_words(path, room, strip(raw))

    def check_include(self, path, room, line, quoted, name):
        where = (path, line)
        if INTRINSICS.match(name) and not is_isa_file(path) and not path.startswith(("tests/", "bench/")):
            self.breach(*where, f"<{name}>: intrinsics belong in src/kern/<isa>/")
        if SOCKETS.match(name) and not path.startswith("programs/serve/"):
            self.breach(*where, f"<{name}>: sockets belong in programs/serve/")
        if LIBM.match(name) and path.startswith("src/"):
            self.breach(*where, f"<{name}>: no libm in src/; see base/math64.h")
        if room in ("tests", "fuzz", "bench"):
            return  # they may see what they test; the build links them accordingly
        if room not in ROOMS:
            self.breach(*where, f"room '{room}' is not in the picture (tools/check_layers.py, docs/architecture.md)")
            return
        target = self.resolve(path, name)
        if target is None:
            if quoted:
                self.breach(*where, f'"{name}": not found in src/ or include/; system headers take <>')
            return
        other = room_of(target)
        if other != room and target != "include/" + OPEN_HEADER and other not in ROOMS[room]:
            self.breach(*where, f"{room} may not include {other} ({target})")

    def resolve(self, path, name):
        for base in ("src", "include", os.path.dirname(path), "lab", "programs", "."):
            candidate = os.path.normpath(os.path.join(base, name))
            if os.path.isfile(os.path.join(self.root, candidate)):
                return candidate
        return None

    def check_words(self, path, room, text):
        for number, line in enumerate(text.split("\n"), 1):
            if line.lstrip().startswith("#"):
                line = re.sub(r"^\s*#\s*(include|error|pragma).*", "", line)
            for m in WORD.finditer(line):
                word = m.group(1)
                called = line[m.end():].lstrip().startswith("(")
                if room != "base" and called and word in ALLOCATION:
                    self.breach(path, number, f"{word}(): allocation goes through base/ledger.h")
                if called and word in FORBIDDEN:
                    self.breach(path, number, f"{word}(): the library never prints, exits or reads the environment")
                if word in ("stdout", "stderr", "environ"):
                    self.breach(path, number, f"{word}: the library never prints or reads the environment")
                if LIBM_BUILTIN.match(word):
                    self.breach(path, number, f"{word}: no libm in src/")

    def check_names(self):
        seen = {}
        for path in self.files:
            name = os.path.basename(path)
            if name in seen:
                self.breach(path, 0, f"file name already used by {seen[name]}")
            seen.setdefault(name, path)

    def check_headers(self, cc):
        for path in self.files:
            if not path.endswith(".h"):
                continue
            flags = ["-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
            if path.startswith("include/"):
                flags += ["-std=c17", "-pedantic", "-Wstrict-prototypes", "-Iinclude"]  # a user has only these
            else:
                flags += ["-std=gnu17", "-Iinclude", "-Isrc", "-I" + os.path.dirname(path)]
                if room_of(path) in ("lab", "programs"):
                    flags += ["-I."]  # "lab/lab.h"
                if is_isa_file(path):
                    isa = path.split("/")[2]
                    if isa == "x86" and platform.machine() not in ("x86_64", "AMD64"):
                        continue
                    if isa == "arm" and platform.machine() not in ("aarch64", "arm64"):
                        continue
                    if isa == "x86":
                        flags += ["-mavx2", "-mfma", "-mf16c"]
                        if "avx512" in os.path.basename(path):
                            flags += ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
            # Through a file that includes it, so that "main file" warnings of a header do not arise.
            run = subprocess.run([cc, *flags, "-x", "c", "-"], input=f'#include "{path}"\n', cwd=self.root, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if run.returncode:
                first = next((x for x in run.stdout.split("\n") if "error" in x), run.stdout.strip())
                self.breach(path, 0, f"does not compile alone: {first}")

    def check(self, cc):
        for path in self.files:
            self.check_text(path)
        self.check_names()
        if cc:
            self.check_headers(cc)
        return self.breaches


# What must fail, each alone in a tree that is otherwise sound: (files, text that the breach names).
CLEAN = {
    "include/kvd/kvd_error.h": "#include <stdint.h>\ntypedef struct kvd_error { int code; } kvd_error;\n",
    "include/kvd/kvd.h": '#include "kvd/kvd_error.h"\nint kvd_f(kvd_error *err);\n',
    "src/base/ledger.h": '/* malloc( in a comment, "exit(" too */\n#include "kvd/kvd_error.h"\nvoid *kvd__alloc(int n);\n',
    "src/base/ledger.c": '#include "base/ledger.h"\n#include <stdlib.h>\nvoid *kvd__alloc(int n) { return malloc(n); }\n',
    "src/quant/quant.h": '#include "base/ledger.h"\n',
    "src/kern/kern.h": '#include "quant/quant.h"\n',
    "src/kern/x86/vec.c": '#include "kern/kern.h"\n#include <immintrin.h>\n',
    "src/gen/session.c": '#include "kvd/kvd.h"\n#include "kern/kern.h"\n'
                         'void f(struct t *t) { t->free(t); t->exp(1); kvd__free(t); }\nconst char *s = "abort()";\n',
    "programs/kvd.c": '#include "kvd/kvd.h"\n#include <stdio.h>\nint main(void) { return printf("x"); }\n',
    "tests/unit/test_a.c": '#include "kern/kern.h"\n#include <math.h>\n',
}
BROKEN = [
    ({"src/gguf/g.c": '#include "quant/quant.h"\n'}, "gguf may not include quant"),
    ({"src/quant/q.c": '#include "kern/kern.h"\n'}, "quant may not include kern"),
    ({"src/base/b.c": '#include "quant/quant.h"\n'}, "base may not include quant"),
    ({"src/model/m.h": "\n", "src/kv/k.c": '#include "model/m.h"\n'}, "kv may not include model"),
    ({"src/model/m.c": '#include "kvd/kvd.h"\n'}, "model may not include api"),
    ({"include/kvd/x.h": '#include "base/ledger.h"\n'}, "api may not include base"),
    ({"programs/p.c": '#include "kern/kern.h"\n'}, "programs may not include kern"),
    ({"examples/e.c": '#include "base/ledger.h"\n'}, "examples may not include base"),
    ({"src/base/odd.c": '#include "ledger2.h"\n'}, "not found"),
    ({"src/attic/a.c": '#include "base/ledger.h"\n'}, "not in the picture"),
    ({"src/kern/k.c": "#include <immintrin.h>\n"}, "intrinsics belong"),
    ({"programs/s.c": "#include <sys/socket.h>\n"}, "sockets belong"),
    ({"src/gen/l.c": "#include <math.h>\n"}, "no libm"),
    ({"src/gen/l.c": "double f(double x) { return __builtin_exp(x); }\n"}, "no libm"),
    ({"src/gen/a.c": "#include <stdlib.h>\nvoid *f(void) { return calloc(1, 2); }\n"}, "calloc()"),
    ({"src/kv/a.c": "#include <stdlib.h>\nvoid f(void *p) { free (p); }\n"}, "free()"),
    ({"src/gen/e.c": '#include <stdlib.h>\nchar *f(void) { return getenv("X"); }\n'}, "getenv()"),
    ({"src/gen/p.c": '#include <stdio.h>\nvoid f(void) { printf("x"); }\n'}, "printf()"),
    ({"src/base/p.c": "#include <stdlib.h>\nvoid f(void) { abort(); }\n"}, "abort()"),
    ({"src/base/p.c": '#include <stdio.h>\nvoid *f(void) { return stderr; }\n'}, "stderr"),
    ({"tests/unit/ledger.c": "\n"}, "already used"),
    ({"src/kv/h.h": "size_t f(void);\n"}, "does not compile alone"),
]


def self_test(cc):
    failed = 0
    for files, expected in [({}, None)] + BROKEN:
        with tempfile.TemporaryDirectory() as root:
            for path, text in {**CLEAN, **files}.items():
                os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
                with open(os.path.join(root, path), "w", encoding="utf-8") as f:
                    f.write(text)
            breaches = Tree(root).check(cc if expected in (None, "does not compile alone") else None)
        ok = any(expected in b for b in breaches) if expected else not breaches
        if not ok:
            failed += 1
            print(f"self-test: {'expected ' + repr(expected) if expected else 'a sound tree'}: got {breaches}")
    print(f"check_layers self-test: {len(BROKEN) + 1 - failed} passed, {failed} failed")
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description="check the layers of the source tree")
    parser.add_argument("--root", default=os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    parser.add_argument("--cc", default=os.environ.get("CC", "cc"))
    parser.add_argument("--self-test", action="store_true")
    args = parser.parse_args()
    if args.self_test:
        return self_test(args.cc)
    tree = Tree(args.root)
    breaches = tree.check(args.cc)
    for b in breaches:
        print(b)
    print(f"check_layers: {len(tree.files)} files, {len(breaches)} breaches")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
