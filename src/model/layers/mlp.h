// The dense SwiGLU feed-forward layer; also the shared expert. tp ranks have hidden / tp columns each (model/layers/linear.h):
// x and y are a rank's rows t of the residual stream, all between is of the rows T of all tp ranks.
#pragma once

#include "memory/saved_tensor.h"
#include "model/layers/linear.h"

namespace moebius {

class Mlp {
 public:
  struct Saved {
    Tensor x_tD;  // the caller's
    SavedTensor h_T2F;
    Tensor dy_TD, dh_T2F, a_TF;  // left by backward_input for backward_weight, on the step stack
  };
  // Parts are prefix.gate_proj, up_proj (one matrix, this rank's gate rows first) and down_proj. Error{usage} when tp
  // does not divide hidden. fusion: products and SwiGLU in one pass where the device has one; the same bits.
  Mlp(ParamTable& params, const std::string& prefix, int64_t width, int64_t hidden, DType dtype, const Mesh& mesh,
      float init_std, bool fusion = true);
  // tokens: rows of x.
  void declare_saved(MemoryPlan& plan, const std::string& prefix, int64_t tokens, Saved& saved,
                     bool RecomputeSpec::*what) const;

  void forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const;
  // Before backward_input: x as it was, and what was not kept once more.
  void remake(Step& step, Tensor x_tD, Saved& saved) const;
  // y = down(swiglu(h)): the second half of forward.
  void output(Step& step, Tensor y_tD, const Saved& saved) const;
  void backward_input(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved, bool accumulate_dx = false) const;
  void backward_weight(Step& step, const Saved& saved) const;

 private:
  void up(Step& step, Tensor a_TF, Tensor x_tD, const Saved& saved) const;  // h, and a = swiglu(h)

  int64_t tp_, F_;  // F: of this rank
  DType dtype_;
  bool fusion_;
  ColumnLinear gate_up_;
  RowLinear down_;
};

}  // namespace moebius
