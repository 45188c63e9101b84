// AdamW (arXiv 1711.05101) for every trainable parameter. The state has two moments per parameter: the running means of
// the gradient and of its square.
#pragma once

#include <array>

#include "parallel/optim/streamed_update.h"

namespace moebius {

// Updates tensors whose states are those two moments.
void update_by_adamw(Stream& s, const OptimizerSpec& spec, std::span<const UpdatedTensor> tensors,
                     const OptimizerStepArgs& args);

class AdamWOptimizer final : public Optimizer {
 public:
  static constexpr std::array<std::string_view, 2> kStatePrefixes{"adam_m.", "adam_v."};
  static int64_t num_moments(const OptimizerSpec&, bool) { return 2; }

  explicit AdamWOptimizer(const OptimizerContext& context);  // as make_optimizer()

  void update(Stream& s, StepStack& stack, const OptimizerStepArgs& args) override;
  std::vector<OptimizerState> state() const override { return params_.state(); }
  StreamedUpdate* streamed() override { return streamed_.get(); }

 private:
  OptimizerSpec spec_;
  TrainedParams params_;
  std::unique_ptr<StreamedUpdate> streamed_;
};

}  // namespace moebius
