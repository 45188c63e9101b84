// RMSNorm over all query heads together, and over all key heads together, in the rows of the q, k, v projection (OLMoE,
// arXiv 2409.02060), as passes of their own. Each rank has some columns of q and of k. A norm needs sums over a whole
// row; the ranks add these up between two passes. ops/rope has the norms of a rank with all columns, and those
// per head.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// Row t of x is [A columns of q | B of k | B of v]. x, dy and the weights have one dtype, f32 or bf16; the maths is
// in f32.
//
// sums[t] = [sum of q^2, sum of k^2]                                   (without dy)
// sums[t] = [sum of q^2, sum of k^2, sum of dq w q, sum of dk w k]     (with dy)
//
// The sums are over the columns of this rank.
struct QkNormSums {
  Tensor sums_TS;                   // out, f32 [T, 2], or [T, 4] with dy
  Tensor x_TC, q_norm_A, k_norm_B;  // in
  Tensor dy_TC;                     // in, empty in the forward pass
};
void qk_norm_sums(Stream& s, const QkNormSums& a);

// y = [w_q round(q rstd_q) | w_k round(k rstd_k) | v],  rstd_q = 1/sqrt(mean(q^2) + eps)
//
// sums are those over all ranks, each of which has the same number of columns. Each normalised part is rounded to the
// dtype before the product with its weight, as in rms_norm_fwd.
struct QkNormBlockFwd {
  Tensor y_TC;                               // out
  Tensor x_TC, q_norm_A, k_norm_B, sums_T2;  // in
  int64_t num_ranks = 1;
  float eps = 1e-6f;
};
void qk_norm_block_fwd(Stream& s, const QkNormBlockFwd& a);

// dx = [rstd (dq w - qhat mean(dq w qhat)) | the same of k | dv]
//
// The gradient of y is replaced by that of x in place, so the columns of v stay as they are. dq_norm and dk_norm
// accumulate. Rows are summed in a fixed order.
struct QkNormBlockBwd {
  Tensor dx_TC;                              // inout: dy, then dx
  Tensor dq_norm_A, dk_norm_B;               // inout, f32
  Tensor x_TC, q_norm_A, k_norm_B, sums_T4;  // in
  int64_t num_ranks = 1;
  float eps = 1e-6f;
};
void qk_norm_block_bwd(Stream& s, const QkNormBlockBwd& a);

}  // namespace moebius
