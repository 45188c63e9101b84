#include "model/layers/mlp.h"

#include "ops/activation/activation.h"
#include "ops/gated_mlp/gated_mlp.h"

namespace moebius {
namespace {

ParamSpec gate_up_spec(const LayerContext& c, const std::string& prefix, int64_t hidden) {
  const int64_t D = c.model.hidden_size, F = hidden / c.mesh.shape().tp;
  const Shape whole{hidden, D};
  const Shard rows = shard_of(whole, 0, c.mesh.place().tp, c.mesh.shape().tp);
  return {.name = prefix + ".gate_up_proj.weight",
          .shape = {2 * F, D},
          .dtype = c.dtype,
          .parts = {{prefix + ".gate_proj.weight", whole, 0, rows}, {prefix + ".up_proj.weight", whole, F * D, rows}},
          .init_std = c.init_std()};
}

ParamSpec down_spec(const LayerContext& c, const std::string& prefix, int64_t hidden) {
  const Shape whole{c.model.hidden_size, hidden};
  const std::string name = prefix + ".down_proj.weight";
  return {.name = name,
          .shape = {c.model.hidden_size, hidden / c.mesh.shape().tp},
          .dtype = c.dtype,
          .parts = {{name, whole, 0, shard_of(whole, 1, c.mesh.place().tp, c.mesh.shape().tp)}},
          .init_std = c.init_std()};
}

}  // namespace

Mlp::Mlp(const LayerContext& c, const std::string& prefix, int64_t hidden)
    : tp_(c.mesh.shape().tp),
      T_(c.shape.tokens()),
      D_(c.model.hidden_size),
      F_(div_exact(hidden, tp_, "mlp: hidden width over parallel.tp")),
      dtype_(c.dtype),
      fusion_(c.fusion),
      is_inference_(c.params.use() == ModelUse::inference),
      gate_up_(c, gate_up_spec(c, prefix, hidden)),
      down_(c, down_spec(c, prefix, hidden)),
      saves_in_8_bits_(saves_in_8_bits(c, gate_up_.linear().is_quantised() && down_.linear().is_quantised())) {}

void Mlp::declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved, bool RecomputeSpec::*what) const {
  saved.h_T2F.declare(plan, prefix + ".h", {T_, 2 * F_}, dtype_, what, saves_in_8_bits_);
  saved.dy_TD.declare(plan, prefix + ".dy", {T_, D_}, dtype_);
  saved.dh_T2F.declare(plan, prefix + ".dh", {T_, 2 * F_}, dtype_);
  saved.a_TF.declare(plan, prefix + ".a", {T_, F_}, dtype_);
}

void Mlp::forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const {
  saved.x_tD = x_tD;
  StackScope scope(step.stack);
  saved.h_T2F.open(step.stack);
  const Tensor a_TF = step.alloc({x_tD.dim(0) * tp_, F_}, dtype_);
  up(step, a_TF, x_tD, saved);
  saved.h_T2F.save(step, a_TF.dim(0), {});
  down_.forward(step, y_tD, a_TF);
}

void Mlp::up(Step& step, Tensor a_TF, Tensor x_tD, const Saved& saved) const {
  StackScope scope(step.stack);
  if (gate_up_.linear().has_adapter()) {
    const Tensor h_T2F = saved.h_T2F.rows(0, a_TF.dim(0));
    gate_up_.forward(step, h_T2F, x_tD);
    return swiglu_fwd(step.stream, {.a_TF = a_TF, .h_T2F = h_T2F});
  }
  gated_up(step.stream, {.h_T2F = saved.h_T2F.rows(0, a_TF.dim(0)),
                         .a_TF = a_TF,
                         .x_TD = gate_up_.linear().x(step, gate_up_.gather(step, x_tD)),
                         .w_2FD = gate_up_.linear().w(step),
                         .fused = fusion_,
                         .few_rows = is_inference_});
}

void Mlp::output(Step& step, Tensor y_tD, const Saved& saved) const {
  const int64_t T = y_tD.dim(0) * tp_;
  StackScope scope(step.stack);
  const Tensor a_TF = step.alloc({T, F_}, dtype_);
  swiglu_fwd(step.stream, {.a_TF = a_TF, .h_T2F = saved.h_T2F.rows(0, T)});
  down_.forward(step, y_tD, a_TF);
}

void Mlp::recompute(Step& step, Tensor x_tD, Saved& saved) const {
  saved.x_tD = x_tD;
  saved.h_T2F.recompute(step.stack, [&] {
    StackScope scope(step.stack);
    up(step, step.alloc({x_tD.dim(0) * tp_, F_}, dtype_), x_tD, saved);
  });
}

void Mlp::backward_input(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved, bool accumulate_dx) const {
  backward_hidden(step, dy_tD, saved);
  backward_x(step, dx_tD, saved, accumulate_dx);
}

void Mlp::backward_hidden(Step& step, Tensor dy_tD, Saved& saved) const {
  const int64_t T = dy_tD.dim(0) * tp_;
  saved.dy_TD.hold(step.stream, down_.gather(step, dy_tD));
  saved.dh_T2F.open(step.stack);
  saved.a_TF.open(step.stack);
  StackScope scope(step.stack);
  const Tensor da_TF = step.alloc({T, F_}, dtype_), h_T2F = saved.h_T2F.for_backward(step, T, {});
  if (down_.linear().has_adapter()) {
    down_.backward_input(step, da_TF, saved.dy_TD);
    swiglu_bwd(step.stream, {.dh_T2F = saved.dh_T2F, .a_TF = saved.a_TF, .da_TF = da_TF, .h_T2F = h_T2F});
  } else {
    d_gated_down(step.stream, {.dh_T2F = saved.dh_T2F,
                               .a_TF = saved.a_TF,
                               .da_TF = da_TF,
                               .dy_TD = down_.linear().dy(step, saved.dy_TD),
                               .w_DF = down_.linear().w_for_dx(step),
                               .h_T2F = h_T2F,
                               .fused = fusion_});
  }
}

void Mlp::backward_x(Step& step, Tensor dx_tD, const Saved& saved, bool accumulate_dx) const {
  gate_up_.backward_input(step, dx_tD, saved.dh_T2F, accumulate_dx);
}

void Mlp::backward_weight(Step& step, const Saved& saved) const {
  StackScope scope(step.stack);
  RowBlocks::Gathering x = gate_up_.start_gather(step, saved.x_tD);
  down_.backward_weight(step, saved.dy_TD, saved.a_TF);
  gate_up_.backward_weight(step, saved.dh_T2F, std::move(x));
}

void Mlp::backward(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved) const {
  backward_hidden(step, dy_tD, saved);
  StackScope scope(step.stack);
  RowsInFlight sum = gate_up_.start_backward_input(step, dx_tD, saved.dh_T2F);
  backward_weight(step, saved);
  sum.wait();
}

}  // namespace moebius
