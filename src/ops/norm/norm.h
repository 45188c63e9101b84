// RMS normalisation of rows (Zhang & Sennrich, arXiv 1910.07467), alone and fused with the residual addition before it.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// Of a row on a GPU, which a block holds whole.
inline constexpr int64_t kMaxGpuNormWidth = 16384;

// sum[t,:] = x[t,:] + residual[t,:]   (when residual is given; x itself otherwise)
// y[t,:] = w * round(sum[t,:] * rstd[t]),  rstd[t] = 1/sqrt(mean(sum[t,:]^2) + eps)
// sum may be the same memory as residual or x.
// x, residual, sum, y, w: f32 or bf16 alike; rstd f32.
// The sum is rounded to its dtype first and that value is normalised, in f32. As in Llama the normalised row is
// rounded to the dtype before the product with w.
struct RmsNormFwd {
  Tensor y_TD, rstd_T;            // out
  Tensor sum_TD;                  // out, only with residual
  Tensor x_TD, residual_TD, w_D;  // in
  float eps = 1e-6f;
};
void rms_norm_fwd(Stream& s, const RmsNormFwd& a);
Cost cost(const RmsNormFwd& a);

// dx[t,:] += rstd * (dy*w - xhat * mean(dy*w*xhat)),  xhat = x*rstd;  dw += sum over t of dy[t,:]*xhat[t,:].
// dx is the gradient of the residual stream: it is ADDED to (in f32, rounded to its dtype). dw f32 accumulates.
// x is what forward normalised (its sum).
// partial: scratch f32 [num_partials(T, D, s), D]; rows are summed in fixed chunks.
struct RmsNormBwd {
  Tensor dx_TD, dw_D;               // inout
  Tensor partial_PD;                // scratch
  Tensor dy_TD, x_TD, rstd_T, w_D;  // in
  static int64_t num_partials(int64_t num_rows, int64_t width, const Stream& s);
};
void rms_norm_bwd(Stream& s, const RmsNormBwd& a);
Cost cost(const RmsNormBwd& a);

}  // namespace moebius
