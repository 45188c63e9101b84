#include "model/layers/linear.h"

#include "ops/elementwise/elementwise.h"
#include "ops/gemm/gemm.h"

namespace moebius {

void Linear::forward(Step& step, Tensor y, Tensor x, bool accumulate) const { forward(step, y, x, {}, accumulate, {}); }

void Linear::forward_with_bias(Step& step, Tensor y, Tensor x, Tensor bias, const Low& low) const {
  forward(step, y, x, bias, /*accumulate=*/false, low);
}

void Linear::forward(Step& step, const Tensor& y, const Tensor& x, const Tensor& bias, bool accumulate,
                     const Low& low) const {
  StackScope scope(step.stack);
  gemm(step.stream, {.c_MN = y,
                     .a = this->x(step, x),
                     .b = w(step),
                     .bias_N = bias,
                     .trans_b = true,
                     .accumulate = accumulate,
                     .few_rows = is_inference_});
  adapter_.forward(step, {.y = y, .x = x, .low = low.low});
}

void Linear::backward_input(Step& step, Tensor dx, Tensor dy, bool accumulate, const Low& low) const {
  StackScope scope(step.stack);
  gemm(step.stream, {.c_MN = dx, .a = this->dy(step, dy), .b = w_for_dx(step), .accumulate = accumulate});
  adapter_.backward_input(step, {.dx = dx, .dy = dy, .dlow = low.dlow});
}

void Linear::backward_weight(Step& step, Tensor dy, Tensor x, bool adds, const Low& low) const {
  adapter_.backward_weight(step, {.dy = dy, .x = x, .low = low.low, .dlow = low.dlow});
  if (!w_.has_grad) return;
  StackScope scope(step.stack);
  const RowGroups rows = rows_.groups(step, dy.dim(0));
  const auto [dy_q, x_q] = precision_.for_dw(quantize_context(step), dy, rows, x, rows);
  gemm(step.stream,
       {.c_MN = w_.dw, .a = dy_q, .b = x_q, .trans_a = true, .accumulate = adds || w_.adds_to_grad(step.batch)});
}

void ColumnLinear::forward(Step& step, Tensor y_TC, Tensor x_tD, Tensor bias_C, const Linear::Low& low) const {
  StackScope scope(step.stack);
  linear_.forward_with_bias(step, y_TC, rows_.gather(step, x_tD), bias_C, low);
}

void ColumnLinear::backward_input(Step& step, Tensor dx_tD, Tensor dy_TC, bool accumulate,
                                  const Linear::Low& low) const {
  if (rows_.num_ranks() == 1) return linear_.backward_input(step, dx_tD, dy_TC, accumulate, low);
  StackScope scope(step.stack);
  const Tensor dx_TD = step.alloc({dy_TC.dim(0), dx_tD.dim(1)}, dx_tD.dtype);
  linear_.backward_input(step, dx_TD, dy_TC, /*accumulate=*/false, low);
  rows_.sum(step, dx_tD, dx_TD, accumulate);
}

RowsInFlight ColumnLinear::start_backward_input(Step& step, Tensor dx_tD, Tensor dy_TC, const Linear::Low& low) const {
  if (!rows_.overlaps()) {
    backward_input(step, dx_tD, dy_TC, /*accumulate=*/false, low);
    return {};
  }
  const Tensor dx_TD = step.alloc({dy_TC.dim(0), dx_tD.dim(1)}, dx_tD.dtype);
  linear_.backward_input(step, dx_TD, dy_TC, /*accumulate=*/false, low);
  return rows_.start_sum(step, dx_tD, dx_TD);
}

void ColumnLinear::backward_weight(Step& step, Tensor dy_TC, RowBlocks::Gathering x, const Linear::Low& low) const {
  x.arriving.wait();
  linear_.backward_weight(step, dy_TC, x.x_TD, /*adds=*/false, low);
}

void RowLinear::forward(Step& step, Tensor y_tD, Tensor x_TC, Tensor bias_D, const Linear::Low& low) const {
  if (rows_.num_ranks() == 1) return linear_.forward_with_bias(step, y_tD, x_TC, bias_D, low);
  StackScope scope(step.stack);
  const Tensor y_TD = step.alloc({x_TC.dim(0), y_tD.dim(1)}, y_tD.dtype);
  linear_.forward_with_bias(step, y_TD, x_TC, {}, low);
  rows_.sum(step, y_tD, y_TD);
  if (!bias_D.empty()) add_row(step.stream, y_tD, bias_D.view({1, bias_D.dim(0)}));
}

}  // namespace moebius
