// Gradients of parameters that may be frozen.
#pragma once

#include "model/params.h"
#include "model/step.h"

namespace moebius {

// Where an op puts a small gradient that it makes on its way to dx: the parameter's own, or scratch of the caller's
// stack scope when the parameter has none. Large ones are left out as whole passes.
inline Tensor gradient_or_scratch(Step& step, const Param& p) {
  return p.has_grad ? p.dw : step.alloc(p.spec.shape, DType::f32);
}

}  // namespace moebius
