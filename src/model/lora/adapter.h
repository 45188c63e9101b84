// The adapter beside the product with a frozen matrix W, a term of the same output (LoRA, arXiv
// 2106.09685). Its parameters are those of model/lora/adapter_params.h.
//
//   y = W x + scale * B (A x),   scale = alpha / rank
//
// A layer holds one for each matrix and calls it after each product with W, whether or not W is a
// target. An adapter without targets has no parameters and does nothing.
//
// scale * A x and scale * B^T dy have few columns: rank for each target. A caller that keeps them between the
// passes gives tensors for them; else backward_weight computes them a second time. Operands of an adapter
// are never quantised.
//
// Some products with W of experts add the adapter's term to their own sums (LowRankTerm in
// ops/experts/experts.h). Then forward_term() and backward_term() compute what they need, in place of
// forward() and backward_input().
//
// With lora.dropout each matrix reads x with elements dropped, in training alone (adapter_dropout.h).
// Then x is copied for each target, onto the step stack.
#pragma once

#include "model/layer_context.h"
#include "model/lora/adapter_dropout.h"
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
  // low, dlow: [R, low_columns()] of the dtype of y, for scale A x and scale B^T dy, or empty. forward and
  // backward_input write them, and backward_weight reads them.
  //
  // tokens: with experts and dropout, the token of each row; else what Linear's rows say.
  struct Tokens {
    Tensor index_N;  // i32, of AdapterDropout::token_index, of all ranks whose rows come here
    Tensor row_R;    // i32, the index of row r in index_N
  };
  struct Forward {
    Tensor y, x;
    Rows rows = {};
    int64_t first = 0;
    Tensor low = {};
    Tokens tokens = {};
  };
  void forward(Step& step, const Forward& in) const;  // y += ...
  // dx (+)= scale * A^T (B^T dy)
  struct Input {
    Tensor dx, dy;
    Rows rows = {};
    int64_t first = 0;
    bool accumulate = true;
    Tensor dlow = {};
    Tokens tokens = {};
  };
  void backward_input(Step& step, const Input& in) const;
  // The terms of forward() and of backward_input() in parts: their tensors, and then their values. That of the forward
  // pass has B [e, out, low_columns()] of all blocks; where that is not B itself it is on the step stack. Empty without
  // targets, and with dropout, for which the gradient of x is not a product.
  // REQUIRES: of experts; low, or dlow, is given, and all columns of y are there.
  LowRankTerm forward_term(Step& step, Tensor low) const;
  LowRankTerm backward_term(Step& step, Tensor dlow) const;
  void compute(Step& step, const LowRankTerm& term, const Forward& in) const;
  void compute(Step& step, const LowRankTerm& term, const Input& in) const;

  // dA += scale * (B^T dy) x^T,  dB += scale * dy (A x)^T
  struct Weight {
    Tensor dy, x;
    Rows rows = {};
    bool gather_dy = false, gather_x = false;
    int64_t first = 0;
    Tensor low = {}, dlow = {};
    Tokens tokens = {};
  };
  void backward_weight(Step& step, const Weight& in) const;

  bool has_dropout(const Step& step) const { return !is_empty() && dropout_.is_on(step); }
  const AdapterDropout& dropout() const { return dropout_; }

 private:
  // A block's columns of y, its rows of B, and its columns of A x.
  struct Window {
    Columns y, low;
    int64_t row;
  };
  std::vector<Window> windows(int64_t first, int64_t count) const;
  Columns low_of(int64_t block) const { return {block * rank_, rank_}; }
  float scale_of(const Step& step) const { return scale_ * dropout_.scale(step); }
  // low [R, low_columns()] = scale A x
  void down(Step& step, const Tensor& low, const Tensor& x, const Rows& rows, const Tokens& tokens) const;
  // x of a block as its A reads it, [R, in] on the step stack.
  Tensor dropped(Step& step, int64_t block, const Tensor& x, int64_t R, const Rows& rows, const Tokens& tokens) const;
  void wgrad_a(Step& step, const Tensor& dlow, const Tensor& x, const Rows& rows, const Tokens& tokens) const;
  Tokens tokens_of(Step& step, const Tokens& given, int64_t num_rows) const;
  // dlow [R, low_columns()] = scale B^T dy
  void up_bwd(Step& step, const Tensor& dlow, const Tensor& dy, const Rows& rows, int64_t first) const;
  Tensor alloc_low(Step& step, const Tensor& like, int64_t num_rows) const;

  int64_t rank_ = 0, out_ = 0;  // out_: of W here
  float scale_ = 0;
  std::vector<AdapterBlock> blocks_;
  AdapterDropout dropout_;
  const Param *a_ = nullptr, *b_ = nullptr;
};

}  // namespace moebius
