// SGD with momentum (ops/optimizer/optimizer.h has the formula) over every trainable parameter. The
// state is one tensor a parameter, the running sum of its gradients; without momentum there is none.
#pragma once

#include <array>

#include "parallel/optim/trained_params.h"

namespace moebius {

class SgdOptimizer final : public Optimizer {
 public:
  static constexpr std::array<std::string_view, 1> kStatePrefixes{"sgd_m."};
  static int64_t num_moments(const OptimizerSpec& spec, bool) { return spec.momentum == 0 ? 0 : 1; }

  // Argument is that of make_optimizer().
  explicit SgdOptimizer(const OptimizerContext& context);

  void update(Stream& s, StepStack& stack, const OptimizerStepArgs& args) override;
  std::vector<OptimizerState> state() const override { return params_.state(); }

 private:
  OptimizerSpec spec_;
  TrainedParams params_;
};

}  // namespace moebius
