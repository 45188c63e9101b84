// RMSNorm with its weight, fused with the residual addition before it. It works on this rank's rows of the residual
// stream; the weight is whole on every rank.
#pragma once

#include "memory/saved_tensor.h"
#include "model/params.h"
#include "model/step.h"
#include "ops/norm/norm.h"

namespace moebius {

class Norm {
 public:
  struct Saved {
    SavedTensor sum_TD;  // the input of the norm, x + residual
    Tensor rstd_T;       // 1 / rms of each row, f32
  };
  Norm(ParamTable& params, const std::string& name, int64_t width, DType dtype, float eps);
  // The sum is saved as the input of a layer. With `sum`, a name in memory.recompute, Block may recompute it.
  void declare_saved(MemoryPlan& plan, const std::string& prefix, int64_t tokens, Saved& saved) const;
  void declare_saved(MemoryPlan& plan, const std::string& prefix, int64_t tokens, Saved& saved,
                     bool RecomputeSpec::*sum) const;

  // saved.sum = x + residual (x alone without residual), y = norm(saved.sum).
  void forward(Step& step, Tensor y_TD, Tensor x_TD, Tensor residual_TD, Saved& saved) const;
  // Returns the op that does the rest of forward(), for ops that fuse the norm with the product after it. Without a
  // residual it copies x.
  RmsNormFwd op(Step& step, Tensor y_TD, Tensor x_TD, Tensor residual_TD, Saved& saved) const;
  // Recomputes y from saved.sum.
  void recompute(Step& step, Tensor y_TD, const Saved& saved) const;
  // dresidual += the derivative w.r.t. the sum. Also adds to the gradient of the weight, which needs the same pass.
  void backward(Step& step, Tensor dresidual_TD, Tensor dy_TD, const Saved& saved) const;
  bool has_gradient() const { return w_.has_grad; }

 private:
  const Param& w_;
  float eps_;
};

}  // namespace moebius
