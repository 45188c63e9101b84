// AdamW (arXiv 1711.05101) over every trainable parameter. The state is two moments a parameter: the
// running means of the gradient and of its square.
#pragma once

#include <array>
#include <deque>
#include <vector>

#include "parallel/optim/optimizer.h"
#include "parallel/optim/param_groups.h"

namespace moebius {

class AdamWOptimizer final : public Optimizer {
 public:
  static constexpr std::array<std::string_view, 2> kStatePrefixes{"adam_m.", "adam_v."};
  static int64_t num_moments(const OptimizerSpec&) { return 2; }

  // Arguments are those of make_optimizer().
  AdamWOptimizer(const OptimizerSpec& spec, const ParamTable& params, MemoryPlan& plan);

  void update(Stream& s, StepStack& stack, const OptimizerStepArgs& args) override;
  std::vector<OptimizerState> state() const override;

 private:
  struct Moments {
    const Param* param;
    double weight_decay;
    Tensor m, v;  // f32 [owned.count]
  };

  OptimizerSpec spec_;
  std::deque<Moments> moments_;  // a deque: the plan fills in m and v where they are
};

}  // namespace moebius
