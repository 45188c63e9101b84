#include "model/layers/bias.h"

#include "ops/elementwise/elementwise.h"

namespace moebius {

Tensor Bias::columns(int64_t first, int64_t count) const { return b_.w.rows(first, first + count); }

void Bias::forward(Step& step, Tensor y_TC, int64_t first) const {
  const int64_t C = y_TC.dim(1);
  add_row(step.stream, y_TC, columns(first, C).view({1, C}));
}

void Bias::backward_weight(Step& step, Tensor dy_TC, int64_t first) const {
  if (!b_.has_grad) return;
  StackScope scope(step.stack);
  SumRows sum{.sum_C = b_.dw.rows(first, first + dy_TC.dim(1)), .x_TC = dy_TC};
  sum.scratch = step.alloc_bytes(SumRows::scratch_bytes(sum));
  sum_rows(step.stream, sum);
}

}  // namespace moebius
