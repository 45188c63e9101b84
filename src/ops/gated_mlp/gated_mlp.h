// The products of a dense gated feed-forward layer (Shazeer, arXiv 2002.05202) that can be fused with SwiGLU. All
// tensors have one dtype, f32 or bf16, except quantised operands. Products accumulate in f32. The fused pass rounds the
// same values at the same places as two passes do.
#pragma once

#include "core/quantized.h"
#include "device/device.h"

namespace moebius {

// h = x w^T
// a = silu(h[:, :F]) * h[:, F:]     (of h as rounded)
//
// w has F gate rows, then F up rows. With `fused` the op is one pass if the device has such a kernel, else two; the
// bits are the same. few_rows is as in Gemm; a GPU then runs one pass.
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
// A quantised w is transposed. Computes dh from da, and a again, as SwigluBwd does (ops/activation). `fused` is as in
// GatedUp above.
struct DGatedDown {
  Tensor dh_T2F, a_TF;  // out
  Tensor da_TF;         // scratch, written if there are two passes
  Operand dy_TD, w_DF;  // in
  Tensor h_T2F;         // in
  bool fused = true;
};
void d_gated_down(Stream& s, const DGatedDown& a);
Cost cost(const DGatedDown& a);

}  // namespace moebius
