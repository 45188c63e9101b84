// Rows of activations and gradients as the products of nvfp4 read them: each number is quantised, and its value is
// stored in the dtype of the rows. Scales and elements have the formulas of quantize.h, and are not stored.
//
// Numbers depend on the place of a row in the global batch alone, and not on the rank that has it:
//   blocks   16 columns of a row; or 16 rows of a group in one column, after the Hadamard transform of quantize.h,
//            which is undone after rounding
//   draws    by the token of a row, its expert and the column of the whole matrix
//   scales   the f32 scale of a tensor is that of a micro-batch, also where rows of several micro-batches are together
// Where a layer computes in chunks, blocks of rows and scales are those of a chunk.
#pragma once

#include <array>

#include "core/rng.h"
#include "device/device.h"

namespace moebius {

// The rows to be rounded. Row r < R is x[token[r]], or x[r] without token; R is the number of tokens, or N.
struct NvRows {
  Tensor x_NC;     // in, f32 or bf16
  Tensor token_R;  // in i32, may be empty
  // in i32, may be empty: rows are sorted by group. Rows at and past the last offset are neither read nor written.
  Tensor offsets_g1;
  // in i32, may be empty; with hadamard. Group g consists of the rows order[offsets[g]] to order[offsets[g + 1] - 1].
  Tensor order_R;
  // The token of row r is index[source[r]], i32. Without source it is index[r], and without index draw[1] + source[r]
  // or draw[1] + r.
  Tensor index_N, source_R;
  bool hadamard = false;
  // The number M of micro-batches and the tokens of each. A row of token t is in micro-batch
  //   t / batch_tokens % M
  int64_t num_batches = 1, batch_tokens = 1;
  int64_t num_rows() const { return token_R.empty() ? x_NC.dim(0) : token_R.numel(); }
};

// bits[m] = the bits of the largest magnitude in micro-batch m
//
// It is that after the transform, and 0 without rows. Bits are ordered as those of largest_magnitudes() (quantize.h).
struct NvMagnitudes {
  Tensor bits_M;       // out i32
  NvRows of;           // in
  Tensor draw_2 = {};  // in i64 [step, token of row 0]; may be empty
};
void nv_magnitudes(Stream& s, const NvMagnitudes& a);
Cost cost(const NvMagnitudes& a);

// Columns of rows: those from `here` on are the columns from `whole` on of the whole matrix.
struct ColumnRun {
  int64_t here = 0, whole = 0;
};
struct WholeColumns {
  static constexpr int kMaxRuns = 4;
  std::array<ColumnRun, kMaxRuns> runs = {};
  int num_runs = 1;
  int64_t count = 0;  // columns of the whole matrix; 0: the rows have them all
};

// Stochastic rounding to one of the two neighbours, as StochasticRounding of quantize.h. The draw of an element has the
// index  (token * num_experts + first_expert + expert) * columns + column.  The expert is the group of a row that is
// divided by groups_per_expert; 0 without groups. With hadamard the token is that of the first row of the block, plus
// the place in the block.
struct NvDraws {
  Tensor draw_2;  // in i64 [step, token of row 0]; may be empty if no element draws
  uint64_t seed = 0;
  uint32_t key = 0;
  int64_t first_expert = 0, num_experts = 1, groups_per_expert = 1;
  WholeColumns columns = {};
};

// y[r] = the values of row r
struct NvRound {
  Tensor y_RC;  // out, dtype of x
  NvRows of;    // in
  // The largest magnitudes of the micro-batches in columns [first_batch, first_batch + M), a row for each rank that has
  // some of their rows.
  Tensor magnitude_WB;  // in i32
  int64_t first_batch = 0;
  NvDraws draws = {};
  bool draws_elements = false;  // else they are rounded to nearest even
  Tensor stats_5 = {};          // inout f64, may be empty: as Quantize::stats_5
};
void nv_round(Stream& s, const NvRound& a);
Cost cost(const NvRound& a);

// Sorts the rows of each expert by token, and divides them into micro-batches.
//
// order[offsets_of_batches[e M + m] ...] = the rows of expert e in micro-batch m, by token and then by row
// Rows are sorted by expert; index, source, num_batches and batch_tokens are as in NvRows. Rows past the last offset
// have no place in the order.
struct NvOrder {
  Tensor order_R;             // out i32
  Tensor offsets_of_batches;  // out i32 [e M + 1]
  Tensor offsets_e1;          // in i32
  Tensor index_N, source_R;   // in i32; source may be empty
  int64_t num_batches = 1, batch_tokens = 1;
};
void nv_order(Stream& s, const NvOrder& a);

}  // namespace moebius
