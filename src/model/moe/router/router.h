// The router of an MoE layer: scores, top-k choice, load balancing. All counts stay on the device. The tokens of a
// micro-batch are spread over the ranks of tp x cp (model/attention/token_runs.h). So statistics of a micro-batch are
// summed over these ranks, and rules that depend on all of its tokens give the result of one rank.
#pragma once

#include <memory>
#include <optional>

#include "model/layer_context.h"
#include "model/layers/bias.h"
#include "model/lora/router_adapter.h"
#include "model/moe/router/router_sums.h"
#include "ops/norm/norm.h"
#include "ops/routing/routing.h"

namespace moebius {

class Router {
 public:
  struct Saved {
    Tensor x_TD;  // the caller's
    Tensor logits_TE;
    Route route;
    Tensor dsbar_SE;  // derivative of the balance losses w.r.t. the normalised scores
  };
  // layer: the index in the model, part of the key of random draws.
  Router(const LayerContext& c, const std::string& prefix, int64_t layer);
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const;

  // Routes x. Fills saved.route, and returns its part for the tokens of x. In training also computes the balance losses
  // and the metrics of the micro-batch.
  Route forward(Step& step, Tensor x_TD, Saved& saved) const;
  // The parts of forward for one token in generation, whose x is norm.y: the norm and the logits, and then the choice.
  // takes_normed() returns whether nothing else is between them.
  bool takes_normed(const Step& step, const RmsNormFwd& norm) const;
  RouteFwd normed_logits(Step& step, const RmsNormFwd& norm, Saved& saved) const;
  Route choose(Step& step, RouteFwd op) const;
  // Adds the derivative through the logits to dx. Also adds to the gradient of the gate, which has only E rows and
  // needs the same dlogits.
  void backward(Step& step, Tensor dx_TD, Tensor dweight_TK, const Saved& saved) const;

  // Called once per global batch, after its last micro-batch. Sums over the ranks the statistics for the routing of the
  // next step, and the metrics, unless they are among those of LayerContext::router_sums, which reduces them itself.
  void reduce_metrics(Stream& s) const;
  // Called after the metrics were read. Updates the expert bias, stores the load for the global balance loss, and
  // clears the sums.
  void end_of_step(Stream& s) const;
  // Sets the state of the start of a run: zero bias, even load.
  void init_state(Stream& s) const;

  RouterMetrics metrics() const { return sums_->of_layer(layer_of_sums_); }

 private:
  RouteRule rule(bool training, int64_t T) const;
  // Returns the number of ranks that the rows of a micro-batch are spread over.
  int64_t ranks_of_batch() const { return mesh_.shape().tp * mesh_.shape().cp; }
  Tensor segments(Step& step) const;
  Tensor router_input(Step& step, Tensor x_TD) const;
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
  const Param* last_load_ = nullptr;  // state, f32 [1, E]: load of the last global batch, for the global balance loss
  Tensor step_load_1E_;               // f32: load of this global batch so far
  std::unique_ptr<RouterSums> own_sums_;  // without LayerContext::router_sums
  RouterSums* sums_;
  size_t layer_of_sums_;
};

}  // namespace moebius
