#include "parallel/optim/sgd.h"

namespace moebius {

SgdOptimizer::SgdOptimizer(const OptimizerContext& context)
    : spec_(context.spec),
      params_(context,
              std::span(kStatePrefixes).first(static_cast<size_t>(num_moments(context.spec, /*of_matrices=*/true)))),
      streamed_(StreamedUpdate::make(
          context, params_, [this](Stream& s, std::span<const UpdatedTensor> tensors, const OptimizerStepArgs& args) {
            update_tensors(s, tensors, args);
          })) {}

void SgdOptimizer::update(Stream& s, StepStack&, const OptimizerStepArgs& args) {
  if (!streamed_) return update_tensors(s, params_.tensors(), args);
  streamed_->start(s, args);
  streamed_->finish(s);
}

void SgdOptimizer::update_tensors(Stream& s, std::span<const UpdatedTensor> tensors,
                                  const OptimizerStepArgs& args) const {
  sgd(s, {.tensors = tensors,
          .scale_1 = args.scale_1,
          .lr_and_step_2 = args.lr_and_step_2,
          .lr = static_cast<float>(args.lr),
          .momentum = static_cast<float>(spec_.momentum),
          .step = args.train_step});
}

}  // namespace moebius
