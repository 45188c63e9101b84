// The two places of a dense gated feed-forward layer (Shazeer, arXiv 2002.05202) where a product and SwiGLU meet, and
// may be one pass. f32 or bf16 alike, accumulated in f32; what is rounded, and when, is what two passes round.
#pragma once

#include "core/quantized.h"
#include "device/device.h"

namespace moebius {

// h = x w^T;  a = silu(h[:, :F]) * h[:, F:], of h as rounded.  w rows are F gate rows, then F up rows.
// fused: in one pass where the device has one; without, in two, and the bits are the same.
struct GatedUp {
  Tensor h_T2F, a_TF;   // out
  Operand x_TD, w_2FD;  // in
  bool fused = true;
};
void gated_up(Stream& s, const GatedUp& a);
Cost cost(const GatedUp& a);

// With da = dy w, rounded to the dtype: dh from da, and a again, as SwigluBwd (ops/activation) has them.
struct DGatedDown {
  Tensor dh_T2F, a_TF;  // out
  Tensor da_TF;         // scratch, written where there are two passes
  Operand dy_TD, w_DF;  // in
  Tensor h_T2F;         // in
  bool fused = true;
};
void d_gated_down(Stream& s, const DGatedDown& a);
Cost cost(const DGatedDown& a);

}  // namespace moebius
