// Gradients of parameters that may be frozen.
#pragma once

#include "model/params.h"
#include "model/step.h"

namespace moebius {

// Returns the tensor for a small gradient that an op computes together with dx: the parameter's gradient, or scratch in
// the caller's stack scope if the parameter is frozen. (The passes of large gradients are left out instead.)
inline Tensor gradient_or_scratch(Step& step, const Param& p) {
  return p.has_grad ? p.dw : step.alloc(p.spec.shape, DType::f32);
}

}  // namespace moebius
