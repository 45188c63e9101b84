// A stash: rows that forward passes save for backward passes, in pages of one pool. Only the device knows the number of
// rows. All passes of a step share the pool, and allocate and free its pages in the order of the stream. So the host
// reads no counts, and a CUDA graph may capture all of it.
//
//   forward    alloc_pages   allocates the pages that the rows need, or all free pages if these are fewer
//              stash_rows    copies the rows that have a page
//   backward   unstash_rows  copies them back
//              free_pages    frees the pages, and returns the rows without a page, which the caller recomputes
//              end_spill     measures the time of that recomputation
//
// Rows [0, kept) of a pass have a page and rows [kept, requested) have none. Their layout:
//   state_2   of the pool: [0] free pages, [1] requested rows that are not freed yet
//   held_3    of a pass: [0] kept, [1] allocated pages, [2] requested rows
//   counts_3  [0] rows without a page, [1] the maximum of state_2[1] / (rows of the pool), [2] nanoseconds of
//             recomputing rows
// free_P holds the numbers of the free pages in its first state_2[0] elements.
#pragma once

#include "device/device.h"

namespace moebius {

inline constexpr int64_t kStashPageRows = 64;

// Marks all pages free, and initialises free_P, state_2 and counts_3.
struct ClearStash {
  Tensor free_P, state_2, counts_3;  // out; i32, i64, f64
};
void clear_stash(Stream& s, const ClearStash& a);
Cost cost(const ClearStash& a);

// Allocates pages for the R = offsets[e] rows of a pass. Pages that the pass still has, after a forward without a
// backward, are freed first.
//   page_Q[0 .. held_3[1])  the allocated pages
struct AllocPages {
  Tensor page_Q, held_3, free_P, state_2, counts_3;  // inout; i32, i32, i32, i64, f64
  Tensor offsets_e1;                                 // in; i32
};
void alloc_pages(Stream& s, const AllocPages& a);
Cost cost(const AllocPages& a);

// pool[64 page_Q[r / 64] + r % 64, first .. first + C) = x[r,:] for the rows r < kept
struct StashRows {
  Tensor pool_SM;         // out
  Tensor x_RC;            // in, of the same dtype: f32 or bf16
  Tensor page_Q, held_3;  // in
  int64_t first = 0;
  int64_t expected_rows = 0;  // rows in the cost of the op
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

// Frees the pages of a pass, and sets held_3 to 0.
//   spilled[i] = max(offsets[i], kept): the offsets of the rows without a page
//   since = the device's clock in ns if there are such rows, else -1
struct FreePages {
  Tensor spilled_e1, since_1;              // out; i32, i64
  Tensor free_P, state_2, page_Q, held_3;  // inout
  Tensor offsets_e1;                       // in
};
void free_pages(Stream& s, const FreePages& a);
Cost cost(const FreePages& a);

// counts_3[2] += the time since `since`, unless that is -1
struct EndSpill {
  Tensor counts_3;  // inout
  Tensor since_1;   // in
};
void end_spill(Stream& s, const EndSpill& a);
Cost cost(const EndSpill& a);

}  // namespace moebius
