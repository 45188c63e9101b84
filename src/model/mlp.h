// The dense SwiGLU feed-forward layer; also the shared expert.
#pragma once

#include "memory/saved_tensor.h"
#include "model/linear.h"

namespace moebius {

class Mlp {
 public:
  struct Saved {
    Tensor x_TD;  // the caller's
    SavedTensor h_T2F;
    Tensor dy_TD, dh_T2F, a_TF;  // left by backward_input for backward_weight, on the step stack
  };
  // Parts are prefix.gate_proj, up_proj (one matrix, gate rows first) and down_proj.
  Mlp(ParamTable& params, const std::string& prefix, int64_t width, int64_t hidden, DType dtype, float init_std);
  void declare_saved(MemoryPlan& plan, const std::string& prefix, int64_t tokens, Saved& saved,
                     bool RecomputeSpec::*what) const;

  void forward(Step& step, Tensor y_TD, Tensor x_TD, Saved& saved) const;
  // Before backward_input: x as it was, and what was not kept once more.
  void remake(Step& step, Tensor x_TD, Saved& saved) const;
  // y = down(swiglu(h)): the second half of forward.
  void output(Step& step, Tensor y_TD, const Saved& saved) const;
  void backward_input(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved, bool accumulate_dx = false) const;
  void backward_weight(Step& step, const Saved& saved) const;

 private:
  int64_t F_;
  DType dtype_;
  Linear gate_up_, down_;
};

}  // namespace moebius
