// The norms of qk_norm.h where ranks share the heads. Each rank has some columns of q and of k. A
// norm needs sums over a whole row; the ranks add these up between two passes.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// sums[t] = [sum of q^2, sum of k^2]                                   (without dy)
// sums[t] = [sum of q^2, sum of k^2, sum of dq w q, sum of dk w k]     (with dy)
//
// The sums are over the columns of this rank.
struct QkNormSums {
  Tensor sums_TS;                   // out, f32 [T, 2], or [T, 4] with dy
  Tensor x_TC, q_norm_A, k_norm_B;  // in, as in QkNormFwd
  Tensor dy_TC;                     // in, empty in the forward pass
};
void qk_norm_sums(Stream& s, const QkNormSums& a);

// y is as in QkNormFwd. sums are those over all ranks, each of which has the same
// number of columns.
struct QkNormBlockFwd {
  Tensor y_TC;                               // out
  Tensor x_TC, q_norm_A, k_norm_B, sums_T2;  // in
  int64_t num_ranks = 1;
  float eps = 1e-6f;
};
void qk_norm_block_fwd(Stream& s, const QkNormBlockFwd& a);

// dx, dq_norm and dk_norm are as in QkNormBwd. Rows are summed in a fixed order.
struct QkNormBlockBwd {
  Tensor dx_TC;                                     // out
  Tensor dq_norm_A, dk_norm_B;                      // inout, f32
  Tensor dy_TC, x_TC, q_norm_A, k_norm_B, sums_T4;  // in
  int64_t num_ranks = 1;
  float eps = 1e-6f;
};
void qk_norm_block_bwd(Stream& s, const QkNormBlockBwd& a);

}  // namespace moebius
