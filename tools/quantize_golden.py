#!/usr/bin/env python3
"""Writes quantised bytes and scales for tests/golden, from the published formulas.

    tools/quantize_golden.py [FILE]    default tests/golden/data/quantize.safetensors

It needs numpy, ml_dtypes and safetensors. ml_dtypes rounds; the scales are these formulas in f32:

    rows.*, columns.*   TransformerEngine, tests/pytorch/references/quantize_scale_calc.py, with
                        pow_2_scales and eps 0, over blocks of 1 x 128 of x and of its transpose
    square.*            the same over blocks of 128 x 128. DeepGEMM's per_block_cast_to_fp8 with
                        use_ue8m0 has these scales where a block's largest magnitude is at least 1e-4
    tensor_e4m3.*, tensor_e5m2.*   TransformerEngine's current scaling, the same file
    mx.*                torchao, to_mx with the scaling mode RCEIL, over blocks of 1 x 32; a block of
                        zeros has the scale 1
    nv.*, nv_square.*, nv_hadamard.*   NVIDIA, arXiv 2509.25149, appendix C, over blocks of 1 x 16,
                        16 x 16, and 1 x 16 of the transpose after TransformerEngine's Hadamard transform;
                        a tensor of zeros has the scale 1
    weights.*           weights as DeepSeek-V3 releases them: for blocks of 128 x 128 the scale is the
                        largest magnitude / 448, in f32, and at least 1e-4 / 448. weights.bf16 is what its
                        fp8_cast_bf16.py makes of them

The input of most is `plain`, and again `cases`: matrices at the borders of formats and of f32. NAME of
`cases` is cases_NAME. The input of nv_hadamard is `whole`, and `whole_cases`.
"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

DATA = Path(__file__).resolve().parent.parent / "tests" / "golden" / "data" / "quantize.safetensors"
ROWS, COLS = 144, 160
CASE_ROWS, CASE_COLS = 16, 48
E4M3, E5M2, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn
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


def midpoints(dtype, largest_code):
    """The numbers halfway between neighbours, and beside each the next larger and smaller f32, of both signs."""
    value = np.arange(largest_code + 1, dtype=np.uint8).view(dtype).astype(F32)
    middle = (value[:-1] + value[1:]) / 2
    around = np.stack([middle, np.nextafter(middle, F32_MAX), np.nextafter(middle, F32(0))], 1).ravel()
    return np.concatenate([around, -around])


def led_blocks(first, others):
    """A matrix whose blocks of 16 begin with `first`, a number or one each; the others follow, again and again."""
    blocks = np.empty((CASE_ROWS * CASE_COLS // 16, 16), F32)
    blocks[:, 0] = first
    blocks[:, 1:] = np.resize(others, (len(blocks), 15))
    return blocks.reshape(CASE_ROWS, CASE_COLS)


def one_number(value, others):
    x = np.full((CASE_ROWS, CASE_COLS), others, F32)
    x[5, 20] = value
    return x


def cases():
    """Matrices [16, 48]: each is a block of 128 x 128 and a tensor by itself."""
    shape = (CASE_ROWS, CASE_COLS)
    random = np.random.default_rng(4)
    normal = np.clip(random.standard_normal(shape), -4, 4).astype(F32)
    unit = random.uniform(-1, 1, shape).astype(F32)
    sign = np.where(random.integers(0, 2, shape) == 0, F32(1), F32(-1))
    border = np.exp2(np.arange(CASE_ROWS) - 8).astype(F32) * F32(448)
    row = np.arange(CASE_ROWS)[:, None]
    zeros = normal.copy()
    zeros[::2, :32], zeros[1, :16], zeros[3, 16:], zeros[7], zeros[8] = 0, 0, -0.0, 0, -0.0
    scales = np.resize(midpoints(E4M3, 0x7e)[:378:8], CASE_ROWS * CASE_COLS // 16) * F32(6)
    nv_scales = led_blocks(scales, 0) + np.abs(led_blocks(0, unit[:, :45])) * np.repeat(scales, 16).reshape(shape)
    ties_of_f4 = led_blocks(6, midpoints(E2M1, 7))
    saturating = led_blocks(6 * np.linspace(1, 2, CASE_ROWS * CASE_COLS // 16), midpoints(E2M1, 7))
    for x in nv_scales, ties_of_f4, saturating:
        x[0, 0] = 448 * 6  # so that the scale of the tensor is 1
    return np.stack([
        np.zeros(shape), np.full(shape, -0.0), zeros,                  # blocks of zeros
        one_number(3, 0), one_number(-1e-3, -0.0), one_number(F32_MAX, 0), one_number(2.0**-149, -0.0),
        unit * F32_MAX, sign * F32_MAX,                                # the largest numbers
        sign * F32(2.0**-126), unit * F32(2.0**-119),                  # the smallest normal numbers
        sign * F32(2.0**-149), np.round(unit * 2.0**23) * 2.0**-149,   # subnormal numbers
        normal * np.exp2(F32(16) * row - 140).astype(F32),             # a row for each magnitude
        normal * np.exp2(-2.0 * row).astype(F32),                      # scales of nv_blocks that become zero
        led_blocks(448, midpoints(E4M3, 0x7e)), led_blocks(57344, midpoints(E5M2, 0x7b)), ties_of_f4,
        nv_scales, saturating,                                         # scales between two E4M3 numbers, and beyond 6
        led_blocks(np.repeat(border, 3), midpoints(E4M3, 0x7e)[:180] / 512),
        led_blocks(np.repeat(np.nextafter(border, F32_MAX), 3), midpoints(E4M3, 0x7e)[:180] / 512),
        led_blocks(np.repeat(np.nextafter(border, F32(0)), 3), midpoints(E4M3, 0x7e)[:180] / 512),
        sign * np.exp2(random.integers(-126, 128, shape)), sign * np.exp2(-(row % 4)),  # powers of two
        normal * F32(0.9e-4) * 2.0**-2, sign * F32(1e-4), sign * np.nextafter(F32(1e-4), F32(0)),  # DeepGEMM's 1e-4
        sign * F32(448 * 2.0**-22), normal,
    ]).astype(F32)


def whole_cases():
    """Matrices [16, 48] of few bits, so that the Hadamard transform is exact."""
    shape = (CASE_ROWS, CASE_COLS)
    random = np.random.default_rng(5)
    whole = random.integers(-4096, 4096, shape).astype(F32)
    zeros = whole.copy()
    zeros[:, ::3], zeros[:, 1::6] = 0, -0.0
    return np.stack([np.zeros(shape), np.full(shape, -0.0), zeros, one_number(3, 0), one_number(-2.0**120, -0.0),
                     whole * F32(2.0**110), whole * F32(2.0**-130), np.ones(shape), random.integers(-6, 7, shape),
                     np.exp2(random.integers(-6, 7, shape)), whole * np.exp2(-2.0 * np.arange(CASE_COLS))]).astype(F32)


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


def transformer_engine_blocks(x, rows, cols, dtype=E4M3):
    amax, spread = block_amax(x, rows, cols)
    scale, scale_inv = transformer_engine_scale(amax, ml_dtypes.finfo(dtype).max)
    return codes(x * spread(scale), dtype), scale_inv


def torchao_mx(x):
    amax, spread = block_amax(x, 1, 32)
    fraction, exponent = np.frexp(amax)  # 448 is 0.875 * 2^9
    exponent = np.where(amax == 0, 0, np.maximum(exponent - 9 + (fraction > 0.875), -127))
    return codes(x * spread(np.ldexp(F32(1), -exponent)), E4M3), (exponent + 127).astype(np.uint8)


def released_weights(x):
    """Gives bytes, scales, and the bf16 numbers that they are converted to."""
    amax, spread = block_amax(x, 128, 128)
    scale = np.maximum(amax, F32(1e-4)) / F32(448)
    data = codes(x / spread(scale), E4M3)
    return data, scale, (data.view(E4M3).astype(F32) * spread(scale)).astype(ml_dtypes.bfloat16).view(np.uint16)


def packed(x):
    pairs = np.clip(x, -6, 6).astype(E2M1).view(np.uint8)
    return pairs[:, ::2] | pairs[:, 1::2] << 4


def nvidia_blocks(x, rows):
    amax, spread = block_amax(x, rows, 16)
    largest = np.abs(x).max()
    encode = np.minimum(F32(448) * F32(6) / largest, F32_MAX).astype(F32) if largest else F32(1)
    decode = (F32(1) / encode).astype(F32)
    scale = np.minimum((amax / F32(6)).astype(F32) * encode, F32(448)).astype(E4M3)
    with np.errstate(divide="ignore"):
        inverse = np.minimum(F32(1) / (scale.astype(F32) * decode), F32_MAX)
    scales = np.repeat(scale.view(np.uint8), rows, 0)[:x.shape[0]]
    return packed((x * spread(inverse)).astype(F32)), scales, decode.reshape(1)


SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], F32)


def hadamard(x):
    """In double and rounded once: of numbers with few bits it is exact in any order. The sign of a zero is that of
    four rounds of sums and differences."""
    y = x.reshape(-1, 16).astype(np.float64) * SIGNS
    for step in 1, 2, 4, 8:
        pairs = y.reshape(-1, 8 // step, 2, step)
        y = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
    return (y / 4).reshape(x.shape).astype(F32)


def padded_transpose(x):
    """The transpose, with columns up to a multiple of 128."""
    wide = np.zeros((x.shape[1], -(-x.shape[0] // 128) * 128), F32)
    wide[:, :x.shape[0]] = x.T
    return np.ascontiguousarray(wide)


def by_rows(x):
    return transformer_engine_blocks(x, 1, 128)


FORMATS = {
    "square": lambda x: transformer_engine_blocks(x, 128, 128),
    "tensor_e4m3": lambda x: whole_tensor(x, E4M3),
    "tensor_e5m2": lambda x: whole_tensor(x, E5M2),
    "mx": torchao_mx,
    "nv": lambda x: nvidia_blocks(x, 1),
    "nv_square": lambda x: nvidia_blocks(x, 16),
    "weights": released_weights,
}


def whole_tensor(x, dtype):
    data, scale = transformer_engine_blocks(x, *x.shape, dtype)
    return data, scale.reshape(1)


def named(name, parts):
    """A format's parts as tensors of the file."""
    third = "bf16" if name.endswith("weights") else "tensor_scale"
    return {f"{name}.{part}": tensor for part, tensor in zip(("data", "scales", third), parts)}


def of_each(quantise, matrices):
    parts = [np.stack(part) for part in zip(*map(quantise, matrices))]
    return [p.reshape(-1) if p.shape[1:] == (1,) else p for p in parts]


def tensors():
    x, plain = crafted(), ordinary(2)
    whole = np.random.default_rng(3).integers(-4096, 4096, (ROWS, COLS)).astype(F32)
    out = {"x": x, "plain": plain, "whole": whole, "cases": cases(), "whole_cases": whole_cases()}
    out |= named("rows", by_rows(x)) | named("columns", by_rows(padded_transpose(x)))
    for name, quantise in FORMATS.items():
        out |= named(name, quantise(plain)) | named(f"cases_{name}", of_each(quantise, out["cases"]))
    out |= named("cases_rows", of_each(by_rows, out["cases"]))
    out |= named("cases_columns", of_each(lambda m: by_rows(m.T), out["cases"]))
    out |= named("nv_hadamard", nvidia_blocks(hadamard(padded_transpose(whole)), 1))
    out |= named("cases_nv_hadamard", of_each(lambda m: nvidia_blocks(hadamard(m.T), 1), out["whole_cases"]))
    return out


def main():
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA
    made_by = f"tools/quantize_golden.py, format 2, numpy {np.__version__}, ml_dtypes {ml_dtypes.__version__}"
    with np.errstate(divide="ignore", over="ignore"):
        made = tensors()
    save_file({name: np.ascontiguousarray(t) for name, t in made.items()}, file, metadata={"made_by": made_by})
    print(f"{file}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
