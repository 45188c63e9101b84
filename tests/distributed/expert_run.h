// Trains a small model with experts on ranks. On a GPU its sizes are such that each kernel of the architecture runs, in
// bf16 those of Hopper's own instructions.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "engine/engine_testing.h"
#include "tests/equivalence/tiny.h"
#include "train/metrics.h"

namespace moebius {

// Returns the sides of the matrices. On a CPU, drawing them takes most of a run.
inline int64_t expert_side(DeviceKind device) { return device == DeviceKind::cuda ? 128 : 64; }

// On a GPU the last ones are replayed.
inline int64_t num_expert_steps(DeviceKind device) { return device == DeviceKind::cuda ? 6 : 2; }

inline EngineSpec expert_spec(const MeshShape& mesh, DispatcherKind dispatcher, DeviceKind device, DType compute) {
  ModelSpec m = testing::tiny_model();
  const int64_t side = expert_side(device);
  m.vocab_size = m.hidden_size = side;
  m.head_dim = side / 2;
  m.num_experts = 8;
  m.moe_intermediate_size = side;
  m.shared_intermediate_size = side / 2;
  m.initializer_range = 0.1;
  m.expert_bias = true;
  m.score = ScoreFunction::sigmoid;
  m.check();
  EngineSpec spec = testing::tiny_engine(m, /*batch=*/2, compute, 1);
  spec.shape = {.batch = 2, .seq = 64, .max_segments = 2, .documents = false};
  spec.num_micro_batches = device == DeviceKind::cuda ? 4 : 2;
  spec.mesh = mesh;
  spec.dispatcher = dispatcher;
  spec.device = spec.target = device;
  spec.graph = false;
  return spec;
}

// Sets the bias by which the first experts are chosen. At 100 they get every token.
inline void set_skew(Engine& engine, double skew, int num_experts) {
  Stream s = engine.stream();
  for (const Param& p : engine.model().params().all()) {
    if (p.spec.name.find("e_score_correction_bias") == std::string::npos) continue;
    std::vector<float> bias(static_cast<size_t>(p.w.numel()));
    std::fill_n(bias.begin(), num_experts, static_cast<float>(skew));
    copy_to_device(s, p.w.data, bias.data(), p.w.num_bytes());
    synchronize(s);
  }
}

struct TrainedExperts {
  std::vector<double> losses, grad_norms;
  std::vector<float> masters;  // of this rank, on a CPU
  int64_t spilled_rows = 0;    // of the last step
  double peak_over_budget = 0;
};

inline TrainedExperts train_experts(Transport& world, EngineSpec spec, double skew, int num_skewed = 2) {
  spec.world = &world;
  Engine engine(spec);
  testing::init_params(engine);
  set_skew(engine, skew, num_skewed);
  TrainedExperts trained;
  for (int64_t step = 1; step <= num_expert_steps(spec.device); ++step) {
    const int64_t all = spec.num_micro_batches * spec.shape.batch * spec.mesh.dp;
    for (int64_t m = 0; m < spec.num_micro_batches; ++m) {
      const int64_t first = (m * spec.mesh.dp + engine.data_share().dp_rank) * spec.shape.batch;
      testing::fill_random(engine.batch(m), spec.model, step, first, all);
    }
    engine.step(step, 1e-2);
    const StepReport report = read_step(engine, /*step_time_s=*/1);
    trained.losses.push_back(report.loss);
    trained.grad_norms.push_back(report.grad_norm);
    if (report.expert_rows) {
      trained.spilled_rows = report.expert_rows->spilled_rows;
      trained.peak_over_budget = report.expert_rows->peak_over_budget;
      EXPECT_GE(report.expert_rows->spill_time_s, 0);
    }
    engine.end_of_step();
  }
  if (spec.device == DeviceKind::cpu) trained.masters = testing::all_elements(engine, false);
  return trained;
}

inline void expect_same(const TrainedExperts& got, const TrainedExperts& want) {
  EXPECT_EQ(got.losses, want.losses);
  EXPECT_EQ(got.grad_norms, want.grad_norms);
  EXPECT_EQ(got.masters, want.masters);
}

}  // namespace moebius
