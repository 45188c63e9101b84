// Between tokens and expert-sorted rows: the gather-sums of combine and its backward, and weights by row.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// out[t,:] = sum over k of weight[t,k] * y[pair_row[t,k],:], k in order, f32, rounded once
// Pairs at row -1 add nothing.
// Without weights (empty): the plain sum, which is the backward of the gather.
// accumulate: out += (rounded once).
struct Combine {
  Tensor out_TD;                        // out (inout with accumulate)
  Tensor y_RD, pair_row_TK, weight_TK;  // in
  bool accumulate = false;
};
void combine(Stream& s, const Combine& a);
Cost cost(const Combine& a);

// to[r,:] = from[row[r],:] for the rows r below offsets[E]; the same dtype, any. Others are not written.
struct GatherRows {
  Tensor to_RD;                       // out
  Tensor from_ND, row_R, offsets_E1;  // in; row and offsets i32
};
void gather_rows(Stream& s, const GatherRows& a);

// to_R[r] = from_TK[pair[r]] for the rows below offsets[E] (f32): weights of rows.
struct PairsToRows {
  Tensor to_R;                             // out
  Tensor from_TK, row_pair_R, offsets_E1;  // in
};
void pairs_to_rows(Stream& s, const PairsToRows& a);

// to_TK[p] = from_R[pair_row[p]], 0 for dropped pairs (f32): gradients of weights.
struct RowsToPairs {
  Tensor to_TK;                // out
  Tensor from_R, pair_row_TK;  // in
};
void rows_to_pairs(Stream& s, const RowsToPairs& a);

}  // namespace moebius
