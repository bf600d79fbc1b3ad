#!/usr/bin/env python3
"""Compare our dequantisation with the gguf Python package, bit for bit.

usage: check_quant_gguf.py PATH/TO/test_quant

Random blocks with finite scales go through `test_quant --dequant TYPE` and
through gguf.quants.dequantize. Exits 77 (skipped) when gguf or numpy is missing.
"""
import subprocess
import sys

try:
    import gguf
    import gguf.quants
    import numpy as np
except ImportError as e:
    print(f"SKIPPED: check_quant_gguf: {e}", file=sys.stderr)
    sys.exit(77)

# type: (block bytes, offsets of its f16 fields)
TYPES = {
    "F16": (2, [0]), "BF16": (2, []),
    "Q4_0": (18, [0]), "Q4_1": (20, [0, 2]), "Q5_0": (22, [0]), "Q5_1": (24, [0, 2]),
    "Q8_0": (34, [0]), "IQ4_NL": (18, [0]),
    "Q2_K": (84, [80, 82]), "Q3_K": (110, [108]), "Q4_K": (144, [0, 2]), "Q5_K": (176, [0, 2]),
    "Q6_K": (210, [208]), "IQ4_XS": (136, [0]),
}
N_BLOCKS = 500


def main():
    rng = np.random.default_rng(1)
    failed = 0
    for name, (size, halves) in TYPES.items():
        raw = rng.integers(0, 256, (N_BLOCKS, size), dtype=np.uint8)
        for at in halves:  # a finite exponent
            raw[:, at + 1] &= 0xBF
        if name == "BF16":
            raw[:, 1] &= 0xBF
        ours = np.frombuffer(subprocess.run([sys.argv[1], "--dequant", name], input=raw.tobytes(),
                                            stdout=subprocess.PIPE, check=True).stdout, np.float32)
        theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name]).reshape(-1).astype(np.float32)
        same = ours.size == theirs.size and np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))
        print(f"{name:8} {'same bits' if same else 'DIFFERS'} ({theirs.size} values)")
        failed += not same
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main())
