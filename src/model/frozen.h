// Gradients of parameters that may be frozen.
#pragma once

#include "model/params.h"
#include "model/step.h"

namespace moebius {

// Returns the tensor into which an op writes a small gradient that it computes on its way to dx. It
// is the parameter's own gradient, or scratch of the caller's stack scope when the parameter has
// none. Large gradients are left out by leaving out their whole passes.
inline Tensor gradient_or_scratch(Step& step, const Param& p) {
  return p.has_grad ? p.dw : step.alloc(p.spec.shape, DType::f32);
}

}  // namespace moebius
