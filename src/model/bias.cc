#include "model/bias.h"

#include "ops/elementwise/elementwise.h"
#include "ops/gemm/gemm.h"

namespace moebius {
namespace {

// Broadcasting a row and summing rows are products with a column of ones.
Tensor take_ones(Step& step, int64_t T, DType dtype) {
  const Tensor ones_T1 = step.take({T, 1}, dtype);
  fill_normal(step.stream, {.x = ones_T1, .rng = Rng(0, RngSite::init), .mean = 1.0f, .std = 0.0f});
  return ones_T1;
}

}  // namespace

void Bias::forward(Step& step, Tensor y_TC) const {
  StackScope scope(step.stack);
  const Tensor ones_T1 = take_ones(step, y_TC.dim(0), y_TC.dtype);
  gemm(step.stream, {.c_MN = y_TC, .a = ones_T1, .b = b_.w.view({1, y_TC.dim(1)}), .accumulate = true});
}

void Bias::backward_weight(Step& step, Tensor dy_TC) const {
  if (!b_.has_grad) return;
  StackScope scope(step.stack);
  const Tensor ones_T1 = take_ones(step, dy_TC.dim(0), dy_TC.dtype);
  gemm(step.stream,
       {.c_MN = b_.dw.view({1, dy_TC.dim(1)}), .a = ones_T1, .b = dy_TC, .trans_a = true, .accumulate = true});
}

}  // namespace moebius
