// What an MoE layer gives for a few tokens and of one expert, by plain loops in double from its inputs and weights.
#pragma once

#include "bench/check.h"
#include "bench/shapes.h"

namespace moebius {

struct MoeInputs {
  BenchShape shape;
  // A router chose by the logits x[t, 0 .. E), else all weights are 1 / K. With a router E < D.
  bool is_routed = true;
  Tensor x_TD, dy_TD, w1_e2FD, w2_eDF;  // bf16
  Tensor topk_TK;                       // the experts that the layer chose
};

// All that costs time is done once, in the constructor: about 3 D F K products for each token, and 3 D for each row of
// the expert and each of its inner columns that is looked at.
class MoeCheck {
 public:
  // Error{numerics} where a token that is looked at has a better logit than those of its experts.
  MoeCheck(Stream& s, const MoeInputs& in);

  // Error{numerics} where a result is off; else its error is in the line (check_sample).
  void y(Stream& s, BenchLine& line, const Tensor& y_TD) const;
  // with_router: dx holds the gradient through the logits too, which is compared by itself.
  void dx(Stream& s, BenchLine& line, const Tensor& dx_TD, bool with_router) const;
  // f32, the sum of `calls` backward passes.
  void dw(Stream& s, BenchLine& line, const Tensor& dw1_e2FD, const Tensor& dw2_eDF, int64_t calls) const;

 private:
  struct OfToken {
    int64_t token = 0;
    std::vector<int64_t> experts;        // K
    std::vector<double> weight, dlogit;  // K
    std::vector<double> dlogit_size;     // K, of the terms that dlogit is the sum of
    std::vector<double> y, dx;           // at columns_; dx without the router
    std::vector<double> dx_of_chosen;    // at the columns of the experts' logits, K
  };
  // Gradients of inner column f of the expert, at columns_.
  struct OfColumn {
    int64_t f = 0;
    std::vector<double> dw1_gate, dw1_up, dw2;
  };
  OfToken token(Stream& s, int64_t t) const;
  void add_expert(Stream& s, OfToken& of, int64_t k) const;
  OfColumn column(Stream& s, const HostRows& x, const HostRows& dy, int64_t f) const;
  std::vector<double> weights(const HostRows& x, int64_t t, const std::vector<int64_t>& experts) const;
  std::vector<int64_t> experts_of(const HostRows& topk, int64_t t) const;
  void choose_expert(const HostRows& topk, const HostRows& x);

  MoeInputs in_;
  std::vector<int64_t> columns_;  // past the logits
  std::vector<OfToken> tokens_;
  int64_t expert_ = 0;                                 // with the fewest rows, of those that have any
  std::vector<std::pair<int64_t, double>> row_token_;  // its rows: token and weight
  std::vector<OfColumn> of_expert_;
};

}  // namespace moebius
