// The experts' own data flow, at the granularity of the best fused kernels: rows of a Rows are sorted by expert, how
// many each has is read from offsets in memory, and x is gathered by index where it is used. Weights of all experts are
// one tensor.
//
//   forward   expert_up -> expert_down -> combine          kept: x_TD and h_R2F, nothing else
//   backward  d_expert_down -> d_expert_up -> combine_bwd, and expert_wgrad twice
// After Tang et al., SonicMoE (arXiv 2512.14080), and Megatron's memory-efficient permutation (the weight moves inside
// W2).
#pragma once

#include "core/device.h"
#include "core/tensor.h"

namespace moebius {

// Which rows the experts here work on. Row r belongs to expert e with offsets[e] <= r < offsets[e+1], and reads
// x[token[r]].
struct Rows {
  Tensor offsets_e1;  // i32
  Tensor token_R;     // i32, empty: row r reads x[r]
};

// h[r,:] = w1[e] x[token[r],:];  a = silu(h[:, :F]) * h[:, F:].  w1 rows are F gate rows, then F up rows.
// f32 or bf16 alike, accumulated in f32; a is computed from h as rounded. Rows at and past offsets[e] are not written.
struct ExpertUp {
  Tensor h_R2F, a_RF;    // out
  Tensor x_TD, w1_e2FD;  // in
  Rows rows;
  Tensor scratch;  // bytes of any dtype, as many as the device that s is or stands for needs
  static int64_t scratch_bytes(const ExpertUp& a, const Stream& s);
};
void expert_up(Stream& s, const ExpertUp& a);
Cost cost(const ExpertUp& a);  // of a full route: R rows

// y[r,:] = w2[e] a[r,:].
struct ExpertDown {
  Tensor y_RD;          // out
  Tensor a_RF, w2_eDF;  // in
  Rows rows;
  Tensor scratch;
  static int64_t scratch_bytes(const ExpertDown& a, const Stream& s);
};
void expert_down(Stream& s, const ExpertDown& a);
Cost cost(const ExpertDown& a);

// The model's y is  sum of weight * (w2 a).  With g = w2^T dout[token[r],:], rounded to the dtype:
//   a from h again;  dweight[r] = <g, a>;  dh from  da = weight * g;  sa = weight * a  (for the weight gradient of w2)
struct DExpertDown {
  Tensor dh_R2F, sa_RF, dweight_R;          // out; dweight f32
  Tensor dout_TD, w2_eDF, h_R2F, weight_R;  // in; weight f32, of each row
  Rows rows;
  Tensor scratch;
  static int64_t scratch_bytes(const DExpertDown& a, const Stream& s);
};
void d_expert_down(Stream& s, const DExpertDown& a);
Cost cost(const DExpertDown& a);

// dxrow[r,:] = w1[e]^T dh[r,:].
struct DExpertUp {
  Tensor dx_RD;            // out
  Tensor dh_R2F, w1_e2FD;  // in
  Rows rows;
  Tensor scratch;
  static int64_t scratch_bytes(const DExpertUp& a, const Stream& s);
};
void d_expert_up(Stream& s, const DExpertUp& a);
Cost cost(const DExpertUp& a);

// dw[e] += sum over the rows r of e of left[r,:]^T right[r,:]  (f32). Either side may be gathered: with gather_left,
// left row r is left[token[r],:], likewise gather_right.
//   dw1: left = dh,  right = x gathered      dw2: left = dout gathered,  right = sa
struct ExpertWgrad {
  Tensor dw_eMN;             // inout f32
  Tensor left_RM, right_RN;  // in
  bool gather_left = false, gather_right = false;
  Rows rows;
  Tensor scratch;
  static int64_t scratch_bytes(const ExpertWgrad& a, const Stream& s);
};
void expert_wgrad(Stream& s, const ExpertWgrad& a);
Cost cost(const ExpertWgrad& a);

}  // namespace moebius
