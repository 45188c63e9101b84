// Computes an MoE layer for a few tokens and one expert, from inputs and weights, by plain
// loops in double.
#pragma once

#include "bench/check.h"
#include "bench/shapes.h"

namespace moebius {

struct MoeInputs {
  BenchShape shape;
  // If true, a router chose by the logits x[t, 0 .. E). Otherwise all weights are 1 / K. With a router E < D.
  bool is_routed = true;
  bool is_quantised = false;            // results of a quantised layer are checked too, in more tokens
  Tensor x_TD, dy_TD, w1_e2FD, w2_eDF;  // bf16
  Tensor topk_TK;                       // the experts that the layer chose
};

// Bounds on the relative errors of a layer's results. Without a recipe all are kBf16Tolerance, which also holds for the
// f32 gradients of weights, since what they multiply is bf16.
// With a recipe the layer's results are compared with those of the numbers before they are quantised:
//   A product of two quantised operands errs by e, or by g if the left one is a gradient (quantised_error). It is a sum
//   of many terms, so this is relative to the root mean square of its elements, and the errors of elements are random.
//   Through SwiGLU an error of the pre-activations h becomes at most 1.44 times as large in a = silu(gate) up, and 1.25
//   times in its derivatives. These are the integrals over normally distributed h of a standard deviation s: for a any
//   s, and for the derivatives s up to 3; x has one of 1, and with logits among its columns at most 2.3.
//   Errors of products that follow each other add as squares:
//     y     hypot(1.44 e, e)       h, then W2 a
//     dx    hypot(1.25 e, g, g)    h in the derivatives, W2^T dy, then W1^T dh
//     dw1   hypot(1.25 e, g, g)    the same dh, then dh^T x
//     dw2   hypot(1.44 e, g)       a, then dy^T a
//     dx_of_logits hypot(1.44 e, g), relative to the terms of dweight: a, and W2^T dy
// A bound is twice this: at least 32 random errors do not exceed it by chance. For the logits, of which eight may be
// checked, it is three times this. y or dx without one of eight experts errs by 0.35, more than any bound.
struct MoeBounds {
  double y, dx, dx_of_logits, dw1, dw2;
  static MoeBounds of(PrecisionRecipe recipe);
};

// The constructor does all slow work once. It needs about 3 D F K products for each token. For each
// row of the expert it needs 3 D for each inner column that is checked.
class MoeCheck {
 public:
  // Throws Error{numerics} where a checked token has a larger logit for an expert that it
  // did not choose.
  MoeCheck(Stream& s, const MoeInputs& in);

  // bounds: of the layer whose results are compared. These throw Error{numerics} where a result is wrong. Otherwise
  // they add its error to the line (check_sample).
  void y(Stream& s, BenchLine& line, const MoeBounds& bounds, const Tensor& y_TD) const;
  // with_router: dx includes the gradient through the logits, which is compared separately.
  void dx(Stream& s, BenchLine& line, const MoeBounds& bounds, const Tensor& dx_TD, bool with_router) const;
  // The gradients are f32 sums over `calls` backward passes.
  void dw(Stream& s, BenchLine& line, const MoeBounds& bounds, const Tensor& dw1_e2FD, const Tensor& dw2_eDF,
          int64_t calls) const;

 private:
  struct TokenResults {
    int64_t token = 0;
    std::vector<int64_t> experts;        // K
    std::vector<double> weight, dlogit;  // K
    std::vector<double> dlogit_size;     // K, size of the terms whose sum is dlogit
    std::vector<double> y, dx;           // at columns_; dx without the router
    std::vector<double> dx_of_chosen;    // at the columns of the experts' logits, K
  };
  // Gradients of inner column f of the expert, at columns_.
  struct ColumnGradients {
    int64_t f = 0;
    std::vector<double> dw1_gate, dw1_up, dw2;
  };
  TokenResults token(Stream& s, int64_t t) const;
  void add_expert(Stream& s, TokenResults& result, int64_t k) const;
  ColumnGradients column(Stream& s, const HostRows& x, const HostRows& dy, int64_t f) const;
  std::vector<double> weights(const HostRows& x, int64_t t, const std::vector<int64_t>& experts) const;
  std::vector<int64_t> experts_of(const HostRows& topk, int64_t t) const;
  void choose_expert(const HostRows& topk, const HostRows& x);

  MoeInputs in_;
  std::vector<int64_t> columns_;  // after the logits
  std::vector<TokenResults> tokens_;
  int64_t expert_ = 0;                                 // the one with the fewest rows, but at least one
  std::vector<std::pair<int64_t, double>> row_token_;  // its rows: token and weight
  std::vector<ColumnGradients> expert_columns_;
};

}  // namespace moebius
