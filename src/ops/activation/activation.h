// SwiGLU (Shazeer, arXiv 2002.05202) on rows whose first half is the gate and second half the up projection.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// a[t,f] = silu(h[t,f]) * h[t,F+f],  silu(g) = g / (1 + exp(-g)).  f32 or bf16; maths in f32, rounded once.
struct SwigluFwd {
  Tensor a_TF;   // out
  Tensor h_T2F;  // in
};
void swiglu_fwd(Stream& s, const SwigluFwd& a);
Cost cost(const SwigluFwd& a);

// dh from da, and a again (the weight gradient of the down projection needs it; forward does not keep it).
// a may be empty.
struct SwigluBwd {
  Tensor dh_T2F, a_TF;  // out
  Tensor da_TF, h_T2F;  // in
};
void swiglu_bwd(Stream& s, const SwigluBwd& a);
Cost cost(const SwigluBwd& a);

}  // namespace moebius
