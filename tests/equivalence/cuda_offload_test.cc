// Activations on the host of a GPU: copies on streams of their own, eager and captured.
// Skipped where there is no GPU.
#include <gtest/gtest.h>

#include "device/accelerator.h"
#include "io/testing.h"
#include "tests/equivalence/gpu_specs.h"
#include "train/evaluate.h"
#include "train/testing.h"

namespace moebius {
namespace {

class OffloadOnGpu : public ::testing::TestWithParam<Way> {
 protected:
  using SpecOn = EngineSpec (*)(DeviceKind, DType, bool);

  void SetUp() override {
    const std::string why = Accelerator::why_missing();
    if (!why.empty()) GTEST_SKIP() << why;
  }
  static EngineSpec on_gpu(SpecOn spec_on, bool graph = true) {
    EngineSpec spec = spec_on(DeviceKind::cuda, GetParam().compute, graph);
    spec.kernels = GetParam().kernels;
    return spec;
  }
  // More layers than slots, so that each slot is used again in both passes.
  static EngineSpec deep(bool graph) {
    EngineSpec spec = on_gpu(wide_spec_on, graph);
    spec.model.num_layers = 7;
    spec.model.moe_layers.assign(7, true);
    return spec;
  }
};

// Each name separately, captured and eager. Every layer of the model keeps something under some name.
TEST_P(OffloadOnGpu, ChangesNoBit) {
  Engine kept(on_gpu(wide_spec_on));
  const std::vector<double> expected = train(initialised(kept), 6);
  const auto expect_same = [&](const OffloadSpec& offload, const RecomputeSpec& recompute = {}) {
    for (const bool graph : {false, true}) {
      EngineSpec spec = on_gpu(wide_spec_on, graph);
      spec.offload = offload;
      spec.recompute = recompute;
      Engine moved(spec);
      EXPECT_GT(moved.plan().offloaded_bytes(), 0);
      EXPECT_EQ(train(initialised(moved), 6), expected);
      EXPECT_EQ(masters(moved), masters(kept));
      EXPECT_EQ(EngineTestAccess::stack_high_water(moved), moved.plan().bytes(Life::stack));
    }
  };
  for (const auto& [name, flag] : kRecomputeNames) {
    SCOPED_TRACE(name);
    if (flag == &RecomputeSpec::mla_up_proj) continue;
    OffloadSpec offload;
    offload.tensors.*flag = true;
    expect_same(offload);
  }
  expect_same({.layer_input = true}, {.layer = true});
  expect_same({.tensors = {.layer = true}, .fraction = 0.5}, {.norm = true});
}

// Eager and captured, with an update that is complete before the next step, and in each case of two steps in a row.
TEST_P(OffloadOnGpu, OfStatesChangesNoBit) {
  const OptimizerSpec formats[] = {
      {}, {.state = StateFormat::blocks_8bit, .master = MasterFormat::bf16_stochastic, .grad = GradFormat::bf16}};
  for (const OptimizerSpec& optimizer : formats) {
    EngineSpec spec = on_gpu(wide_spec_on);
    spec.model.hidden_size = 256;  // rows of whole blocks of 8-bit codes
    spec.optimizer = optimizer;
    Engine kept(spec);
    const std::vector<double> expected = train(initialised(kept), 9);
    spec.optimizer->offload = true;
    for (const bool graph : {false, true}) {
      for (const bool overlaps : {false, true}) {
        for (const bool sums : {false, true}) {
          if (sums && optimizer.grad == GradFormat::f32) continue;
          SCOPED_TRACE(fmt::format("graph {}, overlaps {}, sums {}", graph, overlaps, sums));
          spec.graph = graph;
          spec.overlaps_update = overlaps;
          spec.optimizer->offload_grad = sums;
          Engine moved(spec);
          std::vector<double> losses = train(initialised(moved), 2);
          moved.finish_update();
          for (const double loss : train(moved, 7, /*first_step=*/3)) losses.push_back(loss);
          EXPECT_EQ(losses, expected);
          EXPECT_GT(moved.step_times().states_s, 0);
          moved.finish_update();
          EXPECT_EQ(masters(moved), masters(kept));
        }
      }
    }
  }
}

// States of which some stay on the GPU, in a buffer for a quarter, for half, and for all of them.
TEST_P(OffloadOnGpu, OfSomeStatesChangesNoBit) {
  for (const bool sums : {false, true}) {
    EngineSpec spec = on_gpu(wide_spec_on);
    spec.model.hidden_size = 256;  // rows of whole blocks of 8-bit codes
    spec.optimizer = {
        .state = StateFormat::blocks_8bit, .master = MasterFormat::bf16_stochastic, .grad = GradFormat::bf16};
    Engine kept(spec);
    const std::vector<double> expected = train(initialised(kept), 9);
    spec.optimizer->offload = true;
    const auto all = static_cast<double>(Engine(spec).plan().bytes(Life::host));
    spec.optimizer->offload_grad = sums;
    for (const double share : {0.25, 0.5, 1.0}) {
      for (const bool graph : {false, true}) {
        for (const bool overlaps : {false, true}) {
          SCOPED_TRACE(fmt::format("sums {}, share {}, graph {}, overlaps {}", sums, share, graph, overlaps));
          spec.optimizer->offload_buffer = share * all / (int64_t{1} << 30);
          spec.graph = graph;
          spec.overlaps_update = overlaps;
          Engine moved(spec);
          std::vector<double> losses = train(initialised(moved), 2);
          moved.finish_update();
          for (const double loss : train(moved, 7, /*first_step=*/3)) losses.push_back(loss);
          EXPECT_EQ(losses, expected);
          moved.finish_update();
          EXPECT_EQ(masters(moved), masters(kept));
        }
      }
    }
  }
}

TEST_P(OffloadOnGpu, InCombinationChangesNoBit) {
  for (const auto kept_spec : {documents_on, balanced_on, sinkhorn_on, many_on, whole_norm_on, frozen_on}) {
    Engine kept(on_gpu(kept_spec));
    EngineSpec spec = on_gpu(kept_spec);
    spec.offload.tensors.layer = true;
    Engine moved(spec);
    EXPECT_EQ(train(initialised(moved), 6), train(initialised(kept), 6));
    EXPECT_EQ(masters(moved), masters(kept));
  }
}

// Replays count what they copy, as passes that run do.
TEST_P(OffloadOnGpu, OfManyLayersChangesNoBitAndCountsItsBytes) {
  Engine kept(deep(true));
  const std::vector<double> expected = train(initialised(kept), 6);
  for (const double fraction : {1.0, 0.6}) {
    int64_t eager_bytes = 0;
    for (const bool graph : {false, true}) {
      EngineSpec spec = deep(graph);
      spec.offload = {.tensors = {.layer = true}, .fraction = fraction};
      Engine moved(spec);
      EXPECT_EQ(train(initialised(moved), 6), expected) << fraction << (graph ? " captured" : " eager");
      EXPECT_EQ(masters(moved), masters(kept));
      fill_step(moved, 7);
      moved.step(7, 1e-2);
      const int64_t bytes = moved.model().offload()->bytes_to_host();
      EXPECT_GT(bytes, 0);
      if (graph) {
        EXPECT_EQ(bytes, eager_bytes);
      }
      eager_bytes = bytes;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, OffloadOnGpu, ::testing::ValuesIn(kWays),
                         [](const auto& info) { return name_of(info.param); });

// The memory of the GPU is predicted within 3 %, as without it, and is less by what the host has.
TEST(OffloadOnGpuMemory, IsPredictedBeforeThePlanIsBound) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  for (const KernelChoice kernels : {KernelChoice::automatic, KernelChoice::portable}) {
    SCOPED_TRACE(name_of(kernels));
    EngineSpec spec = wide_spec_on(DeviceKind::cuda, DType::bf16, true);
    spec.kernels = kernels;
    spec.model.vocab_size = 300'000;
    spec.model.num_layers = 8;
    spec.model.moe_layers.assign(8, true);
    spec.offload.tensors.layer = true;
    EngineSpec dry_run = spec;
    dry_run.device = DeviceKind::null;
    Engine counted(dry_run);
    const int64_t predicted = counted.device_memory().total_bytes();
    Engine engine(spec);
    EXPECT_EQ(engine.device_memory().total_bytes(), predicted);
    EXPECT_EQ(engine.plan().bytes(Life::host), counted.plan().bytes(Life::host));
    train(initialised(engine), 4);
    engine.sample_peak_memory();
    EXPECT_LE(engine.peak_bytes(), 1.03 * static_cast<double>(predicted));
    EXPECT_GE(engine.peak_bytes(), 0.97 * static_cast<double>(predicted) - (16 << 20));
  }
}

}  // namespace
}  // namespace moebius
