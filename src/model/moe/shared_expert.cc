#include "model/moe/shared_expert.h"

#include <algorithm>

#include "model/layers/row_chunks.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {

SharedExpert::SharedExpert(const LayerContext& c, const std::string& prefix)
    : t_(c.stream_rows()),
      D_(c.model.hidden_size),
      chunk_(row_chunk(c)),
      dtype_(c.dtype),
      mlp_(chunk_ < t_ ? of_chunk(c, chunk_) : c, prefix + ".shared_experts", c.model.shared_intermediate_size) {
  MOEBIUS_ASSERT(chunk_ == 0 || t_ % chunk_ == 0);
  if (!c.model.shared_expert_gate) return;
  gate_.emplace(c.params, ParamSpec{.name = prefix + ".shared_expert_gate.weight",
                                    .shape = {1, D_},
                                    .dtype = dtype_,
                                    .init_std = c.init_std(),
                                    .grad_axis = Axis::tp_cp_dp});
}

void SharedExpert::declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const {
  constexpr auto kShared = &RecomputeSpec::shared_expert;
  saved.weights_follow = !plan.splits_backward();
  saved.chunks.resize(std::max<int64_t>(1, t_ / std::max<int64_t>(1, chunk_)));
  for (size_t i = 0; i < saved.chunks.size(); ++i)
    mlp_.declare_saved(plan, is_chunked() ? fmt::format("{}.shared.chunk{}", prefix, i) : prefix + ".shared",
                       saved.chunks[i], kShared);
  if (!gate_) return;
  saved.mlp_y_tD.declare(plan, prefix + ".shared_y", {t_, D_}, dtype_, kShared);
  plan.declare(saved.gate_t, prefix + ".shared_gate", {t_}, DType::f32, Life::saved);
  saved.dgate_t1.declare(plan, prefix + ".dshared_gate", {t_, 1}, dtype_);
}

Tensor SharedExpert::open(Step& step, Tensor x_tD, Saved& saved) const {
  if (!gate_) return step.alloc(x_tD.shape, dtype_);
  saved.mlp_y_tD.open(step.stack);
  return saved.mlp_y_tD.rows(0, x_tD.dim(0));
}

void SharedExpert::mlp(Step& step, Tensor mlp_y_tD, Tensor x_tD, Saved& saved) const {
  const int64_t t = x_tD.dim(0);
  saved.x_tD = x_tD;
  if (!is_chunked()) return mlp_.forward(step, mlp_y_tD, x_tD, saved.chunks[0]);
  for (int64_t i = 0; i * chunk_ < t; ++i) {
    const int64_t begin = i * chunk_, end = std::min(t, begin + chunk_);
    ChunkStep of_chunk(step, begin);
    mlp_.forward(of_chunk.step, mlp_y_tD.rows(begin, end), x_tD.rows(begin, end), saved.chunks[i]);
  }
}

void SharedExpert::add_to(Step& step, Tensor y_tD, Tensor mlp_y_tD, Tensor x_tD, const Saved& saved) const {
  if (!gate_) return add(step.stream, y_tD, mlp_y_tD);
  const int64_t t = x_tD.dim(0);
  const Tensor gate_t = saved.gate_t.rows(0, t);
  gate_->forward(step, gate_t.view({t, 1}), x_tD);
  gated_add_fwd(step.stream, {.y_TD = y_tD, .x_TD = mlp_y_tD, .gate_T = gate_t});
}

void SharedExpert::recompute(Step& step, Tensor x_tD, Saved& saved) const {
  saved.x_tD = x_tD;
  if (is_chunked()) {  // each chunk is recomputed right before its backward pass
    for (int64_t i = 0; i * chunk_ < x_tD.dim(0); ++i)
      saved.chunks[i].x_tD = x_tD.rows(i * chunk_, std::min(x_tD.dim(0), (i + 1) * chunk_));
    return;
  }
  mlp_.recompute(step, x_tD, saved.chunks[0]);
  saved.mlp_y_tD.recompute(step.stack, [&] { mlp_.output(step, saved.mlp_y_tD, saved.chunks[0]); });
}

Tensor SharedExpert::through_gate(Step& step, Tensor dy_tD, Tensor mlp_y_tD, int64_t begin, Saved& saved) const {
  const int64_t t = dy_tD.dim(0);
  const Tensor dmlp_tD = step.alloc({t, D_}, dtype_), dgate_t = step.alloc({t}, DType::f32);
  gated_add_bwd(step.stream, {.dx_TD = dmlp_tD,
                              .dgate_T = dgate_t,
                              .dy_TD = dy_tD,
                              .x_TD = mlp_y_tD,
                              .gate_T = saved.gate_t.rows(begin, begin + t)});
  copy(step.stream, saved.dgate_t1.rows(begin, begin + t), dgate_t.view({t, 1}));
  return dmlp_tD;
}

void SharedExpert::backward_hidden(Step& step, Tensor dy_tD, Saved& saved) const {
  if (!gate_) return mlp_.backward_hidden(step, dy_tD, saved.chunks[0]);
  saved.dgate_t1.open(step.stack);
  const Tensor dmlp_tD = through_gate(step, dy_tD, saved.mlp_y_tD.rows(0, dy_tD.dim(0)), 0, saved);
  mlp_.backward_hidden(step, dmlp_tD, saved.chunks[0]);
}

void SharedExpert::backward_x(Step& step, Tensor dx_tD, Saved& saved) const {
  mlp_.backward_x(step, dx_tD, saved.chunks[0], /*accumulate_dx=*/true);
  if (gate_) gate_->backward_input(step, dx_tD, saved.dgate_t1, /*accumulate=*/true);
}

void SharedExpert::backward_chunk(Step& step, Tensor dx_tD, Tensor dy_tD, int64_t i, Saved& saved) const {
  Mlp::Saved& chunk = saved.chunks[i];
  const int64_t t = dy_tD.dim(0), begin = i * chunk_;
  StackScope scope(step.stack);
  mlp_.recompute(step, chunk.x_tD, chunk);
  Tensor dmlp_tD = dy_tD;
  if (gate_) {
    Tensor mlp_y_tD;
    if (saved.mlp_y_tD.is_recomputed())
      mlp_.output(step, mlp_y_tD = step.alloc({t, D_}, dtype_), chunk);
    else
      mlp_y_tD = saved.mlp_y_tD.rows(begin, begin + t);
    dmlp_tD = through_gate(step, dy_tD, mlp_y_tD, begin, saved);
  }
  mlp_.backward_hidden(step, dmlp_tD, chunk);
  mlp_.backward_x(step, dx_tD, chunk, /*accumulate_dx=*/true);
  if (saved.weights_follow) mlp_.backward_weight(step, chunk);
}

void SharedExpert::backward_input(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved) const {
  if (!is_chunked()) {
    backward_hidden(step, dy_tD, saved);
    return backward_x(step, dx_tD, saved);
  }
  const int64_t t = dy_tD.dim(0);
  if (gate_) saved.dgate_t1.open(step.stack);
  for (int64_t i = 0; i * chunk_ < t; ++i) {
    const int64_t begin = i * chunk_, end = std::min(t, begin + chunk_);
    ChunkStep of_chunk(step, begin);
    backward_chunk(of_chunk.step, dx_tD.rows(begin, end), dy_tD.rows(begin, end), i, saved);
  }
  if (gate_) gate_->backward_input(step, dx_tD, saved.dgate_t1, /*accumulate=*/true);
}

void SharedExpert::backward_weight(Step& step, const Saved& saved) const {
  if (!is_chunked() || !saved.weights_follow) {
    for (size_t i = 0; i < saved.chunks.size(); ++i) {
      ChunkStep of_chunk(step, static_cast<int64_t>(i) * chunk_);
      mlp_.backward_weight(of_chunk.step, saved.chunks[i]);
    }
  }
  if (gate_) gate_->backward_weight(step, saved.dgate_t1, saved.x_tD);
}

std::vector<KeptTensor> SharedExpert::kept(const Saved& saved) {
  std::vector<KeptTensor> kept;
  for (const Mlp::Saved& chunk : saved.chunks) kept.push_back({"shared expert pre-activation", chunk.h_T2F.kept()});
  return kept;
}

}  // namespace moebius
