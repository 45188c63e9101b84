#include "bench/moe_layer.h"

#include <cmath>

#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

ModelSpec moe_model(const BenchShape& shape) {
  ModelSpec m;
  m.hidden_size = shape.D;
  m.moe_intermediate_size = shape.F;
  m.num_experts = shape.E;
  m.top_k = shape.K;
  m.norm_topk_prob = true;
  if (std::isfinite(shape.activation.limit)) m.swiglu_limit = shape.activation.limit;
  m.expert_proj_bias = shape.expert_biases;
  m.initializer_range = 1.0 / std::sqrt(static_cast<double>(shape.D));
  return m;
}

const Param& param_named(const ParamTable& params, const std::string& name) {
  for (const Param& p : params.all()) {
    if (p.spec.name == name) return p;
  }
  MOEBIUS_FAIL(internal, "bench: no parameter {}", name);
}

// Quantised weights have copies only in a table of training.
ModelUse use_of(const PrecisionSpec& precision) {
  return precision.recipe == PrecisionRecipe::none ? ModelUse::gradients : ModelUse::training;
}

}  // namespace

void declare_route(MemoryPlan& plan, const BenchShape& shape, Route& route) {
  const int64_t T = shape.T(), E = shape.E, K = shape.K, R = shape.R();
  const auto declare = [&](Tensor& t, Shape sizes, DType dtype) {
    plan.declare(t, "route", sizes, dtype, Life::saved);
  };
  declare(route.topk_TK, {T, K}, DType::i32);
  declare(route.weight_TK, {T, K}, DType::f32);
  declare(route.counts_E, {E}, DType::i32);
  declare(route.offsets_E1, {E + 1}, DType::i32);
  declare(route.row_token_R, {R}, DType::i32);
  declare(route.row_pair_R, {R}, DType::i32);
  declare(route.pair_row_TK, {T, K}, DType::i32);
}

void upload_route(Stream& s, const BenchShape& shape, const BenchRoute& route, const Route& to) {
  const BenchRows rows = bench_rows(shape, route.topk_TK);
  std::vector<int32_t> counts(shape.E);
  for (int64_t e = 0; e < shape.E; ++e) counts[e] = rows.offsets_E1[e + 1] - rows.offsets_E1[e];
  const std::vector<float> weight(shape.R(), 1.0f / static_cast<float>(shape.K));
  const auto upload = [&](const Tensor& tensor, const auto& from) {
    copy_to_device(s, tensor.data, from.data(), tensor.num_bytes());
  };
  upload(to.topk_TK, route.topk_TK);
  upload(to.weight_TK, weight);
  upload(to.counts_E, counts);
  upload(to.offsets_E1, rows.offsets_E1);
  upload(to.row_token_R, rows.row_token_R);
  upload(to.row_pair_R, rows.row_pair_R);
  upload(to.pair_row_TK, rows.pair_row_TK);
  synchronize(s);
}

BenchMoeLayer::BenchMoeLayer(const BenchShape& shape, const PrecisionSpec& precision, DeviceKind device,
                             ThreadPool& pool, bool first_micro_batch)
    : shape_(shape),
      model_(moe_model(shape)),
      precision_(precision),
      target_(device),
      params_(plan_, use_of(precision)),
      router_(context(), "mlp.gate", /*layer=*/0),
      experts_(make_routed_experts(context(), "mlp")),
      w1_(param_named(params_, "mlp.experts.gate_up_proj")),
      w2_(param_named(params_, "mlp.experts.down_proj")) {
  batch_.first_of_step = first_micro_batch;
  router_.declare_saved(plan_, "router", saved_.router);
  saved_.experts = experts_->declare_saved(plan_, "experts");
  declare_micro_batch(plan_, batch_shape(), batch_);
  for (Tensor* t : {&x_TD, &y_TD, &dx_TD, &dy_TD})
    plan_.declare(*t, "activation", {shape.T(), shape.D}, DType::bf16, Life::saved);
  plan_.declare(load_E_, "load", {shape.E}, DType::i64, Life::metrics);
  plan_.declare(dropped_1_, "dropped", {1}, DType::i64, Life::metrics);
  plan_.bind(device, stack_bytes(pool));
}

LayerContext BenchMoeLayer::context() {
  return {.params = params_,
          .plan = plan_,
          .model = model_,
          .balance = balance_,
          .mesh = mesh_,
          .rope_table_Pd = no_rope_table_,
          .precision = precision_,
          .dtype = DType::bf16,
          .shape = batch_shape()};
}

void BenchMoeLayer::fill(Stream& s, const BenchRoute& route) {
  params_.init(s, 1);
  for (const Param& p : params_.all()) {  // the results that checks expect have no biases
    if (p.spec.kind == ParamKind::bias) fill_zero(s, p.w);
  }
  fill_normal(s, {.x = x_TD, .rng = Rng(1, RngSite::bench, 0, 1)});
  fill_normal(s, {.x = dy_TD, .rng = Rng(1, RngSite::bench, 0, 2)});
  if (route.logits_TE.empty())
    upload_route(s, shape_, route, saved_.router.route);
  else
    put_logits_in_x(s, route.logits_TE);
}

void BenchMoeLayer::quantise_weights(Stream& s) {
  if (!params_.has_copies()) return;
  params_.make_copies(s);
  params_.hold_copies();
}

void BenchMoeLayer::put_logits_in_x(Stream& s, const std::vector<float>& logits_TE) {
  const int64_t D = shape_.D, E = shape_.E;
  std::vector<bf16> x(x_TD.numel());
  copy_to_host(s, x.data(), x_TD.data, x_TD.num_bytes());
  for (int64_t t = 0; t < shape_.T(); ++t) {
    for (int64_t e = 0; e < E; ++e) x[t * D + e] = to_bf16(logits_TE[t * E + e]);
  }
  copy_to_device(s, x_TD.data, x.data(), x_TD.num_bytes());
  std::vector<float> identity(E * D);
  for (int64_t e = 0; e < E; ++e) identity[e * D + e] = 1;
  const Tensor gate = param_named(params_, "mlp.gate.weight").w;
  copy_to_device(s, gate.data, identity.data(), gate.num_bytes());
  synchronize(s);
}

void BenchMoeLayer::clear(Stream& s) {
  for (const Tensor& t : {y_TD, dx_TD, w1_.dw, w2_.dw}) fill_zero(s, t);
}

template <class Body>
void BenchMoeLayer::with_step(Stream& s, Body body) {
  StepStack null_stack(DeviceKind::null, nullptr, 0);
  StepStack& stack = s.device() == DeviceKind::null ? null_stack : plan_.stack();
  StackScope scope(stack);
  Step step{s, stack, batch_};
  body(step);
  high_water_ = std::max(high_water_, stack.high_water());
}

void BenchMoeLayer::forward_router(Stream& s) {
  with_step(s, [&](Step& step) {
    const Route route = router_.forward(step, x_TD, saved_.router);
    experts_->forward(step, y_TD, x_TD, route, *saved_.experts);
  });
}

void BenchMoeLayer::backward_router(Stream& s) {
  with_step(s, [&](Step& step) {
    const Tensor dweight_TK = step.alloc({shape_.T(), shape_.K}, DType::f32);
    experts_->backward(step, dx_TD, dweight_TK, dy_TD, *saved_.experts, nullptr);
    router_.backward(step, dx_TD, dweight_TK, saved_.router);
  });
}

void BenchMoeLayer::forward(Stream& s, bool choose) {
  with_step(s, [&](Step& step) {
    if (choose) route_tokens(step);
    experts_->forward(step, y_TD, x_TD, saved_.router.route, *saved_.experts);
  });
}

void BenchMoeLayer::backward(Stream& s) {
  with_step(s, [&](Step& step) {
    const Tensor dweight_TK = step.alloc({shape_.T(), shape_.K}, DType::f32);
    experts_->backward(step, dx_TD, dweight_TK, dy_TD, *saved_.experts, nullptr);
  });
}

int64_t BenchMoeLayer::kept_bytes() const {
  const Route& r = saved_.router.route;
  int64_t bytes = 0;
  const std::initializer_list<Tensor> kept{x_TD,
                                           experts_saved().h_R2F.numbers(),
                                           saved_.router.logits_TE,
                                           r.topk_TK,
                                           r.weight_TK,
                                           r.counts_E,
                                           r.offsets_E1,
                                           r.row_token_R,
                                           r.row_pair_R,
                                           r.pair_row_TK};
  for (const Tensor& t : kept) bytes += t.num_bytes();
  return bytes;
}

int64_t BenchMoeLayer::stack_bytes(ThreadPool& pool) {
  Stream s(DeviceKind::null, pool, nullptr, target_);
  forward_router(s);
  backward_router(s);
  forward(s, true);
  backward(s);
  return high_water_;
}

// Routes by the logits that the last forward pass with the router left.
void BenchMoeLayer::route_tokens(Step& step) {
  const RouteRule rule{.normalize = true};
  StackScope scope(step.stack);
  const int64_t bytes = RouteFwd::scratch_bytes(shape_.T(), shape_.E, shape_.K, rule, step.stream);
  route_fwd(step.stream, {.route = saved_.router.route,
                          .load_E = load_E_,
                          .dropped_1 = dropped_1_,
                          .scratch = step.alloc_bytes(bytes),
                          .logits_TE = saved_.router.logits_TE,
                          .rule = rule});
}

}  // namespace moebius
