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
// c is f32 or has the dtype of a; of quantised operands it is f32 or bf16. With accumulate, c is added to in f32 and rounded once. K = 0
// gives zeros, or leaves c unchanged with accumulate.
//
// Every row of c gets the bias. It has the dtype of c, and excludes accumulate. cuBLASLt adds it to the f32 sums;
// elsewhere c is rounded, and the bias is added to that.
//
// The same call gives the same bits every time. On the CPU the result does not depend on the
// number of threads. Where our own kernel multiplies (cpu/tile_gemm.h), a row of c does not
// depend on the other rows. oneDNN and a GPU choose the order of a sum by the shape, the dtypes
// and the alignment.
//
// few_rows: y = x W^T of at most kFewRows rows that are not quantised reads W once and in place. On a GPU
// operands are bf16, with columns in multiples of 8. Then a row of y depends neither on the others nor on
// how many there are, but its sums are in another order than those of more rows. Generation asks for
// it, and training does not.
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

// The same product by one call of oneDNN, on as many threads of its own as the pool has. It is the
// baseline of the benchmarks. It runs on the CPU only. REQUIRES: onednn_multiplies(a.a.data.dtype).
void gemm_by_onednn(Stream& s, const Gemm& a);
// Returns whether oneDNN multiplies matrices of this dtype here: f32 on every CPU, bf16 where there
// is AVX-512.
bool onednn_multiplies(DType dtype);

}  // namespace moebius
