// One-sided dispatch and combine: the ranks that share the experts of an MoE layer write rows into each other's
// memory. Each rank computes the positions of its rows in the memory of the others before it writes them. The names
// dispatch and combine are those of DeepEP.
//
// P ep ranks with ETP etp ranks each share the experts: W ranks in all. Rank q has the experts of
// its ep rank, E/P of them, and shares them with the other etp ranks:
//   W = P ETP
//   q = etp + ETP ep
//   its experts = [ep E/P, (ep + 1) E/P)
// A token is sent once to each rank that has any of its experts, or to all ranks (ContiguousPlaces). A pair is a
// token and one of its K experts. The destinations of a token are at most J ep ranks, and all etp ranks of each of
// them get its row. At most L of its pairs are on one ep rank:
//   J = min(K, P),  L = min(K, E/P)
//
//   Rows that arrive   At most N, with T tokens per rank W T. They are sorted by the rank that they come
//                      from, then by token.
//   Rows that return   At most B, T J ETP. They are sorted by the rank that they come from, then by
//                      token. A token has one from each of its ranks.
//
// Every rank has a window, memory that all ranks write to (comm/peer_window.h); all windows have one layout. bases_W
// (i64) has the addresses of the windows of all ranks, and `offset` the offset in bytes of an array in a window.
// Destinations, rows and counts are i32 and stay on the device: shapes are bounds, and kernels read numbers of rows
// from memory. sent_1 (i64) accumulates the bytes written to windows of other ranks.
//
// Every op throws Error{usage}, with its name, for a tensor of another shape or dtype, and for a rank that is not one
// of the W ranks.
#pragma once

#include <cstddef>
#include <vector>

#include "core/tensor.h"
#include "device/device.h"
#include "ops/dispatch/row_distances.h"

namespace moebius {

//   dest[t,j]   the j-th of the ep ranks that have experts of token t, ascending; -1 past the last one
//   slot[t,j]   the place of t among this rank's tokens for dest[t,j], by token
//   count[p]    the number of this rank's tokens for ep rank p
//
// A pair whose `kept` is negative is dropped, and not sent.
struct Destinations {
  Tensor dest_TJ, slot_TJ, count_P;  // out i32
  Tensor scratch;                    // scratch_bytes() bytes of any dtype
  Tensor topk_TK, kept_TK;           // in i32; kept may be empty: none is dropped
  int64_t experts_of_rank = 1;       // E/P
  static int64_t scratch_bytes(int64_t num_tokens, int64_t num_ranks, const Stream& s);  // num_ranks: P
};
void destinations(Stream& s, const Destinations& a);

// Computes the positions of rows from the counts of all ranks. n[s,p] is count[p] of rank s; this rank is etp + ETP ep.
//   arrive[s] = sum over s' < s of n[s',ep]
//   row[t,j] = sum over s < rank of n[s,dest[t,j]] + slot[t,j]
//   back[s] = ETP sum over p < ep of n[s,p] + etp n[s,ep]
//   back_row[t, j ETP + i] = ETP sum over p < dest[t,j] of n[rank,p] + i n[rank,dest[t,j]] + slot[t,j]
//
// arrive[s] is the number of rows that arrive here from ranks before s, and arrive[W] that from all ranks. Token t
// arrives at row[t,j] of each of its ETP ranks. The rows that this rank returns begin at back[s] in the window of rank
// s. Past the last destination, row and back_row are -1.
struct DispatchPlaces {
  Tensor row_TJ, back_row_TB, arrive_W1, back_W;  // out i32
  Tensor dest_TJ, slot_TJ, counts_WP;             // in i32
  int64_t rank = 0;                               // this rank's index among the W ranks
};
void dispatch_places(Stream& s, const DispatchPlaces& a);

// The same places if every token goes to all ranks, which needs no counts. J is P.
//   dest[t,j] = j,  row[t,j] = rank T + t,  back_row[t, j ETP + i] = (j ETP + i) T + t
//   arrive[s] = s T,  back[s] = rank T
struct ContiguousPlaces {
  Tensor dest_TJ, row_TJ, back_row_TB, arrive_W1, back_W;  // out i32
  int64_t rank = 0;                                        // this rank's index among the W ranks
};
void contiguous_places(Stream& s, const ContiguousPlaces& a);

// array[row[t,j],:] = x[t,:]  in the windows of the ranks dest[t,j] ETP + i,  for all j with dest[t,j] >= 0
//
// x may have any dtype. Only ranks at the distances `of` from this rank get rows.
//
// If dest and row are those of contiguous_places() for the T rows of x, `windows` may be given: the addresses of all
// windows in this process. In a CUDA graph copy engines then copy the rows, with no multiprocessor. Work that is not
// captured runs the kernel: ranks that are threads could wait for each other in CUDA's copies between GPUs.
struct PushRows {
  Tensor sent_1;                 // inout
  Tensor x_TD;                   // in
  Tensor dest_TJ, row_TJ;        // in
  Tensor bases_W;                // in
  int64_t offset = 0, rank = 0;  // the offset of the array [N, D]; this rank's index among the W ranks
  int64_t etp = 1;               // ETP
  RowDistances of = {};
  std::vector<std::byte*> windows;  // those of all ranks, or none. REQUIRES: dest and row of contiguous_places()
};
void push_rows(Stream& s, const PushRows& a);

// array[rank,:] = x[:]  in the windows of all ranks
struct PushToAll {
  Tensor sent_1;                 // inout
  Tensor x_M;                    // in, any dtype
  Tensor bases_W;                // in
  int64_t offset = 0, rank = 0;  // the offset of the array [W, M]; this rank's index among the W ranks
};
void push_to_all(Stream& s, const PushToAll& a);

// Computes the places of rows in a local array that is sorted by destination, then by token. Destinations are in
// ascending order, but `last` comes last. Each has `section` rows of the array; with section = 0 it has only the rows
// that it gets. first[p] is the sum of the rows of all destinations before p. The P destinations form G blocks, and
// row has the places of each block separately:
//   row[g,t,j] = first[dest[t,j]] + slot[t,j]  where dest[t,j] is one of [g P/G, (g + 1) P/G), else -1
struct SortedPlaces {
  Tensor row_GTJ;                    // out i32
  Tensor dest_TJ, slot_TJ, count_P;  // in i32, of destinations()
  int64_t last = 0, section = 0;
};
void sorted_places(Stream& s, const SortedPlaces& a);

// array[row[t,j],:] = x[t,:]  for all j with row[t,j] >= 0
//
// array and x have the same dtype, which may be any. Other rows of the array are not written.
struct SpreadRows {
  Tensor array_SD;      // out
  Tensor x_TD, row_TJ;  // in
};
void spread_rows(Stream& s, const SpreadRows& a);

// routes[t,k] = topk[t,k] + shift, or -1 where kept[t,k] is negative;  routes[t, K + k] = the bits of weight[t,k]
struct PackRoutes {
  Tensor routes_T2K;                   // out i32
  Tensor topk_TK, kept_TK, weight_TK;  // in; kept may be empty
  int64_t shift = 0;                   // with 1, a row of zeros is a token without experts
};
void pack_routes(Stream& s, const PackRoutes& a);

// topk[n,k] = routes[n,k] - first,  or -1 unless the expert is one of [first, first + num)
//
// Unpacks routes, and selects the pairs of num_experts experts from first_expert on, which are then numbered from 0.
// For all pairs, weight[n,k] is the number whose bits are routes[n, K + k].
struct SelectRoutes {
  Tensor topk_NK, weight_NK;  // out i32, f32
  Tensor routes_N2K;          // in i32, of pack_routes
  int64_t first_expert = 0, num_experts = 1;
};
void select_routes(Stream& s, const SelectRoutes& a);

// Sends to each rank the pairs of a token with its experts, in the order of k. The l-th pair of token t at ep rank p is
// the l-th k with topk[t,k] in [p E/P, (p + 1) E/P) that is not dropped, k(t,p,l); there are L at most.
//   array[row[t,j], l]     = topk[t, k(t,p,l)],    -1 past the last one
//   array[row[t,j], L + l] = the bits of weight[t, k(t,p,l)], 0 past the last one
// in the windows of the ranks p ETP + i,  p = dest[t,j],  for all j with dest[t,j] >= 0
struct PushRoutes {
  Tensor sent_1;                       // inout
  Tensor topk_TK, kept_TK, weight_TK;  // in i32, i32, f32; kept may be empty: none is dropped
  Tensor dest_TJ, row_TJ;              // in
  Tensor bases_W;                      // in
  int64_t offset = 0, rank = 0;        // the offset of the array [N, 2 L], i32; this rank's index among the W ranks
  int64_t etp = 1;                     // ETP
  int64_t experts_of_rank = 1;         // E/P
};
void push_routes(Stream& s, const PushRoutes& a);

// array[back[s] + i,:] = sum over l of weight[n,l] * y[pair_row[n,l],:]  in the window of s,  n = arrive[s] + i
// for each rank s and each row i that came from it
//
// y and the array are f32 or bf16, and weight is f32. The sum runs over l in order, in f32, and is rounded once, with
// the bits of Combine (ops/permute/permute.h). A pair at row -1 adds nothing. Empty weights count as 1. Only rows at
// the distances `of` return.
struct ReturnSums {
  Tensor sent_1;                        // inout
  Tensor y_RD, pair_row_NL, weight_NL;  // in
  Tensor arrive_W1, back_W, bases_W;    // in
  int64_t offset = 0, rank = 0;         // the offset of the array [B, D]; this rank's index among the W ranks
  RowDistances of = {};
  // Used in the cost of the op alone: pairs that have a row, and rows n that arrived. 0 stands for all.
  int64_t expected_pairs = 0, expected_rows = 0;
};
void return_sums(Stream& s, const ReturnSums& a);
Cost cost(const ReturnSums& a);

// array[back[s] + i, l] = from[pair_row[n,l]], or 0 where pair_row[n,l] is -1,  in the window of s,  n = arrive[s] + i
// for each rank s and each row i that came from it;  all f32
struct ReturnPairs {
  Tensor sent_1;                      // inout
  Tensor from_R, pair_row_NL;         // in
  Tensor arrive_W1, back_W, bases_W;  // in
  int64_t offset = 0, rank = 0;       // the offset of the array [B, L]; this rank's index among the W ranks
};
void return_pairs(Stream& s, const ReturnPairs& a);

// to[t,k] = sum over i < ETP of from[back_row[t, j ETP + i], l],  where (t,k) is the l-th pair of t at dest[t,j]
//
// Sums what return_pairs() of the ranks wrote here, for each pair of this rank's tokens. The sum runs over i in
// order, in f32. A dropped pair, whose `kept` is negative, gets 0.
struct SumPairs {
  Tensor to_TK;                 // out f32
  Tensor from_BL;               // in f32: the array that return_pairs() wrote
  Tensor topk_TK, kept_TK;      // in i32; kept may be empty: none is dropped
  Tensor dest_TJ, back_row_TB;  // in
  int64_t experts_of_rank = 1;  // E/P
};
void sum_pairs(Stream& s, const SumPairs& a);

// Divides the rows of this rank's experts into three parts. Own rows are those of its own tokens, which are not sent;
// near rows have distances in [1, far_from), and far rows in [far_from, W). row_token[r] is the row n of N that row r
// reads. It ascends in the rows of an expert, which are sorted by source. Distances wrap around, so near and far rows
// of an expert form at most two runs each.
//   own[0,i], own[1,i]            begin and end of the own rows of expert i
//   near[0,2i+j], near[1,2i+j]    begin and end of run j = 0 or 1 of the near rows of expert i; far has those of the
//                                 far rows. An unused run is empty.
//   own_token[r] = t              where r is a row of token t of this rank; not written for other rows
struct PartRows {
  Tensor own_2e, near_22e, far_22e, own_token_R;  // out i32; near may be empty if far_from = 1
  Tensor offsets_e1, row_token_R, arrive_W1;      // in i32
  Tensor dest_TJ, row_TJ, pair_row_NL;            // in i32: dest and row of this rank's tokens, pair_row of the N rows
  int64_t rank = 0, etp = 1;                      // this rank's index among the W ranks; ETP
  int64_t far_from = 1;                           // in [1, W]
};
void part_rows(Stream& s, const PartRows& a);

}  // namespace moebius
