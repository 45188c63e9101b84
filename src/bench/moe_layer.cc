#include "bench/moe_layer.h"

#include <cmath>

#include "ops/elementwise/elementwise.h"
#include "ops/experts/experts.h"

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

// An expert op with scratch memory from the step stack.
template <class Op>
void run(Step& step, Op op, void (*body)(Stream&, const Op&)) {
  StackScope scope(step.stack);
  op.scratch = step.alloc_bytes(Op::scratch_bytes(op, step.stream));
  body(step.stream, op);
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

BenchMoeLayer::BenchMoeLayer(const BenchShape& shape, DeviceKind device, ThreadPool& pool, bool first_micro_batch)
    : shape_(shape),
      target_(device),
      moe_(LayerContext{.params = params_,
                        .plan = plan_,
                        .model = moe_model(shape),
                        .balance = BalanceSpec{},
                        .mesh = mesh_,
                        .rope_table_Pd = Tensor{},
                        .precision = PrecisionSpec{},
                        .dtype = DType::bf16,
                        .shape = batch_shape()},
           "mlp", /*layer=*/0),
      w1_(param_named(params_, "mlp.experts.gate_up_proj")),
      w2_(param_named(params_, "mlp.experts.down_proj")) {
  batch_.first_of_step = first_micro_batch;
  moe_.declare_saved(plan_, "moe", saved_);
  declare_micro_batch(plan_, batch_shape(), batch_);
  for (Tensor* t : {&x_TD, &y_TD, &dx_TD, &dy_TD})
    plan_.declare(*t, "activation", {shape.T(), shape.D}, DType::bf16, Life::saved);
  plan_.declare(load_E_, "load", {shape.E}, DType::i64, Life::metrics);
  plan_.declare(dropped_1_, "dropped", {1}, DType::i64, Life::metrics);
  plan_.bind(device, stack_bytes(pool));
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
  with_step(s, [&](Step& step) { moe_.forward(step, y_TD, x_TD, saved_); });
}

void BenchMoeLayer::backward_router(Stream& s) {
  with_step(s, [&](Step& step) {
    moe_.backward_input(step, dx_TD, dy_TD, saved_);
    moe_.backward_weight(step, saved_);
  });
}

void BenchMoeLayer::forward(Stream& s, bool choose) {
  with_step(s, [&](Step& step) {
    if (choose) route_tokens(step);
    experts_forward(step);
  });
}

void BenchMoeLayer::backward(Stream& s) {
  with_step(s, [&](Step& step) { experts_backward(step); });
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

void BenchMoeLayer::experts_forward(Step& step) {
  StackScope scope(step.stack);
  dispatcher_.announce(step, saved_.router.route, *experts_saved().handle);
  const Dispatched in = dispatcher_.dispatch(step, x_TD, *experts_saved().handle);
  const Tensor a_RF = step.alloc({shape_.R(), shape_.F}, DType::bf16),
               y_RD = step.alloc({shape_.R(), shape_.D}, DType::bf16);
  run(step,
      ExpertUp{.h_R2F = experts_saved().h_R2F.numbers(),
               .a_RF = a_RF,
               .x_TD = in.source,
               .w1_e2FD = w1_.w,
               .b1_e2F = bias("mlp.experts.gate_up_proj_bias"),
               .rows = in.rows,
               .activation = shape_.activation},
      expert_up);
  run(step,
      ExpertDown{.y_RD = y_RD,
                 .a_RF = a_RF,
                 .w2_eDF = w2_.w,
                 .b2_eC = bias("mlp.experts.down_proj_bias"),
                 .rows = {.offsets_e1 = in.rows.offsets_e1}},
      expert_down);
  dispatcher_.combine(step, y_TD, y_RD, *experts_saved().handle);
}

void BenchMoeLayer::experts_backward(Step& step) {
  const int64_t T = shape_.T(), R = shape_.R(), D = shape_.D, F = shape_.F;
  const Tensor dh_R2F = step.alloc({R, 2 * F}, DType::bf16), sa_RF = step.alloc({R, F}, DType::bf16),
               dweight_R = step.alloc({R}, DType::f32), dweight_TK = step.alloc({T, shape_.K}, DType::f32),
               dx_RD = step.alloc({R, D}, DType::bf16);
  const Dispatched grads = dispatcher_.combine_bwd(step, dy_TD, *experts_saved().handle);
  const Rows own{.offsets_e1 = grads.rows.offsets_e1};
  run(step,
      DExpertDown{.dh_R2F = dh_R2F,
                  .sa_RF = sa_RF,
                  .dweight_R = dweight_R,
                  .dout_TD = grads.source,
                  .w2_eDF = w2_.w,
                  .b2_eC = bias("mlp.experts.down_proj_bias"),
                  .h_R2F = experts_saved().h_R2F.numbers(),
                  .weight_R = grads.weight_R,
                  .rows = grads.rows,
                  .activation = shape_.activation},
      d_expert_down);
  run(step, DExpertUp{.dx_RD = dx_RD, .dh_R2F = dh_R2F, .w1_e2FD = w1_.w, .rows = own}, d_expert_up);
  dispatcher_.dispatch_bwd(step, dx_TD, dweight_TK, dx_RD, dweight_R, *experts_saved().handle);
  const bool accumulate = !step.batch.first_of_step;
  run(step,
      ExpertWgrad{.dw_eMN = w2_.dw,
                  .left_RM = grads.source,
                  .right_RN = sa_RF,
                  .gather_left = true,
                  .accumulate = accumulate,
                  .rows = grads.rows},
      expert_wgrad);
  run(step,
      ExpertWgrad{.dw_eMN = w1_.dw,
                  .left_RM = dh_R2F,
                  .right_RN = x_TD,
                  .gather_right = true,
                  .accumulate = accumulate,
                  .rows = grads.rows},
      expert_wgrad);
  if (!shape_.expert_biases) return;
  expert_bias_grad(step.stream,
                   {.db_eN = param_named(params_, "mlp.experts.gate_up_proj_bias").dw, .x_RM = dh_R2F, .rows = own});
  expert_bias_grad(step.stream, {.db_eN = param_named(params_, "mlp.experts.down_proj_bias").dw,
                                 .x_RM = grads.source,
                                 .weight_R = grads.weight_R,
                                 .gather = true,
                                 .rows = grads.rows});
}

Tensor BenchMoeLayer::bias(const std::string& name) const {
  return shape_.expert_biases ? param_named(params_, name).w : Tensor{};
}

}  // namespace moebius
