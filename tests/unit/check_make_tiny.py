#!/usr/bin/env python3
"""tools/make_tiny_gguf.py: the reader takes what it writes, the bytes are those of
every other machine, and it refuses what cannot be.

usage: check_make_tiny.py MUTATE_GGUF     (the program, which also opens files)
"""
import hashlib
import os
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools"))
import make_tiny_gguf as tiny

# Golden receipts of tiny models hang on these bytes: a change of the tool that
# moves them is a change of those receipts, too.
EXPECTED = {
    "": "833b51bf9fb41d5971bac9c118f5cf8e9881be592476c745480db55d6f42951c",
    "--arch qwen2 --seed 7": "0375ac16eda2cf98f9bf0aea33797c2c605f20703767ccc7e7b8d4732aaf6c83",
    "--arch qwen3 --type Q4_0 --untied": "94e500d6364dfc882184216f745f7c658352ecb957733be15fa8f6dd0a015531",
    "--arch gemma3 --mix": "a1083275d3fa030a1bf8a735852d703e75fdf9905dba4015dd197836488615b7",
    "--mix --rope-freqs": "1df216085026fe205b05217af4f8381defbf03becd98d5fc16c9081496f3bfe8",
}
OTHERS = ["--vocab-only", "--vocab-only --arch gemma3", "--gguf-version 2 --alignment 4096", "--rope-scaling linear:4",
          "--set llama.rope.scaling.type=str:yarn --drop llama.block_count --drop output_norm.weight",
          *("--layers 1 --type " + t for t in tiny.TYPES)]


def build(options):
    return tiny.build(tiny.parse(["-o", "-", *options.split()]))


def main():
    results = []

    def check(condition, what):
        results.append(bool(condition))
        if not condition:
            print("FAILED:", what)

    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for options in [*EXPECTED, *OTHERS]:
            data = build(options)
            paths.append(os.path.join(folder, f"{len(paths)}.gguf"))
            with open(paths[-1], "wb") as f:
                f.write(data)
            if options in EXPECTED:
                got = hashlib.sha256(data).hexdigest()
                check(got == EXPECTED[options], f"sha256 of '{options}' is {got}")
        done = subprocess.run([sys.argv[1], "--open", *paths], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              universal_newlines=True)
        check(done.returncode == 0, f"the reader: {done.stdout}")
    check(len(build("")) < 200000, "the default model is small")
    for options in ("--type Q4_K --d 64", "--vocab 100", "--arch gemma3 --vocab 262", "--set a=b:c"):
        try:
            build(options)
            check(False, f"'{options}' is taken")
        except SystemExit as e:
            check(e.code not in (0, None), f"'{options}' ends without a reason")
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return not all(results)


if __name__ == "__main__":
    sys.exit(main())
