// The places of rows once they are sorted by expert, for the experts of one rank among others.
// Counts stay on the device: shapes are bounds, and kernels read the number of rows from memory.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// The rows that T tokens have at the experts [first_expert, first_expert + e), sorted by expert and
// within an expert by token. A pair that chose another expert, or that kept says is dropped, has no
// row here. A token chooses an expert once. REQUIRES: row_token and row_pair have room for all
// rows, which are at most T min(K, e).
struct IndexRows {
  Tensor counts_e, offsets_e1;  // out i32: rows of each expert, may be empty; their exclusive sum
  // out i32: token of a row, and its pair t K + k; rows at and past offsets[e] are not written
  Tensor row_token_R, row_pair_R;
  Tensor pair_row_TK;  // out i32: row of a pair, -1 where it has none here; may be kept_TK
  Tensor scratch;      // bytes
  Tensor topk_TK;      // in i32: experts of all ranks
  Tensor kept_TK;      // in i32: negative where the pair is dropped; may be empty: none is
  int64_t first_expert = 0;
  static int64_t scratch_bytes(int64_t num_tokens, int64_t num_experts, const Stream& s);  // experts here
};
void index_rows(Stream& s, const IndexRows& a);

// The rows that arrive here from W ranks. Each rank sends its rows for the experts [first_expert,
// first_expert + e) sorted by expert, one rank after the other; rank q sends counts[q, i] rows for
// expert i. The rows are then sorted by expert, and within an expert by rank. Row r of that order
// is the arrival_R[r]-th to arrive; row_R is the inverse. REQUIRES: R is at least their sum.
struct IndexArrivals {
  Tensor offsets_e1, arrival_R, row_R;  // out i32; nothing is written at and past offsets[e]
  Tensor counts_WE;                     // in i32, of all experts
  int64_t first_expert = 0;
};
void index_arrivals(Stream& s, const IndexArrivals& a);

}  // namespace moebius
