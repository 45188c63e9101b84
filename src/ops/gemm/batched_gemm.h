// Many dense matrix products of one shape in one call, for matrices that are too small to fill a GPU alone.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// c[i] = op(a[i]) op(b[i]),  or c[i] += op(a[i]) op(b[i]) with accumulate,  for each of B matrices
//
// Matrices lie one after another in memory. op, dtypes and rounding are those of Gemm (ops/gemm/gemm.h). The bits of a
// product depend neither on B nor on its place. On a GPU k is never split, so they may differ from those of gemm().
struct BatchedGemm {
  Tensor c_BMN;  // out f32, or of the dtype of a
  Tensor a, b;   // in f32 or bf16; [B, M, K] and [B, K, N], or with the last two sizes exchanged
  bool trans_a = false, trans_b = false, accumulate = false;
};
void batched_gemm(Stream& s, const BatchedGemm& a);
Cost cost(const BatchedGemm& a);

}  // namespace moebius
