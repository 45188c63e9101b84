// Pairs of tokens with the experts of one rank, without the pairs with other experts. A token has L of them at most,
// the minimum of K and the rank's e experts, so an index of them is narrower than one of all K pairs of each token.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// The l-th pair of token n is its l-th pair (n, k), in the order of k, with an expert of [first_expert, first_expert +
// e) that is not dropped. Past the last one topk and k are -1, and weight is 0.
struct LocalPairs {
  Tensor topk_NL, k_NL, weight_NL;     // out i32, i32, f32: of the l-th pair its expert, its k and its weight
  Tensor topk_NK, kept_NK, weight_NK;  // in i32, i32, f32; negative kept: the pair is dropped; may be empty
  int64_t first_expert = 0, num_experts = 1;
};
void local_pairs(Stream& s, const LocalPairs& a);

// to[pair_row[n,l]] = from[n,l]  for all pairs with a row;  both f32
//
// Rows without a pair are not written. REQUIRES: no two pairs have the same row.
struct LocalPairsToRows {
  Tensor to_R;                  // out
  Tensor from_NL, pair_row_NL;  // in
};
void local_pairs_to_rows(Stream& s, const LocalPairsToRows& a);

// to[n, k[n,l]] = from[pair_row[n,l]]  for all pairs with a row, and 0 for the other k;  all f32
struct RowsToAllPairs {
  Tensor to_NK;                      // out
  Tensor from_R, pair_row_NL, k_NL;  // in
};
void rows_to_all_pairs(Stream& s, const RowsToAllPairs& a);

}  // namespace moebius
