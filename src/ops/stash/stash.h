// A stash: rows that forward passes leave for backward passes, in pages of one pool. How many rows a pass leaves is
// known on the device alone. All passes of a step share the pool, and take and give back its pages in the order of
// their stream. So no count is read by the host, and a CUDA graph may hold all of it.
//
//   forward    take_pages    as many pages as the rows need, or as are free
//              stash_rows    copies the rows that have a page
//   backward   unstash_rows  copies them back
//              give_pages    frees the pages, and says which rows had none: the caller computes these anew
//              end_spill     measures how long that took
//
// Rows [0, kept) of a pass have a page and rows [kept, asked) have none. Their layout:
//   state_2   of the pool: [0] pages that are free, [1] rows that passes asked for and did not give back yet
//   held_3    of a pass: [0] kept, [1] pages that it holds, [2] rows that it asked for
//   counts_3  [0] rows without a page, [1] the largest state_2[1] so far over the rows of the pool, [2] nanoseconds of
//             computing rows anew
// free_P holds the numbers of the free pages in its first state_2[0] elements.
#pragma once

#include "device/device.h"

namespace moebius {

inline constexpr int64_t kStashPageRows = 64;

// All pages are free: free_P, state_2 and counts_3 begin.
struct ClearStash {
  Tensor free_P, state_2, counts_3;  // out; i32, i64, f64
};
void clear_stash(Stream& s, const ClearStash& a);
Cost cost(const ClearStash& a);

// A pass asks for R = offsets[e] rows. Pages that it holds still, of a pass without a backward, are given back first.
//   page_Q[0 .. held_3[1])  the pages that it gets
struct TakePages {
  Tensor page_Q, held_3, free_P, state_2, counts_3;  // inout; i32, i32, i32, i64, f64
  Tensor offsets_e1;                                 // in; i32
};
void take_pages(Stream& s, const TakePages& a);
Cost cost(const TakePages& a);

// pool[64 page_Q[r / 64] + r % 64, first .. first + C) = x[r,:] for the rows r < kept
struct StashRows {
  Tensor pool_SM;         // out
  Tensor x_RC;            // in, of the same dtype: f32 or bf16
  Tensor page_Q, held_3;  // in
  int64_t first = 0;
  int64_t expected_rows = 0;  // rows that are counted as work
};
void stash_rows(Stream& s, const StashRows& a);
Cost cost(const StashRows& a);

// x[r,:] = pool[64 page_Q[r / 64] + r % 64, first .. first + C) for the rows r < kept
struct UnstashRows {
  Tensor x_RC;                     // out: rows below kept
  Tensor pool_SM, page_Q, held_3;  // in
  int64_t first = 0;
  int64_t expected_rows = 0;
};
void unstash_rows(Stream& s, const UnstashRows& a);
Cost cost(const UnstashRows& a);

// The pages of a pass are free again, and held_3 = 0.
//   spilled[i] = max(offsets[i], kept): the offsets of the rows that had no page
//   since = the device's clock in ns if there are such rows, else -1
struct GivePages {
  Tensor spilled_e1, since_1;              // out; i32, i64
  Tensor free_P, state_2, page_Q, held_3;  // inout
  Tensor offsets_e1;                       // in
};
void give_pages(Stream& s, const GivePages& a);
Cost cost(const GivePages& a);

// counts_3[2] += the time since `since`, unless that is -1
struct EndSpill {
  Tensor counts_3;  // inout
  Tensor since_1;   // in
};
void end_spill(Stream& s, const EndSpill& a);
Cost cost(const EndSpill& a);

}  // namespace moebius
