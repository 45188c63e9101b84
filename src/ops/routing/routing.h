// Routing: chooses the experts of each token and their weights, and sorts the rows by expert. A Route stays on the
// device, and its buffers have R = T K rows for any choice.
#pragma once

#include "config/model_spec.h"
#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// The route of a batch, computed by the router, and read by dispatch, experts and combine. Rows are sorted by expert,
// then by token. There are offsets[E] rows; kernels read this number from memory.
struct Route {
  Tensor topk_TK;      // i32  expert of each pair, best score first
  Tensor weight_TK;    // f32  0 for a dropped pair
  Tensor counts_E;     // i32  rows of each expert (dropped pairs have none)
  Tensor offsets_E1;   // i32  exclusive sum of counts; offsets[E] = rows in all
  Tensor row_token_R;  // i32  token of a row
  Tensor row_pair_R;   // i32  pair t*K + k of a row
  Tensor pair_row_TK;  // i32  row of a pair, -1 when dropped
};

constexpr int64_t kMaxExperts = 1024;  // the maximum number of experts of a layer

// Returns whether the scores of a token's experts sum to one.
constexpr bool sums_to_one(ScoreFunction score) {
  switch (score) {
    case ScoreFunction::softmax:
      return true;
    case ScoreFunction::sigmoid:
      return false;
  }
  return false;
}

// Returns d log s / d logit of an expert with score s, without the part through a sum over experts.
constexpr float log_slope(ScoreFunction score, float s) {
  switch (score) {
    case ScoreFunction::softmax:
      return 1.0f;
    case ScoreFunction::sigmoid:
      return 1.0f - s;
  }
  return 0.0f;
}

enum class RouteChoice {
  scores,    // the K best of score + bias
  sinkhorn,  // the K best of the Sinkhorn-balanced exp(logits); weights: sigmoid (K = 1), else softmax over all experts
  forced,    // experts (t K + k) mod E: exact balance, for benchmarks; weights from the scores of those experts
};
enum class RouteDrop { probs, position };

struct RouteRule {
  ScoreFunction score = ScoreFunction::softmax;
  RouteChoice choice = RouteChoice::scores;
  bool normalize = false;  // divide by the sum over the chosen k (sigmoid: + 1e-20)
  float scale = 1.0f;      // applied after normalisation
  int64_t num_groups = 1, topk_groups = 1;
  GroupScore group_score = GroupScore::sum_of_top;
  constexpr int64_t group_top(int64_t top_k) const {  // the number of best experts whose scores are a group's score
    switch (group_score) {
      case GroupScore::max:
        return 1;
      case GroupScore::sum_of_two:
        return 2;
      case GroupScore::sum_of_top:
        return top_k / topk_groups > 1 ? top_k / topk_groups : 1;
    }
    return 0;
  }
  int64_t capacity = 0;  // maximum rows of an expert; 0: no maximum
  // The pairs that an expert keeps: those with the largest weights, or of the first tokens. Ties go to the lower token.
  RouteDrop drop = RouteDrop::probs;
};

// s = softmax(logits) or sigmoid(logits)     (f32)
//
// The K experts with the largest s + bias are chosen; of equal scores the lower expert comes first.
// The bias is not part of the weights.
//
// With groups, E/num_groups experts form a group. A group is scored on s + bias: by its best
// expert, by the sum of its best K/topk_groups, or by the sum of its best two. Only experts of the
// best topk_groups groups can be chosen; the others count as minus infinity.
//
// The weights are s[chosen], normalised and scaled by the rule. Dropped pairs get weight 0, without normalising the
// others again. load_E (i64) accumulates the choices before any drop; dropped_1 (i64) accumulates dropped pairs.
struct RouteFwd {
  Route route;               // out
  Tensor load_E, dropped_1;  // inout
  Tensor scratch;            // bytes
  Tensor logits_TE, bias_E;  // in f32; bias may be empty
  RouteRule rule;
  static int64_t scratch_bytes(int64_t num_tokens, int64_t num_experts, int64_t top_k, const RouteRule& rule,
                               const Stream& s);
};
void route_fwd(Stream& s, const RouteFwd& a);
Cost cost(const RouteFwd& a);

// Computes the statistics of all balance losses. A segment is the scope of a loss: a micro-batch, a sequence or a
// document. sbar[t,:] is softmax(logits), or sigmoid(logits) divided by its sum over all experts (at least FLT_MIN).
//   prob[s,i]  = sum over the tokens t of segment s of sbar[t,i]     (f32)
//   count[s,i] = how often i is among the K best plain scores (no bias or groups) in s   (f32)
//   z_1       += sum over t of logsumexp(logits[t])^2     (f64)
//   entropy_1 += - sum over t, i of sbar[t,i] log sbar[t,i]     (f64)
//
// segment_T is i32, does not decrease, and is in [0, num_segments); empty means one segment. Sums
// have a fixed order: by token on the CPU, by chunk of tokens on CUDA.
struct BalanceStats {
  Tensor prob_SE, count_SE;     // out
  Tensor z_1, entropy_1;        // inout
  Tensor scratch;               // bytes
  Tensor logits_TE, segment_T;  // in
  ScoreFunction score = ScoreFunction::softmax;
  int64_t top_k = 1;
  static int64_t scratch_bytes(int64_t num_tokens, int64_t num_experts, int64_t num_segments, const Stream& s);
};
void balance_stats(Stream& s, const BalanceStats& a);

// loss_1 += coeff * sum over s of tokens[s]/total * E/(K tokens[s]^2)
//                 * sum over i of prob[s,i] * count[s,i]
// dsbar[s,i] += coeff * E / (K tokens[s] total) * count[s,i]
//
// dsbar is the derivative w.r.t. sbar[t,i] for t in s, with constant counts. tokens[s] is the sum of count[s,:] / K. An
// empty segment adds nothing. total (f64, positive) is the number of tokens over which the loss is a mean. loss_1 is
// f64. (Switch Transformer, arXiv 2101.03961, eq. 4; a perfect balance has the loss coeff.) Segments are weighted by
// their tokens.
struct BalanceLoss {
  Tensor loss_1, dsbar_SE;   // inout
  Tensor prob_SE, count_SE;  // in
  Tensor total_tokens_1;
  float coeff = 0;
  int64_t top_k = 1;
};
void balance_loss(Stream& s, const BalanceLoss& a);

// dlogits (f32) = the derivative of the objective w.r.t. the logits, the sum of the parts
//   through the weights of chosen pairs that are not dropped (dweight_TK, f32)
//   through sbar, with dsbar[segment[t],:] (empty: none)
//   through z: z_coeff / total * d(logsumexp^2), with total as in BalanceLoss
//
// The dweight of a dropped pair is ignored.
struct RouteBwd {
  Tensor dlogits_TE;                       // out
  Tensor dweight_TK, dsbar_SE, segment_T;  // in
  Tensor logits_TE;
  Route route;
  Tensor total_tokens_1;  // only with z_coeff
  RouteRule rule;
  double z_coeff = 0;
};
void route_bwd(Stream& s, const RouteBwd& a);
Cost cost(const RouteBwd& a);

// bias[i] += rate * sign(mean(load) - load[i]),  then load = 0     (arXiv 2408.15664)
//
// bias is f32, load is i64.
void update_expert_bias(Stream& s, Tensor bias_E, Tensor load_E, float rate);

// logits = x w^T + bias  in f32, whatever the dtype of x
//
// w is f32, or has the dtype of x. The bias is f32, and may be empty; it is added last.
struct RouterLogitsFwd {
  Tensor logits_TE;           // out f32
  Tensor scratch;             // bytes
  Tensor x_TD, w_ED, bias_E;  // in
  static int64_t scratch_bytes(const RouterLogitsFwd& a, const Stream& s);
};
void router_logits_fwd(Stream& s, const RouterLogitsFwd& a);
// dx += dlogits w     (rounded once to the dtype of dx)
// dw += dlogits^T x     (f32)
// dbias += sum over t of dlogits[t,:]     (f32; in the order of SumRows, elementwise.h)
//
// partial is f32 scratch of shape [num_partials, E, D]. The product for a bf16 dx may be computed with 16 bits of
// precision, which is far below its rounding.
struct RouterLogitsBwd {
  Tensor dx_TD, dw_ED, dbias_E;   // inout; each may be empty
  Tensor partial_PED, scratch;    // scratch; bytes
  Tensor dlogits_TE, x_TD, w_ED;  // in
  static int64_t num_partials(const RouterLogitsBwd& a, const Stream& s);
  static int64_t scratch_bytes(const RouterLogitsBwd& a, const Stream& s);
};
void router_logits_bwd(Stream& s, const RouterLogitsBwd& a);

}  // namespace moebius
