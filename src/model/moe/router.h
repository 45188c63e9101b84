// The router: scores, choice, balance. All counts stay on the device. The tokens of a
// micro-batch are spread over the ranks of tp x cp (model/attention/token_runs.h). A sum over the
// micro-batch is a sum over these ranks, and a choice that depends on all of its tokens is the
// choice that one rank would make.
#pragma once

#include <optional>

#include "model/layer_context.h"
#include "model/layers/bias.h"
#include "model/lora/router_adapter.h"
#include "ops/routing/routing.h"

namespace moebius {

// The report of one MoE layer for a step: sums over its micro-batches and ranks.
struct RouterMetrics {
  Tensor load_E;     // i64  tokens sent to each expert, before any drop
  Tensor dropped_1;  // i64  pairs dropped by capacity
  Tensor aux_1;      // f64  balance losses, as they enter the objective
  Tensor z_1;        // f64  sum of logsumexp^2; times z_coeff / tokens it is the z-loss
  Tensor entropy_1;  // f64  sum over tokens of the entropy of their scores
};

class Router {
 public:
  struct Saved {
    Tensor x_TD;  // the caller's
    Tensor logits_TE;
    Route route;
    Tensor dsbar_SE;  // derivative of the balance losses by the normalised scores
  };
  // layer: its index in the model, which draws of the router depend on.
  Router(const LayerContext& c, const std::string& prefix, int64_t layer);
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const;

  // Fills saved.route and returns it, cut to the tokens of x. In training it also computes the
  // balance losses of the micro-batch and the metrics.
  Route forward(Step& step, Tensor x_TD, Saved& saved) const;
  // Adds to dx the derivative through the logits. The gate's gradient is added here too: it is E
  // rows, and needs the same dlogits.
  void backward(Step& step, Tensor dx_TD, Tensor dweight_TK, const Saved& saved) const;

  // Called once per global batch, after its last micro-batch. Sums over the ranks the metrics and
  // the state of the next step's routing.
  void reduce_metrics(Stream& s) const;
  // Called after the metrics were read. Moves the bias, keeps the load for the global
  // balance loss, and clears the sums.
  void end_of_step(Stream& s) const;
  // State at the start of a run: no bias, an even load.
  void init_state(Stream& s) const;

  const RouterMetrics& metrics() const { return metrics_; }

 private:
  RouteRule rule(bool training, int64_t T) const;
  // The number of ranks that the rows of a micro-batch are spread over.
  int64_t ranks_of_batch() const { return mesh_.shape().tp * mesh_.shape().cp; }
  Tensor segments(Step& step) const;
  Tensor router_input(Step& step, Tensor x_TD) const;
  RouterMetrics unused_metrics(Step& step) const;
  // Statistics of the micro-batch, and the balance losses with their derivative (router_balance.cc).
  struct Stats {
    Tensor prob_SE, count_SE;  // f32, over the micro-batch's segments: summed scores, and tokens of each expert
  };
  void declare_state(const LayerContext& c, const std::string& prefix);
  void balance(Step& step, Saved& saved) const;
  Stats alloc_stats(Step& step, int64_t num_segments) const;
  void add_loss(Step& step, Tensor dsbar_SE, const Stats& stats) const;
  void aux_loss(Step& step, Tensor dsbar_1E, const Stats& batch) const;
  void global_aux_loss(Step& step, Tensor dsbar_1E, const Stats& batch) const;
  void seq_aux_loss(Step& step, Saved& saved) const;

  int64_t E_, K_, D_;
  BalanceSpec balance_;
  ModelSpec model_;
  DType dtype_;
  BatchShape shape_;
  const Mesh& mesh_;
  uint32_t layer_;
  uint64_t seed_;
  const Param& gate_;
  RouterAdapter adapter_;
  std::optional<Bias> logit_bias_;
  const Param* bias_ = nullptr;       // state: e_score_correction_bias
  const Param* last_load_ = nullptr;  // state, f32 [1, E]: counts of the last global batch, for the global balance loss
  Tensor step_load_1E_;               // f32: its counts so far in this one
  RouterMetrics metrics_;
};

}  // namespace moebius
