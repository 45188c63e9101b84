// Moves data between tokens and rows that are sorted by expert: the gather-sums of combine and of its backward, and
// weights of rows.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// out[t,:] = sum over k of weight[t,k] * y[pair_row[t,k],:]
//
// The sum runs over k in order, in f32, and is rounded once; a pair at row -1 adds nothing. Empty weights count as 1:
// that is the backward of a gather. With accumulate the sum is added to out, and rounded once. Both out and y may be
// f32 or bf16.
struct Combine {
  Tensor out_TD;                        // out (inout with accumulate)
  Tensor y_RD, pair_row_TK, weight_TK;  // in
  bool accumulate = false;
  int64_t expected_pairs = 0;  // pairs with a row, in the cost of the op; 0: all pairs
};
void combine(Stream& s, const Combine& a);
Cost cost(const Combine& a);

// to[r,:] = from[row[r],:]  for the rows r below offsets[E]
//
// Both have one dtype, which may be any. Other rows are not written.
struct GatherRows {
  Tensor to_RD;                       // out
  Tensor from_ND, row_R, offsets_E1;  // in; row and offsets i32
  int64_t expected_rows = 0;          // rows below offsets[E], in the cost of the op; 0: all rows of `to`
};
void gather_rows(Stream& s, const GatherRows& a);
Cost cost(const GatherRows& a);

// to_R[r] = from_TK[pair[r]]  for the rows r below offsets[E]
//
// Used for the weights of rows. Both are f32.
struct PairsToRows {
  Tensor to_R;                             // out
  Tensor from_TK, row_pair_R, offsets_E1;  // in
};
void pairs_to_rows(Stream& s, const PairsToRows& a);

// to_TK[p] = from_R[pair_row[p]],  or 0 for a dropped pair
//
// Used for the gradients of weights. Both are f32.
struct RowsToPairs {
  Tensor to_TK;                // out
  Tensor from_R, pair_row_TK;  // in
};
void rows_to_pairs(Stream& s, const RowsToPairs& a);

}  // namespace moebius
