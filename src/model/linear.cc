#include "model/linear.h"

#include "ops/gemm/gemm.h"

namespace moebius {

void Linear::forward(Step& step, Tensor y, Tensor x, bool accumulate) const {
  gemm(step.stream, {.c_MN = y, .a = x, .b = w_.w, .trans_b = true, .accumulate = accumulate});
}

void Linear::backward_input(Step& step, Tensor dx, Tensor dy, bool accumulate) const {
  gemm(step.stream, {.c_MN = dx, .a = dy, .b = w_.w, .accumulate = accumulate});
}

void Linear::backward_weight(Step& step, Tensor dy, Tensor x) const {
  if (!w_.has_grad) return;
  gemm(step.stream, {.c_MN = w_.dw, .a = dy, .b = x, .trans_a = true, .accumulate = true});
}

}  // namespace moebius
