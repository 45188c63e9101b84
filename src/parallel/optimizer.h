// AdamW over every trainable parameter, clipped by one global gradient norm. Gradients are summed over the group that
// shares the parameter: dense over dp x cp, experts over edp; nobody scales.
#pragma once

#include <deque>

#include "comm/mesh.h"
#include "config/train_spec.h"
#include "model/params.h"
#include "model/step.h"

namespace moebius {

// What changes from step to step.
struct OptimizerMove {
  int64_t train_step = 1;  // 1-based
  double lr = 0;
  Tensor schedule_2;  // f64 [lr, train_step] in the device's memory, may be empty: read in their place
};

class Optimizer {
 public:
  Optimizer(const OptimizerSpec& spec, const ParamTable& params, const Mesh& mesh, MemoryPlan& plan);

  // After the last micro-batch: reduces gradients, clips, updates masters and weights. Gradients are left as they are.
  // A gradient norm that is not finite changes nothing: the caller looks at grad_norm().
  void step(Stream& s, StepStack& stack, const OptimizerMove& move) const;

  const Tensor& grad_norm() const { return norm_1_; }  // f32 [1], before clipping
  struct Moments {
    const Param* param;
    Tensor m, v;
  };
  const std::deque<Moments>& moments() const { return moments_; }

 private:
  void reduce_gradients(Stream& s) const;
  void measure_norm(Stream& s, StepStack& stack) const;

  OptimizerSpec spec_;
  const Mesh& mesh_;
  std::deque<Moments> moments_;
  Tensor sum_squares_1_, norm_1_, scale_1_;
};

}  // namespace moebius
