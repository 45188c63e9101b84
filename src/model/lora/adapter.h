// The adapter beside the product with a frozen matrix W, a term of the same output (LoRA, arXiv
// 2106.09685). Its parameters are those of model/lora/adapter_params.h.
//
//   y = W x + scale * B (A x),   scale = alpha / rank
//
// A layer holds one for each matrix and calls it after each product with W, whether or not W is a
// target. An adapter without targets has no parameters and does nothing.
//
// A x and B^T dy have few columns: rank for each target. A caller that keeps them between the passes
// gives tensors for them; else backward_weight computes them a second time. Operands of an adapter are
// never quantised.
#pragma once

#include "model/layer_context.h"
#include "model/lora/adapter_params.h"
#include "ops/low_rank/low_rank.h"

namespace moebius {

class Adapter {
 public:
  Adapter() = default;  // of a matrix that cannot be a target
  // w: as it was declared. Error{usage} as adapter_params().
  Adapter(const LayerContext& c, const ParamSpec& w);
  bool is_empty() const { return blocks_.empty(); }
  int64_t low_columns() const { return std::ssize(blocks_) * rank_; }

  // With experts, row r belongs to the expert that rows.offsets say. x of forward, dy of
  // backward_input and the gathered side of backward_weight are read by rows.token, where there is one.
  //
  // first: where a product has only some rows of W, y and dy have the columns [first, first + C) of all.
  //
  // low, dlow: [R, low_columns()] of the dtype of y, for A x and scale B^T dy, or empty. forward and
  // backward_input write them, and backward_weight reads them.
  void forward(Step& step, Tensor y, Tensor x, const Rows& rows = {}, int64_t first = 0,
               Tensor low = {}) const;  // y += ...
  // dx (+)= scale * A^T (B^T dy)
  struct Input {
    Tensor dx, dy;
    Rows rows = {};
    int64_t first = 0;
    bool accumulate = true;
    Tensor dlow = {};
  };
  void backward_input(Step& step, const Input& in) const;
  // dA += scale * (B^T dy) x^T,  dB += scale * dy (A x)^T
  struct Weight {
    Tensor dy, x;
    Rows rows = {};
    bool gather_dy = false, gather_x = false;
    int64_t first = 0;
    Tensor low = {}, dlow = {};
  };
  void backward_weight(Step& step, const Weight& in) const;

 private:
  // A block's columns of y, its rows of B, and its columns of A x.
  struct Window {
    Columns y, low;
    int64_t row;
  };
  std::vector<Window> windows(int64_t first, int64_t count) const;
  // low [R, low_columns()] = A x
  void down(Step& step, const Tensor& low, const Tensor& x, const Rows& rows) const;
  // dlow [R, low_columns()] = scale B^T dy
  void up_bwd(Step& step, const Tensor& dlow, const Tensor& dy, const Rows& rows, int64_t first) const;
  Tensor alloc_low(Step& step, const Tensor& like, int64_t num_rows) const;

  int64_t rank_ = 0;
  float scale_ = 0;
  std::vector<AdapterBlock> blocks_;
  const Param *a_ = nullptr, *b_ = nullptr;
};

}  // namespace moebius
