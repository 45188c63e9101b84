// Dense matrix products. a and b have one dtype (f32 or bf16), or both are quantised; products are
// accumulated in f32 whatever the dtypes.
#pragma once

#include "core/quantized.h"
#include "device/device.h"

namespace moebius {

// c = op(a) op(b) + bias,  or c += op(a) op(b) with accumulate
//
// op(a) is [M, K] and op(b) is [K, N]; op(t) is t or its transpose.
//   y = x W^T    {.c = y, .a = x, .b = W, .trans_b = true}
//   dx = dy W    {.c = dx, .a = dy, .b = W}
//   dW += dy^T x {.c = dW, .a = dy, .b = x, .trans_a = true, .accumulate = true}
//
// c is f32 or has the dtype of a; for quantised operands it is f32 or bf16. Of quantised operands a GPU takes f8_e4m3
// alone, a with row_blocks and b with square_blocks, or per_tensor scales. With these a may be f8_e5m2, and in dW it
// has to be. With accumulate the product is added to c in f32, and rounded once. K = 0 gives zeros, or leaves c
// unchanged with accumulate.
//
// The bias is added to every row of c, and excludes accumulate. It has the dtype of c. cuBLASLt adds it to the f32
// sums; elsewhere it is added to the rounded c.
//
// The same call gives the same bits every time, on the CPU for any number of threads. With our own CPU kernel
// (cpu/tile_gemm.h) the bits of a row of c do not depend on the other rows. oneDNN and GPUs choose the order of a sum
// by the shape, the dtypes and the alignment.
//
// few_rows: for generation, y = x W^T with at most kFewRows rows, not quantised; reads W once and in place. The bits of
// a row of y depend neither on the other rows nor on their number, but differ from those without few_rows. On a GPU it
// needs bf16, with columns in multiples of 8.
constexpr int64_t kFewRows = 32;
struct Gemm {
  Tensor c_MN;         // out
  Operand a, b;        // in
  Tensor bias_N = {};  // in, may be empty: none
  bool trans_a = false, trans_b = false, accumulate = false;
  bool few_rows = false;
};
void gemm(Stream& s, const Gemm& a);
Cost cost(const Gemm& a);

// The same product by one call of oneDNN on the CPU, with as many threads of its own as the pool has: the baseline of
// benchmarks. REQUIRES: onednn_multiplies(a.a.data.dtype).
void gemm_by_onednn(Stream& s, const Gemm& a);
// Returns whether oneDNN multiplies matrices of this dtype on this CPU: always for f32, with AVX-512 for bf16.
bool onednn_multiplies(DType dtype);

}  // namespace moebius
