// The two places of a dense gated feed-forward layer (Shazeer, arXiv 2002.05202) where a product
// and SwiGLU meet, so that one pass can do both. Tensors are f32 or bf16 alike, or the operands of
// the product are quantised and the others f32 or bf16 alike. Products accumulate in f32. One pass
// rounds the same values at the same places as two passes do.
#pragma once

#include "core/quantized.h"
#include "device/device.h"

namespace moebius {

// h = x w^T
// a = silu(h[:, :F]) * h[:, F:]     (of h as rounded)
//
// The rows of w are F gate rows, then F up rows. With fused the op is one pass where the device has
// one, else two; the bits are the same. few_rows is as in Gemm; a
// GPU then has one pass.
struct GatedUp {
  Tensor h_T2F, a_TF;   // out
  Operand x_TD, w_2FD;  // in
  bool fused = true;
  bool few_rows = false;
};
void gated_up(Stream& s, const GatedUp& a);
Cost cost(const GatedUp& a);

// da = dy w     (rounded to the dtype)
//
// A quantised w is transposed. dh follows from da, and a is computed a second time, as in
// SwigluBwd (ops/activation). fused is as in GatedUp.
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
