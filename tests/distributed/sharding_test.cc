// Weights and sums of gradients of layers that are sharded over the ranks that hold them: the bits of whole ones, in
// every pass, on every layout, in every format of the optimizer's state, and from checkpoint to checkpoint.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "checkpoint/reader.h"
#include "checkpoint/store.h"
#include "comm/control.h"
#include "io/testing.h"
#include "tests/distributed/checkpoint_files.h"
#include "tests/distributed/layout_run.h"
#include "tests/distributed/ranks.h"
#include "train/state.h"

namespace moebius {
namespace {

struct ShardedCase {
  const char* name;
  int ranks;
  ParallelSpec layout;
  LayoutModel model = {};
};

void PrintTo(const ShardedCase& c, std::ostream* out) { *out << c.name << " on " << c.ranks << " ranks"; }

const ShardedCase kCases[] = {
    {"alone", 1, {}},
    {"dp2", 2, {}},
    {"dp3", 3, {}},
    {"dp4", 4, {}},
    {"cp2", 2, {.cp = 2}},
    {"tp2", 2, {.tp = 2}},
    {"tp2_dp2", 4, {.tp = 2}},
    {"cp2_ring_dp2", 4, {.cp = 2, .cp_comm = CpComm::ring}},
    {"ep2", 2, {.ep = 2}},
    {"ep2_edp2", 4, {.ep = 2}},
    {"ep2_edp2_direct", 4, {.ep = 2, .dispatcher = DispatcherKind::direct}},
    {"ep2_edp2_alltoall_skewed", 4, {.ep = 2, .dispatcher = DispatcherKind::alltoall}, {.skewed = true}},
    {"etp2_edp2", 4, {.etp = 2}},
    {"pp2_dp2", 4, {.pp = 2}},
    {"pp2_vpp2_dp2_tied", 4, {.pp = 2, .vpp = 2}, {.tied = true}},
    {"pp2_vpp2_ep2_sigmoid", 4, {.pp = 2, .vpp = 2, .ep = 2}, {.sigmoid = true}},
    {"tp2_ep4_dp2_pp2", 8, {.tp = 2, .pp = 2, .ep = 2}},
    {"tp2_cp2_pp2", 8, {.tp = 2, .cp = 2, .pp = 2}},
    {"dp2_tied", 2, {}, {.tied = true}},
    {"dp2_mtp", 2, {}, {.mtp = 2}},
    {"pp2_dp2_mtp_tied", 4, {.pp = 2}, {.tied = true, .mtp = 1}},
    {"dp2_latent", 2, {}, {.latent_qkv = true}},
    {"tp2_dp2_gpt_oss", 4, {.tp = 2}, {.gpt_oss = true}},
    {"dp3_frozen", 3, {}, {.freeze = kParts}},
    {"dp3_frozen_below", 3, {}, {.freeze = kBelow}},
    {"dp3_lora", 3, {}, {.lora = true}},
    {"tp2_dp2_lora", 4, {.tp = 2}, {.lora = true}},
    {"cp2_lora", 2, {.cp = 2}, {.lora = true}},
    {"ep2_edp2_lora", 4, {.ep = 2}, {.lora = true}},
    {"etp2_edp2_lora", 4, {.etp = 2}, {.lora = true}},
    {"ep2_edp4", 8, {.ep = 2}},
    {"pp2_cp2_dp2", 8, {.cp = 2, .pp = 2}},
    {"pp2_vpp2_dp2_lora", 4, {.pp = 2, .vpp = 2}, {.lora = true, .dropout = true}},
};

class Fsdp : public ::testing::TestWithParam<ShardedCase> {};

// Groups of at most `shard` ranks are sharded whole; `shard` divides the others.
bool has_shards_of(const ShardedCase& c, int64_t shard) {
  MeshShape mesh = mesh_shape(c.layout, c.ranks);
  mesh.fsdp_shard = shard;
  const auto is_cut = [&](Axis axis) { return group_size(mesh, axis) > shard; };
  const auto fits = [&](Axis axis) { return group_size(mesh, axis) % shard_size(mesh, axis) == 0; };
  return std::any_of(kGradAxes.begin(), kGradAxes.end(), is_cut) &&
         std::all_of(kGradAxes.begin(), kGradAxes.end(), fits);
}

TEST_P(Fsdp, ChangesNoBit) {
  const ShardedCase& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    const LayoutOutcome whole = train_briefly(world, c.model, c.layout);
    RecomputeSpec layer;
    layer.layer = true;
    const LayoutWay ways[] = {{.fsdp = true},
                              {.overlap = false, .recompute = layer, .expert_rows = 0.5, .fsdp = true},
                              {.fsdp = true, .offload_weights = true}};
    for (const LayoutWay& way : ways) expect_same_bits(train_briefly(world, c.model, c.layout, way), whole);
    if (!has_shards_of(c, 2)) return;
    LayoutWay shards{.fsdp = true, .fsdp_shard = 2};
    expect_same_bits(train_briefly(world, c.model, c.layout, shards), whole);
    shards.offload_weights = true;
    shards.overlap = false;
    expect_same_bits(train_briefly(world, c.model, c.layout, shards), whole);
  });
}

INSTANTIATE_TEST_SUITE_P(Everywhere, Fsdp, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return fmt::format("{}_on_{}", info.param.name, info.param.ranks); });

// Products of fp8_block, with weights that are gathered in f32 or in 8 bits. These models are wider.
class FsdpQuantised : public ::testing::TestWithParam<ShardedCase> {};

TEST_P(FsdpQuantised, ChangesNoBit) {
  const ShardedCase& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    const LayoutOutcome whole = train_on(world, c.model, c.layout, 2, {.num_micro_batches = 1});
    for (const int64_t shard : {0, 2}) {
      if (shard > 0 && !has_shards_of(c, shard)) continue;
      LayoutWay way{.overlap = shard == 0, .fsdp = true, .num_micro_batches = 1, .fsdp_shard = shard};
      expect_same_bits(train_on(world, c.model, c.layout, 2, way), whole);
      way.offload_weights = true;
      expect_same_bits(train_on(world, c.model, c.layout, 2, way), whole);
    }
  });
}

const ShardedCase kQuantisedCases[] = {
    {"dp2", 2, {}, {.quantised = true}},
    {"tp2_dp2_held", 4, {.tp = 2}, {.quantised = true, .held_in_8_bits = true}},
    {"ep2_edp2_held", 4, {.ep = 2}, {.quantised = true, .narrow_rows = true, .held_in_8_bits = true}},
    {"pp2_dp2_held", 4, {.pp = 2}, {.quantised = true, .held_in_8_bits = true}},
};

INSTANTIATE_TEST_SUITE_P(Everywhere, FsdpQuantised, ::testing::ValuesIn(kQuantisedCases),
                         [](const auto& info) { return fmt::format("{}_on_{}", info.param.name, info.param.ranks); });

class ShardGradients : public ::testing::TestWithParam<ShardedCase> {};

// With one micro-batch of each rank in a step.
TEST_P(ShardGradients, ChangeNoBitOfOneMicroBatch) {
  const ShardedCase& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    const LayoutOutcome whole = train_briefly(world, c.model, c.layout, {.num_micro_batches = 1});
    const LayoutWay ways[] = {{.shard_gradients = true, .num_micro_batches = 1},
                              {.fsdp = true, .shard_gradients = true, .num_micro_batches = 1},
                              {.overlap = false, .fsdp = true, .shard_gradients = true, .num_micro_batches = 1}};
    const LayoutWay shards{.fsdp = true, .shard_gradients = true, .num_micro_batches = 1, .fsdp_shard = 2};
    if (has_shards_of(c, 2)) expect_same_bits(train_briefly(world, c.model, c.layout, shards), whole);
    for (const LayoutWay& way : ways) expect_same_bits(train_briefly(world, c.model, c.layout, way), whole);
  });
}

// With several, the sum over ranks comes first. Its order depends on nothing else.
TEST_P(ShardGradients, HaveOneOrderOfSeveralMicroBatches) {
  const ShardedCase& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    const LayoutOutcome sharded = train_briefly(world, c.model, c.layout, {.shard_gradients = true});
    const LayoutWay ways[] = {{.overlap = false, .shard_gradients = true}, {.fsdp = true, .shard_gradients = true}};
    for (const LayoutWay& way : ways) expect_same_bits(train_briefly(world, c.model, c.layout, way), sharded);
    expect_same(sharded, train_briefly(world, c.model, c.layout));
  });
}

const ShardedCase kGradientCases[] = {
    {"dp2", 2, {}},
    {"dp3_frozen", 3, {}, {.freeze = kParts}},
    {"dp4", 4, {}},
    {"cp2", 2, {.cp = 2}},
    {"tp2_dp2", 4, {.tp = 2}},
    {"ep2_edp2_direct", 4, {.ep = 2, .dispatcher = DispatcherKind::direct}},
    {"etp2_edp2", 4, {.etp = 2}},
    {"pp2_dp2_mtp_tied", 4, {.pp = 2}, {.tied = true, .mtp = 1}},
    {"dp2_latent", 2, {}, {.latent_qkv = true}},
    {"tp2_dp2_gpt_oss", 4, {.tp = 2}, {.gpt_oss = true}},
    {"dp2_lora", 2, {}, {.lora = true}},
};

INSTANTIATE_TEST_SUITE_P(Everywhere, ShardGradients, ::testing::ValuesIn(kGradientCases),
                         [](const auto& info) { return fmt::format("{}_on_{}", info.param.name, info.param.ranks); });

// --- checkpoints ----------------------------------------------------------------------------------------------------

// Steps 1 to n, each by an engine that resumes from the checkpoint of the one before. Returns that of the last. The
// base of adapters is in no checkpoint.
CheckpointBytes resumed_steps(int ranks, const std::vector<EngineSpec>& steps, const std::string& dir,
                              const LayoutModel& what = {}) {
  for (int64_t step = 1; step <= std::ssize(steps); ++step) {
    run_threads(ranks, test_world(), [&](Transport& world) {
      Control control(world);
      EngineSpec spec = steps[step - 1];
      spec.world = &world;
      Engine engine(spec);
      if (step == 1 || what.lora) init_layout(engine, what);
      if (step > 1) load_checkpoint(engine, control, fmt::format("{}/step-{:08}", dir, step - 1));
      layout_step(engine, what, step);
      save_checkpoint(engine, control, dir, step);
    });
  }
  return contents_of(fmt::format("{}/step-{:08}", dir, std::ssize(steps)));
}

EngineSpec spec_on(int ranks, const ParallelSpec& layout, const LayoutWay& way, const LayoutModel& what = {}) {
  EngineSpec spec;
  run_threads(ranks, test_world(), [&](Transport& world) {
    if (world.rank() == 0) spec = layout_engine_spec(world, what, layout, way);
  });
  return spec;
}

void expect_same_contents(const CheckpointBytes& got, const CheckpointBytes& expected) {
  EXPECT_EQ(got.size(), expected.size());
  for (const auto& [name, bytes] : expected) EXPECT_TRUE(got.contains(name) && got.at(name) == bytes) << name;
}

TEST(Sharding, ResumesFromWholeAndBack) {
  const TestDir dir;
  for (const ParallelSpec& layout : {ParallelSpec{.ep = 2}, ParallelSpec{.tp = 2}}) {
    SCOPED_TRACE(layout.tp * 10 + layout.ep);
    const std::string name = dir.path(fmt::format("tp{}_ep{}", layout.tp, layout.ep));
    const LayoutWay whole{.num_micro_batches = 1}, weights{.fsdp = true, .num_micro_batches = 1},
        gradients{.shard_gradients = true, .num_micro_batches = 1},
        both{.fsdp = true, .shard_gradients = true, .num_micro_batches = 1};
    const auto steps = [&](const std::vector<LayoutWay>& ways, const char* kind) {
      std::vector<EngineSpec> specs;
      for (const LayoutWay& way : ways) specs.push_back(spec_on(4, layout, way));
      return resumed_steps(4, specs, fmt::format("{}/{}", name, kind));
    };
    const LayoutWay shards{.fsdp = true, .num_micro_batches = 1, .fsdp_shard = 2},
        host{.fsdp = true, .num_micro_batches = 1, .offload_weights = true};
    const CheckpointBytes expected = steps({whole, whole, whole, whole}, "whole");
    expect_same_contents(steps({weights, whole, both, gradients}, "mixed"), expected);
    expect_same_contents(steps({shards, host, shards, whole}, "shards"), expected);
    expect_same_contents(steps({gradients, both, weights, whole}, "turned"), expected);
  }
}

// A share of a frozen weight is saved by the rank that keeps it; the frozen base of adapters is not saved.
TEST(Sharding, ResumesWithFrozenWeights) {
  const TestDir dir;
  const LayoutWay whole{.num_micro_batches = 1}, weights{.fsdp = true, .num_micro_batches = 1};
  for (const LayoutModel& what : {LayoutModel{.freeze = kParts}, LayoutModel{.lora = true}}) {
    const std::string name = dir.path(what.lora ? "lora" : "freeze");
    const auto steps = [&](const std::vector<LayoutWay>& ways, const char* kind) {
      std::vector<EngineSpec> specs;
      for (const LayoutWay& way : ways) specs.push_back(spec_on(4, {.ep = 2}, way, what));
      return resumed_steps(4, specs, fmt::format("{}/{}", name, kind), what);
    };
    const CheckpointBytes expected = steps({whole, whole, whole}, "whole");
    expect_same_contents(steps({weights, whole, weights}, "mixed"), expected);
    expect_same_contents(steps({whole, weights, whole}, "turned"), expected);
  }
}

// Ranks that share gradients sum them in bf16 where these are whole, and where they are sharded.
TEST(Sharding, KeepsTheBitsOfSumsInBf16) {
  const TestDir dir;
  const LayoutWay whole{.num_micro_batches = 1}, gradients{.shard_gradients = true, .num_micro_batches = 1},
      both{.overlap = false, .fsdp = true, .shard_gradients = true, .num_micro_batches = 1};
  for (const ParallelSpec& layout : {ParallelSpec{.ep = 2}, ParallelSpec{.tp = 2}, ParallelSpec{.pp = 2}}) {
    const std::string name = dir.path(fmt::format("tp{}_pp{}", layout.tp, layout.pp));
    const auto steps = [&](const std::vector<LayoutWay>& ways, const char* kind) {
      std::vector<EngineSpec> specs;
      for (const LayoutWay& way : ways) {
        EngineSpec& spec = specs.emplace_back(spec_on(4, layout, way));
        spec.precision.compute = DType::bf16;
        spec.optimizer->master = MasterFormat::bf16_remainder;
        spec.optimizer->grad = GradFormat::bf16;
      }
      return resumed_steps(4, specs, fmt::format("{}/{}", name, kind));
    };
    expect_same_contents(steps({both, whole, gradients}, "mixed"), steps({whole, whole, whole}, "whole"));
  }
}

// Shares of sums on the host come to the device for each micro-batch but the first, and return.
TEST(Sharding, KeepsTheBitsOfSumsOnTheHost) {
  const TestDir dir;
  const auto run = [&](const char* name, bool on_host, bool overlap) {
    EngineSpec spec = spec_on(4, {.ep = 2}, {.overlap = overlap, .shard_gradients = true, .num_micro_batches = 3});
    spec.precision.compute = DType::bf16;
    spec.optimizer->grad = GradFormat::bf16;
    spec.optimizer->offload_grad = on_host;
    return resumed_steps(4, {spec, spec}, dir.path(name));
  };
  const CheckpointBytes on_device = run("device", false, true);
  expect_same_contents(run("host", true, true), on_device);
  expect_same_contents(run("host_serial", true, false), on_device);
}

struct Formats {
  const char* name;
  OptimizerSpec optimizer;
  bool shards_gradients = true;  // that can be combined with them
};

TEST(Sharding, KeepsTheBitsOfEveryFormat) {
  constexpr StateFormat kHalf = StateFormat::bf16, kBlocks = StateFormat::blocks_8bit;
  using enum MasterFormat;
  const Formats all[] = {
      {"adamw", {}},
      {"remainder", {.master = bf16_remainder}},
      {"half_state_stochastic", {.state = kHalf, .master = bf16_stochastic}},
      {"blocks_offload", {.state = kBlocks, .offload = true}},
      {"half_gradients", {.grad = GradFormat::bf16}},
      {"half_gradients_fused_remainder", {.master = bf16_remainder, .grad = GradFormat::bf16, .fuse_grad = true}},
      {"half_gradients_offload",
       {.state = kHalf, .master = bf16_remainder, .grad = GradFormat::bf16, .offload = true, .offload_grad = true}},
      {"sgd", {.kind = OptimizerKind::sgd}},
      {"muon", {.kind = OptimizerKind::muon}, false},
      {"clipped", {.qk_clip = 0.01}},
      {"clipped_remainder", {.master = bf16_remainder, .qk_clip = 0.01}},
      {"half_state_remainder_offload", {.state = kHalf, .master = bf16_remainder, .offload = true}},
      {"clipped_stochastic", {.state = kHalf, .master = bf16_stochastic, .qk_clip = 0.01}},
  };
  const TestDir dir;
  for (const Formats& formats : all) {
    SCOPED_TRACE(formats.name);
    const auto run = [&](const char* kind, const LayoutWay& way) {
      EngineSpec spec = spec_on(2, {}, way);
      spec.precision.compute = DType::bf16;
      spec.model.hidden_size = 256;  // rows of whole blocks of 8-bit codes
      spec.optimizer = formats.optimizer;
      return resumed_steps(2, {spec, spec}, dir.path(fmt::format("{}_{}", formats.name, kind)));
    };
    const CheckpointBytes whole = run("whole", {.num_micro_batches = 1});
    expect_same_contents(run("fsdp", {.fsdp = true, .num_micro_batches = 1}), whole);
    expect_same_contents(run("host", {.fsdp = true, .num_micro_batches = 1, .offload_weights = true}), whole);
    if (!formats.shards_gradients) continue;
    expect_same_contents(run("both", {.fsdp = true, .shard_gradients = true, .num_micro_batches = 1}), whole);
    expect_same_contents(run("gradients", {.shard_gradients = true, .num_micro_batches = 1}), whole);
  }
}

// --- memory ---------------------------------------------------------------------------------------------------------

// A rank holds what the dry run counts, byte by byte: 1/n of the layers.
TEST(Sharding, HoldsAShareOfEachLayer) {
  constexpr int kRanks = 4;
  const auto planned = [&](const LayoutWay& way) {
    EngineSpec spec = spec_on(kRanks, {}, way);
    spec.world = nullptr;
    spec.device = DeviceKind::null;
    const Engine dry(spec);
    std::array<int64_t, kNumLives> bytes{};
    for (int life = 0; life < kNumLives; ++life) bytes[life] = dry.plan().bytes(static_cast<Life>(life));
    run_threads(kRanks, test_world(), [&](Transport& world) {
      const Engine engine(layout_engine_spec(world, {}, {}, way));
      if (world.rank() > 0) return;  // the dry run is of the first rank
      for (int life = 0; life < kNumLives; ++life)
        EXPECT_EQ(engine.plan().bytes(static_cast<Life>(life)), bytes[life]) << name_of(static_cast<Life>(life));
    });
    return bytes;
  };
  const auto of = [](const auto& bytes, Life life) { return bytes[static_cast<size_t>(life)]; };
  const auto whole = planned({}), weights = planned({.fsdp = true}),
             both = planned({.fsdp = true, .shard_gradients = true});
  // f32 parameters of layers, with the embedding, the head and the last norm, which stay whole.
  int64_t ends = 0, layers = 0;
  run_threads(1, test_world(), [&](Transport& world) {
    const Engine engine(layout_engine_spec(world, {}, {}));
    for (const Param& p : engine.model().params().all())
      if (p.has_grad) (p.layer < 0 ? ends : layers) += p.w.num_bytes();
  });
  const int64_t slack = 4 * 256 * 4 * 30;  // each parameter begins at a multiple of 256, and a share ends at one
  EXPECT_NEAR(of(whole, Life::param), ends + layers, 2 * slack);
  EXPECT_NEAR(of(weights, Life::param), ends + layers / kRanks, slack);
  EXPECT_EQ(of(weights, Life::grad) > of(both, Life::grad), true);
  EXPECT_NEAR(of(both, Life::grad), ends + layers / kRanks, slack);
  EXPECT_EQ(of(both, Life::param), of(weights, Life::param));
  EXPECT_GT(of(weights, Life::comm), of(whole, Life::comm));  // two layers
  EXPECT_EQ(of(whole, Life::layer_grad), 0);
  EXPECT_GT(of(both, Life::layer_grad), 0);
  // Shards of two ranks, in addition to the elements that each rank updates.
  const auto halves = planned({.fsdp = true, .fsdp_shard = 2});
  EXPECT_NEAR(of(halves, Life::param), ends + layers / 2 + layers / kRanks, slack);
  EXPECT_EQ(of(halves, Life::comm), of(weights, Life::comm));
  // Shares on the host, and in staging memory those of two of the four layers.
  const auto host = planned({.fsdp = true, .offload_weights = true});
  EXPECT_NEAR(of(host, Life::param), ends, slack);
  EXPECT_NEAR(of(host, Life::host), layers / kRanks, slack);
  EXPECT_NEAR(of(host, Life::comm) - of(weights, Life::comm), layers / kRanks / 2, slack);
}

}  // namespace
}  // namespace moebius
