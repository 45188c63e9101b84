#include "model/layers/mtp.h"

#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

std::string name_of_part(int64_t layer, const char* part) { return fmt::format("model.layers.{}.{}", layer, part); }

ParamSpec projection(const LayerContext& c, int64_t layer) {
  return {.name = name_of_part(layer, "eh_proj.weight"),
          .shape = {c.model.hidden_size, 2 * c.model.hidden_size},
          .dtype = c.dtype,
          .init_std = c.init_std(),
          .grad_axis = Axis::tp_cp_dp};
}

Norm make_norm(const LayerContext& c, int64_t layer, const char* part) {
  return Norm(c.params, name_of_part(layer, part), c.model.hidden_size, c.dtype, c.norm_eps());
}

}  // namespace

Mtp::Mtp(const LayerContext& c, int64_t depth)
    : depth_(depth),
      layer_(c.model.num_layers + depth - 1),
      D_(c.model.hidden_size),
      rows_(c.stream_rows()),
      dtype_(c.dtype),
      enorm_(make_norm(c, layer_, "enorm.weight")),
      hnorm_(make_norm(c, layer_, "hnorm.weight")),
      eh_proj_(c.params, projection(c, layer_)),
      block_(c, layer_),
      norm_(make_norm(c, layer_, "shared_head.norm.weight")) {}

void Mtp::declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const {
  enorm_.declare_saved(plan, prefix + ".enorm", rows_, saved.enorm);
  hnorm_.declare_saved(plan, prefix + ".hnorm", rows_, saved.hnorm);
  saved.eh_TD2.declare(plan, prefix + ".eh", {rows_, 2 * D_}, dtype_, &RecomputeSpec::norm);
  block_.declare_saved(plan, prefix, saved.block);
  norm_.declare_saved(plan, prefix + ".norm", rows_, saved.norm);
  plan.declare(saved.dh_TD, prefix + ".dh", {rows_, D_}, dtype_, Life::saved);
  saved.deh_output_TD.declare(plan, prefix + ".deh_output", {rows_, D_}, dtype_);
}

void Mtp::join(Step& step, Tensor eh_TD2, Tensor e_TD, Tensor h_TD) const {
  copy_columns(step.stream, {.to_TA = eh_TD2, .from_TB = e_TD, .count = D_});
  copy_columns(step.stream, {.to_TA = eh_TD2, .from_TB = h_TD, .to_first = D_, .count = D_});
}

void Mtp::forward(Step& step, const Embedding& embedding, Tensor h_TD, Tensor before_TD, Saved& saved) const {
  const Shape TD{rows_, D_};
  StackScope scope(step.stack);
  saved.eh_TD2.open(step.stack);
  Residual residual{.delta_TD = step.alloc(TD, dtype_), .buffer_TD = step.alloc(TD, dtype_)};
  {
    StackScope inputs(step.stack);
    const Tensor x_TD = residual.delta_TD, e_TD = step.alloc(TD, dtype_), hn_TD = step.alloc(TD, dtype_);
    embedding.forward(step, x_TD, token(step));
    enorm_.forward(step, e_TD, x_TD, {}, saved.enorm);
    hnorm_.forward(step, hn_TD, before_TD, {}, saved.hnorm);
    join(step, saved.eh_TD2, e_TD, hn_TD);
  }
  eh_proj_.forward(step, residual.delta_TD, saved.eh_TD2);
  block_.forward(step, residual, saved.block);
  norm_.forward(step, h_TD, residual.delta_TD, residual.base_TD, saved.norm);
}

void Mtp::recompute(Step& step, Saved& saved) const {
  saved.eh_TD2.recompute(step.stack, [&] {
    StackScope outputs(step.stack);
    const Tensor e_TD = step.alloc({rows_, D_}, dtype_), hn_TD = step.alloc({rows_, D_}, dtype_);
    enorm_.recompute(step, e_TD, saved.enorm);
    hnorm_.recompute(step, hn_TD, saved.hnorm);
    join(step, saved.eh_TD2, e_TD, hn_TD);
  });
}

void Mtp::backward(Step& step, const Embedding& embedding, Tensor dbefore_TD, Saved& saved) const {
  run_backward(step, embedding, dbefore_TD, saved, /*with_weights=*/true);
}

void Mtp::backward_input(Step& step, const Embedding& embedding, Tensor dbefore_TD, Saved& saved) const {
  run_backward(step, embedding, dbefore_TD, saved, /*with_weights=*/false);
}

void Mtp::run_backward(Step& step, const Embedding& embedding, Tensor dbefore_TD, Saved& saved,
                       bool with_weights) const {
  const Shape TD{rows_, D_};
  StackScope scope(step.stack);
  const Tensor dstream_TD = step.alloc(TD, dtype_);
  fill_zero(step.stream, dstream_TD);
  norm_.backward(step, dstream_TD, saved.dh_TD, saved.norm);
  if (with_weights)
    block_.backward(step, dstream_TD, saved.block);
  else
    block_.backward_input(step, dstream_TD, saved.block);

  const Tensor deh_TD2 = step.alloc({rows_, 2 * D_}, dtype_), dn_TD = step.alloc(TD, dtype_);
  saved.deh_output_TD.hold(step.stream, dstream_TD);
  eh_proj_.backward_input(step, deh_TD2, dstream_TD);
  if (with_weights) {
    recompute(step, saved);
    eh_proj_.backward_weight(step, saved.deh_output_TD, saved.eh_TD2);
  }

  copy_columns(step.stream, {.to_TA = dn_TD, .from_TB = deh_TD2, .from_first = D_, .count = D_});
  hnorm_.backward(step, dbefore_TD, dn_TD, saved.hnorm);
  copy_columns(step.stream, {.to_TA = dn_TD, .from_TB = deh_TD2, .count = D_});
  fill_zero(step.stream, dstream_TD);
  enorm_.backward(step, dstream_TD, dn_TD, saved.enorm);
  embedding.backward_weight(step, dstream_TD, token(step));
}

void Mtp::backward_weight(Step& step, Saved& saved) const {
  StackScope scope(step.stack);
  block_.backward_weight(step, saved.block);
  recompute(step, saved);
  eh_proj_.backward_weight(step, saved.deh_output_TD, saved.eh_TD2);
}

}  // namespace moebius
