#!/usr/bin/env python3
"""Checks with cuobjdump which GPUs a program has native code for, and the PTX for later ones.

usage: tools/gpu_code.py --architectures "80;90a" [--portable "rows;rope"] [--cuobjdump FILE] [--required] PROGRAM

Every kernel of cuda/ and sm80/ must have code for each architecture, and PTX of 8.0 unless 90a is the only one. With
"ptx;90a" it must have the PTX, and only kernels that start early have native code for 90a too. Those
of sm90/ have code for 90a alone. Files of one name are counted together: where sm90/ has the name too, one of them
may lack code for 90a unnoticed (ops/cuda/early_launch.h finds this where it matters). The exit status is 1 where something is missing. Without a cuobjdump it is 77, and 1 with --required.

--portable names the sources of cuda/ and sm80/, without endings. One that has code for 90a alone is then found.
"""
import argparse
import collections
import os
import re
import shutil
import subprocess
import sys

HOPPER = "90a"
PTX = "80"
PTX_ALONE = "ptx"  # "ptx;90a": only sources of Hopper's own instructions have native code
SKIPPED = 77
LISTED = re.compile(r":\s*(?:\S*/)?(.+?)\.(?:\d+\.)?sm_(\d+)a?\.(?:cubin|ptx)\s*$")


def parse(listing):
    """Returns a Counter of source names for each architecture, from the output of cuobjdump --list-elf or --list-ptx."""
    found = collections.defaultdict(collections.Counter)
    for line in listing.splitlines():
        if match := LISTED.search(line):
            found[match.group(2)][match.group(1)] += 1
    return found


def problems(architectures, native, ptx, sources=()):
    """Returns what is missing, as lines. native and ptx are results of parse(); sources: names of portable sources."""
    portable = [a for a in architectures if a != HOPPER]
    names = collections.Counter()
    if PTX_ALONE in portable:
        return problems_of_ptx_alone(native, ptx, sources)
    for a in portable:
        names |= native[a]
    if portable:  # a source without kernels has no code at all
        names |= native[HOPPER.rstrip("a")] & collections.Counter(sources)
    lines = []
    for a in architectures:
        have = native[a.rstrip("a")]
        if not have:
            lines.append(f"expected native code for {a}; there is none")
        elif lacking := names - have:
            lines.append(f"expected native code for {a} of every portable kernel; there is none of {', '.join(sorted(lacking))}")
    for a in sorted(set(native) - {a.rstrip("a") for a in architectures}):
        lines.append(f"expected no native code for {a}, which MOEBIUS_CUDA_ARCHITECTURES does not name")
    if portable and (lacking := names - ptx[PTX]):
        lines.append(f"expected PTX of {PTX} for other GPUs; there is none of {', '.join(sorted(lacking))}")
    return lines


def problems_of_ptx_alone(native, ptx, sources):
    """Does the same for a build of "ptx;90a". A source without native code and without PTX may have no kernels."""
    lines = []
    for a in sorted(set(native) - {HOPPER.rstrip("a")}):
        lines.append(f"expected no native code for {a}, since the portable kernels have PTX alone")
    if not native[HOPPER.rstrip("a")]:
        lines.append(f"expected native code for {HOPPER}; there is none")
    if lacking := native[HOPPER.rstrip("a")] & collections.Counter(sources) - ptx[PTX]:
        lines.append(f"expected PTX of {PTX} for other GPUs; there is none of {', '.join(sorted(lacking))}")
    if not ptx[PTX]:
        lines.append(f"expected PTX of {PTX}; there is none")
    return lines


def find_cuobjdump():
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("cuobjdump") or shutil.which("cuobjdump", path=os.path.join(home, "bin"))


def list_code(cuobjdump, option, program):
    ran = subprocess.run([cuobjdump, option, program], capture_output=True, text=True, check=False)
    # cuobjdump fails where a program has none of what it lists.
    return parse(ran.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", required=True)
    parser.add_argument("--portable", default="")
    parser.add_argument("--required", action="store_true")
    parser.add_argument("--cuobjdump", default=find_cuobjdump())
    parser.add_argument("program")
    args = parser.parse_args()
    if not args.cuobjdump:
        how = "there is no cuobjdump; install the toolkit's (Debian: cuda-cuobjdump), or set CUDA_HOME"
        print(how if args.required else f"skipped: {how}")
        return 1 if args.required else SKIPPED
    native = list_code(args.cuobjdump, "--list-elf", args.program)
    ptx = list_code(args.cuobjdump, "--list-ptx", args.program)
    for a in sorted(native, key=int):
        print(f"native code for {a}: {sum(native[a].values())} sources")
    for a in sorted(ptx, key=int):
        print(f"PTX of {a}: {sum(ptx[a].values())} sources")
    wrong = problems(args.architectures.split(";"), native, ptx, filter(None, args.portable.split(";")))
    for line in wrong:
        print(f"{args.program}: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
