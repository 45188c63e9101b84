// The adapter beside the product with a frozen matrix W, a term of the same output (LoRA, arXiv
// 2106.09685). Its parameters are those of model/lora/adapter_params.h.
//
//   y = W x + scale * B (A x),   scale = alpha / rank
//
// A layer holds one for each matrix and calls it after each product with W, whether or not W is a
// target. An adapter without targets has no parameters and does nothing.
//
// An adapter keeps nothing for backward: backward_weight computes A x and B^T dy a second time, which
// have rank columns. Its operands are never quantised.
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

  // With experts, row r belongs to the expert that rows.offsets say. x of forward, dy of
  // backward_input and the gathered side of backward_weight are read by rows.token, where there is one.
  //
  // first: where a product has only some rows of W, y and dy have the columns [first, first + C) of all.
  void forward(Step& step, Tensor y, Tensor x, const Rows& rows = {}, int64_t first = 0) const;  // y += ...
  // dx (+)= scale * A^T (B^T dy)
  struct Input {
    Tensor dx, dy;
    Rows rows = {};
    int64_t first = 0;
    bool accumulate = true;
  };
  void backward_input(Step& step, const Input& in) const;
  // dA += scale * (B^T dy) x^T,  dB += scale * dy (A x)^T
  struct Weight {
    Tensor dy, x;
    Rows rows = {};
    bool gather_dy = false, gather_x = false;
    int64_t first = 0;
  };
  void backward_weight(Step& step, const Weight& in) const;

 private:
  // A block's columns of y, its rows of B, and its columns of A x.
  struct Window {
    Columns y, low;
    int64_t row;
  };
  std::vector<Window> windows(int64_t first, int64_t count) const;
  Tensor down(Step& step, const Tensor& x, const Rows& rows, int64_t num_rows) const;                    // A x
  Tensor up_bwd(Step& step, const Tensor& dy, const Rows& rows, int64_t num_rows, int64_t first) const;  // scale B^T dy

  int64_t rank_ = 0;
  float scale_ = 0;
  std::vector<AdapterBlock> blocks_;
  const Param *a_ = nullptr, *b_ = nullptr;
};

}  // namespace moebius
