#include "parallel/optim/grad_norm.h"

#include <vector>

#include "ops/elementwise/elementwise.h"
#include "ops/optimizer/optimizer.h"

namespace moebius {

GradNorm::GradNorm(const ParamTable& params, const Mesh& mesh, MemoryPlan& plan, double clip)
    : params_(params), mesh_(mesh), clip_(static_cast<float>(clip)) {
  plan.declare(sum_squares_1_, "grad_sum_squares", {1}, DType::f64, Life::metrics);
  plan.declare(norm_1_, "grad_norm", {1}, DType::f32, Life::metrics);
  plan.declare(scale_1_, "grad_scale", {1}, DType::f32, Life::metrics);
}

// Every element of the model is owned by one rank, except for a tied copy. Without tied copies the
// sum over the world counts each square once.
void GradNorm::measure(Stream& s, StepStack& stack) const {
  fill_zero(s, sum_squares_1_);
  std::vector<Tensor> gradients;
  for (const Param& p : params_.all())
    if (p.spec.trainable && !p.spec.tied_copy) gradients.push_back(p.owned_gradient());
  StackScope scope(stack);
  sum_squares(s, {.sum_1 = sum_squares_1_,
                  .partial_P = stack.alloc({SumSquares::num_partials(gradients)}, DType::f64),
                  .x = gradients});
  mesh_.group(Axis::world).all_reduce_sum(s, sum_squares_1_);
  clip_scale(s, {.norm_1 = norm_1_, .scale_1 = scale_1_, .sum_squares_1 = sum_squares_1_, .clip = clip_});
}

}  // namespace moebius
