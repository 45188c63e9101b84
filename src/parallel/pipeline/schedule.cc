#include "parallel/pipeline/schedule.h"

#include "core/error.h"

namespace moebius {

std::string describe(const Action& action) {
  const char* verb[] = {"the receive for ", "", "the send after ", "the wait for the send after "};
  const char* pass[kNumPasses] = {"forward", "input backward", "weight backward"};
  return fmt::format("{}{} of micro-batch {}, stage {}", verb[static_cast<int>(action.verb)],
                     pass[static_cast<int>(action.pass)], action.micro_batch, action.stage);
}

void PipelineShape::check() const {
  MOEBIUS_CHECK(usage, num_ranks >= 1 && num_virtual >= 1 && num_micro_batches >= 1,
                "pipeline: ranks, virtual stages and micro-batches must be at least 1; "
                "got pp = {}, vpp = {}, {} micro-batches",
                num_ranks, num_virtual, num_micro_batches);
  MOEBIUS_CHECK(usage, num_virtual == 1 || num_ranks > 1,
                "pipeline: vpp > 1 splits the stages of a pipeline, pp > 1; got pp = 1, vpp = {}", num_virtual);
}

Schedule without_overlap(const Schedule& schedule) {
  Schedule result{schedule.shape, {}};
  for (const std::vector<Action>& list : schedule.actions) {
    std::vector<Action>& actions = result.actions.emplace_back();
    for (const Action& a : list) {
      if (a.verb == Verb::wait) continue;
      actions.push_back(a);
      if (a.verb == Verb::send) actions.push_back({Verb::wait, a.pass, a.micro_batch, a.stage});
    }
  }
  return result;
}

}  // namespace moebius
