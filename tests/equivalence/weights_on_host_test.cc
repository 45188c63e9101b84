// Weights of layers in host memory on one rank: the bits of weights on the device, in every format of the optimizer, in
// evaluations, and from checkpoint to checkpoint. On the CPU copies run when they are waited for, so each missing wait
// changes numbers. Tests with several ranks are in tests/distributed/sharding_test.cc.
#include <gtest/gtest.h>

#include <limits>

#include "checkpoint/store.h"
#include "comm/control.h"
#include "device/accelerator.h"
#include "io/testing.h"
#include "tests/distributed/checkpoint_files.h"
#include "tests/equivalence/gpu_specs.h"
#include "train/state.h"

namespace moebius {
namespace {

using enum MasterFormat;

// The last one also has all states on the device, in a buffer.
const OptimizerSpec kFormats[] = {
    {},
    {.offload = true},
    {.state = StateFormat::bf16, .master = bf16_remainder, .offload = true},
    {.state = StateFormat::blocks_8bit, .master = bf16_stochastic, .grad = GradFormat::bf16},
    {.state = StateFormat::blocks_8bit,
     .master = bf16_stochastic,
     .grad = GradFormat::bf16,
     .offload = true,
     .offload_grad = true},
    {.kind = OptimizerKind::muon},
    {.kind = OptimizerKind::sgd, .offload = true, .offload_buffer = 1},
};

EngineSpec on_host(EngineSpec spec) {
  spec.offload_weights = true;
  return spec;
}

EngineSpec spec_of(const OptimizerSpec& optimizer, DeviceKind device = DeviceKind::cpu, DType compute = DType::bf16) {
  EngineSpec spec = device == DeviceKind::cpu ? spec_on(device, compute) : wide_spec_on(device, compute);
  spec.model.hidden_size = 256;  // rows of whole blocks of 8-bit codes
  spec.optimizer = optimizer;
  return spec;
}

// Trains three steps, with an evaluation before the last.
struct Trained {
  explicit Trained(const EngineSpec& spec) : engine(spec) {
    losses = train(initialised(engine), 2);
    fill(engine.batch(), spec, /*step=*/9, 0);
    engine.forward();
    losses.push_back(engine.loss());
    engine.end_of_step();
    losses.push_back(train(engine, 1, /*first_step=*/3).front());
  }
  Engine engine;
  std::vector<double> losses;
};

void expect_same(const EngineSpec& spec) {
  const TestDir dir;
  Trained kept(spec), moved(on_host(spec));
  EXPECT_EQ(moved.losses, kept.losses);
  EXPECT_TRUE(state_of(moved.engine, dir, "moved") == state_of(kept.engine, dir, "kept"));
}

TEST(WeightsOnHost, ChangeNoBitOfAnyFormat) {
  for (const OptimizerSpec& optimizer : kFormats) {
    SCOPED_TRACE(&optimizer - kFormats);
    expect_same(spec_of(optimizer));
  }
  expect_same(spec_of({.offload = true}, DeviceKind::cpu, DType::f32));
}

// The last run trains adapters beside a frozen base on the host.
TEST(WeightsOnHost, ChangeNoBitOfOtherRuns) {
  EngineSpec recomputed = spec_of({}), adapted = spec_of({}), serial = spec_of({.offload = true}),
             quantised = spec_of({}), held_in_8_bits = quantised_on(DeviceKind::cpu, PrecisionRecipe::fp8_block);
  recomputed.recompute.layer = true;
  recomputed.offload.layer_input = true;
  serial.overlap = false;
  quantised.precision.recipe = PrecisionRecipe::fp8_tensor;
  quantised.precision.weight_copies = false;
  held_in_8_bits.precision.weights = PrecisionChoice::recipe;
  held_in_8_bits.precision.weight_copies = false;
  adapted.lora = {.rank = 4, .alpha = 8, .dropout = 0.1, .targets = {"*"}};
  for (const EngineSpec& spec : {recomputed, serial, quantised, held_in_8_bits, adapted}) expect_same(spec);
}

// The device has the weights of two layers, and the host those of all.
TEST(WeightsOnHost, TakeTheMemoryOfTwoLayers) {
  EngineSpec spec = spec_of({});
  spec.model.num_layers = 6;
  spec.model.moe_layers.assign(6, true);
  spec.device = DeviceKind::null;
  const Engine kept(spec), moved(on_host(spec));
  const auto bytes = [](const Engine& engine, Life life) { return engine.plan().bytes(life); };
  const int64_t weights = bytes(moved, Life::host), left = bytes(moved, Life::param);
  EXPECT_EQ(bytes(kept, Life::host), 0);
  constexpr int64_t kSlack = 6 << 10;  // tensors of two dtypes begin at multiples of 256 elements
  EXPECT_NEAR(weights + left, bytes(kept, Life::param), kSlack);
  EXPECT_NEAR(bytes(moved, Life::comm) - bytes(kept, Life::comm), weights / 3, kSlack);
  EXPECT_NEAR(moved.plan().device_bytes(), kept.plan().device_bytes() - weights + weights / 3, kSlack);
}

TEST(WeightsOnHost, StayAsTheyAreIfGradientsAreNotFinite) {
  const TestDir dir;
  for (const bool offload : {false, true}) {
    Engine engine(on_host(spec_of({.offload = offload})));
    train(initialised(engine), 2);
    const CheckpointBytes before = state_of(engine, dir, "before");
    const auto loss = [&] {
      fill(engine.batch(), engine.spec(), /*step=*/9, 0);
      engine.forward();
      const double value = engine.loss();
      engine.end_of_step();
      return value;
    };
    const double expected = loss();
    fill_step(engine, 3);
    engine.batch().scalars.set_loss_scale(0, std::numeric_limits<double>::infinity());
    engine.step(3, 1e-2);
    EXPECT_FALSE(std::isfinite(*engine.grad_norm().ptr<float>()));
    engine.end_of_step();
    EXPECT_EQ(loss(), expected);
    EXPECT_TRUE(state_of(engine, dir, "after") == before);
  }
}

// A run resumes without the key, and with it.
TEST(WeightsOnHost, ResumeFromTheDeviceAndBack) {
  const TestDir dir;
  const std::unique_ptr<Transport> self = make_self_transport();
  Control control(*self);
  const EngineSpec spec = spec_of({.master = bf16_remainder, .offload = true});
  Trained whole(spec);
  const CheckpointBytes expected = state_of(whole.engine, dir, "whole");
  for (const bool first_on_host : {false, true}) {
    Engine first(first_on_host ? on_host(spec) : spec), second(first_on_host ? spec : on_host(spec));
    train(initialised(first), 2);
    const std::string name = fmt::format("first_{}", first_on_host);
    state_of(first, dir, name.c_str());
    load_checkpoint(second, control, dir.path(name) + "/step-00000001");
    train(second, 1, /*first_step=*/3);
    EXPECT_TRUE(state_of(second, dir, fmt::format("second_{}", first_on_host).c_str()) == expected);
  }
}

// --- on a GPU -------------------------------------------------------------------------------------------------------

class WeightsOnHostOfGpu : public ::testing::TestWithParam<Way> {};

TEST_P(WeightsOnHostOfGpu, ChangeNoBit) {
  if (const std::string why = Accelerator::why_missing(); !why.empty()) GTEST_SKIP() << why;
  for (const OptimizerSpec& optimizer : kFormats) {
    if (optimizer.grad == GradFormat::bf16 && GetParam().compute == DType::f32) continue;
    SCOPED_TRACE(&optimizer - kFormats);
    EngineSpec spec = spec_of(optimizer, DeviceKind::cuda, GetParam().compute);
    spec.kernels = GetParam().kernels;
    Engine kept(spec);
    const std::vector<double> expected = train(initialised(kept), 6);
    for (const bool graph : {false, true}) {
      for (const bool overlap : {false, true}) {
        SCOPED_TRACE(fmt::format("graph {}, overlap {}", graph, overlap));
        EngineSpec host = on_host(spec);
        host.graph = graph;
        host.overlap = overlap;
        Engine moved(host);
        EXPECT_EQ(train(initialised(moved), 6), expected);
        EXPECT_EQ(masters(moved), masters(kept));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, WeightsOnHostOfGpu, ::testing::ValuesIn(kWays),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace moebius
