#!/usr/bin/env python3
"""Compares the quantised bytes and scales of tests/golden with what published software computes.

    tools/quantize_reference.py --transformer-engine DIR --deep-gemm DIR --deepseek DIR [FILE]

The folders are checkouts of TransformerEngine, DeepGEMM and DeepSeek-V3; the tool runs their Python on
the CPU without their packages, and DeepSeek's kernels by Triton's interpreter. It needs torch, torchao,
triton, numpy and safetensors. FILE is tests/golden/data/quantize.safetensors, which
tools/quantize_golden.py wrote by the formulas. It prints a line for each comparison. Some blocks differ
for a reason that is known: it checks that theirs are as the reason says, counts them, and compares the
others. Its exit code is 1 where anything else differs.
"""

import argparse
import importlib.util
import os
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before torchao imports triton

import torch
from safetensors.torch import load_file

DATA = Path(__file__).resolve().parent.parent / "tests" / "golden" / "data" / "quantize.safetensors"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
F32_MAX = torch.finfo(torch.float32).max
SMALLEST_OF_DEEPSEEK = 2.0**-22  # 1e-4 / 448, rounded up to a power of two


class AnyName(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Anything(metaclass=AnyName):
    """Stands for a class or a module of the package that a reference names and these calls do not use."""

    def __init__(self, *args, **kwargs):
        self.rowwise_usage = kwargs.get("rowwise", True)
        self.columnwise_usage = kwargs.get("columnwise", True)

    def __class_getitem__(cls, _):
        return cls


def module(name, **members):
    made = types.ModuleType(name)
    made.__path__ = []
    vars(made).update(members)
    sys.modules[name] = made
    return made


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def transformer_engine(folder):
    references, recipes = folder / "tests/pytorch/references", folder / "transformer_engine/pytorch/custom_recipes"
    module("references")
    scale = load("references.quantize_scale_calc", references / "quantize_scale_calc.py")
    blocks = load("references.blockwise_quantizer_reference", references / "blockwise_quantizer_reference.py")
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        module(name)
    module("transformer_engine.pytorch.custom_recipes", gemm=Anything, reference_utils=Anything)
    module("transformer_engine.pytorch.quantized_tensor", QuantizedTensorStorage=Anything, Quantizer=Anything)
    nv = load("reference_nvfp4", recipes / "reference_nvfp4.py")
    return scale, blocks.BlockwiseQuantizerReference, nv.NVFP4QuantizerRef


def padded_transpose(x):
    """The transpose, with columns up to a multiple of 128."""
    return torch.nn.functional.pad(x.t(), (0, -x.shape[0] % 128)).contiguous()


@dataclass
class Known:
    """A reason for which blocks differ: where, what theirs are there, and whether their elements differ too."""

    why: str
    where: torch.Tensor
    theirs: torch.Tensor | float
    elements: bool = True


@dataclass
class Comparison:
    """What software gives for the tensor `name` of the file, whose blocks are `block` elements."""

    software: str
    name: str
    data: torch.Tensor
    scales: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None
    block: tuple = (1, 1)
    known: list = field(default_factory=list)
    input: torch.Tensor | None = None  # with a tensor scale


def spread(per_block, block, shape):
    """Gives every element what its block has."""
    return per_block.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., :shape[-2], :shape[-1]]


def block_amax(x, block):
    padded = torch.nn.functional.pad(x.abs(), (0, -x.shape[-1] % block[1], 0, -x.shape[-2] % block[0]))
    return padded.unflatten(-2, (-1, block[0])).unflatten(-1, (-1, block[1])).amax((-3, -1))


def of_each(quantise, x):
    """Gives the parts of each matrix, stacked; of a single matrix as they are."""
    if x.dim() == 2:
        return quantise(x)
    return [torch.stack(part) for part in zip(*map(quantise, x))]


def borders(golden, name, amax, theirs):
    """log2 in f32 gives a whole number for what is next to a power of two."""
    quotient = amax / 448
    fraction, _ = torch.frexp(quotient)
    ours = golden[f"{name}.scales"]
    half = ours - 1 if ours.dtype == torch.uint8 else ours / 2
    where = (theirs.to(half.dtype) == half) & (fraction > 0.5) & (fraction < 0.5 * (1 + 2.0**-16))
    return Known("log2 of nearly a power of two", where, half)


def floor(amax):
    return Known("1e-4 for smaller magnitudes", amax <= 448 * SMALLEST_OF_DEEPSEEK / 2, SMALLEST_OF_DEEPSEEK)


def of_transformer_engine(golden, folder):
    scale_calc, Blocks, Nv = transformer_engine(folder)
    how = {"return_transpose": False, "pow_2_scales": True, "eps": 0.0}

    def rows(x):
        q = Blocks._quantize_vector_tiling(x, E4M3, 128, **how)
        return q.data, q.scale

    def square(x):
        q = Blocks._quantize_square_block_tiling(x, E4M3, 128, **how)
        return q.data, q.scale

    def whole(x, dtype):
        scale, inverse, _ = scale_calc.scale_from_amax_tensor(torch.float32, x.abs().max().view(1), dtype, eps=0.0,
                                                              pow_2_scales=True)
        return (x * scale).to(dtype), inverse

    x, cases = golden["x"], golden["cases"]
    for name, of in (("rows", x), ("columns", padded_transpose(x)), ("cases_rows", cases),
                     ("cases_columns", cases.mT.contiguous())):
        yield Comparison("TransformerEngine", name, *of_each(rows, of))
    for prefix, of in (("", golden["plain"]), ("cases_", cases)):
        yield Comparison("TransformerEngine", f"{prefix}square", *of_each(square, of))
        for name, dtype in (("tensor_e4m3", E4M3), ("tensor_e5m2", E5M2)):
            data, scale = of_each(lambda m: whole(m, dtype), of)
            yield Comparison("TransformerEngine", f"{prefix}{name}", data, scale)
        yield nvfp4(golden, Nv, f"{prefix}nv", of, 1)
        yield nvfp4(golden, Nv, f"{prefix}nv_square", of, 16)
    yield nvfp4(golden, Nv, "nv_hadamard", padded_transpose(golden["whole"]).t().contiguous(), 1, True)
    yield nvfp4(golden, Nv, "cases_nv_hadamard", golden["whole_cases"], 1, True)


def nvfp4(golden, Nv, name, of, rows, rht=False):
    ref = Nv(Anything(), quant_tile_shape=(rows, 16), with_rht=rht)

    def quantise(x):
        parts = ref._quantize(x)
        data, scales, amax = (parts[2], parts[3], parts[5]) if rht else (parts[0], parts[1], parts[4])
        scales = scales[:data.shape[0], :data.shape[1] // 8].view(torch.uint8)
        encode = torch.div(torch.tensor(448.0 * 6.0), amax).clamp(max=F32_MAX)
        blocks = block_amax(ref._apply_rht(x.t().contiguous()) if rht else x, (rows, 16)).repeat_interleave(rows, 0)
        plain = (blocks / 6 * encode).clamp(max=448).to(E4M3).view(torch.uint8)
        return data, scales, encode.reciprocal().view(1), plain

    data, scales, tensor_scale, plain = of_each(quantise, of)
    where = (golden[f"{name}.scales"] == plain) & (scales != plain)
    folded = Known("the division by 6 is folded", where, scales)
    return Comparison("TransformerEngine", name, data, scales, tensor_scale.flatten(), (1, 16), [folded], of)


def of_torchao(golden):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    for prefix, of in (("", golden["plain"]), ("cases_", golden["cases"])):
        padded = torch.nn.functional.pad(of, (0, -of.shape[-1] % 32))
        scales, data = to_mx(padded, E4M3, 32, scaling_mode=ScaleCalculationMode.RCEIL)
        scales, amax = scales.view(torch.uint8), block_amax(of, (1, 32))
        known = [Known("zeros", amax == 0, 0, elements=False),
                 Known("scale 2^-127, elements unscaled", (amax > 0) & (golden[f"{prefix}mx.scales"] == 0), 0),
                 borders(golden, f"{prefix}mx", amax, scales)]
        yield Comparison("torchao", f"{prefix}mx", data[..., :of.shape[-1]], scales, None, (1, 32), known)


def of_deep_gemm(golden, folder):
    math = load("deep_gemm_math", folder / "deep_gemm/utils/math.py")
    x, cases = golden["x"], golden["cases"]
    for name, of in (("rows", x), ("columns", padded_transpose(x)), ("cases_rows", cases),
                     ("cases_columns", cases.mT.contiguous())):
        data, scales = of_each(lambda m: math.per_token_cast_to_fp8(m, use_ue8m0=True), of)
        yield Comparison("DeepGEMM", name, data, scales, None, (1, 128), [floor(block_amax(of, (1, 128)))])
    for prefix, of in (("", golden["plain"]), ("cases_", cases)):
        data, scales = of_each(lambda m: math.per_block_cast_to_fp8(m, use_ue8m0=True), of)
        known = [floor(block_amax(of, (128, 128)))]
        yield Comparison("DeepGEMM", f"{prefix}square", data, scales, None, (128, 128), known)
        data, scales = of_each(lambda m: math.per_block_cast_to_fp8(m, use_ue8m0=False), of)
        yield Comparison("DeepGEMM", f"{prefix}weights", data, scales)


def of_deepseek(golden, folder):
    """Triton's interpreter truncates to bf16 and misrounds to E4M3, so kernels store f32, and torch rounds."""
    kernel = load("deepseek_kernel", folder / "inference/kernel.py")

    def act_quant(x, block_size, scale_format):
        y, s = torch.empty_like(x), torch.empty(x.numel() // block_size)
        kernel.act_quant_kernel[(s.numel(),)](x, y, s, BLOCK_SIZE=block_size, scale_fmt=scale_format)
        return y.to(E4M3), s

    def rows(x):
        data, scales = act_quant(torch.nn.functional.pad(x, (0, -x.shape[1] % 128)).contiguous(), 128, "ue8m0")
        return data[:, :x.shape[1]], scales.view(x.shape[0], -1)

    def weights(x):
        """The kernel on blocks of 128 x 128, one after another, and the conversion back."""
        down, across = -(-x.shape[0] // 128), -(-x.shape[1] // 128)
        padded = torch.nn.functional.pad(x, (0, across * 128 - x.shape[1], 0, down * 128 - x.shape[0]))
        blocks = padded.view(down, 128, across, 128).transpose(1, 2).contiguous()
        data, scales = act_quant(blocks, 128 * 128, None)
        data = data.view(down, across, 128, 128).transpose(1, 2).reshape(down * 128, -1)
        return data[:x.shape[0], :x.shape[1]], scales.view(down, across)

    for name, of in (("rows", golden["x"]), ("cases_rows", golden["cases"])):
        data, scales = of_each(rows, of)
        amax = block_amax(of, (1, 128))
        known = [floor(amax), borders(golden, name, amax, scales)]
        yield Comparison("DeepSeek-V3 act_quant", name, data, scales, None, (1, 128), known)
    for prefix, of in (("", golden["plain"]), ("cases_", golden["cases"])):
        yield Comparison("DeepSeek-V3 act_quant", f"{prefix}weights", *of_each(weights, of))
        data, scales = golden[f"{prefix}weights.data"].view(E4M3), golden[f"{prefix}weights.scales"]
        pairs = zip(data, scales) if data.dim() == 3 else [(data, scales)]
        values = torch.cat([kernel.weight_dequant(d.contiguous(), s.contiguous()) for d, s in pairs])
        yield Comparison("DeepSeek-V3 weight_dequant", f"{prefix}weights.bf16", values.to(torch.bfloat16))


def nibbles(t):
    return torch.stack([t & 15, t >> 4], -1).flatten(-2)


def report(software, part, equal, total, known):
    differ = int((~equal).sum())
    said = "equal" if not differ else f"{differ} DIFFER"
    why = "".join(f"; {count} left out: {reason}" for reason, count in known if count)
    print(f"{software}: {part}: {said}, {equal.numel()} of {total}{why}")
    return differ


def same_elements(c, want):
    """Gives which of the elements that count are equal, of how many, and why others do not count."""
    want, got = (nibbles(t) if c.input is not None else t.view(torch.uint8) for t in (want, c.data))
    counted, reasons = torch.ones_like(want, dtype=torch.bool), []
    for known in c.known:
        if known.elements:
            inside = spread(known.where, c.block, want.shape) & counted
            reasons.append((known.why, int(inside.sum())))
            counted &= ~inside
    if c.input is not None:
        unsigned = (want == 8) & (got == 0) & counted
        reasons.append(("negative zeros", int(unsigned.sum())))
        counted &= ~unsigned
    return (want == got)[counted], want.numel(), reasons


def same_scales(c, want):
    got = c.scales.reshape(want.shape)
    counted, reasons = torch.ones_like(want, dtype=torch.bool), []
    for known in c.known:
        where = known.where & counted
        theirs = torch.as_tensor(known.theirs, dtype=got.dtype).expand_as(got)
        assert torch.equal(got[where], theirs[where]), f"{c.name}: {known.why}: theirs are others"
        reasons.append((known.why, int((want[where] != got[where]).sum())))
        counted &= ~where | (want == got)
    return (want == got)[counted], want.numel(), reasons


def same_tensor_scales(c, want):
    zero = c.input.reshape(want.numel(), -1).abs().amax(1) == 0
    assert torch.equal(c.tensor_scale[zero], torch.full_like(want[zero], 1 / F32_MAX)), f"{c.name}: a tensor of zeros"
    return (want == c.tensor_scale)[~zero], want.numel(), [("tensors of zeros", int(zero.sum()))]


def compare(c, golden):
    """Prints a line for each part, and gives how many numbers differ."""
    if c.name in golden:
        equal = golden[c.name].view(torch.int16).flatten() == c.data.view(torch.int16).flatten()
        return report(c.software, c.name, equal, equal.numel(), [])
    differ = report(c.software, f"{c.name}.data", *same_elements(c, golden[f"{c.name}.data"]))
    if c.scales is not None:
        differ += report(c.software, f"{c.name}.scales", *same_scales(c, golden[f"{c.name}.scales"]))
    if c.tensor_scale is not None:
        differ += report(c.software, f"{c.name}.tensor_scale", *same_tensor_scales(c, golden[f"{c.name}.tensor_scale"]))
    return differ


def main():
    arguments = argparse.ArgumentParser()
    for folder in "--transformer-engine", "--deep-gemm", "--deepseek":
        arguments.add_argument(folder, type=Path, required=True)
    arguments.add_argument("file", nargs="?", type=Path, default=DATA)
    options = arguments.parse_args()
    golden = load_file(options.file)
    differ = 0
    for comparisons in (of_transformer_engine(golden, options.transformer_engine), of_torchao(golden),
                        of_deep_gemm(golden, options.deep_gemm), of_deepseek(golden, options.deepseek)):
        for comparison in comparisons:
            differ += compare(comparison, golden)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
