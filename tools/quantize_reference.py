#!/usr/bin/env python3
"""Compares the quantised bytes and scales of tests/golden with what published software computes.

    tools/quantize_reference.py --transformer-engine DIR [FILE]

DIR is a checkout of TransformerEngine: its references in Python run without the package. It needs
torch (on a CPU), torchao, numpy and safetensors. FILE is tests/golden/data/quantize.safetensors, which
tools/quantize_golden.py wrote by the formulas. It prints a line for each tensor, and its exit code is 1
where one differs.
"""

import argparse
import importlib.util
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import load_file

DATA = Path(__file__).resolve().parent.parent / "tests" / "golden" / "data" / "quantize.safetensors"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


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
    module("transformer_engine.pytorch.custom_recipes", gemm=Anything,
           reference_utils=Anything)
    module("transformer_engine.pytorch.quantized_tensor", QuantizedTensorStorage=Anything, Quantizer=Anything)
    nv = load("reference_nvfp4", recipes / "reference_nvfp4.py")
    return scale, blocks.BlockwiseQuantizerReference, nv.NVFP4QuantizerRef


def padded_transpose(x):
    """The transpose, with columns up to a multiple of 128."""
    return torch.nn.functional.pad(x.t(), (0, -x.shape[0] % 128)).contiguous()


def published(golden, folder):
    """Gives (name, data, scales, tensor scale or None) of each golden tensor."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scale_calc, Blocks, Nv = transformer_engine(folder)
    x, plain, whole = golden["x"], golden["plain"], golden["whole"]
    how = {"return_transpose": False, "pow_2_scales": True, "eps": 0.0}
    for name, of in (("rows", x), ("columns", padded_transpose(x))):
        q = Blocks._quantize_vector_tiling(of, E4M3, 128, **how)
        yield name, q.data, q.scale, None
    q = Blocks._quantize_square_block_tiling(plain, E4M3, 128, **how)
    yield "square", q.data, q.scale, None
    for name, dtype in (("tensor_e4m3", E4M3), ("tensor_e5m2", E5M2)):
        scale, inverse, _ = scale_calc.scale_from_amax_tensor(torch.float32, plain.abs().max().view(1), dtype, eps=0.0,
                                                              pow_2_scales=True)
        yield name, (plain * scale).to(dtype), inverse, None
    scales, data = to_mx(plain, E4M3, 32, scaling_mode=ScaleCalculationMode.RCEIL)
    yield "mx", data, scales, None
    for name, of, rows, rht in (("nv", plain, 1, False), ("nv_square", plain, 16, False), ("nv_hadamard", whole, 1, True)):
        ref = Nv(Anything(), quant_tile_shape=(rows, 16), with_rht=rht)
        if rht:
            of = padded_transpose(whole).t().contiguous()
        rows_data, rows_scales, cols_data, cols_scales, amax_row, amax_col = ref._quantize(of)
        data, scales, amax = (cols_data, cols_scales, amax_col) if rht else (rows_data, rows_scales, amax_row)
        yield name, data, scales[:data.shape[0]], 1 / (448.0 * 6.0 / amax)


def as_bytes(t):
    return t.contiguous().view(torch.uint8).flatten()


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--transformer-engine", type=Path, required=True)
    arguments.add_argument("file", nargs="?", type=Path, default=DATA)
    options = arguments.parse_args()
    golden, differ = load_file(options.file), 0
    for name, *tensors in published(golden, options.transformer_engine):
        for part, got in zip(("data", "scales", "tensor_scale"), tensors):
            if got is None:
                continue
            want, got = as_bytes(golden[f"{name}.{part}"]), as_bytes(got)
            count = int((want != got).sum()) if want.shape == got.shape else -1
            differ += count != 0
            said = "equal" if count == 0 else f"{count} bytes differ" if count > 0 else "another size"
            print(f"{name}.{part}: {said}, of {want.numel()}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
