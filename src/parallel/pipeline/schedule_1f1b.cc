#include <algorithm>

#include "core/error.h"
#include "parallel/pipeline/action_list.h"

namespace moebius {
namespace {

// Returns one pass of all micro-batches through the virtual stages of a rank: for each group of G micro-batches, for
// each virtual stage, the micro-batches of the group.
std::vector<Turn> turns_of(const PipelineShape& shape, int64_t pp_rank, Pass pass) {
  const int64_t V = shape.num_virtual, M = shape.num_micro_batches;
  const int64_t G = V == 1 ? M : shape.group_size();
  std::vector<Turn> turns;
  for (int64_t begin = 0; begin < M; begin += G) {
    for (int64_t i = 0; i < V; ++i) {
      const int64_t v = pass == Pass::forward ? i : V - 1 - i;
      for (int64_t m = begin; m < std::min(begin + G, M); ++m)
        turns.push_back({pass, m, shape.stage_of(pp_rank, v), /*with_weight=*/pass == Pass::backward_input});
    }
  }
  return turns;
}

std::vector<Turn> compute_order(const PipelineShape& shape, int64_t pp_rank) {
  const std::vector<Turn> forwards = turns_of(shape, pp_rank, Pass::forward);
  const std::vector<Turn> backwards = turns_of(shape, pp_rank, Pass::backward_input);
  const int64_t warmup = num_warmup_forwards(shape, pp_rank);
  std::vector<Turn> order(forwards.begin(), forwards.begin() + warmup);
  for (int64_t i = 0; i < std::ssize(backwards); ++i) {
    if (warmup + i < std::ssize(forwards)) order.push_back(forwards[warmup + i]);
    order.push_back(backwards[i]);
  }
  return order;
}

void check_interleaving(const PipelineShape& shape) {
  const int64_t P = shape.num_ranks, V = shape.num_virtual, M = shape.num_micro_batches, G = shape.group_size();
  if (V == 1) return;
  MOEBIUS_CHECK(usage, P <= G && G <= M,
                "pipeline: vpp = {} needs pp <= group <= micro-batches; got {} <= {} <= {}; raise the micro-batches of "
                "a step (global batch / (micro-batch * dp)) or set vpp = 1",
                V, P, G, M);
  MOEBIUS_CHECK(usage, M % G == 0 || M % G >= P,
                "pipeline: vpp = {} needs micro-batches mod group = 0 or >= pp = {}; got {} mod {} = {}; change the "
                "micro-batches of a step (global batch / (micro-batch * dp)) or set vpp = 1",
                V, P, M, G, M % G);
}

}  // namespace

int64_t num_warmup_forwards(const PipelineShape& shape, int64_t pp_rank) {
  const int64_t V = shape.num_virtual, later_ranks = shape.num_ranks - pp_rank - 1;
  const int64_t warmup = V == 1 ? later_ranks : 2 * later_ranks + (V - 1) * shape.group_size();
  return std::min(warmup, V * shape.num_micro_batches);
}

std::vector<Action> actions_of_1f1b(const PipelineShape& shape, int64_t pp_rank) {
  shape.check();
  check_interleaving(shape);
  MOEBIUS_ASSERT(shape.backward);
  const int64_t early_inputs = shape.num_virtual == 1 ? 1 : 1 + shape.group_size() - shape.num_ranks;
  return actions_in_order(shape, compute_order(shape, pp_rank), early_inputs);
}

}  // namespace moebius
