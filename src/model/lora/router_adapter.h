// The adapter of a router's matrix. It computes in f32, whatever the dtype of x is:
//   logits += scale * B (A x)
// The products with A are those of the router itself (ops/routing/routing.h).
#pragma once

#include "model/layer_context.h"
#include "model/lora/adapter_dropout.h"

namespace moebius {

class RouterAdapter {
 public:
  // gate: the router's matrix as it was declared.
  RouterAdapter(const LayerContext& c, const ParamSpec& gate);
  bool is_empty() const { return a_ == nullptr; }
  void forward(Step& step, Tensor logits_TE, Tensor x_TD) const;
  // dx += the derivative through the adapter. Also adds to the gradients of A and B.
  void backward(Step& step, Tensor dx_TD, Tensor dlogits_TE, Tensor x_TD) const;

 private:
  Tensor down(Step& step, Tensor x_TD) const;  // A x, f32 [T, rank]; x as dropped() gives it
  // x itself without dropout. Both are on the caller's step stack.
  Tensor dropped(Step& step, Tensor x_TD, const Tensor& index_T) const;
  Tensor token_index(Step& step, int64_t T) const;
  float scale_of(const Step& step) const { return scale_ * dropout_.scale(step); }

  int64_t rank_ = 0;
  float scale_ = 0;
  AdapterDropout dropout_;
  const Param *a_ = nullptr, *b_ = nullptr;  // null: the router is no target
};

}  // namespace moebius
