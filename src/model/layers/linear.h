// A linear layer y = x W^T, with W [out, in] whole or split over tp.
//
// The split is that of Megatron-LM (arXiv 1909.08053). Between the projections the rows are
// split as well: see model/attention/row_blocks.h. T is the number of rows of all tp ranks;
// one rank has t = T / tp of them.
//
//   Linear        rows t -> rows t, W whole: the same on every rank, which adds the gradient of its
//                 own rows
//   ColumnLinear  rows t -> rows T, W [out / tp, in]: gathers x, computes this rank's columns of y
//   RowLinear     rows T -> rows t, W [out, in / tp]: this rank's columns of x; the products are
//                 summed over the ranks
//
// The spec of a parameter is that of the rank: it has the shape of its block, and parts that say
// which block. With tp = 1 all three are one product.
#pragma once

#include "model/attention/row_blocks.h"
#include "model/params.h"
#include "model/step.h"

namespace moebius {

class Linear {
 public:
  Linear(ParamTable& params, ParamSpec spec) : w_(params.declare(std::move(spec))) {}
  void forward(Step& step, Tensor y, Tensor x, bool accumulate = false) const;           // y (+)= x W^T
  void backward_input(Step& step, Tensor dx, Tensor dy, bool accumulate = false) const;  // dx (+)= dy W
  void backward_weight(Step& step, Tensor dy, Tensor x) const;                           // dW += dy^T x
  const Param& param() const { return w_; }

 private:
  const Param& w_;
};

class ColumnLinear {
 public:
  ColumnLinear(ParamTable& params, ParamSpec spec, const Mesh& mesh) : linear_(params, std::move(spec)), rows_(mesh) {}
  void forward(Step& step, Tensor y_TC, Tensor x_tD) const;
  // The factors of forward, for an op that fuses more work with the product. This returns x of all
  // rows, on the step stack; param() has the weights.
  Tensor gather(Step& step, Tensor x_tD) const { return rows_.gather(step, x_tD); }
  const Param& param() const { return linear_.param(); }
  void backward_input(Step& step, Tensor dx_tD, Tensor dy_TC, bool accumulate = false) const;
  // Gathers x again, since only the rows of this rank are kept.
  void backward_weight(Step& step, Tensor dy_TC, Tensor x_tD) const;

 private:
  Linear linear_;
  RowBlocks rows_;
};

class RowLinear {
 public:
  RowLinear(ParamTable& params, ParamSpec spec, const Mesh& mesh) : linear_(params, std::move(spec)), rows_(mesh) {}
  void forward(Step& step, Tensor y_tD, Tensor x_TC) const;
  // Both backward passes read dy of all rows. It is gathered once, on the step stack.
  // With one rank it is dy itself.
  Tensor gather(Step& step, Tensor dy_tD) const { return rows_.gather(step, dy_tD); }
  void backward_input(Step& step, Tensor dx_TC, Tensor dy_TD) const { linear_.backward_input(step, dx_TC, dy_TD); }
  void backward_weight(Step& step, Tensor dy_TD, Tensor x_TC) const { linear_.backward_weight(step, dy_TD, x_TC); }
  const Param& param() const { return linear_.param(); }

 private:
  Linear linear_;
  RowBlocks rows_;
};

}  // namespace moebius
