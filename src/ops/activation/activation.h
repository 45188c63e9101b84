// SwiGLU (Shazeer, arXiv 2002.05202) on rows whose first half is the gate and whose second half is
// the up projection.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// a[t,f] = silu(h[t,f]) * h[t,F+f],  silu(g) = g / (1 + exp(-g))
//
// a and h have one dtype, f32 or bf16. The result is computed in f32 and rounded once.
struct SwigluFwd {
  Tensor a_TF;   // out
  Tensor h_T2F;  // in
};
void swiglu_fwd(Stream& s, const SwigluFwd& a);
Cost cost(const SwigluFwd& a);

// Computes dh from da, and a again.
//
// The weight gradient of the down projection needs a, which the forward pass does not save. a may be empty: then only
// dh is written.
struct SwigluBwd {
  Tensor dh_T2F, a_TF;  // out
  Tensor da_TF, h_T2F;  // in
};
void swiglu_bwd(Stream& s, const SwigluBwd& a);
Cost cost(const SwigluBwd& a);

}  // namespace moebius
