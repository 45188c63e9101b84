#!/usr/bin/env python3
"""Times MoE layers of PyTorch and of other software on one GPU: forward and backward, bf16, T = 32768.

Prints a table on standard output. With --moebius it has the ratio to the time of Moebius.
--moebius names a file of JSON lines that `moebius bench moe-layer --device cuda --json` printed,
one for each --shape and --routing. Missing times are reported on standard error.
--json FILE writes one JSON object per row.
Times are CUDA events around forward and backward, with a buffer larger than the L2 cache written in
between. The result is the median.
Gradients are new in every iteration and bf16. Moebius adds to f32 gradients, which is more bytes.
Exit code 3 when PyTorch or a GPU is missing, 1 when no peer ran.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import statistics
import sys
import time

try:
    import torch
except ImportError as error:
    print(f"torch_cuda: needs the Python package torch; got: {error}", file=sys.stderr)
    sys.exit(3)

from moe_peers import PEERS, Problem
from moe_shapes import SHAPES, route


ROUTERS = {"both": [False, True], "with": [True], "without": [False]}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--peers", nargs="+", choices=list(PEERS),
                        default=[p for p in PEERS if p not in ["grouped_mm_max_autotune", "liger_rows_128"]])
    parser.add_argument("--routing", nargs="+", default=["balanced", "zipf"], choices=["balanced", "zipf"])
    parser.add_argument("--zipf", type=float, default=1.0, help="the exponent")
    parser.add_argument("--router", choices=list(ROUTERS), default="both",
                        help="with: router, softmax, top-k and their backward count; building the index always does")
    parser.add_argument("--iterations", type=int, default=30, help="at most; fewer where one takes long")
    parser.add_argument("--seconds", type=float, default=1.5, help="of measuring a row, about; at least 10 iterations")
    parser.add_argument("--tokens", type=int, help="T, for trying things out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warm-only", action="store_true", help="compiles and tunes, times nothing")
    parser.add_argument("--moebius", help="JSON lines of Moebius' own figures")
    parser.add_argument("--json", help="file that the rows are added to")
    return parser.parse_args()


def make_problem(shape, routing, args, device="cuda"):
    topk, logits = route(shape, routing, args.zipf, args.seed)
    torch.manual_seed(args.seed)
    normal = lambda *size, std=1.0: torch.randn(*size, device=device, dtype=torch.bfloat16) * std
    x_TD = normal(shape.T, shape.D)
    topk_TK = torch.from_numpy(topk).to(device)
    if logits is not None:  # the router computes them from x, so that it chooses topk itself
        x_TD[:, :shape.E] = torch.from_numpy(logits).to(device)
        chosen = torch.softmax(x_TD[:, :shape.E].float().gather(1, topk_TK.long()), -1)
    else:
        chosen = torch.softmax(torch.randn(shape.T, shape.K, device=device), -1)
    problem = Problem(shape, x_TD, normal(shape.T, shape.D), normal(shape.E, 2 * shape.F, shape.D, std=shape.D**-0.5),
                      normal(shape.E, shape.D, shape.F, std=shape.F**-0.5),
                      torch.eye(shape.E, shape.D, device=device, dtype=torch.bfloat16), topk_TK,
                      chosen.to(torch.bfloat16), logits is not None)
    for leaf in problem.leaves():
        leaf.requires_grad_()
    return problem


class Timer:
    def __init__(self, device="cuda"):
        self.flush = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)

    def median_ms(self, body, args):
        """Times body(before, middle, after), which records three events. Returns medians from before
        to after and to middle, and n.
        """
        once = self.events(body)
        once[2].synchronize()
        n = int(min(args.iterations, max(10, args.seconds * 1e3 / once[0].elapsed_time(once[2]))))
        runs = [self.events(body) for _ in range(n)]
        torch.cuda.synchronize()
        return (statistics.median(e[0].elapsed_time(e[2]) for e in runs),
                statistics.median(e[0].elapsed_time(e[1]) for e in runs), n)

    def events(self, body):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        self.flush.zero_()
        body(*events)
        return events


def matrix_tflops(timer, args, n=8192):
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def body(before, middle, after):
        before.record()
        middle.record()
        torch.mm(a, b.t())
        after.record()

    return 2 * n**3 / timer.median_ms(body, args)[0] / 1e9


def kept_bytes(problem, layer, with_router):
    """Returns the bytes that stay allocated between forward and backward, without y."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y_TD = layer(problem.x_TD, with_router)
    kept = torch.cuda.memory_allocated() - before - y_TD.numel() * y_TD.element_size()
    return kept + problem.x_TD.numel() * problem.x_TD.element_size()


def results_of(problem, layer, with_router):
    for leaf in problem.leaves():
        leaf.grad = None
    y_TD = layer(problem.x_TD, with_router)
    y_TD.backward(problem.dy_TD)
    return [y_TD.detach(), problem.x_TD.grad, problem.w2_eDF.grad]


def references(shape, routing, args):
    """Returns y, dx and dw2 of the simplest peer, by with_router."""
    problem = make_problem(shape, routing, args)
    layer = PEERS["grouped_mm"](problem)
    return {r: results_of(problem, layer, r) for r in [False, True] if problem.routable or not r}


def worst_difference(got, expected):
    """Returns the largest relative L2 distance of y, dx and dw2."""
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(got, expected))


def time_layer(timer, problem, layer, with_router, args):
    def body(before, middle, after):
        for leaf in problem.leaves():
            leaf.grad = None
        before.record()
        y_TD = layer(problem.x_TD, with_router)
        middle.record()
        y_TD.backward(problem.dy_TD)
        after.record()

    for _ in range(2):
        timer.events(body)
    if args.warm_only:
        return 0.0, 0.0, 0
    return timer.median_ms(body, args)


def moebius_ms(path):
    """Returns milliseconds by (shape, routing, router)."""
    times = {}
    for text in open(path) if path else []:
        row = json.loads(text)
        for line in row.get("lines", []):
            if line["name"].startswith("moe_layer_fwd_bwd"):
                times[row["shape"], row["routing"], line["name"].endswith("_router")] = line["median_ms"]
    return times


def warn_of_missing(args, ours):
    """Reports which ratios the table will lack although --moebius was given."""
    for name, routing, router in itertools.product(args.shapes, args.routing, ROUTERS[args.router]):
        routable = routing == "balanced" or SHAPES[name].E > SHAPES[name].K
        if args.moebius and (routable or not router) and (name, routing, router) not in ours:
            print(f"torch_cuda: {args.moebius} has no time of {name}, {routing}, {'with' if router else 'without'} the "
                  f"router: no ratio; add what `build/moebius bench moe-layer --device cuda --shape {name} --routing "
                  f"{routing} --json` prints", file=sys.stderr)


def run_peer(timer, name, shape, routing, expected, args, ours):
    """Returns the rows of one peer for one shape and routing."""
    problem = make_problem(shape, routing, args)
    rows = []
    layer = PEERS[name](problem)
    for with_router in [r for r in ROUTERS[args.router] if problem.routable or not r]:
        row = {"shape": shape.name, "routing": routing, "router": with_router, "peer": name}
        begin = time.perf_counter()
        results = results_of(problem, layer, with_router)
        off = worst_difference(results, expected[with_router])
        if off > 0.03:
            raise ArithmeticError(f"relative difference from the first peer {off:.3f}")
        del results
        ms, forward_ms, n = time_layer(timer, problem, layer, with_router, args)
        row |= {"ms": ms, "forward_ms": forward_ms, "iterations": n, "difference": off,
                "tflops": shape.flops() / ms / 1e9 if ms else 0,
                "kept_gib": kept_bytes(problem, layer, with_router) / 2**30,
                "all_s": time.perf_counter() - begin}
        if (shape.name, routing, with_router) in ours:
            row["ratio"] = ms / ours[shape.name, routing, with_router]
        rows.append(row)
    return rows


def print_row(row):
    head = f"{row['shape']:19s} {row['routing']:9s} {'router' if row['router'] else '-':7s} {row['peer']:24s}"
    if "skipped" in row:
        print(f"{head} skipped: {row['skipped']}", flush=True)
        return
    ratio = f"{row['ratio']:6.2f} x Moebius' time" if "ratio" in row else ""
    print(f"{head} {row['ms']:9.3f} ms  fwd {row['forward_ms']:8.3f}  {row['tflops']:6.1f} TFLOP/s  kept "
          f"{row['kept_gib']:6.2f} GiB  n {row['iterations']:2d}  diff {row['difference']:.4f}  ({row['all_s']:.0f} s) "
          f"{ratio}", flush=True)


def main():
    args = parse_args()
    if not torch.cuda.is_available():
        print("torch_cuda: needs a GPU", file=sys.stderr)
        return 3
    timer = Timer()
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}; bf16 8192^3: "
          f"{matrix_tflops(timer, args):.0f} TFLOP/s; Zipf exponent {args.zipf}; seed {args.seed}", flush=True)
    ours, rows = moebius_ms(args.moebius), []
    warn_of_missing(args, ours)
    for shape, routing in itertools.product([SHAPES[name] for name in args.shapes], args.routing):
        if args.tokens:
            shape = dataclasses.replace(shape, T=args.tokens)
        expected = references(shape, routing, args)
        for name in args.peers:
            try:
                new = run_peer(timer, name, shape, routing, expected, args, ours)
            except Exception as error:  # a failed peer is a line of the table
                reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
                new = [{"shape": shape.name, "routing": routing, "router": False, "peer": name, "skipped": reason}]
            for row in new:
                print_row(row)
            rows += new
            if args.json:
                with open(args.json, "a") as out:
                    out.writelines(json.dumps(row) + "\n" for row in new)
            gc.collect()
            torch.cuda.empty_cache()
    return 0 if any("ms" in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
