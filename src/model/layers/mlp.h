// The dense SwiGLU feed-forward layer, which is also the shared expert. Each tp rank has hidden /
// tp columns, as model/layers/linear.h says. x and y are a rank's rows t of the residual stream.
// The tensors between them have the rows T of all tp ranks.
#pragma once

#include <vector>

#include "memory/saved_tensor.h"
#include "memory/wgrad_input.h"
#include "model/layer_context.h"
#include "model/layers/linear.h"

namespace moebius {

class Mlp {
 public:
  struct Saved {
    Tensor x_tD;  // the caller's
    SavedTensor h_T2F;
    WgradInput dy_TD, dh_T2F, a_TF;
  };
  // hidden: the inner width F of all tp ranks. The parts are prefix.gate_proj and up_proj (one
  // matrix, with this rank's gate rows first) and down_proj. Error{usage} when tp does not divide
  // hidden. c.fusion: products and SwiGLU run in one pass where the device has one; the bits are
  // the same.
  Mlp(const LayerContext& c, const std::string& prefix, int64_t hidden);
  // what: the name in memory.recompute that selects the layer.
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved,
                     bool RecomputeSpec::*what = &RecomputeSpec::mlp) const;

  // The calls of FeedForward.
  void forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const;
  void recompute(Step& step, Tensor x_tD, Saved& saved) const;
  // y = down(swiglu(h)): the second half of forward.
  void output(Step& step, Tensor y_tD, const Saved& saved) const;
  void backward_input(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved, bool accumulate_dx = false) const;
  // The two parts of it: the first needs dy alone, and leaves what the second and backward_weight need.
  void backward_hidden(Step& step, Tensor dy_tD, Saved& saved) const;
  void backward_x(Step& step, Tensor dx_tD, const Saved& saved, bool accumulate_dx) const;
  void backward_weight(Step& step, const Saved& saved) const;
  static std::vector<KeptTensor> kept(const Saved& saved) { return {{"MLP pre-activation", saved.h_T2F.kept()}}; }

 private:
  void up(Step& step, Tensor a_TF, Tensor x_tD, const Saved& saved) const;  // h, and a = swiglu(h)

  int64_t tp_, T_, D_, F_;  // T: of a micro-batch on all tp ranks; F: of this rank
  DType dtype_;
  bool fusion_;
  bool is_inference_;  // rows may be few
  ColumnLinear gate_up_;
  RowLinear down_;
};

}  // namespace moebius
