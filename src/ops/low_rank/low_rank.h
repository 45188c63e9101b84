// The products of low-rank adapters (Hu et al., LoRA, arXiv 2106.09685):
//   y = W x + scale * B (A x)       A [rank, in], B [out, rank]
//
// Several matrices that read the same x may be stored as one, so each product works on a window of columns of its
// tensors. Weights are one matrix, or one per expert (ops/experts/experts.h): then row r belongs to expert e if
// offsets[e] <= r < offsets[e+1]. Without offsets all rows belong to the one matrix. Rows at and past the last offset
// are neither read nor written.
//
// All tensors have one dtype, f32 or bf16, and sums are in f32. On the CPU any number of threads gives the same bits.
#pragma once

#include "device/device.h"
#include "ops/experts/experts.h"

namespace moebius {

// The columns [first, first + count) of a matrix.
struct Columns {
  int64_t first = 0, count = 0;
};

// y[r, y.first + n] (+)= scale * sum over k of x[i, x.first + k] w[e][w_first + n, k]
//
// i is token[r], or r without token. With `transposed` the factor is w[e][w_first + k, n]. Of w[e] the product reads
// `count` rows from w_first on, and all columns. With `accumulate` the product is added to y, and rounded once.
struct LowRankProduct {
  Tensor y_RM;         // out
  Tensor x_TK, w_ePQ;  // in
  Columns y, x;
  int64_t w_first = 0;
  bool transposed = false, accumulate = false;
  float scale = 1.0f;
  Rows rows;       // token is optional
  Tensor scratch;  // scratch_bytes(a, s) bytes of any dtype
  static int64_t scratch_bytes(const LowRankProduct& a, const Stream& s);
};
void low_rank_product(Stream& s, const LowRankProduct& a);
Cost cost(const LowRankProduct& a);

// dw[e][w_first + m, n] += scale * sum over the rows r of e of left[i, left.first + m] right[j, right.first + n]
//
// dw is f32, and dw[e] has right.count columns. i is token[r] with gather_left, else r; j likewise.
struct LowRankWgrad {
  Tensor dw_ePQ;             // inout f32
  Tensor left_RM, right_RN;  // in
  Columns left, right;
  int64_t w_first = 0;
  float scale = 1.0f;
  bool gather_left = false, gather_right = false;
  Rows rows;
  Tensor scratch;
  static int64_t scratch_bytes(const LowRankWgrad& a, const Stream& s);
};
void low_rank_wgrad(Stream& s, const LowRankWgrad& a);
Cost cost(const LowRankWgrad& a);

// to[e][m, columns.first + n] = from[e][row + m - first, n]  for first <= m < first + count, and 0 for all other m
//
// Expands the B of one of several stacked matrices to all rows of W, for LowRankTerm (ops/experts/experts.h).
// columns.count is the number of columns of `from`. Other columns of `to` are not written.
struct LowRankBlock {
  Tensor to_eML, from_ePQ;  // out, in; of one dtype
  Columns columns;
  int64_t first = 0, count = 0, row = 0;
};
void low_rank_block(Stream& s, const LowRankBlock& a);
Cost cost(const LowRankBlock& a);

// a[r,:] = activation(h[r,:F], h[r,F:])
//
// This is the second half of expert_up, after an adapter has added to h.
struct LowRankActivation {
  Tensor a_RF;        // out
  Tensor h_R2F;       // in
  Tensor offsets_e1;  // i32
  GatedActivation activation;
};
void low_rank_activation(Stream& s, const LowRankActivation& a);
Cost cost(const LowRankActivation& a);

// dweight[r] += <g[r,:], a[r,:]>
// dh[r,:]    += the derivative of weight[r] <g[r,:], a[r,:]> w.r.t. h[r,:]
//
// a is activation(h), rounded. d_expert_down computes both for g of W2. They are linear in g, so this op adds those for
// the g of W2's adapter. dweight and weight are f32.
struct DLowRankActivation {
  Tensor dh_R2F, dweight_R;      // inout
  Tensor g_RF, h_R2F, weight_R;  // in
  Tensor offsets_e1;             // i32
  GatedActivation activation;
};
void d_low_rank_activation(Stream& s, const DLowRankActivation& a);
Cost cost(const DLowRankActivation& a);

}  // namespace moebius
