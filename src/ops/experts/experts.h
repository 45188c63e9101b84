// The grouped products of experts, with the granularity of the best fused kernels. Rows are sorted by expert, the
// number of rows of each expert is read from offsets in device memory, and x is gathered by index where it is read. The
// weights of all experts are one tensor.
//
//   forward   expert_up -> expert_down -> combine          saves x_TD and h_R2F, nothing else
//   backward  d_expert_down -> d_expert_up -> combine_bwd, and expert_wgrad twice
//
// The two operands of a product are both plain, or both quantised (core/quantized.h). With quantised operands the other
// tensors have one dtype, f32 or bf16, values are multiplied in f32, and sums run along the rows of data on both sides.
// So w2 of d_expert_down and w1 of d_expert_up are transposed, and so are both sides of expert_wgrad, in which the rows
// of each expert begin at group_begin(), as quantize() writes them.
//
// The flow follows Tang et al., SonicMoE (arXiv 2512.14080), and Megatron's memory-efficient
// permutation, where the weight of a row is applied before W2.
#pragma once

#include <limits>

#include "core/quantized.h"
#include "device/device.h"

namespace moebius {

// The rows of this rank's experts. Row r belongs to expert e if offsets[e] <= r < offsets[e+1], and reads x[token[r]].
struct Rows {
  Tensor offsets_e1;  // i32
  Tensor token_R;     // i32, empty: row r reads x[r]
};

// Some of the rows of an op. It reads and writes only these, with the bits that they have among all rows. Error{usage}
// with quantised operands, with few_rows, where e does not divide G, and on the portable kernels of GPUs.
struct RowPart {
  // i32 [2, G]: rows [runs[0,g], runs[1,g]) are of expert g / (G / e); empty: all rows. REQUIRES: runs do not overlap.
  Tensor runs_2G;
  // Only cost() reads these: the expected parts of all rows of the op, and of the rows of x or dout that they read.
  double share = 1, source_share = 1;
};

// The gated activation of a gate and an up projection:
//   g = min(gate, limit)
//   u = min(max(up, -limit), limit)
//   a = g sigmoid(alpha g) (u + shift)
//
// The defaults give SwiGLU, silu(gate) up. gpt-oss has alpha 1.702, limit 7 and shift 1 (arXiv 2508.10925). Clamped
// values have no gradient.
struct GatedActivation {
  float alpha = 1.0f, limit = std::numeric_limits<float>::infinity(), shift = 0.0f;
  bool operator==(const GatedActivation&) const = default;
};

// A term of low-rank adapters that a product adds to its own sums before they are rounded:
//   expert_up, expert_down        + w[e] low[r,:]      w [e, N, L]
//   d_expert_down, d_expert_up    + w[e]^T low[r,:]    w [e, L, N]
//
// N is the number of columns of the product: 2F, D, F (of g) and D. The rows of low are those of the product, sorted by
// expert. Not every kernel can add a term: adds_term() returns whether the kernel of an op on the
// device of s does. Others throw Error{usage}.
struct LowRankTerm {
  Tensor low_RL, w;  // in, of the dtype of the product
  bool empty() const { return w.empty(); }
};

// h[r,:] = w1[e] x[token[r],:] + b1[e]
// a[r,:] = activation(h[r,:F], h[r,F:])
//
// w1 has F gate rows, then F up rows. All tensors have one dtype, f32 or bf16, and products accumulate in f32. a is
// computed from the rounded h. Rows at and past the last offset are not written.
//
// few_rows: for generation, where experts have at most about 32 rows each. Plain weights are read once and in place.
// The bits of a row depend neither on the other rows nor on their number, but differ from those without few_rows.
struct ExpertUp {
  Tensor h_R2F, a_RF;     // out
  Operand x_TD, w1_e2FD;  // in
  Tensor b1_e2F;          // in, may be empty: none
  LowRankTerm added = {};
  Rows rows;
  GatedActivation activation;
  bool few_rows = false;
  Tensor scratch;  // scratch_bytes(a, s) bytes of any dtype
  RowPart part = {};
  static int64_t scratch_bytes(const ExpertUp& a, const Stream& s);
};
void expert_up(Stream& s, const ExpertUp& a);
Cost cost(const ExpertUp& a);  // cost for R rows
bool adds_term(const Stream& s, const ExpertUp& a);

// y[r,:] = w2[e] a[r,:] + b2[e]
//
// b2 has the columns [b2_first, b2_first + C) of the bias, and may be empty: if ranks share an expert, their y are
// summed, so each rank adds a part of the columns. few_rows is as in ExpertUp.
struct ExpertDown {
  Tensor y_RD;           // out
  Operand a_RF, w2_eDF;  // in
  Tensor b2_eC;          // in
  LowRankTerm added = {};
  int64_t b2_first = 0;
  Rows rows;
  bool few_rows = false;
  Tensor scratch;
  RowPart part = {};
  static int64_t scratch_bytes(const ExpertDown& a, const Stream& s);
};
void expert_down(Stream& s, const ExpertDown& a);
Cost cost(const ExpertDown& a);
bool adds_term(const Stream& s, const ExpertDown& a);

// The model's output is the sum of weight[r] * (w2 a[r,:] + b2) over the rows of a token. With
//   g[r,:] = w2[e]^T dout[token[r],:]     (rounded to the dtype)
// the op recomputes a from h, and computes
//   dweight[r] = <g[r,:], a[r,:]> + <dout[token[r],:], b2[e]>
//   da[r,:] = weight[r] * g[r,:],  and dh from da
//   sa[r,:] = weight[r] * a[r,:]          (for the weight gradient of w2)
//
// b2 is as in ExpertDown.
struct DExpertDown {
  Tensor dh_R2F, sa_RF, dweight_R;  // out; dweight f32
  Operand dout_TD, w2_eDF;          // in
  Tensor b2_eC, h_R2F, weight_R;    // in; weight f32, of each row
  LowRankTerm added = {};           // term that is added to g
  int64_t b2_first = 0;
  Rows rows;
  GatedActivation activation;
  Tensor scratch;
  RowPart part = {};
  static int64_t scratch_bytes(const DExpertDown& a, const Stream& s);
};
void d_expert_down(Stream& s, const DExpertDown& a);
Cost cost(const DExpertDown& a);
bool adds_term(const Stream& s, const DExpertDown& a);

// dx[r,:] = w1[e]^T dh[r,:]
struct DExpertUp {
  Tensor dx_RD;             // out
  Operand dh_R2F, w1_e2FD;  // in
  LowRankTerm added = {};
  Rows rows;
  Tensor scratch;
  RowPart part = {};
  static int64_t scratch_bytes(const DExpertUp& a, const Stream& s);
};
void d_expert_up(Stream& s, const DExpertUp& a);
Cost cost(const DExpertUp& a);
bool adds_term(const Stream& s, const DExpertUp& a);

// dw[e] = sum over the rows r of e of left[r,:]^T right[r,:],  or dw[e] += that with accumulate
//
// dw is f32. An expert without rows gets zeros, or keeps its dw with accumulate. One side may be gathered: with
// gather_left, row r of left is left[token[r],:], and likewise with gather_right. Quantised sides are already gathered,
// so the two flags are not read.
//
// With bf16 sides dw may be bf16, too. Its elements then have the bits of the op into an f32 tensor and sum_gradient()
// (ops/optimizer/optimizer.h) after it. On GPUs only the kernels of Hopper can do so; others throw Error{usage}.
//   dw1: left = dh,  right = x gathered      dw2: left = dout gathered,  right = sa
//
// A GPU takes quantised sides in f8_e4m3, the left one with row_blocks and the right one with square_blocks, or with
// per_tensor scales the left one in f8_e5m2 and the right one in f8_e4m3.
struct ExpertWgrad {
  Tensor dw_eMN;              // out f32 or bf16; inout with accumulate
  Operand left_RM, right_RN;  // in
  bool gather_left = false, gather_right = false, accumulate = false;
  Rows rows;
  Tensor scratch;
  static int64_t scratch_bytes(const ExpertWgrad& a, const Stream& s);
};
void expert_wgrad(Stream& s, const ExpertWgrad& a);
Cost cost(const ExpertWgrad& a);

// db[e,n] += sum over the rows r of e of weight[r] x[i, x_first + n]
//
// db is f32. i is token[r] with gather, else r. Empty weights count as 1.
//   db1: x = dh      db2: x = dout gathered, with the weights
struct ExpertBiasGrad {
  Tensor db_eN;           // inout f32
  Tensor x_RM, weight_R;  // in; M >= x_first + N
  int64_t x_first = 0;
  bool gather = false;
  Rows rows;
};
void expert_bias_grad(Stream& s, const ExpertBiasGrad& a);
Cost cost(const ExpertBiasGrad& a);

}  // namespace moebius
