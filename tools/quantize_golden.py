#!/usr/bin/env python3
"""Writes quantised bytes and scales for tests/golden, from the published formulas.

    tools/quantize_golden.py [FILE]    default tests/golden/data/quantize.safetensors

It needs numpy, ml_dtypes and safetensors. ml_dtypes rounds; the scales are these formulas in f32:

    rows.*, columns.*   TransformerEngine, tests/pytorch/references/quantize_scale_calc.py, with
                        pow_2_scales and eps 0, over blocks of 1 x 128 of x and of its transpose
    square.*            DeepGEMM, per_block_cast_to_fp8 with use_ue8m0: DeepSeek-V3's conversion of
                        weights, with scales rounded up to powers of two
    tensor_e4m3.*, tensor_e5m2.*   TransformerEngine's current scaling, the same file
    mx.*                torchao, to_mx with the scaling mode RCEIL, over blocks of 1 x 32
    nv.*, nv_square.*, nv_hadamard.*   TransformerEngine, NVFP4QuantizerRef, over blocks of 1 x 16,
                        16 x 16, and 1 x 16 of the transpose after the Hadamard transform
"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

DATA = Path(__file__).resolve().parent.parent / "tests" / "golden" / "data" / "quantize.safetensors"
ROWS, COLS = 144, 160
F32_MAX = np.finfo(np.float32).max
F32 = np.float32


def ordinary(seed):
    """Normal numbers whose rows and columns have magnitudes of their own."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((ROWS, COLS))
    return (x * np.exp2(random.integers(-3, 4, (ROWS, 1))) * np.exp2(random.integers(-2, 3, (1, COLS)))).astype(F32)


def crafted():
    """Rows at the borders of formats and of f32."""
    x = ordinary(1)
    x[0] = 0
    x[1] = 448 * 2.0**-3
    x[2] = np.nextafter(F32(448), F32(500))
    x[3] *= F32(1e-37)
    x[4] = F32(1e-41) * np.arange(COLS)
    x[5] *= F32(1e30)
    x[6] = (np.arange(COLS) - 80) * 2.0**-10
    x[7] = -0.0
    x[8, 1:] = 0
    x[9] = 57344
    return x


def codes(x, dtype):
    """The bytes of x, rounded to nearest even; ml_dtypes does not saturate."""
    largest = F32(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -largest, largest).astype(dtype).view(np.uint8)


def block_amax(x, rows, cols):
    """The largest magnitude of each block, and a function that spreads a number a block over x."""
    down, across = -(-x.shape[0] // rows), -(-x.shape[1] // cols)
    padded = np.zeros((down * rows, across * cols), F32)
    padded[:x.shape[0], :x.shape[1]] = np.abs(x)
    amax = padded.reshape(down, rows, across, cols).max(axis=(1, 3))
    return amax, lambda v: np.repeat(np.repeat(v, rows, 0), cols, 1)[:x.shape[0], :x.shape[1]]


def transformer_engine_scale(amax, largest):
    """Gives (scale, scale_inv) with pow_2_scales."""
    with np.errstate(divide="ignore", over="ignore"):
        scale = (F32(largest) / amax).astype(F32)
    scale = np.where(np.isinf(scale), F32_MAX, scale)
    _, exponent = np.frexp(scale)
    scale = np.where(amax == 0, F32(1), np.ldexp(F32(1), exponent - 1)).astype(F32)
    return scale, (F32(1) / scale).astype(F32)


def transformer_engine_blocks(x, rows, cols, dtype=ml_dtypes.float8_e4m3fn):
    amax, spread = block_amax(x, rows, cols)
    scale, scale_inv = transformer_engine_scale(amax, ml_dtypes.finfo(dtype).max)
    return codes(x * spread(scale), dtype), scale_inv


def deep_gemm_square(x):
    amax, spread = block_amax(x, 128, 128)
    scale = np.exp2(np.ceil(np.log2(np.maximum(amax, F32(1e-4)) / F32(448)))).astype(F32)
    return codes(x * (F32(1) / spread(scale)), ml_dtypes.float8_e4m3fn), scale


def torchao_mx(x):
    amax, spread = block_amax(x, 1, 32)
    with np.errstate(divide="ignore"):
        exponent = np.clip(np.ceil(np.log2(amax / F32(448))), -127, 127)
    scale = np.exp2(-exponent).astype(F32)
    return codes(x * spread(scale), ml_dtypes.float8_e4m3fn), (exponent + 127).astype(np.uint8)


def packed(x):
    pairs = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return pairs[:, ::2] | pairs[:, 1::2] << 4


def transformer_engine_nv(x, rows):
    amax, spread = block_amax(x, rows, 16)
    encode = np.minimum(F32(448) * F32(6) / np.abs(x).max(), F32_MAX).astype(F32)
    decode = (F32(1) / encode).astype(F32)
    scale = np.minimum((amax / F32(6)).astype(F32) * encode, F32(448)).astype(ml_dtypes.float8_e4m3fn)
    with np.errstate(divide="ignore"):
        inverse = np.minimum(F32(1) / (scale.astype(F32) * decode), F32_MAX)
    scales = np.repeat(scale.view(np.uint8), rows, 0)[:x.shape[0]]
    return packed((x * spread(inverse)).astype(F32)), scales, decode.reshape(1)


SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], F32)


def hadamard(x):
    """In double and rounded once: the transform of integers below is exact in any order."""
    h = np.ones((1, 1))
    while len(h) < 16:
        h = np.block([[h, h], [h, -h]])
    return ((x.reshape(-1, 16).astype(np.float64) * SIGNS) @ h / 4).reshape(x.shape).astype(F32)


def padded_transpose(x):
    """The transpose, with columns up to a multiple of 128."""
    wide = np.zeros((x.shape[1], -(-x.shape[0] // 128) * 128), F32)
    wide[:, :x.shape[0]] = x.T
    return np.ascontiguousarray(wide)


def tensors():
    x, plain = crafted(), ordinary(2)
    whole = np.random.default_rng(3).integers(-4096, 4096, (ROWS, COLS)).astype(F32)
    out = {"x": x, "plain": plain, "whole": whole}
    out["rows.data"], out["rows.scales"] = transformer_engine_blocks(x, 1, 128)
    out["columns.data"], out["columns.scales"] = transformer_engine_blocks(padded_transpose(x), 1, 128)
    out["square.data"], out["square.scales"] = deep_gemm_square(plain)
    for name, dtype in (("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)):
        out[f"tensor_{name}.data"], scales = transformer_engine_blocks(plain, ROWS, COLS, dtype)
        out[f"tensor_{name}.scales"] = scales.reshape(1)
    out["mx.data"], out["mx.scales"] = torchao_mx(plain)
    for name, source, rows in (("nv", plain, 1), ("nv_square", plain, 16),
                               ("nv_hadamard", hadamard(padded_transpose(whole)), 1)):
        out[f"{name}.data"], out[f"{name}.scales"], out[f"{name}.tensor_scale"] = transformer_engine_nv(source, rows)
    return out


def main():
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA
    made_by = f"tools/quantize_golden.py, format 1, numpy {np.__version__}, ml_dtypes {ml_dtypes.__version__}"
    save_file({name: np.ascontiguousarray(t) for name, t in tensors().items()}, file, metadata={"made_by": made_by})
    print(f"{file}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
