// The global L2 norm of the gradients of a model, and the factor by which gradient clipping scales them.
#pragma once

#include "comm/mesh.h"
#include "model/params.h"
#include "model/step.h"

namespace moebius {

class GradNorm {
 public:
  // Declares three scalars of Life::metrics. clip: the maximum norm; 0: no clipping. The references must outlive this.
  GradNorm(const ParamTable& params, const Mesh& mesh, MemoryPlan& plan, double clip);
  GradNorm(const GradNorm&) = delete;

  // Computes the norm of the trainable gradients, and the factor. Each rank counts the elements that it owns; tied
  // copies do not count. Accumulates in f64. All ranks call it together. REQUIRES: gradients are summed over ranks.
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
