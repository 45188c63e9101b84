#include "model/attention/row_blocks.h"

#include "ops/elementwise/elementwise.h"

namespace moebius {

Tensor RowBlocks::gather(Step& step, Tensor x_tD) const {
  if (num_ranks() == 1) return x_tD;
  MOEBIUS_ASSERT(x_tD.shape.rank() == 2);
  const Tensor x_TD = step.alloc({num_ranks() * x_tD.dim(0), x_tD.dim(1)}, x_tD.dtype);
  tp_.all_gather(step.stream, x_TD, x_tD);
  return x_TD;
}

void RowBlocks::sum(Step& step, Tensor y_tD, Tensor x_TD, bool accumulate) const {
  if (!accumulate) return tp_.reduce_scatter_sum(step.stream, y_tD, x_TD);
  StackScope scope(step.stack);
  const Tensor sum_tD = step.alloc(y_tD.shape, y_tD.dtype);
  tp_.reduce_scatter_sum(step.stream, sum_tD, x_TD);
  add(step.stream, y_tD, sum_tD);
}

}  // namespace moebius
