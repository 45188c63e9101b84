#include "parallel/pipeline/action_list.h"

namespace moebius {
namespace {

// Returns all passes of micro-batch 0, then all of micro-batch 1, and so on.
std::vector<Turn> sequential_order(const PipelineShape& shape, int64_t pp_rank, bool splits) {
  const int64_t V = shape.num_virtual;
  std::vector<Turn> order;
  for (int64_t m = 0; m < shape.num_micro_batches; ++m) {
    for (int64_t v = 0; v < V; ++v) order.push_back({Pass::forward, m, shape.stage_of(pp_rank, v)});
    for (int64_t v = V; shape.backward && v-- > 0;) {
      order.push_back({Pass::backward_input, m, shape.stage_of(pp_rank, v), /*with_weight=*/!splits});
      if (splits) order.push_back({Pass::backward_weight, m, shape.stage_of(pp_rank, v)});
    }
  }
  return order;
}

}  // namespace

Schedule sequential_schedule(const PipelineShape& shape, PipelineSchedule step) {
  shape.check();
  Schedule schedule{shape, {}};
  for (int64_t pp_rank = 0; pp_rank < shape.num_ranks; ++pp_rank)
    schedule.actions.push_back(
        actions_in_order(shape, sequential_order(shape, pp_rank, splits_backward(step, pp_rank)), /*early_inputs=*/1));
  return schedule;
}

}  // namespace moebius
