// The tokens of a rank's rows, by their index in the global batch. Random draws are made by it, so no layout
// changes them.
#pragma once

#include "model/attention/token_runs.h"
#include "model/layer_context.h"
#include "ops/low_rank/low_rank_dropout.h"

namespace moebius {

class TokensOfRows {
 public:
  TokensOfRows() = default;
  explicit TokensOfRows(const LayerContext& c)
      : token_{.seq = micro_batch_of(c).seq, .cp = c.mesh.shape().cp, .context = c.mesh.place().cp},
        stream_rows_(rows_between_projections(micro_batch_of(c), c.mesh.shape())),
        layer_rows_(c.stream_rows()),
        num_tp_(c.mesh.shape().tp),
        tp_(c.mesh.place().tp) {}

  // Returns the token of each of num_rows rows, i32 on the step stack: of this rank's rows, or of all tp ranks' rows.
  // In a chunk the rows of each rank begin at MicroBatch::first_row.
  Tensor index(Step& step, int64_t num_rows) const {
    if (num_rows == layer_rows_) return index_of_own(step, num_rows);
    const Tensor index_T = step.alloc({num_rows}, DType::i32);
    const int64_t n = num_rows / num_tp_;                   // of each rank
    const int64_t ranks = n == stream_rows_ ? 1 : num_tp_;  // the rows of a whole micro-batch follow one another
    for (int64_t r = 0; r < ranks; ++r)
      fill(step, index_T.rows(r * num_rows / ranks, (r + 1) * num_rows / ranks), r * stream_rows_);
    return index_T;
  }

  // Returns the token of each of num_rows rows of this rank, i32 [num_rows] on the step stack.
  Tensor index_of_own(Step& step, int64_t num_rows) const {
    const Tensor index_t = step.alloc({num_rows}, DType::i32);
    fill(step, index_t, tp_ * stream_rows_);
    return index_t;
  }

 private:
  static const BatchShape& micro_batch_of(const LayerContext& c) {
    return c.micro_batch_shape.batch > 0 ? c.micro_batch_shape : c.shape;
  }

  // first: the first row of a rank's residual stream.
  void fill(Step& step, const Tensor& index_t, int64_t first) const {
    TokenOfRow token = token_;
    token.first = first + step.batch.first_row;
    row_tokens(step.stream, {.index_T = index_t, .draw_2 = step.batch.draw_2(), .token = token});
  }

  TokenOfRow token_;                                                // the token of the first row of all tp ranks
  int64_t stream_rows_ = 0, layer_rows_ = 0, num_tp_ = 1, tp_ = 0;  // layer_rows: those of a chunk, if there are chunks
};

}  // namespace moebius
