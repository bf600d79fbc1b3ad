#!/usr/bin/env python3
"""Check what the object files of src/ need and offer: check_layers.py's other half.

Text can hide a call behind a macro; an undefined symbol can not. For each object
of a room (BUILD/src/<room>/...):

  needs    no allocator outside base, no libm at all, no getenv, printf, exit or
           abort (assert's own handler is allowed)
  offers   global names begin with kvd_; no writable data, not even static

usage: check_symbols.py BUILD_DIR      exit 1 on a breach; needs objdump of binutils
       check_symbols.py --self-test    prove that each rule can fail; needs cc
"""
import os
import re
import subprocess
import sys
import tempfile

ALLOCATION = set("malloc calloc realloc reallocarray free aligned_alloc posix_memalign memalign valloc strdup strndup "
                 "__strdup asprintf vasprintf mmap mmap64 munmap mremap".split())
FORBIDDEN = set("getenv secure_getenv printf puts putchar fprintf fputs fputc fwrite vprintf vfprintf perror exit _exit "
                "abort stdout stderr __printf_chk __fprintf_chk __vfprintf_chk".split())
LIBM = re.compile(r"^(exp|exp2|expm1|log|log2|log10|log1p|pow|sin|cos|tan|sincos|a?sinh?|a?cosh?|a?tanh?|atan2|cbrt|erfc?|"
                  r"[tl]gamma|hypot|fma|fmod|remainder|round|rint|nearbyint|floor|ceil|trunc|l?l?rint|l?l?round|ldexp|"
                  r"frexp|scalbn|modf|sqrt)[fl]?$")
# .data.rel.ro holds constants with pointers in them: read-only once loaded.
WRITABLE = re.compile(r"^(\.t?(data|bss)(\.(?!rel\.ro).*)?|\*COM\*)$")
# objdump -t: value, 7 flags (0 scope, 5 d: section or file, 6 kind), section, size, maybe visibility, name
SYMBOL = re.compile(r"^[0-9a-f]+ (.{7}) (\S+)\s+[0-9a-f]+ (?:\.\w+ )?(\S+)$")


def symbols(path):
    """(name, section, is global) of an object's symbols."""
    out = subprocess.run(["objdump", "-t", path], check=True, text=True, stdout=subprocess.PIPE).stdout
    for m in filter(None, map(SYMBOL.match, out.splitlines())):
        flags, section, name = m.groups()
        if flags[5] != "d" and not name.startswith(("__asan", "__ubsan", "__odr_asan", "__tsan", "__gcov", "__sanitizer")):
            yield name, section, flags[0] in "gu!" or flags[1] == "w"


def room_of(path):
    """.../src/<room>/... or Meson's flattened .../src/lib<lib>.a.p/<room>_file.c.o"""
    inside = path.rsplit("/src/", 1)[1].split("/")
    if inside[0].endswith(".p"):
        return inside[1].split("_", 1)[0]
    return inside[0]


def check(build):
    """(number of objects, breaches)"""
    objects, breaches = 0, []
    for folder, _, names in os.walk(os.path.join(build, "src")):
        for file in sorted(names):
            if not file.endswith(".o"):
                continue
            objects += 1
            path = os.path.abspath(os.path.join(folder, file))
            room = room_of(path)
            for name, section, is_global in symbols(path):
                breach = None
                if section == "*UND*":
                    if name in ALLOCATION and room != "base":
                        breach = f"needs {name}: allocation goes through base"
                    elif name in FORBIDDEN:
                        breach = f"needs {name}: not in the library"
                    elif LIBM.match(name):
                        breach = f"needs {name}: no libm in src/"
                elif is_global and not name.startswith("kvd_"):
                    breach = f"offers {name}: global names begin with kvd_"
                elif WRITABLE.match(section):
                    breach = f"has {name} in {section}: no writable globals"
                if breach:
                    breaches.append(f"{file} ({room}): {breach}")
    return objects, breaches


def self_test():
    sound = "static const int t = 3; int kvd__f(void); int kvd__f(void) { return t; }"
    cases = [
        (sound, None),
        ("#include <stdlib.h>\nvoid *kvd__f(void) { return malloc(3); }", "needs malloc"),
        ("#include <math.h>\ndouble kvd__f(double x) { return exp(x); }", "needs exp"),
        ("#include <stdio.h>\nvoid kvd__f(int x) { printf(\"%d\", x); }", "needs printf"),
        ("#include <stdlib.h>\nvoid kvd__f(void) { abort(); }", "needs abort"),
        ("int f(void) { return 1; }", "offers f"),
        ("static int n; int kvd__f(void) { return n++; }", "no writable globals"),
        ("int kvd__n = 3;", "no writable globals"),
    ]
    failed = 0
    for text, expected in cases:
        with tempfile.TemporaryDirectory() as build:
            os.makedirs(os.path.join(build, "src", "gen"))
            subprocess.run([os.environ.get("CC", "cc"), "-O1", "-c", "-x", "c", "-", "-o",
                            os.path.join(build, "src", "gen", "a.o")], input=text, text=True, check=True)
            _, breaches = check(build)
        if (expected is None) != (not breaches) or (expected and not any(expected in b for b in breaches)):
            failed += 1
            print(f"self-test: expected {expected!r}, got {breaches}")
    print(f"check_symbols self-test: {len(cases) - failed} passed, {failed} failed")
    return 1 if failed else 0


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if len(sys.argv) != 2:
        print(__doc__.strip().split("\n\n")[-1], file=sys.stderr)
        return 2
    objects, breaches = check(sys.argv[1])
    for b in breaches:
        print(b)
    print(f"check_symbols: {objects} objects, {len(breaches)} breaches")
    return 1 if breaches or not objects else 0


if __name__ == "__main__":
    sys.exit(main())
