// A tiny model with all features, and random batches for it, which the equivalence tests train.
#pragma once

#include <cmath>
#include <memory>
#include <vector>

#include "core/rng.h"
#include "engine/engine_testing.h"

namespace moebius::testing {

inline ModelSpec tiny_model() {
  ModelSpec m;
  m.vocab_size = 61;
  m.hidden_size = 24;
  m.num_layers = 3;
  m.num_heads = 4;
  m.num_kv_heads = 2;
  m.head_dim = 8;
  m.intermediate_size = 40;
  m.max_position_embeddings = 64;
  m.qk_norm = QkNorm::per_head;
  m.initializer_range = 0.3;
  m.moe_layers = {false, true, true};
  m.num_experts = 6;
  m.top_k = 2;
  m.moe_intermediate_size = 16;
  m.shared_intermediate_size = 20;
  m.shared_expert_gate = true;
  m.norm_topk_prob = true;
  m.check();
  return m;
}

inline ModelSpec latent_model() {
  ModelSpec m = tiny_model();
  m.qk_norm = QkNorm::none;
  m.num_kv_heads = m.num_heads;
  m.q_lora_rank = 10;
  m.kv_lora_rank = 12;
  m.head_dim = 6 + 4;
  m.qk_rope_head_dim = 4;
  m.v_head_dim = 7;
  m.rope_interleave = true;
  m.check();
  return m;
}

// Two modules of multi-token prediction, each with experts.
inline ModelSpec mtp_model(ModelSpec m = tiny_model()) {
  m.num_mtp_layers = 2;
  m.check();
  return m;
}

inline EngineSpec tiny_engine(const ModelSpec& model, int64_t batch, DType compute, int threads) {
  OptimizerSpec optimizer;
  optimizer.lr = 1e-2;
  return {.model = model,
          .balance = {.aux = true, .seq_aux = true, .aux_coeff = 0.05, .z_coeff = 0.01},
          .precision = {.compute = compute},
          .use = ModelUse::training,
          .shape = {.batch = batch, .seq = 9, .max_segments = batch * 9, .num_mtp = model.num_mtp_layers},
          .optimizer = optimizer,
          .threads = threads,
          .seed = 7};
}

inline constexpr double kMtpCoeff = 0.2;  // of each depth of multi-token prediction

// Sequence `first + row` of the global batch of a step goes to each row: a function of the
// global index alone.
inline void fill_random(MicroBatch& b, const ModelSpec& model, int64_t step, int64_t first, int64_t global_batch) {
  const int64_t S = b.shape.seq;
  for (int64_t row = 0; row < b.shape.batch; ++row) {
    const Rng rng(11, RngSite::bench, static_cast<uint64_t>(step), static_cast<uint32_t>(first + row));
    for (int64_t i = 0; i < S; ++i) {
      const int64_t t = row * S + i;
      b.token_T.ptr<int32_t>()[t] = static_cast<int32_t>(rng.below(i, model.vocab_size));
      for (int64_t k = 0; k <= std::ssize(b.mtp_targets); ++k) {
        b.targets(k).target_T.ptr<int32_t>()[t] = static_cast<int32_t>(rng.below(i + k + 1, model.vocab_size));
        b.targets(k).weight_T.ptr<float>()[t] = i + k < S ? 1.0f : 0.0f;
      }
      b.pos_T.ptr<int32_t>()[t] = static_cast<int32_t>(i);
      b.doc_start_T.ptr<int32_t>()[t] = 0;
      b.segment_T.ptr<int32_t>()[t] = static_cast<int32_t>(row);
    }
  }
  b.scalars.set_loss_scale(0, 1.0 / static_cast<double>(global_batch * S));
  for (int64_t k = 1; k <= std::ssize(b.mtp_targets); ++k)
    b.scalars.set_loss_scale(k, 1.0 / static_cast<double>(global_batch * (S - k)), kMtpCoeff);
  b.scalars.total_tokens = static_cast<double>(global_batch * S);
  b.scalars.set_step(step);
  b.scalars.set_first_token(first * S);
  b.training = true;
}

// Returns the objective of the micro-batches since the last end_of_step.
inline double objective(Engine& engine) {
  double sum = engine.loss();
  sum += kMtpCoeff * static_cast<double>(engine.batch().mtp_targets.size()) * engine.mtp_loss();
  for (const auto& layer : engine.model().moe_layers()) {
    const RouterMetrics m = layer.moe->router().metrics();
    sum += *m.aux_1.ptr<double>() +
           engine.spec().balance.z_coeff * *m.z_1.ptr<double>() / engine.batch().scalars.total_tokens;
  }
  return sum;
}

inline void init_params(Engine& engine) {
  Stream s = engine.stream();
  engine.model().params().init(s, engine.spec().seed);
  if (engine.spec().precision.weights == PrecisionChoice::recipe) engine.gather_weights(s);
}

// Runs the micro-batches of one step and returns the objective. Gradients stay.
inline double run_micro_batches(Engine& engine, int64_t step, int64_t global_batch) {
  const int64_t B = engine.spec().shape.batch;
  for (int64_t first = 0; first < global_batch; first += B) {
    fill_random(engine.batch(), engine.spec().model, step, first, global_batch);
    engine.forward_backward();
  }
  return objective(engine);
}

// Returns the objectives of num_steps whole steps.
inline std::vector<double> train(Engine& engine, int64_t num_steps, int64_t global_batch) {
  std::vector<double> objectives;
  init_params(engine);
  for (int64_t step = 1; step <= num_steps; ++step) {
    objectives.push_back(run_micro_batches(engine, step, global_batch));
    EngineTestAccess::optimizer_step(engine, step, 1e-2);
    engine.end_of_step();
  }
  return objectives;
}

// Returns the elements of every parameter (master or gradient), one after the other.
inline std::vector<float> all_elements(Engine& engine, bool gradients) {
  std::vector<float> all;
  for (const Param& p : engine.model().params().all()) {
    if (!p.has_grad) continue;
    if (!gradients && p.has_remainder) {
      Stream s = engine.stream();
      all.resize(all.size() + static_cast<size_t>(p.owned.count));
      read_masters(s, p, 0, std::span(all).last(static_cast<size_t>(p.owned.count)));
      continue;
    }
    const Tensor& t = gradients ? p.dw : p.master();
    all.insert(all.end(), t.ptr<float>(), t.ptr<float>() + t.numel());
  }
  return all;
}

inline double relative_l2(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::sqrt(difference / norm);
}

}  // namespace moebius::testing
