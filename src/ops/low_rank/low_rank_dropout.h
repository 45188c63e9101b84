// Dropout of the input of low-rank adapters (Hu et al., LoRA, arXiv 2106.09685):
//   y = W x + scale / (1 - rate) * B (A (keep * x))       keep: 0 with probability rate, else 1
//
// The factor 1 / (1 - rate) belongs to the caller's scale, so kept elements do not change, bit for bit.
//
// A draw is a function of the seed, the step, the name of the matrix, the expert, the token's index in
// the global batch and the column of the whole matrix. So no layout, order or recomputation changes it.
#pragma once

#include "core/rng.h"
#include "device/device.h"
#include "ops/experts/experts.h"

namespace moebius {

// The token of a micro-batch that a row of this rank holds; model/attention/token_runs.h says how cp
// and tp spread them. Row r here is row first + r of the context rank.
struct TokenOfRow {
  int64_t first = 0;
  int64_t seq = 1;  // tokens of a sequence on this rank
  int64_t cp = 1, context = 0;
};

// index[r] = the index in the global batch of the token of row r, by step.batch.draw_2() in memory
struct RowTokens {
  Tensor index_T;  // out i32
  Tensor draw_2;   // in i64 [step, first token]
  TokenOfRow token;
};
void row_tokens(Stream& s, const RowTokens& a);

// The elements that are kept.
struct DropoutDraw {
  Tensor draw_2;   // i64 [step, first token]; the step is read
  Tensor index_N;  // i32, of row_tokens: of each row that rows.token names, or of each row
  uint64_t seed = 0;
  uint32_t matrix = 0;       // key_of() the name of the matrix
  int64_t first_expert = 0;  // index of the first expert here, among all
  int64_t num_experts = 1;   // experts of all ranks
  int64_t first_column = 0;  // index of the first column here, in the whole matrix
  int64_t num_columns = 1;   // columns of the whole matrix
  double rate = 0;           // [0, 1)
};

// y[r, c] (+)= keep[r, c] * x[i, c]
//
// i is token[r] with gather, else r. All tensors have one dtype, f32 or bf16. Rows at and past the last offset
// are neither read nor written.
struct LowRankDropout {
  Tensor y_RK;  // out; inout with accumulate
  Tensor x_TK;  // in
  DropoutDraw draw;
  bool gather = false, accumulate = false;
  Rows rows;  // both parts are optional
};
void low_rank_dropout(Stream& s, const LowRankDropout& a);
Cost cost(const LowRankDropout& a);

namespace cpu {
void row_tokens(Stream& s, const RowTokens& a);
void low_rank_dropout(Stream& s, const LowRankDropout& a);
}  // namespace cpu
namespace cuda {
void row_tokens(Stream& s, const RowTokens& a);
void low_rank_dropout(Stream& s, const LowRankDropout& a);
}  // namespace cuda

}  // namespace moebius
