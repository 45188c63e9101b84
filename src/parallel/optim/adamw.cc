#include "parallel/optim/adamw.h"

namespace moebius {

AdamWOptimizer::AdamWOptimizer(const OptimizerContext& context)
    : spec_(context.spec), params_(context, kStatePrefixes) {}

void AdamWOptimizer::update(Stream& s, StepStack&, const OptimizerStepArgs& args) {
  const std::vector<UpdatedTensor> tensors = params_.tensors();
  adamw(s, {.tensors = tensors,
            .scale_1 = args.scale_1,
            .lr_and_step_2 = args.lr_and_step_2,
            .lr = static_cast<float>(args.lr),
            .beta1 = static_cast<float>(spec_.beta1),
            .beta2 = static_cast<float>(spec_.beta2),
            .eps = static_cast<float>(spec_.eps),
            .step = args.train_step});
}

}  // namespace moebius
