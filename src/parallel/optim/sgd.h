// SGD with momentum (formula in ops/optimizer/optimizer.h) for every trainable parameter. The state has one tensor per
// parameter, the running sum of its gradients; without momentum it is empty.
#pragma once

#include <array>

#include "parallel/optim/streamed_update.h"

namespace moebius {

class SgdOptimizer final : public Optimizer {
 public:
  static constexpr std::array<std::string_view, 1> kStatePrefixes{"sgd_m."};
  static int64_t num_moments(const OptimizerSpec& spec, bool) { return spec.momentum == 0 ? 0 : 1; }

  explicit SgdOptimizer(const OptimizerContext& context);  // as make_optimizer()

  void update(Stream& s, StepStack& stack, const OptimizerStepArgs& args) override;
  std::vector<OptimizerState> state() const override { return params_.state(); }
  StreamedUpdate* streamed() override { return streamed_.get(); }

 private:
  void update_tensors(Stream& s, std::span<const UpdatedTensor> tensors, const OptimizerStepArgs& args) const;

  OptimizerSpec spec_;
  TrainedParams params_;
  std::unique_ptr<StreamedUpdate> streamed_;
};

}  // namespace moebius
