#include "model/moe/moe.h"

#include "model/attention/token_runs.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

std::string expert_name(const std::string& prefix, int64_t e, const char* matrix, const char* what = "weight") {
  return fmt::format("{}.experts.{}.{}.{}", prefix, e, matrix, what);
}

// The experts here: first, first + 1, ..., and of each the shard etp of ETP of its inner width.
struct Experts {
  Experts(const ModelSpec& m, const Mesh& mesh)
      : ETP(mesh.shape().etp),
        etp(mesh.place().etp),
        D(m.hidden_size),
        F(m.moe_intermediate_size),
        F_here(F / ETP),
        count(m.num_experts / mesh.shape().ep),
        first(count * mesh.place().ep) {}
  int64_t ETP, etp, D, F, F_here, count, first;
};

ParamSpec expert_spec(const std::string& name, Shape shape, const ModelSpec& m, DType dtype) {
  return {.name = name,
          .shape = shape,
          .dtype = dtype,
          .init_std = static_cast<float>(m.initializer_range),
          .kind = ParamKind::experts,
          .grad_axis = Axis::edp};
}

ParamSpec w1_spec(const std::string& prefix, const ModelSpec& m, DType dtype, const Mesh& mesh) {
  const Experts x(m, mesh);
  const Shape whole{x.F, x.D};
  ParamSpec spec = expert_spec(prefix + ".experts.gate_up_proj", {x.count, 2 * x.F_here, x.D}, m, dtype);
  for (int64_t i = 0; i < 2 * x.count; ++i) {
    const char* matrix = i % 2 == 0 ? "gate_proj" : "up_proj";
    spec.parts.push_back({.name = expert_name(prefix, x.first + i / 2, matrix),
                          .shape = whole,
                          .offset = i * x.F_here * x.D,
                          .shard = shard_of(whole, 0, x.etp, x.ETP)});
  }
  return spec;
}

ParamSpec w2_spec(const std::string& prefix, const ModelSpec& m, DType dtype, const Mesh& mesh) {
  const Experts x(m, mesh);
  const Shape whole{x.D, x.F};
  ParamSpec spec = expert_spec(prefix + ".experts.down_proj", {x.count, x.D, x.F_here}, m, dtype);
  for (int64_t i = 0; i < x.count; ++i) {
    spec.parts.push_back({.name = expert_name(prefix, x.first + i, "down_proj"),
                          .shape = whole,
                          .offset = i * x.D * x.F_here,
                          .shard = shard_of(whole, 1, x.etp, x.ETP)});
  }
  return spec;
}

ParamSpec bias_spec(const std::string& name, Shape shape, DType dtype) {
  return {.name = name,
          .shape = shape,
          .dtype = dtype,
          .init = ParamInit::zeros,
          .kind = ParamKind::bias,
          .grad_axis = Axis::edp};
}

ParamSpec b1_spec(const std::string& prefix, const ModelSpec& m, DType dtype, const Mesh& mesh) {
  const Experts x(m, mesh);
  ParamSpec spec = bias_spec(prefix + ".experts.gate_up_proj_bias", {x.count, 2 * x.F_here}, dtype);
  for (int64_t i = 0; i < 2 * x.count; ++i) {
    const char* matrix = i % 2 == 0 ? "gate_proj" : "up_proj";
    spec.parts.push_back({.name = expert_name(prefix, x.first + i / 2, matrix, "bias"),
                          .shape = {x.F},
                          .offset = i * x.F_here,
                          .shard = shard_of({x.F}, 0, x.etp, x.ETP)});
  }
  return spec;
}

// Of a shard its columns alone; etp need not divide them.
ParamSpec b2_spec(const std::string& prefix, const ModelSpec& m, DType dtype, const Mesh& mesh) {
  const Experts x(m, mesh);
  const Shard columns = shard_of({x.D}, 0, x.etp, x.ETP);
  const int64_t here = columns.dim < 0 ? x.D : columns.count;
  ParamSpec spec = bias_spec(prefix + ".experts.down_proj_bias", {x.count, here}, dtype);
  for (int64_t i = 0; i < x.count; ++i) {
    spec.parts.push_back({.name = expert_name(prefix, x.first + i, "down_proj", "bias"),
                          .shape = {x.D},
                          .offset = i * here,
                          .shard = columns});
  }
  return spec;
}

GatedActivation activation_of(const ModelSpec& m) {
  if (m.swiglu_limit == 0) return {};
  return {.alpha = 1.702f, .limit = static_cast<float>(m.swiglu_limit), .shift = 1.0f};
}

// The degrees that the experts must divide by, before anything is declared.
const ModelSpec& checked(const ModelSpec& m, const Mesh& mesh) {
  const int64_t ep = mesh.shape().ep, etp = mesh.shape().etp;
  MOEBIUS_CHECK(usage, m.num_experts % ep == 0,
                "parallel.ep must divide model.num_experts: {} % {} must be 0; choose another ep", m.num_experts, ep);
  MOEBIUS_CHECK(usage, m.moe_intermediate_size % etp == 0,
                "parallel.etp must divide model.moe_intermediate_size: {} % {} must be 0; choose another etp",
                m.moe_intermediate_size, etp);
  return m;
}

// Runs an expert op with its scratch taken from the step stack for the duration of the call.
template <class Op, class Run>
void run_expert_op(Step& step, Op op, Run run) {
  StackScope scope(step.stack);
  op.scratch = step.alloc_bytes(Op::scratch_bytes(op, step.stream));
  run(step.stream, op);
}

}  // namespace

Moe::Moe(ParamTable& params, MemoryPlan& plan, const std::string& prefix, const ModelSpec& m,
         const BalanceSpec& balance, DType dtype, const Mesh& mesh, const BatchShape& shape, uint32_t layer,
         uint64_t seed, const std::string& dispatcher, bool fusion)
    : D_(m.hidden_size),
      F_(checked(m, mesh).moe_intermediate_size / mesh.shape().etp),
      max_tokens_(rows_between_projections(shape, mesh.shape())),
      dtype_(dtype),
      router_(params, plan, prefix + ".gate", m, balance, dtype, mesh, shape, layer, seed),
      w1_(params.declare(w1_spec(prefix, m, dtype, mesh))),
      w2_(params.declare(w2_spec(prefix, m, dtype, mesh))),
      dispatcher_(make_dispatcher(dispatcher, {.num_experts = m.num_experts,
                                               .top_k = m.top_k,
                                               .max_tokens = max_tokens_,
                                               .mesh = &mesh,
                                               .rows_factor = balance.rank_rows_factor})) {
  activation_ = activation_of(m);
  if (m.expert_proj_bias) {
    b1_ = &params.declare(b1_spec(prefix, m, dtype, mesh));
    b2_ = &params.declare(b2_spec(prefix, m, dtype, mesh));
    b2_first_ = shard_of({D_}, 0, mesh.place().etp, mesh.shape().etp).begin;
  }
  if (m.shared_intermediate_size == 0) return;
  const float std = static_cast<float>(m.initializer_range);
  shared_.emplace(params, prefix + ".shared_experts", D_, m.shared_intermediate_size, dtype, mesh, std, fusion);
  if (m.shared_expert_gate) {
    shared_gate_.emplace(params, ParamSpec{.name = prefix + ".shared_expert_gate.weight",
                                           .shape = {1, D_},
                                           .dtype = dtype,
                                           .init_std = std,
                                           .grad_axis = Axis::tp_cp_dp});
  }
}

void Moe::declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const {
  router_.declare_saved(plan, prefix + ".router", saved.router);
  dispatcher_->declare_saved(plan, prefix + ".delivery", saved.delivery);
  const int64_t max_rows = dispatcher_->max_rows(max_tokens_);
  saved.h_R2F.declare(plan, prefix + ".h", {max_rows, 2 * F_}, dtype_, &RecomputeSpec::expert_up);
  constexpr auto kShared = &RecomputeSpec::shared_expert;
  if (shared_) shared_->declare_saved(plan, prefix + ".shared", max_tokens_, saved.shared, kShared);
  if (shared_gate_) {
    saved.shared_y_TD.declare(plan, prefix + ".shared_y", {max_tokens_, D_}, dtype_, kShared);
    plan.declare(saved.gate_T, prefix + ".shared_gate", {max_tokens_}, DType::f32, Life::saved);
  }
}

void Moe::forward(Step& step, Tensor y_TD, Tensor x_TD, Saved& saved) const {
  saved.x_TD = x_TD;
  dispatcher_->announce(step, router_.forward(step, x_TD, saved.router), saved.delivery);
  experts_forward(step, y_TD, saved);
  if (shared_) shared_forward(step, y_TD, x_TD, saved);
}

void Moe::experts_forward(Step& step, Tensor y_TD, Saved& saved) const {
  StackScope scope(step.stack);
  const int64_t R = dispatcher_->max_rows(y_TD.dim(0));
  const Dispatched in = dispatcher_->dispatch(step, saved.x_TD, saved.delivery);
  saved.h_R2F.open(step.stack);
  const Tensor a_RF = step.alloc({R, F_}, dtype_), y_RD = step.alloc({R, D_}, dtype_);
  expert_up(step, a_RF, in, saved);
  run_expert_op(step,
                ExpertDown{.y_RD = y_RD,
                           .a_RF = a_RF,
                           .w2_eDF = w2_.w,
                           .b2_eC = b2_ ? b2_->w : Tensor{},
                           .b2_first = b2_first_,
                           .rows = {.offsets_e1 = in.rows.offsets_e1}},
                expert_down);
  dispatcher_->combine(step, y_TD, y_RD, saved.delivery);
}

void Moe::expert_up(Step& step, Tensor a_RF, const Dispatched& in, const Saved& saved) const {
  const Tensor h_R2F = saved.h_R2F.rows(0, a_RF.dim(0));
  run_expert_op(step,
                ExpertUp{.h_R2F = h_R2F,
                         .a_RF = a_RF,
                         .x_TD = in.source,
                         .w1_e2FD = w1_.w,
                         .b1_e2F = b1_ ? b1_->w : Tensor{},
                         .rows = in.rows,
                         .activation = activation_},
                moebius::expert_up);
}

void Moe::shared_forward(Step& step, Tensor y_TD, Tensor x_TD, Saved& saved) const {
  const int64_t T = x_TD.dim(0);
  StackScope scope(step.stack);
  saved.shared_y_TD.open(step.stack);
  const Tensor shared_TD = shared_gate_ ? saved.shared_y_TD.rows(0, T) : step.alloc({T, D_}, dtype_);
  shared_->forward(step, shared_TD, x_TD, saved.shared);
  if (!shared_gate_) return add(step.stream, y_TD, shared_TD);
  const Tensor gate_T = saved.gate_T.rows(0, T);
  shared_gate_->forward(step, gate_T.view({T, 1}), x_TD);
  gated_add_fwd(step.stream, {.y_TD = y_TD, .x_TD = shared_TD, .gate_T = gate_T});
}

void Moe::remake(Step& step, Tensor x_TD, Saved& saved) const {
  saved.x_TD = saved.router.x_TD = x_TD;
  if (!shared_) return;
  shared_->remake(step, x_TD, saved.shared);
  saved.shared_y_TD.remake(step.stack, [&] { shared_->output(step, saved.shared_y_TD, saved.shared); });
}

void Moe::backward_input(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved) const {
  const int64_t T = dy_TD.dim(0), R = dispatcher_->max_rows(T);
  saved.dh_R2F = step.alloc({R, 2 * F_}, dtype_);
  saved.sa_RF = step.alloc({R, F_}, dtype_);
  saved.tokens = dispatcher_->dispatch(step, saved.x_TD, saved.delivery);
  saved.h_R2F.remake(step.stack, [&] {
    StackScope scope(step.stack);
    expert_up(step, step.alloc({R, F_}, dtype_), saved.tokens, saved);
  });
  saved.grads = dispatcher_->combine_bwd(step, dy_TD, saved.delivery);
  const Tensor dweight_TK = step.alloc(saved.delivery.route.weight_TK.shape, DType::f32);
  experts_backward_input(step, dx_TD, dweight_TK, saved);
  router_.backward(step, dx_TD, dweight_TK, saved.router);
  if (shared_) shared_backward_input(step, dx_TD, dy_TD, saved);
}

void Moe::experts_backward_input(Step& step, Tensor dx_TD, Tensor dweight_TK, Saved& saved) const {
  const int64_t R = saved.h_R2F.dim(0);
  StackScope scope(step.stack);
  const Tensor dweight_R = step.alloc({R}, DType::f32), dx_RD = step.alloc({R, D_}, dtype_);
  run_expert_op(step,
                DExpertDown{.dh_R2F = saved.dh_R2F,
                            .sa_RF = saved.sa_RF,
                            .dweight_R = dweight_R,
                            .dout_TD = saved.grads.source,
                            .w2_eDF = w2_.w,
                            .b2_eC = b2_ ? b2_->w : Tensor{},
                            .h_R2F = saved.h_R2F,
                            .weight_R = saved.grads.weight_R,
                            .b2_first = b2_first_,
                            .rows = saved.grads.rows,
                            .activation = activation_},
                d_expert_down);
  run_expert_op(step,
                DExpertUp{.dx_RD = dx_RD,
                          .dh_R2F = saved.dh_R2F,
                          .w1_e2FD = w1_.w,
                          .rows = {.offsets_e1 = saved.grads.rows.offsets_e1}},
                d_expert_up);
  dispatcher_->dispatch_bwd(step, dx_TD, dweight_TK, dx_RD, dweight_R, saved.delivery);
}

void Moe::shared_backward_input(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved) const {
  if (!shared_gate_) return shared_->backward_input(step, dx_TD, dy_TD, saved.shared, /*accumulate_dx=*/true);
  const int64_t T = dy_TD.dim(0);
  const Tensor dshared_TD = step.alloc({T, D_}, dtype_), dgate_T = step.alloc({T}, DType::f32);
  gated_add_bwd(
      step.stream,
      {.dx_TD = dshared_TD, .dgate_T = dgate_T, .dy_TD = dy_TD, .x_TD = saved.shared_y_TD, .gate_T = saved.gate_T});
  shared_->backward_input(step, dx_TD, dshared_TD, saved.shared, /*accumulate_dx=*/true);
  saved.dgate_T = step.alloc({T, 1}, dtype_);
  copy(step.stream, saved.dgate_T, dgate_T.view({T, 1}));
  shared_gate_->backward_input(step, dx_TD, saved.dgate_T, /*accumulate=*/true);
}

void Moe::backward_weight(Step& step, const Saved& saved) const {
  const Rows& tokens = saved.tokens.rows;
  if (w2_.has_grad) {
    run_expert_op(step,
                  ExpertWgrad{.dw_eMN = w2_.dw,
                              .left_RM = saved.grads.source,
                              .right_RN = saved.sa_RF,
                              .gather_left = true,
                              .rows = saved.grads.rows},
                  expert_wgrad);
  }
  if (w1_.has_grad) {
    run_expert_op(step,
                  ExpertWgrad{.dw_eMN = w1_.dw,
                              .left_RM = saved.dh_R2F,
                              .right_RN = saved.tokens.source,
                              .gather_right = true,
                              .rows = tokens},
                  expert_wgrad);
  }
  bias_gradients(step, saved);
  if (shared_) shared_->backward_weight(step, saved.shared);
  if (shared_gate_) shared_gate_->backward_weight(step, saved.dgate_T, saved.x_TD);
}

void Moe::bias_gradients(Step& step, const Saved& saved) const {
  if (b1_ && b1_->has_grad) {
    expert_bias_grad(step.stream,
                     {.db_eN = b1_->dw, .x_RM = saved.dh_R2F, .rows = {.offsets_e1 = saved.grads.rows.offsets_e1}});
  }
  if (b2_ && b2_->has_grad) {
    expert_bias_grad(step.stream, {.db_eN = b2_->dw,
                                   .x_RM = saved.grads.source,
                                   .weight_R = saved.grads.weight_R,
                                   .x_first = b2_first_,
                                   .gather = true,
                                   .rows = saved.grads.rows});
  }
}

}  // namespace moebius
