#include "model/attention/row_blocks.h"

#include "device/gpu_limits.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {

RowsInFlight::RowsInFlight(Step& step, const Group& group, Pending pending)
    : pending_(std::make_unique<Pending>(std::move(pending))) {
  const int taken = group.multiprocessors_of_start();
  if (step.stream.device() != DeviceKind::cuda || taken == 0) return;
  const int left = limited_blocks(step.stream, gpu_limits(step.stream).num_multiprocessors - taken);
  BlockLimit limit{.blocks = left, .wait_for_others = [pending = pending_.get()] { pending->wait_on_host(); }};
  limit_ = std::make_unique<BlockLimitScope>(step.stream, std::move(limit));
}

void RowsInFlight::wait() {
  limit_.reset();
  if (pending_) pending_->wait();
}

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

RowBlocks::Gathering RowBlocks::start_gather(Step& step, Tensor x_tD) const {
  if (!overlaps_) return {gather(step, x_tD), {}};
  const Tensor x_TD = step.alloc({num_ranks() * x_tD.dim(0), x_tD.dim(1)}, x_tD.dtype);
  return {x_TD, {step, tp_, tp_.start_all_gather(step.stream, x_TD, x_tD)}};
}

RowsInFlight RowBlocks::start_sum(Step& step, Tensor y_tD, Tensor x_TD) const {
  const Tensor arrived_TD = step.alloc(x_TD.shape, x_TD.dtype);
  return {step, tp_, tp_.start_reduce_scatter_sum(step.stream, y_tD, x_TD, arrived_TD)};
}

}  // namespace moebius
