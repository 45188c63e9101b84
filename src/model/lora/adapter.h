// A low-rank adapter (LoRA, arXiv 2106.09685): a term that is added to the product with a frozen matrix W. Its
// parameters are in model/lora/adapter_params.h.
//
//   y = W x + scale * B (A x),   scale = alpha / rank
//
// A layer has an adapter for each matrix, and calls it after each product with W. If W is not a target of lora.targets,
// the adapter has no parameters and does nothing.
//
// scale * A x and scale * B^T dy are narrow: they have `rank` columns for each target. A caller may provide tensors
// that keep them between the passes; otherwise backward_weight recomputes them. They are never quantised.
//
// Some kernels for W of experts add the adapter's term to their own sums (LowRankTerm in ops/experts/experts.h). For
// these, forward_term() and backward_term() replace forward() and backward_input().
//
// With lora.dropout, each A reads x with elements dropped, in training alone (adapter_dropout.h). Then x is copied for
// each target, onto the step stack.
#pragma once

#include "model/layer_context.h"
#include "model/lora/adapter_dropout.h"
#include "model/lora/adapter_params.h"
#include "ops/low_rank/low_rank.h"

namespace moebius {

class Adapter {
 public:
  Adapter() = default;  // for a matrix that cannot be a target
  // w: the spec of W, as it was declared. Throws the errors of adapter_params().
  Adapter(const LayerContext& c, const ParamSpec& w);
  bool is_empty() const { return blocks_.empty(); }
  int64_t low_columns() const { return std::ssize(blocks_) * rank_; }

  // The arguments of the passes:
  // rows: with experts, the rows of each expert (rows.offsets), and for x of forward, dy of backward_input and the
  // gathered side of backward_weight the index of each row (rows.token), if there is one.
  // first: y and dy have the columns [first, first + C) of the output, for a product with only some rows of W.
  // low, dlow: [R, low_columns()] of the dtype of y, for scale A x and scale B^T dy, or empty. forward and
  // backward_input write them, and backward_weight reads them. tokens: the token of each row, with experts and dropout.
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
  // Return the term of forward() or backward_input() for a kernel that adds it. compute() fills in the values of its
  // low or dlow. The term of the forward has B [e, out, low_columns()] of all blocks; if that is not B itself, it is on
  // the step stack. The term is empty without targets, and with dropout, where the gradient of x is not a product.
  // REQUIRES: W is of experts; low, or dlow, is given; y has all columns.
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
  // Returns the x that the A of a block reads, after dropout: [R, in] on the step stack.
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
