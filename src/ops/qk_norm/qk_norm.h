// RMSNorm over all query heads together, and over all key heads together, in the rows of the q, k, v projection (OLMoE,
// arXiv 2409.02060). ops/rope has the norms per head.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// Row t of x is [A columns of q | B of k | B of v].
//   y = [w_q round(q rstd_q) | w_k round(k rstd_k) | v],  rstd_q = 1/sqrt(mean(q^2) + eps)
//
// x, y and the weights have one dtype, f32 or bf16; the maths is in f32. Each normalised part is rounded
// to the dtype before the product with its weight, as in rms_norm_fwd.
struct QkNormFwd {
  Tensor y_TC;                      // out
  Tensor x_TC, q_norm_A, k_norm_B;  // in
  float eps = 1e-6f;
};
void qk_norm_fwd(Stream& s, const QkNormFwd& a);
Cost cost(const QkNormFwd& a);

// dx = [rstd (dq w - qhat mean(dq w qhat)) | the same of k | dv]
//
// dq_norm and dk_norm are f32 and accumulate. Rows are summed in fixed chunks. partial is f32
// scratch of shape [num_partials(T, A, B, s), A + B].
struct QkNormBwd {
  Tensor dx_TC;                            // out
  Tensor dq_norm_A, dk_norm_B;             // inout
  Tensor partial_PW;                       // scratch
  Tensor dy_TC, x_TC, q_norm_A, k_norm_B;  // in
  float eps = 1e-6f;
  static int64_t num_partials(int64_t num_rows, int64_t A, int64_t B, const Stream& s);
};
void qk_norm_bwd(Stream& s, const QkNormBwd& a);
Cost cost(const QkNormBwd& a);

}  // namespace moebius
