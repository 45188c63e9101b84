#include "model/moe/router/router.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "model/frozen.h"
#include "model/moe/router/batch_route.h"
#include "ops/elementwise/elementwise.h"
#include "ops/elementwise/fill_zeros.h"
#include "ops/gemm/gemm.h"
#include "ops/one_token/one_token.h"
#include "ops/routing/router_logits_few.h"

namespace moebius {
namespace {

int64_t num_segments(const BalanceSpec& balance, const BatchShape& shape) {
  return balance.seq_aux ? shape.max_segments : 1;
}

bool has_balance_loss(const BalanceSpec& b) { return b.aux_coeff != 0 && (b.aux || b.seq_aux || b.global_aux); }

// A generation step has fewer tokens than were planned for.
Route first_tokens(Route route, int64_t T, int64_t K) {
  route.topk_TK = route.topk_TK.rows(0, T);
  route.weight_TK = route.weight_TK.rows(0, T);
  route.pair_row_TK = route.pair_row_TK.rows(0, T);
  route.row_token_R = route.row_token_R.rows(0, T * K);
  route.row_pair_R = route.row_pair_R.rows(0, T * K);
  return route;
}

}  // namespace

Router::Router(const LayerContext& c, const std::string& prefix, int64_t layer)
    : E_(c.model.num_experts),
      K_(c.model.top_k),
      D_(c.model.hidden_size),
      balance_(c.balance),
      model_(c.model),
      dtype_(c.dtype),
      shape_(c.shape),
      mesh_(c.mesh),
      layer_(static_cast<uint32_t>(layer)),
      seed_(c.seed),
      gate_(c.params.declare({.name = prefix + ".weight",
                              .shape = {E_, D_},
                              .dtype = c.balance.router_f32 ? DType::f32 : c.dtype,
                              .init_std = c.init_std(),
                              .kind = ParamKind::router,
                              .grad_axis = Axis::tp_cp_dp})),
      adapter_(c, gate_.spec),
      own_sums_(c.router_sums ? nullptr : std::make_unique<RouterSums>()),
      sums_(own_sums_ ? own_sums_.get() : c.router_sums),
      layer_of_sums_(sums_->add_layer(E_)) {
  model_.source = {};
  if (c.model.router_bias) {  // f32, as logits are
    logit_bias_.emplace(c.params, ParamSpec{.name = prefix + ".bias",
                                            .shape = {E_},
                                            .init = ParamInit::zeros,
                                            .kind = ParamKind::bias,
                                            .grad_axis = Axis::tp_cp_dp});
  }
  declare_state(c, prefix);
}

void Router::declare_state(const LayerContext& c, const std::string& prefix) {
  if (c.model.expert_bias) {
    bias_ = &c.params.declare(
        {.name = prefix + ".e_score_correction_bias", .shape = {E_}, .kind = ParamKind::state, .trainable = false});
  }
  if (c.params.use() == ModelUse::training && balance_.global_aux) {
    last_load_ = &c.params.declare(
        {.name = prefix + ".last_load", .shape = {1, E_}, .kind = ParamKind::state, .trainable = false});
    c.plan.declare(step_load_1E_, prefix + ".step_load", {1, E_}, DType::f32, Life::metrics);
  }
  if (own_sums_) own_sums_->declare(c.plan);
}

void Router::declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const {
  const int64_t T = rows_between_projections(shape_, mesh_.shape()), R = T * K_;
  Route& route = saved.route;
  plan.declare(saved.logits_TE, prefix + ".logits", {T, E_}, DType::f32, Life::saved);
  plan.declare(route.topk_TK, prefix + ".topk", {T, K_}, DType::i32, Life::saved);
  plan.declare(route.weight_TK, prefix + ".weight", {T, K_}, DType::f32, Life::saved);
  plan.declare(route.counts_E, prefix + ".counts", {E_}, DType::i32, Life::saved);
  plan.declare(route.offsets_E1, prefix + ".offsets", {E_ + 1}, DType::i32, Life::saved);
  plan.declare(route.row_token_R, prefix + ".row_token", {R}, DType::i32, Life::saved);
  plan.declare(route.row_pair_R, prefix + ".row_pair", {R}, DType::i32, Life::saved);
  plan.declare(route.pair_row_TK, prefix + ".pair_row", {T, K_}, DType::i32, Life::saved);
  if (has_balance_loss(balance_))
    plan.declare(saved.dsbar_SE, prefix + ".dsbar", {num_segments(balance_, shape_), E_}, DType::f32, Life::saved);
}

// T: rows of the micro-batch on this rank.
RouteRule Router::rule(bool training, int64_t T) const {
  RouteRule rule;
  rule.score = model_.score;
  rule.normalize = model_.norm_topk_prob;
  rule.scale = static_cast<float>(model_.routed_scaling_factor);
  rule.num_groups = model_.n_group;
  rule.topk_groups = model_.topk_group;
  rule.group_score = model_.group_score;
  if (balance_.sinkhorn && training) rule.choice = RouteChoice::sinkhorn;
  if (balance_.force_balance) rule.choice = RouteChoice::forced;
  // Capacity bounds a training step; in inference the result of a token must not depend on other tokens.
  if (training && balance_.capacity_factor > 0) {
    const int64_t pairs = T * ranks_of_batch() * K_;
    rule.capacity = static_cast<int64_t>(std::ceil(static_cast<double>(pairs) / E_ * balance_.capacity_factor));
    rule.drop = balance_.drop_policy == DropPolicy::probs ? RouteDrop::probs : RouteDrop::position;
  }
  return rule;
}

// Returns the jittered input, on the step stack; x itself without jitter. A draw depends on the token's
// index in the global batch.
Tensor Router::router_input(Step& step, Tensor x_TD) const {
  if (!step.batch.training || balance_.jitter == 0) return x_TD;
  const Tensor y_TD = step.alloc(x_TD.shape, dtype_);
  for (const TokenRun& run : token_runs(shape_, mesh_.shape(), mesh_.place(), step.batch.cp)) {
    jitter(step.stream, {.y_TD = y_TD.rows(run.row, run.row + run.count),
                         .x_TD = x_TD.rows(run.row, run.row + run.count),
                         .draw_2 = step.batch.draw_2(),
                         .row = run.token,
                         .seed = seed_,
                         .layer = layer_,
                         .eps = static_cast<float>(balance_.jitter)});
  }
  return y_TD;
}

Route Router::forward(Step& step, Tensor x_TD, Saved& saved) const {
  const int64_t T = x_TD.dim(0);
  saved.x_TD = x_TD;
  const Route route = first_tokens(saved.route, T, K_);
  StackScope scope(step.stack);
  const Tensor logits_TE = saved.logits_TE.rows(0, T);
  RouterLogitsFwd gate{.logits_TE = logits_TE,
                       .x_TD = router_input(step, x_TD),
                       .w_ED = gate_.w,
                       .bias_E = logit_bias_ ? logit_bias_->all() : Tensor{}};
  gate.scratch = step.alloc_bytes(RouterLogitsFwd::scratch_bytes(gate, step.stream));
  const bool is_few = !step.batch.training && T <= kFewRows;
  is_few ? router_logits_few(step.stream, gate) : router_logits_fwd(step.stream, gate);
  adapter_.forward(step, logits_TE, gate.x_TD);
  const RouteRule how = rule(step.batch.training, T);
  // Evaluation must not count towards what a training step reports or learns from.
  const RouterMetrics sums = step.batch.training ? metrics() : RouterMetrics{};
  RouteFwd choose{.route = route,
                  .load_E = sums.load_E,
                  .dropped_1 = sums.dropped_1,
                  .logits_TE = logits_TE,
                  .bias_E = bias_ ? bias_->w : Tensor{},
                  .rule = how};
  if (ranks_of_batch() > 1 && depends_on_batch(how)) {
    route_batch(step, choose, shape_, mesh_);
  } else {
    choose.scratch = step.alloc_bytes(RouteFwd::scratch_bytes(T, E_, K_, how, step.stream));
    route_fwd(step.stream, choose);
  }
  if (step.batch.training) balance(step, saved);
  return route;
}

bool Router::takes_normed(const Step& step, const RmsNormFwd& norm) const {
  return !step.batch.training && norm.x_TD.dim(0) == 1 && ranks_of_batch() == 1 && adapter_.is_empty();
}

RouteFwd Router::normed_logits(Step& step, const RmsNormFwd& norm, Saved& saved) const {
  saved.x_TD = norm.y_TD;
  StackScope scope(step.stack);
  RouterLogitsFwd gate{.logits_TE = saved.logits_TE.rows(0, 1),
                       .x_TD = norm.y_TD,
                       .w_ED = gate_.w,
                       .bias_E = logit_bias_ ? logit_bias_->all() : Tensor{}};
  gate.scratch = step.alloc_bytes(RouterLogitsFwd::scratch_bytes(gate, step.stream));
  norm_router_logits(step.stream, {.logits = gate, .norm = norm});
  return {.route = first_tokens(saved.route, 1, K_),
          .logits_TE = gate.logits_TE,
          .bias_E = bias_ ? bias_->w : Tensor{},
          .rule = rule(/*training=*/false, 1)};
}

Route Router::choose(Step& step, RouteFwd op) const {
  StackScope scope(step.stack);
  op.scratch = step.alloc_bytes(RouteFwd::scratch_bytes(1, E_, K_, op.rule, step.stream));
  route_fwd(step.stream, op);
  return op.route;
}

void Router::backward(Step& step, Tensor dx_TD, Tensor dweight_TK, const Saved& saved) const {
  const int64_t T = dx_TD.dim(0);
  const bool training = step.batch.training;
  const bool jittered = training && balance_.jitter != 0;
  StackScope scope(step.stack);
  const Tensor dlogits_TE = step.alloc({T, E_}, DType::f32);
  route_bwd(step.stream, {.dlogits_TE = dlogits_TE,
                          .dweight_TK = dweight_TK,
                          .dsbar_SE = training ? saved.dsbar_SE : Tensor{},
                          .segment_T = balance_.seq_aux ? segments(step) : Tensor{},
                          .logits_TE = saved.logits_TE,
                          .route = saved.route,
                          .total_tokens_1 = step.batch.total_tokens_1(),
                          .rule = rule(training, T),
                          .z_coeff = training ? balance_.z_coeff : 0.0});
  const Tensor x_TD = router_input(step, saved.x_TD);
  Tensor dinput_TD = dx_TD;
  if (jittered) {
    dinput_TD = step.alloc(dx_TD.shape, dtype_);
    fill_zero(step.stream, dinput_TD);
  }
  RouterLogitsBwd gate{.dx_TD = dinput_TD,
                       .dw_ED = gate_.has_grad ? gate_.dw : Tensor{},
                       .dbias_E = logit_bias_ ? logit_bias_->gradient() : Tensor{},
                       .dlogits_TE = dlogits_TE,
                       .x_TD = x_TD,
                       .w_ED = gate_.w};
  gate.partial_PED = step.alloc({RouterLogitsBwd::num_partials(gate, step.stream), E_, D_}, DType::f32);
  gate.scratch = step.alloc_bytes(RouterLogitsBwd::scratch_bytes(gate, step.stream));
  router_logits_bwd(step.stream, gate);
  adapter_.backward(step, dinput_TD, dlogits_TE, x_TD);
  if (jittered) add(step.stream, dx_TD, router_input(step, dinput_TD));  // the same factors: d(x u)/dx = u
}

void Router::reduce_metrics(Stream& s) const {
  if (own_sums_) own_sums_->reduce(s, mesh_);
  if (last_load_) mesh_.group(Axis::dp).all_reduce_sum(s, step_load_1E_);
}

void Router::end_of_step(Stream& s) const {
  const RouterMetrics m = metrics();
  if (bias_ && balance_.bias) update_expert_bias(s, bias_->w, m.load_E, static_cast<float>(balance_.bias_rate));
  if (last_load_) copy(s, last_load_->w, step_load_1E_);
  fill_zeros(s, std::array{m.load_E, m.dropped_1, m.aux_1, m.z_1, m.entropy_1,
                           step_load_1E_});  // the last one is empty without a global loss
}

void Router::init_state(Stream& s) const {
  if (bias_) fill_zero(s, bias_->w);
  if (last_load_) {
    const Rng none(0, RngSite::init);
    fill_normal(s, {.x = last_load_->w, .rng = none, .mean = 1.0f, .std = 0.0f});  // no expert is favoured
  }
}

}  // namespace moebius
