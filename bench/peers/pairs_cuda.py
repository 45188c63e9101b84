#!/usr/bin/env python3
"""Compares a peer with Moebius on one GPU: the MoE layer forward and backward without the router.
The two take turns. Each time of Moebius is compared with the mean of its neighbours, because the
GPU's clock follows its power.

usage: bench/peers/pairs_cuda.py [--shapes mixtral-8x7b ...] [--peer sonicmoe] [--pairs 5]
[--moebius build/moebius]

Prints a line for each pair as it is measured, and the median of each shape. A ratio above 1 means
that Moebius is faster.
Exit code 3 when PyTorch or a GPU is missing, 1 when Moebius failed.
"""

import argparse
import gc
import json
import pathlib
import statistics
import subprocess
import sys
import time

import torch_cuda  # exits with 3 without PyTorch
from moe_peers import PEERS
from moe_shapes import SHAPES

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--peer", default="sonicmoe", choices=list(PEERS))
    parser.add_argument("--routing", default="balanced", choices=["balanced", "zipf"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tile", nargs=2, type=int, help="sonicmoe: this tile of M and N alone, instead of tuning over five")
    parser.add_argument("--moebius", default=str(ROOT / "build" / "moebius"))
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.set_defaults(zipf=1.0, seed=1, warm_only=False)
    return parser.parse_args()


def time_moebius(args, shape):
    out = subprocess.run([args.moebius, "bench", "moe-layer", "--device", "cuda", "--shape", shape.name, "--routing",
                          args.routing, "--json"], capture_output=True, text=True)
    if out.returncode != 0:
        sys.exit(f"pairs_cuda: {args.moebius} ended with {out.returncode}: {out.stderr.strip()}")
    for line in out.stdout.splitlines():
        for row in json.loads(line).get("lines", []):
            if row["name"] == "moe_layer_fwd_bwd":
                return row["median_ms"]
    sys.exit(f"pairs_cuda: no moe_layer_fwd_bwd in what {args.moebius} printed")


def measure(args, shape, timer):
    problem = torch_cuda.make_problem(shape, args.routing, args)
    tiles = [[(*args.tile, False)]] if args.tile else []
    begin = time.time()
    layer = PEERS[args.peer](problem, *tiles)
    peer = lambda: torch_cuda.time_layer(timer, problem, layer, False, args)[0]
    before = peer()
    print(f"{shape.name} {args.routing}: {args.peer} is compiled and warm after {time.time() - begin:.0f} s", flush=True)
    ratios = []
    for _ in range(args.pairs):
        before, ours, after = before, time_moebius(args, shape), peer()
        ratios.append((before + after) / 2 / ours)
        print(f"{shape.name} {args.routing}: {args.peer} {before:.3f} Moebius {ours:.3f} {args.peer} {after:.3f} ms, "
              f"ratio {ratios[-1]:.4f}", flush=True)
        before = after
    print(f"{shape.name} {args.routing}: median ratio {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})",
          flush=True)


def main():
    args = parse_args()
    if not torch_cuda.torch.cuda.is_available():
        print("pairs_cuda: needs a GPU", file=sys.stderr)
        return 3
    timer = torch_cuda.Timer()
    for name in args.shapes:
        measure(args, SHAPES[name], timer)
        gc.collect()
        torch_cuda.torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
