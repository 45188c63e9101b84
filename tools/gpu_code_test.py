#!/usr/bin/env python3
"""Tests gpu_code.py on listings of cuobjdump: what it reads in them, and what it misses."""
import sys

import gpu_code

NATIVE = """
Fatbin elf code:
ELF file    1: rows.sm_90a.cubin
ELF file    2: rows.sm_80.cubin
ELF file    3: moebius.4.sm_90.cubin
ELF file    4: moebius.4.sm_80.cubin
ELF file    5: hopper.sm_90a.cubin
"""
PTX = """
PTX file    1: rows.sm_80.ptx
PTX file    2: moebius.4.sm_80.ptx
"""

# architectures, the listings, and what is missing where rows and rope are the portable sources
CASES = [
    ("80;90a", NATIVE, PTX, []),
    ("80;86;90a", NATIVE, PTX, ["expected native code for 86; there is none"]),
    ("90a", NATIVE, "", ["expected no native code for 80, which MOEBIUS_CUDA_ARCHITECTURES does not name"]),
    ("80;90a", NATIVE.replace("ELF file    1: rows.sm_90a.cubin\n", ""), PTX,
     ["expected native code for 90a of every portable kernel; there is none of rows"]),
    ("80;90a", NATIVE, PTX.replace("rows", "rope"), ["expected PTX of 80 for other GPUs; there is none of rows"]),
    ("90a;120", NATIVE.replace("sm_80", "sm_120"), PTX, []),
    ("90a;120", NATIVE.replace("sm_80", "sm_120"), "",
     ["expected PTX of 80 for other GPUs; there is none of moebius, rows"]),
    ("90a", "ELF file    5: hopper.sm_90a.cubin\n", "", []),
    ("80;90a", NATIVE.replace("hopper", "rope"), PTX,
     ["expected native code for 80 of every portable kernel; there is none of rope",
      "expected PTX of 80 for other GPUs; there is none of rope"]),
    ("ptx;90a", "ELF file    5: hopper.sm_90a.cubin\n", PTX, []),
    ("ptx;90a", NATIVE, PTX, ["expected no native code for 80, since the portable kernels have PTX alone"]),
    ("ptx;90a", "ELF file    1: rope.sm_90a.cubin\n", PTX,
     ["expected PTX of 80 for other GPUs; there is none of rope"]),
    ("ptx;90a", "", "", ["expected native code for 90a; there is none", "expected PTX of 80; there is none"]),
    ("80;90a", "", "", ["expected native code for 80; there is none", "expected native code for 90a; there is none"]),
]


def main():
    failed = 0
    for architectures, native, ptx, expected in CASES:
        got = gpu_code.problems(architectures.split(";"), gpu_code.parse(native), gpu_code.parse(ptx),
                                ["rows", "rope"])
        if got != expected:
            failed += 1
            print(f"{architectures}: expected {expected}; got {got}")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
