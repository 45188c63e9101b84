// Clamps elements to [-limit, limit] (OLMo's clip_qkv, arXiv 2402.00838).
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// y[i] = min(max(x[i], -limit), limit)
//
// x and y have one dtype, f32 or bf16; a NaN stays a NaN. The limit is rounded to that dtype first, so that forward and
// backward agree on the elements beyond it. y may be the memory of x.
struct ClampFwd {
  Tensor y;  // out
  Tensor x;  // in
  float limit = 0.0f;
};
void clamp_fwd(Stream& s, const ClampFwd& a);
Cost cost(const ClampFwd& a);

// dx[i] = dy[i] where |x[i]| <= limit, else 0
//
// The limit is rounded as in ClampFwd. dx may be the memory of dy.
struct ClampBwd {
  Tensor dx;     // out
  Tensor dy, x;  // in
  float limit = 0.0f;
};
void clamp_bwd(Stream& s, const ClampBwd& a);
Cost cost(const ClampBwd& a);

}  // namespace moebius
