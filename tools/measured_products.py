#!/usr/bin/env python3
"""Prints rows for src/precision/measured_products.cc from what `moebius bench precision` measured.

    moebius bench precision --recipe recipes/bench_qwen3_30b_a3b_8layers.toml --device cuda \\
        --set precision.recipe=fp8_block --json > qwen3.json
    tools/measured_products.py qwen3.json [FILE ...]

A row has the shape of a product, and the milliseconds of its passes in bf16 and with the recipe. Products that
precision.keep names have no row. If several products or files have the same shape, the first one is printed.
The exit code is 1 if a file was measured with another recipe than fp8_block and fp8_tensor, with another recipe than
the first file, or on a CPU.
"""

import json
import sys
from pathlib import Path

RECIPES = ("fp8_block", "fp8_tensor")
PASSES = ("forward_ms", "backward_input_ms", "backward_weight_ms")


def row(line):
    """Returns the shape of a line of the bench as a C++ initialiser, and the whole row."""
    dims = [int(n) for n in line["shape"].strip("[]").split(",")]
    is_experts, (out, columns) = len(dims) == 3, dims[-2:]
    pairs = [f"{line['plain'][p]:.3f}, {line['quantised'][p]:.3f}" for p in PASSES]
    shape = f"{{{str(is_experts).lower()}, {line['rows']}, {out}, {columns}}}"
    return shape, f"    MeasuredProduct{{{shape}, {{{pairs[0]}}}, {{{pairs[1]}}}, PassPair{{{pairs[2]}}}}},"


def main(files):
    seen, recipe = set(), None
    for file in files:
        bench = json.loads(Path(file).read_text())
        got = bench.get("precision_recipe")
        if got not in RECIPES or got != (recipe or got) or bench.get("device") != "cuda":
            print(f"{file}: expected `bench precision --device cuda --json` of {recipe or ' or '.join(RECIPES)}; got "
                  f"{got} on {bench.get('device')}; measure again with --device cuda "
                  f"--set precision.recipe={recipe or RECIPES[0]}", file=sys.stderr)
            return 1
        recipe = got
        print(f"    // {Path(bench['recipe']).stem}, {bench['rows']} tokens in a micro-batch: {bench['machine']}")
        for line in bench["lines"]:
            if line["kept"]:
                continue
            shape, text = row(line)
            if shape not in seen:
                seen.add(shape)
                print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if sys.argv[1:] else __doc__)
