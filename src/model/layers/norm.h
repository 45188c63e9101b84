// RMSNorm with its weight, fused with the residual addition before it. It works on the rows of the
// residual stream that a rank has; the weight is whole on all of them.
#pragma once

#include "memory/saved_tensor.h"
#include "model/params.h"
#include "model/step.h"

namespace moebius {

class Norm {
 public:
  struct Saved {
    SavedTensor sum_TD;  // the normalised input
    Tensor rstd_T;       // the factor of the norm
  };
  Norm(ParamTable& params, const std::string& name, int64_t width, DType dtype, float eps);
  // The sum is kept as the input of a layer, or with `sum` (a name in memory.recompute) recomputed by
  // the caller: see Block.
  void declare_saved(MemoryPlan& plan, const std::string& prefix, int64_t tokens, Saved& saved) const;
  void declare_saved(MemoryPlan& plan, const std::string& prefix, int64_t tokens, Saved& saved,
                     bool RecomputeSpec::*sum) const;

  // saved.sum = x + residual (x alone without residual), y = norm(saved.sum).
  void forward(Step& step, Tensor y_TD, Tensor x_TD, Tensor residual_TD, Saved& saved) const;
  // Recomputes y from saved.sum.
  void recompute(Step& step, Tensor y_TD, const Saved& saved) const;
  // dresidual += derivative w.r.t. the sum
  // The weight's gradient is added here too, since it needs the same pass.
  void backward(Step& step, Tensor dresidual_TD, Tensor dy_TD, const Saved& saved) const;
  bool has_gradient() const { return w_.has_grad; }

 private:
  const Param& w_;
  float eps_;
};

}  // namespace moebius
