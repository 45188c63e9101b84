// The router: scores, choice, balance. All counts stay on the device. The tokens of a micro-batch lie on the ranks of
// tp x cp (model/attention/token_runs.h): what is defined on the micro-batch is summed over them, or chosen as one rank would.
#pragma once

#include <optional>

#include "comm/mesh.h"
#include "config/model_spec.h"
#include "config/train_spec.h"
#include "model/attention/token_runs.h"
#include "model/layers/bias.h"
#include "model/params.h"
#include "model/step.h"
#include "ops/routing/routing.h"

namespace moebius {

// What one MoE layer reports of a step; sums over its micro-batches and ranks.
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
  Router(ParamTable& params, MemoryPlan& plan, const std::string& prefix, const ModelSpec& model,
         const BalanceSpec& balance, DType dtype, const Mesh& mesh, const BatchShape& shape, uint32_t layer,
         uint64_t seed);
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const;

  // Fills saved.route and returns it, cut to the tokens of x. In training also the balance losses of the micro-batch
  // and the metrics.
  Route forward(Step& step, Tensor x_TD, Saved& saved) const;
  // dx += through logits; the gate's gradient is added here too: it is E rows, and needs the same dlogits.
  void backward(Step& step, Tensor dx_TD, Tensor dweight_TK, const Saved& saved) const;

  // Once per global batch, after its last micro-batch: sums over ranks what the
  // next step's routing depends on and what is reported.
  void reduce_metrics(Stream& s) const;
  // After the metrics were read: moves the bias, keeps the load for the global balance loss, and clears the sums.
  void end_of_step(Stream& s) const;
  // State at the start of a run: no bias, an even load.
  void init_state(Stream& s) const;

  const RouterMetrics& metrics() const { return metrics_; }

 private:
  RouteRule rule(bool training, int64_t T) const;
  // Ranks over which the rows of a micro-batch lie.
  int64_t ranks_of_batch() const { return mesh_.shape().tp * mesh_.shape().cp; }
  Tensor segments(Step& step) const;
  Tensor router_input(Step& step, Tensor x_TD) const;
  RouterMetrics unused_metrics(Step& step) const;
  void balance(Step& step, Saved& saved) const;

  int64_t E_, K_, D_;
  BalanceSpec balance_;
  ModelSpec model_;
  DType dtype_;
  BatchShape shape_;
  std::vector<TokenRun> runs_;  // the rows here
  const Mesh& mesh_;
  uint32_t layer_;
  uint64_t seed_;
  const Param& gate_;
  std::optional<Bias> logit_bias_;
  const Param* bias_ = nullptr;       // state: e_score_correction_bias
  const Param* last_load_ = nullptr;  // state, f32 [1, E]: counts of the last global batch, for the global balance loss
  Tensor step_load_1E_;               // f32: its counts so far in this one
  RouterMetrics metrics_;
};

}  // namespace moebius
