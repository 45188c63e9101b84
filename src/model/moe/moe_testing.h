// A Moe on the ranks of a mesh, over threads, for comparison with the same layer on one rank. The values of tokens and
// parameters are drawn by their global names alone, so every rank can make those that it needs.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <mutex>

#include "comm/transport/threads.h"
#include "core/rng.h"
#include "model/attention/token_runs.h"
#include "model/moe/direct_window.h"
#include "model/moe/dispatcher.h"
#include "model/moe/expert_rows.h"
#include "model/moe/moe.h"
#include "model/quantize_stats.h"

namespace moebius::testing {

struct MoeCase {
  MeshShape mesh;
  DispatcherKind dispatcher = DispatcherKind::allgather;
  BalanceSpec balance;
  DType dtype = DType::f32;
  int64_t batch = 2, seq = 8;  // of a micro-batch on one rank of cp = 1
  bool shared = false, shared_gate = true;
  // Draws of the gate are times this: the larger, the more unequal the experts.
  double gate_std = 0.5;
  PrecisionSpec precision = {};
  double expert_rows = 0;  // the budget of rows, over the even share
  RecomputeSpec recompute = {};
  LoraSpec lora = {};
  int64_t hidden = 20;  // columns of an expert between its products
  ExpertOverlap overlap = ExpertOverlap::none;
  int64_t expert_chunk = 0;  // as LayerContext's
  bool splits_backward = false, first_of_step = false;
  int64_t num_experts = 8;
  bool counts = false;        // log.precision
  bool equal_tokens = false;  // all tokens have the same x and dy
  int threads = 1;            // of each rank
  // Statistics are those of parameters of layers.
  std::string prefix() const { return counts ? "model.layers.0.mlp" : "mlp"; }
};

inline ModelSpec moe_model(const MoeCase& c) {
  ModelSpec m;
  m.hidden_size = 12;
  m.moe_intermediate_size = c.hidden;
  m.num_experts = c.num_experts;
  m.top_k = 3;
  m.norm_topk_prob = true;
  m.expert_bias = c.balance.bias;
  if (c.shared) m.shared_intermediate_size = c.hidden == 20 ? 8 : c.hidden, m.shared_expert_gate = c.shared_gate;
  return m;
}

inline double draw(const std::string& name, int64_t i) {
  return Rng(5, RngSite::bench, 0, key_of(name.c_str())).normal(static_cast<uint64_t>(i));
}

// Calls fn(element here, element of the global tensor) for each element that a part holds.
template <class F>
void for_each_element(const ParamPart& part, F&& fn) {
  const Shape local = part.local_shape();
  const int64_t columns = part.shape.rank() == 1 ? 1 : local[1],
                all_columns = part.shape.rank() == 1 ? 1 : part.shape[1];
  const int64_t row0 = part.shard.dim == 0 ? part.shard.begin : 0, column0 = part.shard.dim == 1 ? part.shard.begin : 0;
  for (int64_t i = 0; i < local.numel(); ++i)
    fn(part.offset + i, (row0 + i / columns) * all_columns + column0 + i % columns);
}

inline double value(const Tensor& t, int64_t i) {
  switch (t.dtype) {
    case DType::f32:
      return t.ptr<float>()[i];
    case DType::f64:
      return t.ptr<double>()[i];
    case DType::i32:
      return t.ptr<int32_t>()[i];
    case DType::i64:
      return static_cast<double>(t.ptr<int64_t>()[i]);
    default:
      return to_f32(t.ptr<bf16>()[i]);
  }
}
inline void set_value(const Tensor& t, int64_t i, double x) {
  if (t.dtype == DType::f32)
    t.ptr<float>()[i] = static_cast<float>(x);
  else
    t.ptr<bf16>()[i] = to_bf16(static_cast<float>(x));
}

// All results of a step, indexed by the number of the step with a global name, and by element: "step 1 y",
// "step 1 dx", "step 1 aux", "step 1 grad " with the name of a parameter, ...
using Outcome = std::map<std::string, std::vector<double>>;

// One rank's part of a training step of the layer. The rank computes the micro-batches of its own dp coordinate, or if
// it is the only rank, those of all dp coordinates.
class MoeRank {
 public:
  MoeRank(const MoeCase& c, Mesh& mesh)
      : c_(c),
        mesh_(mesh),
        shape_{.batch = c.batch, .seq = c.seq / mesh.shape().cp, .max_segments = 2 * c.batch},
        rows_(rows_between_projections(shape_, mesh.shape())),
        plan_(c.recompute),
        window_(make_window(c)),
        expert_rows_(make_expert_rows(moe_model(c), mesh,
                                      {.budget = c.expert_rows,
                                       .max_tokens = rows_,
                                       .dispatcher = c.dispatcher,
                                       .rows_factor = c.balance.rank_rows_factor,
                                       .dtype = c.dtype})),
        moe_(LayerContext{.params = params_,
                          .plan = plan_,
                          .model = moe_model(c),
                          .balance = c.balance,
                          .mesh = mesh,
                          .rope_table_Pd = Tensor{},
                          .precision = c.precision,
                          .dtype = c.dtype,
                          .shape = shape_,
                          .seed = 3,
                          .dispatcher = c.dispatcher,
                          .expert_overlap = c.overlap,
                          .window = window_.get(),
                          .expert_rows = expert_rows_.get(),
                          .expert_chunk = c.expert_chunk,
                          .quantize_stats = c.counts ? &stats_ : nullptr,
                          .lora = c.lora},
             c.prefix(), /*layer=*/1) {
    plan_.split_backward(c.splits_backward);
    if (expert_rows_) expert_rows_->declare(plan_);
    moe_.declare_saved(plan_, "moe", saved_);
    declare_micro_batch(plan_, shape_, batch_);
    for (Tensor* t : {&x_TD, &y_TD, &dx_TD, &dy_TD})
      plan_.declare(*t, "activation", {rows_, moe_model(c).hidden_size}, c.dtype, Life::saved);
    batch_.training = true;
    batch_.first_of_step = c.first_of_step;
    Stream null(DeviceKind::null, pool_);
    StepStack counted(DeviceKind::null, nullptr, 0);
    Step step{null, counted, batch_};
    pass(step);
    plan_.bind(DeviceKind::cpu, counted.high_water());
    moe_.router().init_state(s_);
    if (expert_rows_) expert_rows_->init_state(s_);
    for (const Param& p : params_.all()) {
      if (!p.spec.trainable) continue;
      for (const ParamPart& part : p.spec.parts) {
        const double std = part.name.ends_with("mlp.gate.weight") ? c.gate_std : 0.3;
        for_each_element(part,
                         [&](int64_t here, int64_t global) { set_value(p.w, here, std * draw(part.name, global)); });
      }
    }
  }

  // Runs a step of `num_dp` micro-batches, one for each dp rank. This rank computes those of the dp ranks
  // [first, last).
  void run(int step_number, int64_t first, int64_t last, int64_t num_dp) {
    prefix_ = fmt::format("step {} ", step_number);
    params_.zero_grads(s_);
    stats_.clear(s_);
    fill_segments();
    if (c_.counts) {
      params_.make_copies(s_);
      params_.hold_copies();
    }
    for (int64_t dp = first; dp < last; ++dp) run_batch(step_number, dp, num_dp);
    moe_.router().reduce_metrics(s_);
    keep_metrics();
    keep_gradients();
    for (const QuantizeStats::Layer& layer : stats_.layers()) keep("sums", layer.sums_5.view({1, 5}), 0, 0, 1);
    moe_.router().end_of_step(s_);
    count_spilled_rows();
    for (const Param& p : params_.all())
      if (!p.spec.trainable) keep("state " + p.spec.name, p.w.view({1, p.w.numel()}), 0, 0, 1);
  }

  static constexpr double kAbsent = -12345;  // an element of another rank
  const Outcome& outcome() const { return outcome_; }
  const Moe& moe() const { return moe_; }
  const ParamTable& params() const { return params_; }
  // Returns the rows of all steps that were recomputed; 0 without a budget.
  double spilled_rows() const { return spilled_rows_; }
  int64_t sent_to_experts() const { return group_of_experts(mesh_).sent_bytes(); }  // bytes of this rank

 private:
  std::unique_ptr<DirectWindow> make_window(const MoeCase& c) {
    const ModelSpec m = moe_model(c);
    const DirectSizes sizes{
        .max_tokens = rows_, .num_experts = m.num_experts, .top_k = m.top_k, .width = m.hidden_size, .dtype = c.dtype};
    return make_direct_window(plan_, mesh_, sizes, c.dispatcher, /*num_moe_layers=*/1);
  }
  void run_batch(int step_number, int64_t dp, int64_t num_dp) {
    const int64_t T = c_.batch * c_.seq, D = x_TD.dim(1);
    const std::vector<TokenRun> runs = token_runs(shape_, mesh_.shape(), mesh_.place());
    batch_.scalars.set_step(step_number);
    batch_.scalars.set_first_token(dp * T);
    batch_.scalars.total_tokens = static_cast<double>(num_dp * T);
    batch_.store_scalars();
    for_each_row(runs, dp, [&](int64_t row, int64_t token) {
      for (int64_t d = 0; d < D; ++d) {
        const int64_t i = c_.equal_tokens ? d : token * D + d;
        set_value(x_TD, row * D + d, draw("x" + prefix_, i));
        set_value(dy_TD, row * D + d, draw("dy" + prefix_, i));
      }
    });
    Step step{s_, plan_.stack(), batch_};
    pass(step);
    for_each_row(runs, dp, [&](int64_t row, int64_t token) {
      keep("y", y_TD, row, token, num_dp * T);
      keep("dx", dx_TD, row, token, num_dp * T);
      keep("topk", saved_.router.route.topk_TK, row, token, num_dp * T);
      keep("weight", saved_.router.route.weight_TK, row, token, num_dp * T);
    });
  }
  void count_spilled_rows() {
    if (!expert_rows_ || expert_rows_->counts_W3().empty()) return;
    expert_rows_->reduce_counts(s_);
    for (int64_t rank = 0; rank < mesh_.shape().world(); ++rank)
      spilled_rows_ += value(expert_rows_->counts_W3(), 3 * rank);
    expert_rows_->end_of_step(s_);
  }
  void keep_metrics() {
    const RouterMetrics m = moe_.router().metrics();
    const std::pair<const char*, Tensor> sums[] = {
        {"load", m.load_E}, {"dropped", m.dropped_1}, {"aux", m.aux_1}, {"z", m.z_1}, {"entropy", m.entropy_1}};
    for (const auto& [name, t] : sums) keep(name, t.view({1, t.numel()}), 0, 0, 1);
  }
  void keep_gradients() {
    for (const Param& p : params_.all()) {
      if (!p.has_grad) continue;
      mesh_.group(p.spec.grad_axis).all_reduce_sum(s_, p.dw);
      for (const ParamPart& part : p.spec.parts) {
        std::vector<double>& grad = outcome_[prefix_ + "grad " + part.name];
        grad.assign(part.shape.numel(), kAbsent);
        for_each_element(part, [&](int64_t here, int64_t global) { grad[global] = value(p.dw, here); });
      }
    }
  }
  template <class F>
  void for_each_row(const std::vector<TokenRun>& runs, int64_t dp, F&& fn) {
    for (const TokenRun& run : runs) {
      for (int64_t i = 0; i < run.count; ++i) fn(run.row + i, dp * c_.batch * c_.seq + run.token + i);
    }
  }
  // Sets the segments of all rows of this cp rank. Each sequence has two documents, and the second one begins at
  // another position in each sequence.
  void fill_segments() {
    for (const TokenRun& run : token_runs(shape_, {.cp = mesh_.shape().cp}, {.cp = mesh_.place().cp})) {
      for (int64_t i = 0; i < run.count; ++i) {
        const int64_t b = (run.token + i) / c_.seq, at = (run.token + i) % c_.seq;
        batch_.segment_T.ptr<int32_t>()[run.row + i] = static_cast<int32_t>(2 * b + (at > (2 + 3 * b) % c_.seq));
      }
    }
  }
  void keep(const std::string& name, const Tensor& t, int64_t row, int64_t at, int64_t rows) {
    std::vector<double>& all = outcome_[prefix_ + name];
    const int64_t n = t.numel() / t.dim(0);
    if (all.empty()) all.assign(rows * n, kAbsent);
    for (int64_t i = 0; i < n; ++i) all[at * n + i] = value(t, row * n + i);
  }
  // Other layers use the scratch between the passes: no row of the forward pass may be read from there. All bits set
  // are a NaN.
  void poison_scratch(const Stream& s) const {
    if (!expert_rows_ || s.device() == DeviceKind::null) return;
    const ExpertRows::Scratch& scratch = expert_rows_->scratch();
    for (const Tensor* t : {&scratch.h, &scratch.dh, &scratch.act, &scratch.y, &scratch.low, &scratch.tokens})
      if (t->data) std::memset(t->data, 0xff, static_cast<size_t>(t->num_bytes()));
  }
  void pass(Step& step) {
    StackScope scope(step.stack);
    moe_.forward(step, y_TD, x_TD, saved_);
    poison_scratch(step.stream);
    MicroBatch batch = step.batch;
    batch.backward = true;
    Step backward{step.stream, step.stack, batch};
    moe_.recompute(backward, x_TD, saved_);
    if (c_.overlap != ExpertOverlap::none) return moe_.backward(backward, dx_TD, dy_TD, saved_);
    moe_.backward_input(backward, dx_TD, dy_TD, saved_);
    moe_.backward_weight(backward, saved_);
  }

  MoeCase c_;
  Mesh& mesh_;
  ThreadPool pool_{c_.threads};
  Stream s_{DeviceKind::cpu, pool_};
  BatchShape shape_;
  int64_t rows_;
  MemoryPlan plan_{c_.recompute};
  ParamTable params_{plan_, ModelUse::training};
  QuantizeStats stats_{plan_};
  MicroBatch batch_;
  std::unique_ptr<DirectWindow> window_;
  std::unique_ptr<ExpertRows> expert_rows_;
  Moe moe_;
  Moe::Saved saved_;
  Tensor x_TD, y_TD, dx_TD, dy_TD;
  std::string prefix_;
  Outcome outcome_;
  double spilled_rows_ = 0;
};

// Two steps on one rank.
inline Outcome on_one_rank(MoeCase c) {
  const int64_t dp = c.mesh.dp;
  c.mesh = {};
  Mesh mesh(MeshShape{});
  MoeRank rank(c, mesh);
  for (const int step : {1, 2}) rank.run(step, 0, dp, dp);
  return rank.outcome();
}

// Two steps on a rank of c.mesh; then body(MoeRank). All ranks call it together.
template <class Body>
void on_moe_rank(const MoeCase& c, Transport& transport, Body&& body) {
  Mesh mesh(c.mesh, transport);
  MoeRank rank(c, mesh);
  for (const int step : {1, 2}) rank.run(step, mesh.place().dp, mesh.place().dp + 1, c.mesh.dp);
  body(rank);
}

// The same on all ranks, over threads; body(MoeRank, its number) on each of them, one at a time.
template <class Body>
void on_moe_ranks(const MoeCase& c, Body&& body) {
  std::mutex one_at_a_time;
  run_threads(static_cast<int>(c.mesh.world()), {.timeout_s = 60}, [&](Transport& transport) {
    on_moe_rank(c, transport, [&](const MoeRank& rank) {
      std::lock_guard lock(one_at_a_time);
      body(rank, transport.rank());
    });
  });
}

// The same; body(outcome of a rank, its number).
template <class Body>
void on_ranks(const MoeCase& c, Body&& body) {
  on_moe_ranks(c, [&](const MoeRank& rank, int number) { body(rank.outcome(), number); });
}

}  // namespace moebius::testing
