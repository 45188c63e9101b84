// The adapter of a router's matrix, which computes in f32 whatever x is:
//   logits += scale * B (A x)
// The products with A are those of the router itself (ops/routing/routing.h).
#pragma once

#include "model/layer_context.h"

namespace moebius {

class RouterAdapter {
 public:
  // gate: the router's matrix as it was declared.
  RouterAdapter(const LayerContext& c, const ParamSpec& gate);
  void forward(Step& step, Tensor logits_TE, Tensor x_TD) const;
  // dx += the derivative through the adapter; adds the gradients of A and B.
  void backward(Step& step, Tensor dx_TD, Tensor dlogits_TE, Tensor x_TD) const;

 private:
  Tensor down(Step& step, Tensor x_TD) const;  // A x, f32 [T, rank]

  int64_t rank_ = 0;
  float scale_ = 0;
  const Param *a_ = nullptr, *b_ = nullptr;  // null: the router is no target
};

}  // namespace moebius
