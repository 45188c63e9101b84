// RMS normalisation of rows (Zhang & Sennrich, arXiv 1910.07467), alone and fused with the residual
// addition before it.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// The maximum width of a row on a GPU, where one thread block holds a whole row.
inline constexpr int64_t kMaxGpuNormWidth = 16384;

// sum[t,:] = x[t,:] + residual[t,:]     (x[t,:] without a residual)
// rstd[t] = 1/sqrt(mean(sum[t,:]^2) + eps)
// y[t,:] = w * round(sum[t,:] * rstd[t])
//
// x, residual, sum, y and w have one dtype, f32 or bf16; rstd is f32. The sum is rounded to its dtype
// first, and that value is normalised, in f32. As in Llama, the normalised row is rounded to the
// dtype before the product with w. sum may be the memory of residual or of x.
struct RmsNormFwd {
  Tensor y_TD, rstd_T;            // out
  Tensor sum_TD;                  // out, only with residual
  Tensor x_TD, residual_TD, w_D;  // in
  float eps = 1e-6f;
};
void rms_norm_fwd(Stream& s, const RmsNormFwd& a);
Cost cost(const RmsNormFwd& a);

// xhat[t,:] = x[t,:] * rstd[t]
// dx[t,:] += rstd[t] * (dy[t,:]*w - xhat[t,:] * mean(dy[t,:]*w*xhat[t,:]))
// dw += sum over t of dy[t,:]*xhat[t,:]
//
// dx is the gradient of the residual stream, so the result is ADDED to it, in f32, and rounded to its dtype. dw is f32.
// x is the sum that forward normalised. partial is f32 scratch of shape [num_partials(T, D, s), D]; rows are summed in
// fixed chunks.
struct RmsNormBwd {
  Tensor dx_TD, dw_D;               // inout
  Tensor partial_PD;                // scratch
  Tensor dy_TD, x_TD, rstd_T, w_D;  // in
  static int64_t num_partials(int64_t num_rows, int64_t width, const Stream& s);
};
void rms_norm_bwd(Stream& s, const RmsNormBwd& a);
Cost cost(const RmsNormBwd& a);

}  // namespace moebius
