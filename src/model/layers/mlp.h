// The dense SwiGLU feed-forward layer; the shared expert of an MoE layer is one too. Each tp rank has hidden / tp
// columns (model/layers/linear.h). x and y [t, D] are a rank's rows of the residual stream; the tensors between them
// have the rows T of all tp ranks.
#pragma once

#include <vector>

#include "memory/wgrad_input.h"
#include "model/layer_context.h"
#include "model/layers/linear.h"
#include "model/layers/pre_activation.h"

namespace moebius {

class Mlp {
 public:
  struct Saved {
    Tensor x_tD;  // the caller's
    PreActivation h_T2F;
    WgradInput dy_TD, dh_T2F, a_TF;
  };
  // hidden: the inner width F of all tp ranks. The parameters are prefix.gate_proj and up_proj (one matrix, this rank's
  // gate rows first) and prefix.down_proj. Throws Error{usage} when tp does not divide hidden.
  // c.fusion: fuses products with SwiGLU if the device has such kernels; the bits are the same.
  Mlp(const LayerContext& c, const std::string& prefix, int64_t hidden);
  // what: the name in memory.recompute that applies to the layer.
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved,
                     bool RecomputeSpec::*what = &RecomputeSpec::mlp) const;

  // The methods of FeedForward.
  void forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const;
  void recompute(Step& step, Tensor x_tD, Saved& saved) const;
  // y = down(swiglu(h)): the second half of forward.
  void output(Step& step, Tensor y_tD, const Saved& saved) const;
  void backward_input(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved, bool accumulate_dx = false) const;
  // The two parts of backward_input. backward_hidden reads dy, and computes what backward_x and backward_weight read.
  void backward_hidden(Step& step, Tensor dy_tD, Saved& saved) const;
  void backward_x(Step& step, Tensor dx_tD, const Saved& saved, bool accumulate_dx) const;
  void backward_weight(Step& step, const Saved& saved) const;
  // Runs backward_hidden, backward_x (dx = ...) and backward_weight. The sum of dx over the tp ranks overlaps with the
  // products of the weight gradients.
  void backward(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved) const;
  static std::vector<KeptTensor> kept(const Saved& saved) { return {{"MLP pre-activation", saved.h_T2F.kept()}}; }

 private:
  void up(Step& step, Tensor a_TF, Tensor x_tD, const Saved& saved) const;  // h, and a = swiglu(h)

  int64_t tp_, T_, D_, F_;  // T: of a micro-batch on all tp ranks; F: of this rank
  DType dtype_;
  bool fusion_;
  bool is_inference_;  // rows may be few
  ColumnLinear gate_up_;
  RowLinear down_;
  bool saves_in_8_bits_;  // h
};

}  // namespace moebius
