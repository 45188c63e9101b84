#include "parallel/optim/adamw.h"

namespace moebius {

AdamWOptimizer::AdamWOptimizer(const OptimizerContext& context)
    : spec_(context.spec), params_(context, kStatePrefixes) {}

void update_by_adamw(Stream& s, const OptimizerSpec& spec, const TrainedParams& params, const OptimizerStepArgs& args) {
  const std::vector<UpdatedTensor> tensors = params.tensors();
  adamw(s, {.tensors = tensors,
            .scale_1 = args.scale_1,
            .lr_and_step_2 = args.lr_and_step_2,
            .lr = static_cast<float>(args.lr),
            .beta1 = static_cast<float>(spec.beta1),
            .beta2 = static_cast<float>(spec.beta2),
            .eps = static_cast<float>(spec.eps),
            .step = args.train_step});
}

void AdamWOptimizer::update(Stream& s, StepStack&, const OptimizerStepArgs& args) {
  update_by_adamw(s, spec_, params_, args);
}

}  // namespace moebius
