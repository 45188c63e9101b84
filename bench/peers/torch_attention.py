#!/usr/bin/env python3
"""Times attention of PyTorch on one GPU: causal, bf16, forward and backward, by cuDNN or flash kernels.

The figures stand beside those of `moebius bench attention --device cuda` for the same shape, in TFLOP/s of the keys
that a query sees.
Times are CUDA events around a replayed call, with a buffer larger than the L2 cache written in between. The result is
the median.
Keys and values are given once for each query head where the kernels do not take grouped heads. That is more to read.
Exit code 3 when PyTorch or a GPU is missing.
"""

import argparse
import json
import statistics
import sys

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
except ImportError as error:
    print(f"torch_attention: needs the Python package torch; got: {error}", file=sys.stderr)
    sys.exit(3)

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128])
    parser.add_argument("--value-dim", type=int, default=0, help="0: as --head-dim")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", help="file that the rows are added to")
    return parser.parse_args()


def median_ms(body, runs, flush):
    times = []
    for i in range(runs + 3):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        body()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def time_shape(args, backend, width, flush):
    """Returns milliseconds of the forward pass and of the backward pass."""
    values = args.value_dim or width
    make = lambda heads, d: torch.randn(args.sequences, heads, args.length, d, device="cuda",
                                        dtype=torch.bfloat16).requires_grad_()
    for grouped in [True, False]:
        kv_heads = args.kv_heads if grouped else args.heads
        q, k, v = make(args.heads, width), make(kv_heads, width), make(kv_heads, values)
        with sdpa_kernel(BACKENDS[backend]):
            try:
                run = lambda: scaled_dot_product_attention(q, k, v, is_causal=True,
                                                           enable_gqa=kv_heads != args.heads)
                y = run()
            except RuntimeError:
                if not grouped:
                    raise
                continue
            dy = torch.randn_like(y)
            forward = median_ms(run, args.runs, flush)
            backward = median_ms(lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True), args.runs, flush)
            return forward, backward
    raise AssertionError


def main():
    args = parse_args()
    if not torch.cuda.is_available():
        print("torch_attention: needs a GPU; torch finds none", file=sys.stderr)
        sys.exit(3)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    for width in args.head_dim:
        pairs = args.sequences * args.heads * args.length * (args.length + 1) / 2
        values = args.value_dim or width
        flops, flops_backward = 2 * pairs * (width + values), 2 * pairs * (3 * width + 2 * values)
        for backend in args.backends:
            shape = f"{args.heads} on {args.kv_heads}, {width}, {args.sequences} x {args.length}, {backend}"
            try:
                forward, backward = time_shape(args, backend, width, flush)
            except RuntimeError as error:
                print(f"{shape}: not run: {str(error).splitlines()[0][:120]}")
                continue
            row = {"shape": shape, "forward_ms": forward, "backward_ms": backward,
                   "forward_tflops": flops / forward * 1e-9, "backward_tflops": flops_backward / backward * 1e-9}
            print(f"{shape}: forward {forward:.3f} ms, {row['forward_tflops']:.0f} TFLOP/s; "
                  f"backward {backward:.3f} ms, {row['backward_tflops']:.0f} TFLOP/s", flush=True)
            if args.json:
                with open(args.json, "a", encoding="utf-8") as out:
                    out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
