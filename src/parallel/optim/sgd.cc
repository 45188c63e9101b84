#include "parallel/optim/sgd.h"

namespace moebius {

SgdOptimizer::SgdOptimizer(const OptimizerContext& context)
    : spec_(context.spec),
      params_(context,
              std::span(kStatePrefixes).first(static_cast<size_t>(num_moments(context.spec, /*of_matrices=*/true)))) {}

void SgdOptimizer::update(Stream& s, StepStack&, const OptimizerStepArgs& args) {
  const std::vector<UpdatedTensor> tensors = params_.tensors();
  sgd(s, {.tensors = tensors,
          .scale_1 = args.scale_1,
          .lr_and_step_2 = args.lr_and_step_2,
          .lr = static_cast<float>(args.lr),
          .momentum = static_cast<float>(spec_.momentum),
          .step = args.train_step});
}

}  // namespace moebius
