// Many dense matrix products of one shape in one call, for matrices that are too small to fill a GPU alone.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// c[i] = op(a[i]) op(b[i]),  or c[i] += op(a[i]) op(b[i]) with accumulate,  for each of B matrices
//
// Matrices are stored one after another. op, dtypes and rounding are those of Gemm (ops/gemm/gemm.h). The bits of a
// product depend neither on B nor on its place. On a GPU K is never split, so they may differ from those of gemm().
// Sums are f32, and c is rounded once. Error{usage} unless all three have rank 3 and the shapes below.
struct BatchedGemm {
  Tensor c_BMN;  // out, inout with accumulate: f32, or the dtype of a
  Tensor a, b;   // in, both f32 or both bf16: [B, M, K] and [B, K, N]; with trans_a [B, K, M], with trans_b [B, N, K]
  bool trans_a = false, trans_b = false, accumulate = false;
};
void batched_gemm(Stream& s, const BatchedGemm& a);
Cost cost(const BatchedGemm& a);

}  // namespace moebius
