// Dense matrix products. a and b have one dtype (f32 or bf16); products are accumulated in f32 whatever the dtypes.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// c = op(a) op(b), or c += op(a) op(b) with accumulate; op(a)[M, K], op(b)[K, N]; op(t) is t or its transpose.
//   y = x W^T    {.c = y, .a = x, .b = W, .trans_b = true}
//   dx = dy W    {.c = dx, .a = dy, .b = W}
//   dW += dy^T x {.c = dW, .a = dy, .b = x, .trans_a = true, .accumulate = true}
// c is f32 or a's dtype; accumulate wants f32 or a's dtype alike (added in f32, rounded once).
// K = 0 gives zeros (or c unchanged).
// The same call gives the same bits every time. On the CPU the result does not depend on the number of threads
// and, where our own kernel multiplies (tile_gemm.h), a row of c not on the other rows; oneDNN and a GPU take the
// order of a sum from the shape, the dtypes and the alignment.
struct Gemm {
  Tensor c_MN;  // out
  Tensor a, b;  // in
  bool trans_a = false, trans_b = false, accumulate = false;
};
void gemm(Stream& s, const Gemm& a);
Cost cost(const Gemm& a);

// The same product by one call of oneDNN on as many threads of its own as the pool has: the baseline of the benchmarks.
// CPU only. REQUIRES: onednn_multiplies(a.a.dtype).
void gemm_by_onednn(Stream& s, const Gemm& a);
// Whether oneDNN multiplies matrices of this dtype here: f32 on every CPU, bf16 where there is AVX-512.
bool onednn_multiplies(DType dtype);

}  // namespace moebius
