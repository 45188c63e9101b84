// The global norm of the gradients of a model, and the factor that clips them by it.
#pragma once

#include "comm/mesh.h"
#include "model/params.h"
#include "model/step.h"

namespace moebius {

class GradNorm {
 public:
  // Declares three scalars of Life::metrics. clip: the largest norm that is not
  // scaled down; 0: nothing is clipped. The references outlive it.
  GradNorm(const ParamTable& params, const Mesh& mesh, MemoryPlan& plan, double clip);
  GradNorm(const GradNorm&) = delete;

  // Measures the trainable gradients and the factor, once gradients are summed over ranks.
  // Each rank counts the elements that it owns; a tied copy does not count. Accumulates in
  // f64. All ranks call it together.
  void measure(Stream& s, StepStack& stack) const;

  const Tensor& norm() const { return norm_1_; }    // f32 [1], the same on every rank
  const Tensor& scale() const { return scale_1_; }  // f32 [1], as clip_scale() of ops/optimizer computes it

 private:
  const ParamTable& params_;
  const Mesh& mesh_;
  float clip_;
  Tensor sum_squares_1_, norm_1_, scale_1_;
};

}  // namespace moebius
