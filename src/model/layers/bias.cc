#include "model/layers/bias.h"

#include "ops/elementwise/elementwise.h"
#include "ops/gemm/gemm.h"

namespace moebius {
namespace {

// Broadcasting a row and summing rows are products with a column of ones.
Tensor take_ones(Step& step, int64_t T, DType dtype) {
  const Tensor ones_T1 = step.alloc({T, 1}, dtype);
  fill_normal(step.stream, {.x = ones_T1, .rng = Rng(0, RngSite::init), .mean = 1.0f, .std = 0.0f});
  return ones_T1;
}

Tensor row_of(const Tensor& b, int64_t first, int64_t width) { return b.rows(first, first + width).view({1, width}); }

}  // namespace

void Bias::forward(Step& step, Tensor y_TC, int64_t first) const {
  StackScope scope(step.stack);
  const Tensor ones_T1 = take_ones(step, y_TC.dim(0), y_TC.dtype);
  gemm(step.stream, {.c_MN = y_TC, .a = ones_T1, .b = row_of(b_.w, first, y_TC.dim(1)), .accumulate = true});
}

void Bias::backward_weight(Step& step, Tensor dy_TC, int64_t first) const {
  if (!b_.has_grad) return;
  StackScope scope(step.stack);
  const Tensor ones_T1 = take_ones(step, dy_TC.dim(0), dy_TC.dtype);
  gemm(step.stream,
       {.c_MN = row_of(b_.dw, first, dy_TC.dim(1)), .a = ones_T1, .b = dy_TC, .trans_a = true, .accumulate = true});
}

}  // namespace moebius
