#include "parallel/optim/adamw.h"

namespace moebius {

AdamWOptimizer::AdamWOptimizer(const OptimizerContext& context)
    : spec_(context.spec),
      params_(context, kStatePrefixes),
      streamed_(StreamedUpdate::make(
          context, params_, [this](Stream& s, std::span<const UpdatedTensor> tensors, const OptimizerStepArgs& args) {
            update_by_adamw(s, spec_, tensors, args);
          })) {}

void update_by_adamw(Stream& s, const OptimizerSpec& spec, std::span<const UpdatedTensor> tensors,
                     const OptimizerStepArgs& args) {
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
  if (!streamed_) return update_by_adamw(s, spec_, params_.tensors(), args);
  streamed_->start(s, args);
  streamed_->finish(s);
}

}  // namespace moebius
