#include <algorithm>

#include "core/error.h"
#include "parallel/pipeline/action_list.h"

namespace moebius {
namespace {

std::vector<Turn> compute_order(const PipelineShape& shape, int64_t pp_rank) {
  const int64_t M = shape.num_micro_batches, delay = pp_rank, warmup = num_warmup_forwards(shape, pp_rank);
  const bool splits = splits_backward(PipelineSchedule::zb_h1, pp_rank);
  std::vector<Turn> order;
  const auto add = [&](Pass pass, int64_t m, bool with_weight = false) {
    order.push_back({pass, m, pp_rank, with_weight});
  };
  for (int64_t m = 0; m < warmup; ++m) add(Pass::forward, m);
  for (int64_t m = 0; m < M; ++m) {
    if (warmup + m < M) add(Pass::forward, warmup + m);
    add(Pass::backward_input, m, /*with_weight=*/!splits);
    if (splits && m >= delay) add(Pass::backward_weight, m - delay);
  }
  if (!splits) return order;
  for (int64_t m = std::max<int64_t>(0, M - delay); m < M; ++m) add(Pass::backward_weight, m);
  return order;
}

}  // namespace

std::vector<Action> actions_of_zb_h1(const PipelineShape& shape, int64_t pp_rank) {
  shape.check();
  MOEBIUS_CHECK(
      usage, shape.num_virtual == 1,
      "pipeline: parallel.schedule = \"zb_h1\" needs one stage per rank (parallel.vpp = 1); got parallel.vpp = {}; set parallel.vpp = "
      "1 or parallel.schedule = \"1f1b\"",
      shape.num_virtual);
  MOEBIUS_ASSERT(shape.backward);
  return actions_in_order(shape, compute_order(shape, pp_rank), /*early_inputs=*/1);
}

}  // namespace moebius
