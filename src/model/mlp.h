// The dense SwiGLU feed-forward layer; also the shared expert.
#pragma once

#include "model/linear.h"

namespace moebius {

class Mlp {
 public:
  struct Saved {
    Tensor x_TD, h_T2F;          // x is the caller's
    Tensor dy_TD, dh_T2F, a_TF;  // left by backward_input for backward_weight, on the step stack
  };
  // Parts are prefix.gate_proj, up_proj (one matrix, gate rows first) and down_proj.
  Mlp(ParamTable& params, const std::string& prefix, int64_t width, int64_t hidden, DType dtype, float init_std);
  void declare_saved(MemoryPlan& plan, const std::string& prefix, int64_t tokens, Saved& saved) const;

  void forward(Step& step, Tensor y_TD, Tensor x_TD, Saved& saved) const;
  void backward_input(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved, bool accumulate_dx = false) const;
  void backward_weight(Step& step, const Saved& saved) const;

 private:
  int64_t F_;
  DType dtype_;
  Linear gate_up_, down_;
};

}  // namespace moebius
