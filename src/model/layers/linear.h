// A linear layer y = x W^T, with W [out, in] whole or split over tp.
//
// Tensor parallelism is that of Megatron-LM (arXiv 1909.08053), with sequence parallelism
// (model/attention/row_blocks.h): the residual stream has T rows on all tp ranks together, and t = T / tp on each.
//
//   Linear        rows t -> rows t, W [out, in] whole on every rank; its gradient is that of the rank's own rows
//   ColumnLinear  rows t -> rows T, W [out / tp, in]: all-gathers x, computes this rank's columns of y
//   RowLinear     rows T -> rows t, W [out, in / tp]: reads this rank's columns of x, reduce-scatters y
//
// The ParamSpec is that of the rank: the shape of its block, and parts that place the block in the global tensor. With
// tp = 1 all three are one product.
//
// The recipe of the run may quantise the operands (precision/product_precision.h). A matrix that lora.targets names has
// an adapter (model/lora/adapter.h), whose term every pass adds. tp splits A and B as it splits W, so the terms of the
// ranks sum to the whole term.
#pragma once

#include "model/attention/row_blocks.h"
#include "model/layers/precision_of.h"
#include "model/lora/adapter.h"

namespace moebius {

class Linear {
 public:
  // Its products follow the recipe of the run (precision_of.h).
  Linear(const LayerContext& c, const ParamSpec& spec)
      : w_(c.params.declare(stored_first(held_as_weights(c, spec)))),
        precision_(precision_of(c, spec)),
        weights_(c, w_, precision_),
        rows_(c, precision_),
        adapter_(c, spec),
        is_inference_(c.params.use() == ModelUse::inference) {}
  // Its operands are never quantised, and it has no adapter.
  Linear(ParamTable& params, ParamSpec spec)
      : w_(params.declare(stored_first(std::move(spec)))),
        weights_(w_),
        is_inference_(params.use() == ModelUse::inference) {}
  // Memory in which a caller keeps the narrow products of the adapter between the passes (model/lora/adapter_rows.h).
  struct Low {
    Tensor low, dlow;
  };
  void forward(Step& step, Tensor y, Tensor x, bool accumulate = false) const;  // y (+)= x W^T
  // y = x W^T + bias. An empty bias means none.
  void forward_with_bias(Step& step, Tensor y, Tensor x, Tensor bias, const Low& low = {}) const;
  // dx (+)= dy W
  void backward_input(Step& step, Tensor dx, Tensor dy, bool accumulate = false, const Low& low = {}) const;
  // dW += dy^T x
  // In the first micro-batch of a step it stores the product instead of adding it. Call it once per micro-batch.
  // adds: always adds, for a second call in a micro-batch.
  void backward_weight(Step& step, Tensor dy, Tensor x, bool adds = false, const Low& low = {}) const;
  const Param& param() const { return w_; }
  const Adapter& adapter() const { return adapter_; }

  bool is_quantised() const { return !precision_.is_plain(); }  // its products
  // Returns whether an adapter adds a term. Then other ops must not compute the products with W.
  bool has_adapter() const { return !adapter_.is_empty(); }
  // Returns the operands of forward and backward_input, for ops that fuse the product with other work. Quantised
  // operands are on the step stack, or are copies of the weights in the plan. REQUIRES: !has_adapter().
  Operand x(Step& step, Tensor x) const { return precision_.x(quantize_context(step), x); }
  Operand w(Step& step) const { return weights_.w(step); }
  Operand dy(Step& step, Tensor dy) const {
    return precision_.dy(quantize_context(step), dy, rows_.groups(step, dy.dim(0)));
  }
  Operand w_for_dx(Step& step) const { return weights_.w_for_dx(step); }

 private:
  void forward(Step& step, const Tensor& y, const Tensor& x, const Tensor& bias, bool accumulate, const Low& low) const;

  const Param& w_;
  ProductPrecision precision_;
  WeightOperands weights_;
  DenseRows rows_;
  Adapter adapter_;
  bool is_inference_;  // rows may be few
};

class ColumnLinear {
 public:
  ColumnLinear(const LayerContext& c, const ParamSpec& spec) : linear_(c, spec), rows_(c.mesh) {}
  void forward(Step& step, Tensor y_TC, Tensor x_tD, Tensor bias_C = {}, const Linear::Low& low = {}) const;
  // For ops that fuse the product with other work: x of all rows, on the step stack, and the linear layer.
  Tensor gather(Step& step, Tensor x_tD) const { return rows_.gather(step, x_tD); }
  const Linear& linear() const { return linear_; }
  const Param& param() const { return linear_.param(); }
  void backward_input(Step& step, Tensor dx_tD, Tensor dy_TC, bool accumulate = false,
                      const Linear::Low& low = {}) const;
  // Starts the sum of dx over the ranks, which overlaps with later work. dx may be read after wait(). The buffers are
  // on the step stack, in the caller's scope, which must not end before that.
  [[nodiscard]] RowsInFlight start_backward_input(Step& step, Tensor dx_tD, Tensor dy_TC,
                                                  const Linear::Low& low = {}) const;
  // All-gathers x again, since only this rank's rows of x are saved. start_gather() lets that overlap with other work.
  void backward_weight(Step& step, Tensor dy_TC, RowBlocks::Gathering x, const Linear::Low& low = {}) const;
  [[nodiscard]] RowBlocks::Gathering start_gather(Step& step, Tensor x_tD) const {
    return rows_.start_gather(step, x_tD);
  }

 private:
  Linear linear_;
  RowBlocks rows_;
};

class RowLinear {
 public:
  RowLinear(const LayerContext& c, const ParamSpec& spec) : linear_(c, spec), rows_(c.mesh) {}
  // The bias is added once, to the sum over the ranks.
  void forward(Step& step, Tensor y_tD, Tensor x_TC, Tensor bias_D = {}, const Linear::Low& low = {}) const;
  // Returns dy of all rows for both backward passes, on the step stack; dy itself with one rank.
  Tensor gather(Step& step, Tensor dy_tD) const { return rows_.gather(step, dy_tD); }
  void backward_input(Step& step, Tensor dx_TC, Tensor dy_TD, const Linear::Low& low = {}) const {
    linear_.backward_input(step, dx_TC, dy_TD, /*accumulate=*/false, low);
  }
  void backward_weight(Step& step, Tensor dy_TD, Tensor x_TC, const Linear::Low& low = {}) const {
    linear_.backward_weight(step, dy_TD, x_TC, /*adds=*/false, low);
  }
  const Linear& linear() const { return linear_; }
  const Param& param() const { return linear_.param(); }

 private:
  Linear linear_;
  RowBlocks rows_;
};

}  // namespace moebius
