#!/usr/bin/env python3
"""Check what the object files of src/ need and offer: check_layers.py's other half.

Text can hide a call behind a macro; an undefined symbol can not. For each object
of a room (BUILD/src/<room>/...):

  needs    no allocator outside base, no libm at all, no getenv, printf, exit or
           abort (assert's own handler is allowed)
  offers   global names begin with kvd_; no writable globals ("no globals")

usage: check_symbols.py BUILD_DIR      exit 1 on a breach. Uses nm of binutils.
"""
import os
import re
import subprocess
import sys

ALLOCATION = set("malloc calloc realloc reallocarray free aligned_alloc posix_memalign memalign valloc strdup strndup "
                 "__strdup asprintf vasprintf mmap mmap64 munmap mremap".split())
FORBIDDEN = set("getenv secure_getenv printf puts putchar fprintf fputs fputc fwrite vprintf vfprintf perror exit _exit "
                "abort stdout stderr __printf_chk __fprintf_chk __vfprintf_chk".split())
LIBM = re.compile(r"^(exp|exp2|expm1|log|log2|log10|log1p|pow|sin|cos|tan|sincos|a?sinh?|a?cosh?|a?tanh?|atan2|cbrt|erfc?|"
                  r"[tl]gamma|hypot|fma|fmod|remainder|round|rint|nearbyint|floor|ceil|trunc|l?l?rint|l?l?round|ldexp|"
                  r"frexp|scalbn|modf|sqrt)[fl]?$")


def room_of(path):
    """.../src/<room>/... or Meson's flattened .../src/lib<lib>.a.p/<room>_file.c.o"""
    inside = path.split("/src/", 1)[1].split("/")
    if inside[0].endswith(".p"):
        return inside[1].split("_", 1)[0]
    return inside[0]


def main():
    if len(sys.argv) != 2:
        print(__doc__.strip().split("\n\n")[-1], file=sys.stderr)
        return 2
    objects, breaches = 0, []
    for folder, _, names in os.walk(os.path.join(sys.argv[1], "src")):
        for name in sorted(names):
            if not name.endswith(".o"):
                continue
            objects += 1
            path = os.path.join(folder, name)
            room = room_of(os.path.abspath(path))
            out = subprocess.run(["nm", "-P", path], check=True, text=True, stdout=subprocess.PIPE).stdout
            for line in out.splitlines():
                symbol, kind = line.split()[:2]
                if symbol.startswith(("__asan", "__ubsan", "__tsan", "__gcov", "__sanitizer")):
                    continue
                if kind in "Uw":
                    if symbol in ALLOCATION and room != "base":
                        breaches.append(f"{name} ({room}): needs {symbol}: allocation goes through base")
                    if symbol in FORBIDDEN:
                        breaches.append(f"{name} ({room}): needs {symbol}: not in the library")
                    if LIBM.match(symbol):
                        breaches.append(f"{name} ({room}): needs {symbol}: no libm in src/")
                elif kind.isupper() and not symbol.startswith("kvd_"):
                    breaches.append(f"{name} ({room}): offers {symbol}: global names begin with kvd_")
                elif kind in "DBC":
                    breaches.append(f"{name} ({room}): offers {symbol}: a writable global")
    for b in breaches:
        print(b)
    if not objects:
        print("check_symbols: no objects found", file=sys.stderr)
        return 1
    print(f"check_symbols: {objects} objects, {len(breaches)} breaches")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
