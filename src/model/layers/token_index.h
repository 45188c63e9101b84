// The tokens of a rank's rows, by their index in the global batch. Random draws are made by it, so no layout changes them.
#pragma once

#include "model/layer_context.h"
#include "ops/low_rank/low_rank_dropout.h"

namespace moebius {

class RowTokenIndex {
 public:
  RowTokenIndex() = default;
  explicit RowTokenIndex(const LayerContext& c)
      : token_{.seq = c.shape.seq, .cp = c.mesh.shape().cp, .context = c.mesh.place().cp},
        stream_rows_(c.stream_rows()),
        tp_(c.mesh.place().tp) {}

  // Returns the token of each of num_rows rows, i32 on the step stack: of this rank's rows, or of all tp ranks' rows.
  Tensor of_rows(Step& step, int64_t num_rows) const {
    TokenOfRow token = token_;
    if (num_rows == stream_rows_) token.first = tp_ * stream_rows_;
    const Tensor index_T = step.alloc({num_rows}, DType::i32);
    row_tokens(step.stream, {.index_T = index_T, .draw_2 = step.batch.draw_2(), .token = token});
    return index_T;
  }

 private:
  TokenOfRow token_;  // the token of the first row of all tp ranks
  int64_t stream_rows_ = 0, tp_ = 0;
};

}  // namespace moebius
