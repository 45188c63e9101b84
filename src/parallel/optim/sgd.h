// SGD with momentum (ops/optimizer/optimizer.h has the formula) over every trainable parameter. The
// state is one tensor a parameter, the running sum of its gradients; without momentum there is none.
#pragma once

#include <array>
#include <deque>
#include <vector>

#include "parallel/optim/optimizer.h"
#include "parallel/optim/param_groups.h"

namespace moebius {

class SgdOptimizer final : public Optimizer {
 public:
  static constexpr std::array<std::string_view, 1> kStatePrefixes{"sgd_m."};
  static int64_t num_moments(const OptimizerSpec& spec) { return spec.momentum == 0 ? 0 : 1; }

  // Arguments are those of make_optimizer().
  SgdOptimizer(const OptimizerSpec& spec, const ParamTable& params, MemoryPlan& plan);

  void update(Stream& s, StepStack& stack, const OptimizerStepArgs& args) override;
  std::vector<OptimizerState> state() const override;

 private:
  struct Momentum {
    const Param* param;
    double weight_decay;
    Tensor m;  // f32 [owned.count]; empty without momentum
  };

  OptimizerSpec spec_;
  std::deque<Momentum> momenta_;  // a deque: the plan fills in m where it is
};

}  // namespace moebius
