// The engines that tests of a GPU train: each with what decides which kernels run. And a step
// on random tokens.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <ostream>
#include <string>
#include <vector>

#include "engine/engine_testing.h"
#include "tests/equivalence/tiny.h"

namespace moebius {

using testing::fill_random;
using testing::latent_model;
using testing::mtp_model;
using testing::tiny_engine;
using testing::tiny_model;

inline constexpr int64_t kMicroBatches = 2, kBatch = 3;

// A run computes in this dtype, with kernels of this choice.
struct Way {
  DType compute;
  KernelChoice kernels = KernelChoice::automatic;
};
inline constexpr Way kWays[] = {{DType::f32}, {DType::bf16}, {DType::bf16, KernelChoice::portable}};

inline std::string name_of(const Way& way) { return fmt::format("{}_{}", name_of(way.compute), name_of(way.kernels)); }
inline void PrintTo(const Way& way, std::ostream* out) { *out << name_of(way); }

inline EngineSpec spec_on(DeviceKind device, DType compute, bool graph = true) {
  EngineSpec spec = tiny_engine(tiny_model(), kBatch, compute, 2);
  spec.num_micro_batches = kMicroBatches;
  spec.device = device;
  spec.target = device;
  spec.graph = graph;
  return spec;
}

// A model whose sizes the specialized kernels support: bf16 tiles, fused attention.
inline EngineSpec wide_spec_on(DeviceKind device, DType compute, bool graph = true) {
  EngineSpec spec = spec_on(device, compute, graph);
  ModelSpec& m = spec.model;
  m.vocab_size = 128;
  m.hidden_size = 128;
  m.head_dim = 64;
  m.moe_intermediate_size = 128;
  m.shared_intermediate_size = 64;
  m.initializer_range = 0.1;
  spec.shape = {.batch = kBatch, .seq = 128, .max_segments = kBatch, .documents = false};
  return spec;
}

// Quantised products, in widths that a GPU's kernels of FP8 take.
inline EngineSpec quantised_on(DeviceKind device, PrecisionRecipe recipe, bool graph = true) {
  EngineSpec spec = wide_spec_on(device, DType::bf16, graph);
  spec.model.intermediate_size = spec.model.shared_intermediate_size = 128;
  spec.precision.recipe = recipe;
  return spec;
}

// Two documents in each sequence. The second one begins after a third of it, so neither is a
// multiple of a tile.
inline EngineSpec documents_on(DeviceKind device, DType compute, bool graph = true) {
  EngineSpec spec = wide_spec_on(device, compute, graph);
  spec.shape.documents = true;
  spec.shape.max_segments = 2 * kBatch;
  return spec;
}

// A step hands data to the next one on the device: the bias and the last load. Experts
// drop pairs too.
inline EngineSpec balanced_on(DeviceKind device, DType compute, bool graph = true) {
  EngineSpec spec = wide_spec_on(device, compute, graph);
  spec.model.expert_bias = true;
  spec.model.score = ScoreFunction::sigmoid;
  spec.balance.bias = spec.balance.global_aux = true;
  spec.balance.capacity_factor = 1.0;
  return spec;
}

inline EngineSpec sinkhorn_on(DeviceKind device, DType compute, bool graph = true) {
  EngineSpec spec = wide_spec_on(device, compute, graph);
  spec.balance = {.sinkhorn = true};
  return spec;
}

// Random draws that differ in each step and micro-batch.
inline EngineSpec jittered_on(DeviceKind device, DType compute, bool graph = true) {
  EngineSpec spec = wide_spec_on(device, compute, graph);
  spec.balance.jitter = 0.1;
  return spec;
}

// More micro-batches than eager launches before the capture.
inline EngineSpec many_on(DeviceKind device, DType compute, bool graph = true) {
  EngineSpec spec = spec_on(device, compute, graph);
  spec.num_micro_batches = 5;
  return spec;
}

// q and k are normed over all heads, as in OLMoE.
inline EngineSpec whole_norm_on(DeviceKind device, DType compute, bool graph = true) {
  EngineSpec spec = wide_spec_on(device, compute, graph);
  spec.model.qk_norm = QkNorm::whole;
  return spec;
}

// A loss without the gradient of its weights, an embedding whose gradient goes nowhere, and
// a frozen router.
inline EngineSpec frozen_on(DeviceKind device, DType compute, bool graph = true) {
  EngineSpec spec = wide_spec_on(device, compute, graph);
  spec.freeze = {"lm_head.*", "model.embed_tokens.weight", "*.mlp.gate.*", "model.layers.0.self_attn.*"};
  return spec;
}

// Everything that can be recomputed is recomputed, and the capture is in the first step.
inline EngineSpec recomputed_on(DeviceKind device, DType compute, bool graph = true) {
  EngineSpec spec = documents_on(device, compute, graph);
  spec.model.qk_norm = QkNorm::whole;
  spec.num_micro_batches = 5;
  for (const auto& [name, flag] : kRecomputeNames) spec.recompute.*flag = true;
  return spec;
}

// Latent attention, of odd widths, and of the widths of DeepSeek, for which the GPU's architecture
// has kernels.
inline EngineSpec latent_on(DeviceKind device, DType compute, bool graph = true) {
  EngineSpec spec = spec_on(device, compute, graph);
  spec.model = latent_model();
  return spec;
}
inline EngineSpec wide_latent_on(DeviceKind device, DType compute, bool graph = true) {
  EngineSpec spec = documents_on(device, compute, graph);
  ModelSpec& m = spec.model;
  m.qk_norm = QkNorm::none;
  m.num_heads = m.num_kv_heads = 2;
  m.kv_lora_rank = 64;
  m.head_dim = 192;
  m.qk_rope_head_dim = 64;
  m.v_head_dim = 128;
  m.check();
  return spec;
}

// Two depths of multi-token prediction.
inline EngineSpec mtp_on(DeviceKind device, DType compute, bool graph = true) {
  EngineSpec spec = wide_spec_on(device, compute, graph);
  spec.model = mtp_model(spec.model);
  spec.shape.num_mtp = spec.model.num_mtp_layers;
  return spec;
}

// Returns the features of gpt_oss: sinks, biases of every product, the clamped activation, and a window of
// some layers that is no multiple of a tile.
inline EngineSpec gpt_oss_on(DeviceKind device, DType compute, bool graph = true) {
  EngineSpec spec = documents_on(device, compute, graph);
  ModelSpec& m = spec.model;
  m.qk_norm = QkNorm::none;
  m.attention_sinks = m.qkv_bias = m.o_bias = m.router_bias = m.expert_proj_bias = true;
  m.sliding_window = 50;
  m.sliding_layers = {true, false, true};
  m.moe_layers = {true, true, true};
  m.shared_intermediate_size = 0;
  m.shared_expert_gate = false;
  m.swiglu_limit = 1.5;
  m.check();
  return spec;
}

// Adapters everywhere, with dropout.
inline EngineSpec adapted_on(DeviceKind device, DType compute, bool graph = true) {
  EngineSpec spec = wide_spec_on(device, compute, graph);
  spec.lora = {.rank = 8, .alpha = 64, .dropout = 0.2, .targets = {"*"}};
  return spec;
}

inline constexpr auto kSpecs = {spec_on,     wide_spec_on,   documents_on,  balanced_on, sinkhorn_on,
                                jittered_on, many_on,        whole_norm_on, frozen_on,   recomputed_on,
                                latent_on,   wide_latent_on, mtp_on,        gpt_oss_on,  adapted_on};

inline void split_documents(MicroBatch& b) {
  const int64_t S = b.shape.seq, cut = S / 3;
  for (int64_t row = 0; row < b.shape.batch; ++row) {
    for (int64_t i = 0; i < S; ++i) {
      const int64_t t = row * S + i;
      b.pos_T.ptr<int32_t>()[t] = static_cast<int32_t>(i < cut ? i : i - cut);
      b.doc_start_T.ptr<int32_t>()[t] = static_cast<int32_t>(i < cut ? 0 : cut);
      b.segment_T.ptr<int32_t>()[t] = static_cast<int32_t>(2 * row + (i < cut ? 0 : 1));
    }
  }
}

inline void fill(MicroBatch& batch, const EngineSpec& spec, int64_t step, int64_t m) {
  fill_random(batch, spec.model, step, m * kBatch, spec.num_micro_batches * kBatch);
  if (spec.shape.documents) split_documents(batch);
}

class RandomBatches final : public BatchSource {
 public:
  explicit RandomBatches(const EngineSpec& spec) : spec_(spec) {}
  void fill(MicroBatch& batch, int64_t m) override { moebius::fill(batch, spec_, batch.scalars.step(), m); }

 private:
  const EngineSpec& spec_;
};

inline void fill_step(Engine& engine, int64_t step) {
  for (int64_t m = 0; m < engine.spec().num_micro_batches; ++m) fill(engine.batch(m), engine.spec(), step, m);
}

inline std::vector<double> train(Engine& engine, int64_t num_steps, int64_t first_step = 1) {
  std::vector<double> losses;
  for (int64_t step = first_step; step < first_step + num_steps; ++step) {
    fill_step(engine, step);
    engine.step(step, 1e-4 * static_cast<double>(step));
    losses.push_back(engine.loss());
    engine.end_of_step();
  }
  return losses;
}

// Does the same, pass by pass.
inline std::vector<double> train_by_passes(Engine& engine, int64_t num_steps) {
  std::vector<double> losses;
  for (int64_t step = 1; step <= num_steps; ++step) {
    fill_step(engine, step);
    for (int64_t m = 0; m < engine.spec().num_micro_batches; ++m) {
      engine.batch(m).scalars.set_step(step);
      engine.forward_backward(m);
    }
    EngineTestAccess::optimizer_step(engine, step, 1e-4 * static_cast<double>(step));
    losses.push_back(engine.loss());
    engine.end_of_step();
  }
  return losses;
}

inline Engine& initialised(Engine& engine) {
  Stream s = engine.stream();
  engine.model().params().init(s, 5);
  if (engine.spec().precision.weights == PrecisionChoice::recipe) engine.gather_weights(s);
  return engine;
}

inline std::vector<std::byte> masters(Engine& engine) {
  Stream s = engine.stream();
  std::vector<std::byte> all;
  for (const Param& p : engine.model().params().all()) {
    std::vector<std::byte> bytes(p.master().num_bytes());
    copy_to_host(s, bytes.data(), p.master().data, p.master().num_bytes());
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

}  // namespace moebius
