// Sorting of rows by expert, for the experts of one rank. Counts stay on the device: shapes are bounds, and kernels
// read the number of rows from memory.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// Computes the rows of T tokens at the experts [first_expert, first_expert + e), sorted by expert, then by token. Pairs
// with another expert, and dropped pairs, have no row. A token chooses an expert at most once.
// REQUIRES: row_token has at least T min(K, e) elements.
struct IndexRows {
  Tensor counts_e, offsets_e1;  // out i32: rows of each expert, may be empty; their exclusive sum
  // out i32: token of a row, and its pair t K + k, which may be empty; rows at and past offsets[e] are not written
  Tensor row_token_R, row_pair_R;
  Tensor pair_row_TK;  // out i32: row of a pair, -1 if it has none; may be kept_TK
  Tensor scratch;      // scratch_bytes() bytes of any dtype
  Tensor topk_TK;      // in i32: the experts of each token, by global index
  Tensor kept_TK;      // in i32: negative if the pair is dropped; may be empty: none is dropped
  int64_t first_expert = 0;
  static int64_t scratch_bytes(int64_t num_tokens, int64_t num_experts, const Stream& s);  // num_experts: e
};
void index_rows(Stream& s, const IndexRows& a);

// Computes the rows of N tokens as IndexRows does, from routes that arrived (PushRoutes in ops/dispatch/dispatch.h):
//   topk[n,l] = routes[n,l];  weight[n,l] = the number whose bits are routes[n, L + l]
//
// The N tokens are in G sections of N/G. Of section g the first arrive[g, V - 1] tokens arrived. The others have no row
// and weight 0; their routes may have any bits. A pair has no row where topk is negative.
struct IndexRoutes {
  Tensor offsets_e1, row_token_R, pair_row_NL, weight_NL;  // out i32, weight f32; as in IndexRows
  Tensor scratch;                                          // IndexRows::scratch_bytes(N, e, s) bytes of any dtype
  Tensor routes_N2L, arrive_GV;                            // in i32
  int64_t first_expert = 0;
};
void index_routes(Stream& s, const IndexRoutes& a);

// Sorts by expert, then by rank, the rows that arrive from W ranks. The rows arrive rank after rank, those of each rank
// sorted by expert; rank q sends counts[q, i] rows for expert i. Row r of the sorted order is the arrival_R[r]-th row
// to arrive, and row_R is the inverse. REQUIRES: R is at least the number of rows for the experts [first_expert,
// first_expert + e).
struct IndexArrivals {
  Tensor offsets_e1, arrival_R, row_R;  // out i32; nothing is written at and past offsets[e]
  Tensor counts_WE;                     // in i32, of all experts
  int64_t first_expert = 0;
};
void index_arrivals(Stream& s, const IndexArrivals& a);

}  // namespace moebius
