#!/usr/bin/env python3
"""Times products of experts and of dense layers in FP8 by PyTorch and torchao on one GPU, beside bf16 by PyTorch.

Prints a table on standard output; --json FILE writes one JSON object per row.

    python3 bench/peers/torch_fp8.py --shapes qwen3-30b-a3b olmoe

The rows of an expert are those of moe_shapes.py with balanced routes, T = 32768. For each shape:

    up        [R, D] x [e, 2F, D]     forward
    down      [R, F] x [e, D, F]      forward
    d_down    [R, D] x [e, F, D]      gradient of down's input
    d_up      [R, 2F] x [e, D, 2F]    gradient of up's input
    dw1, dw2  gradients of weights, products over the rows of each expert

    grouped_mm         torch._grouped_mm, bf16
    scaled_grouped_mm  torch._scaled_grouped_mm: E4M3, one f32 scale per row of either operand; result bf16
    quantise           amax, scale and cast of the left operand by torch.compile, which a layer has to run as well
    scaled_mm          torch._scaled_mm for one dense matrix of the same size: a scale per row, or 1x128 and 128x128 blocks
    torchao            torchao.prototype.moe_training's differentiable grouped product, forward and backward together,
                       with its quantisation; where torchao is installed

Operands were quantised before, except where the row says otherwise, as for `moebius bench experts --operands fp8_block`.
What a PyTorch does not offer is named with its error, and is no failure.
Exit code 3 when PyTorch or a GPU is missing.
"""

import argparse
import json
import statistics
import sys

try:
    import torch
except ImportError as error:
    print(f"torch_fp8: needs the Python package torch; got: {error}", file=sys.stderr)
    sys.exit(3)

from moe_shapes import SHAPES

E4M3_MAX = 448.0


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[s for s in SHAPES if s != "gpt-oss-20b"], choices=list(SHAPES))
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--json", help="file that the rows are added to")
    return parser.parse_args()


def median_ms(body, iterations):
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    events = []
    for i in range(iterations + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        body()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in events[3:])


def quantised(x, dim=-1):
    """Returns x in E4M3 and the f32 scale of each slice along dim."""
    scale = x.abs().amax(dim, keepdim=True).float().clamp(min=1e-12) / E4M3_MAX
    return (x.float() / scale).to(torch.float8_e4m3fn), scale.squeeze(dim)


quantise_compiled = torch.compile(quantised)


def random(*size):
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16) * 0.05


def products_of(shape):
    """Returns (name, columns of the left operand K, columns of the result N) of the products with weights."""
    return [("up", shape.D, 2 * shape.F), ("down", shape.F, shape.D), ("d_down", shape.D, shape.F),
            ("d_up", 2 * shape.F, shape.D)]


class Table:
    def __init__(self, args):
        self.args = args

    def time(self, shape, product, peer, flops, make):
        """Times the body that make() returns. An error is a row, too."""
        row = {"shape": shape, "product": product, "peer": peer}
        try:
            body = make()
            body()
            row["ms"] = median_ms(body, self.args.iterations)
            row["tflops"] = flops / row["ms"] / 1e9 if flops else None
        except Exception as error:  # what this PyTorch cannot do
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        rate = f"{row['tflops']:8.0f}" if row.get("tflops") else " " * 8
        print(f"{shape:20} {product:8} {peer:18} " +
              (f"{row['ms']:9.3f} ms {rate} TFLOP/s" if "ms" in row else row["error"]), flush=True)
        if self.args.json:
            with open(self.args.json, "a") as file:
                file.write(json.dumps(row) + "\n")
        torch.cuda.empty_cache()


def time_weights(table, shape, R, offsets):
    for name, K, N in products_of(shape):
        flops = 2 * R * K * N
        x, w = random(R, K), random(shape.E, N, K)
        table.time(shape.name, name, "grouped_mm", flops,
                   lambda: lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=offsets, out_dtype=torch.bfloat16))

        def scaled():
            (x8, sx), (w8, sw) = quantised(x), quantised(w)
            return lambda: torch._scaled_grouped_mm(x8, w8.transpose(1, 2), sx, sw, offs=offsets,
                                                    out_dtype=torch.bfloat16, use_fast_accum=False)

        table.time(shape.name, name, "scaled_grouped_mm", flops, scaled)
        table.time(shape.name, name, "quantise", 0, lambda: lambda: quantise_compiled(x))


def time_weight_gradients(table, shape, R, offsets):
    for name, rows, columns in [("dw1", 2 * shape.F, shape.D), ("dw2", shape.D, shape.F)]:
        flops = 2 * R * rows * columns
        dy, x = random(R, rows), random(R, columns)
        table.time(shape.name, name, "grouped_mm", flops,
                   lambda: lambda: torch._grouped_mm(dy.t(), x, offs=offsets, out_dtype=torch.bfloat16))

        def scaled():
            dy8, sdy = quantised(dy.t().contiguous())       # [rows, R]
            x8, sx = quantised(x.t().contiguous())          # [columns, R], read as [R, columns] by columns
            return lambda: torch._scaled_grouped_mm(dy8, x8.t(), sdy.repeat(shape.E), sx.repeat(shape.E), offs=offsets,
                                                    out_dtype=torch.bfloat16, use_fast_accum=False)

        table.time(shape.name, name, "scaled_grouped_mm", flops, scaled)


def time_dense(table, shape):
    M, K, N = shape.T, shape.D, 2 * shape.D
    x, w = random(M, K), random(N, K)
    table.time(shape.name, "dense", "mm", 2 * M * K * N, lambda: lambda: torch.mm(x, w.t()))

    def by_rows():
        (x8, sx), (w8, sw) = quantised(x), quantised(w)
        return lambda: torch._scaled_mm(x8, w8.t(), sx[:, None], sw[None, :], out_dtype=torch.bfloat16)

    def by_blocks():
        x8, sx = quantised(x.view(M, K // 128, 128))
        blocks = w.view(N // 128, 128, K // 128, 128).transpose(1, 2).reshape(N // 128, K // 128, -1)
        w8, sw = quantised(blocks)
        w8 = w8.view(N // 128, K // 128, 128, 128).transpose(1, 2).reshape(N, K)
        return lambda: torch._scaled_mm(x8.view(M, K), w8.t(), sx.t().contiguous().t(), sw.t(), out_dtype=torch.bfloat16)

    table.time(shape.name, "dense", "scaled_mm rows", 2 * M * K * N, by_rows)
    table.time(shape.name, "dense", "scaled_mm blocks", 2 * M * K * N, by_blocks)


def time_torchao(table, shape, R, offsets):
    try:
        from torchao.prototype.moe_training.scaled_grouped_mm import _scaled_grouped_mm as product
    except ImportError as error:
        print(f"{shape.name:20} torchao: {error}", file=sys.stderr)
        return
    for name, K, N in [("up", shape.D, 2 * shape.F), ("down", shape.F, shape.D)]:
        x, w, dy = random(R, K).requires_grad_(), random(shape.E, N, K).requires_grad_(), random(R, N)

        def make():
            call = torch.compile(lambda: product(x, w.transpose(1, 2), offs=offsets, out_dtype=torch.bfloat16))

            def body():
                x.grad = w.grad = None
                call().backward(dy)
            return body

        table.time(shape.name, name, "torchao, 3 passes", 6 * R * K * N, make)


def main():
    args = parse_args()
    if not torch.cuda.is_available():
        print("torch_fp8: needs a GPU", file=sys.stderr)
        return 3
    torch.manual_seed(1)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    table = Table(args)
    for shape in [SHAPES[name] for name in args.shapes]:
        R = shape.T * shape.K
        offsets = (torch.arange(1, shape.E + 1, device="cuda") * (R // shape.E)).to(torch.int32)
        time_weights(table, shape, R, offsets)
        time_weight_gradients(table, shape, R, offsets)
        time_dense(table, shape)
        time_torchao(table, shape, R, offsets)
    return 0


if __name__ == "__main__":
    sys.exit(main())
